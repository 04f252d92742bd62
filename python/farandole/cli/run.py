"""Starts a command once per rank, on this host or on several, shows their output with the rank in
front of every line, and ends them all when one fails. No process outlives it, even if it is killed
itself."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from farandole import _launch
from farandole._launch import Copies, Share
from farandole._live.server import listen, url_of
from farandole.cli import (
    CommandError,
    _elastic,
    _hosts,
    add_options,
    add_ranks,
    given,
    number_of,
    seconds_of,
)
from farandole.cli._horovod_flags import FLAGS, Flag, add_flags, settings_of

EPILOG = """\
examples:
  farandole run -np 4 -- python train.py --epochs 3
  farandole run -np 2 --output-dir logs -- python train.py
  farandole run -np 4 -- bash -c 'echo I am rank $RANK of $WORLD_SIZE'
  farandole run -H a:4,b:4 -- python train.py
  farandole run -np 4 --min-np 2 -- python a_program_with_elastic_run.py
  farandole run --horovod -np 2 -- python a_program_for_horovod.py

what the ranks find:
  environment   RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK CROSS_RANK
                CROSS_SIZE MASTER_ADDR MASTER_PORT, the HOROVOD_ names of these, FARANDOLE_RUN_ID,
                PYTHONUNBUFFERED=1; OMP_NUM_THREADS = cores / ranks unless it is set; on several
                hosts FARANDOLE_SECRET_FILE (with --insecure FARANDOLE_INSECURE=1)
  stdin         empty (/dev/null)

before they start: the first job on a kind of host measures its memory for about 2 s, for all later
jobs (farandole tune); not if the host is busy, CI is set, or FARANDOLE_TUNING is kept or off

how it ends (with --min-np, --max-np or --host-discovery-script see docs/elastic.md):
  one rank fails    the others have --grace seconds to say what they saw, then SIGTERM and SIGKILL;
                    the last line names the rank that is the cause, whose exit code is returned
                    (128 + n for signal n)
  Ctrl-C            SIGINT to all, after --patience SIGTERM, then SIGKILL; Ctrl-C again: SIGKILL now
  SIGTERM, SIGHUP   passed on, then likewise; SIGUSR1, SIGUSR2 (to the ranks alone), Ctrl-Z too
  exit codes        2 wrong arguments, 124 --timeout is over, 126 the command cannot be executed,
                    127 it is not found
"""


def _share_of(option: str, text: str) -> float:
    """Raises CommandError where it is no number from 0 to 1."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise CommandError(f"{option} takes a share from 0 to 1, not '{text}'")
    return share


def _restarts_of(option: str, text: str) -> int:
    return number_of(option, text, least=0)


def _time_of(option: str, text: str) -> float:
    return seconds_of(option, text, zero=False)


_JOB = _launch.Job._field_defaults
_PATH = {"type": Path}
_SECONDS = {"reads": seconds_of}
_OPTIONS = (
    ("--horovod", "", "`import horovod` means farandole, in the command and all that it starts"),
    ("--no-prefix", "", "show lines as they are, without '[rank] '"),
    ("--all-output", "",
     "show the progress bars of all ranks (default: rank 0's, and that of a rank that fails)"),
    ("--output-dir", "DIR",
     "also write DIR/rank-N.out and DIR/rank-N.err, byte for byte (created; 0600)", _PATH),
    ("--grace", "SECONDS",
     f"time for the other ranks to react to a failed one (default: {_JOB['grace']:g})", _SECONDS),
    ("--patience", "SECONDS",
     f"time between a signal and the next harsher one (default: {_JOB['patience']:g})", _SECONDS),
    ("--bind", None,
     "each rank runs on cores of its own, or on those of one NUMA node (default: none)",
     {"choices": _launch.BINDINGS, "dest": "binding"}),
    ("--timeout", "SECONDS",
     "end the job after so long, as SIGTERM does; restarts are part of it (exit code 124)",
     {"reads": _time_of}),
    ("--restarts", "N",
     "run the job again after a failure, at most N times; ranks find how often in "
     "FARANDOLE_RESTART_COUNT, and begin from their checkpoint (default: 0)",
     {"reads": _restarts_of}),
    ("--preflight", "",
     "first check the hosts and their links (farandole check); the job runs if all is well"),
    ("--metrics", "[ADDRESS:]PORT",
     "serve the counters of all ranks for Prometheus there, and /healthz (ADDRESS: 127.0.0.1; "
     "port 0: one that is free)", {"type": listen}),
    ("--slow", "SHARE",
     f"tell of a rank that all others wait for, for more than this share of the time "
     f"(default: {_JOB['slow']:g}; 0: never)", {"reads": _share_of}),
)  # fmt: skip
_HOROVODS = (
    ("-hostfile --hostfile", "FILE", "the same as 'HOST slots=N'", _PATH),
    ("-p --ssh-port", "PORT", "the port of ssh on other hosts", {"type": int}),
    ("-i --ssh-identity-file", "FILE", "the key that ssh uses", _PATH),
    ("--output-filename", "DIR",
     "also write DIR/rank.N/stdout and DIR/rank.N/stderr (replaced if they are there)", _PATH),
)  # fmt: skip


def defaults() -> dict[str, object]:
    """The values of the options that horovodrun does not have."""
    parser = argparse.ArgumentParser()
    add_options(parser, *_OPTIONS)
    return vars(parser.parse_args([]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "farandole run -np N [options] -- COMMAND [ARGUMENT …]"
    add_ranks(parser, "how many ranks to start")
    add_options(parser, *_OPTIONS)
    _hosts.add_arguments(parser.add_argument_group("several hosts"))
    _elastic.add_arguments(parser.add_argument_group("ranks that come and go"))
    add_horovods(parser.add_argument_group("as horovodrun has them"), WITH_AN_EFFECT)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(options=tuple(parser._option_string_actions))


WITH_AN_EFFECT = [flag for flag in FLAGS if flag.sets]


def add_horovods(parser: argparse._ActionsContainer, flags: Sequence[Flag]) -> None:
    """The options that `farandole-horovodrun` has, too."""
    _hosts.add_hosts(parser)
    add_options(parser, *_HOROVODS)
    add_flags(parser, flags)


def handle(arguments: argparse.Namespace, name: str = "farandole run") -> int:
    command = arguments.command
    if command[:1] == ["--"]:
        command = command[1:]
    if command and command[0].startswith("-"):
        from farandole.cli._near import did_you_mean

        near = did_you_mean(command[0], [o for o in arguments.options if o.startswith("--")])
        raise CommandError(f"unknown option {command[0]}{near} (see: {name} --help)")
    if not command:
        raise CommandError(f"the command is missing: {name} -np 4 -- python train.py")

    from farandole.cli._terminal import wants_colour
    from farandole.horovod import as_environment

    slots = _launch.hosts_of(arguments.hosts, arguments.hostfile)
    settings = settings_of(arguments)
    ranks = _ranks(arguments.ranks, command, slots, name)
    terms = _elastic.terms_of(arguments, ranks, slots, name)
    is_discovered = terms is not None and bool(terms.discovery)
    if terms is not None and arguments.restarts:
        raise CommandError("--restarts: an elastic job goes on by itself; leave it out")
    if terms is not None and arguments.binding:
        raise CommandError("--bind: ranks of an elastic job come and go; leave it out")
    most = ranks if terms is None else terms.most
    hosts = () if is_discovered else _hosts.shares(arguments, most, slots)
    is_remote = bool(hosts) or is_discovered
    if arguments.metrics is not None:
        print(f"farandole: metrics at {url_of(arguments.metrics)}", file=sys.stderr)
    job = _launch.Job(
        command=command,
        ranks=ranks,
        prefix=not arguments.no_prefix,
        all_output=arguments.all_output,
        colours=(wants_colour(1), wants_colour(2)),
        copies=_copies(arguments),
        environment=settings
        | (as_environment() if arguments.horovod else {})
        | ({"FARANDOLE_WIRE": "sealed"} if arguments.seal else {})
        | _launch.named(arguments.exports, os.environ),
        hosts=hosts,
        reach=_hosts.reach(arguments, is_remote, name),
        start_timeout=float(settings.get("FARANDOLE_START_TIMEOUT") or _JOB["start_timeout"]),
        insecure=arguments.insecure,
        elastic=terms,
        ends_at=None if arguments.timeout is None else time.monotonic() + arguments.timeout,
        **given(arguments, "grace", "patience", "slow", "metrics", "restarts", "binding"),
    )
    if arguments.preflight and (code := _checked(hosts, arguments, settings)):
        return code
    if is_remote:
        return _launch.launch(job)
    _launch.check_command(command)  # before anything that takes time
    if (os.environ.get("FARANDOLE_TUNING") or "auto") == "auto":
        from farandole._tune.first_use import measure_if_unknown

        measure_if_unknown(job.ranks)
    return _launch.launch(job)


def _checked(
    hosts: Sequence[Share], arguments: argparse.Namespace, settings: Mapping[str, str]
) -> int:
    from farandole.cli.check import check

    if len(hosts) < 2:
        raise CommandError("--preflight checks the links between hosts: name two or more with -H")
    return check([share.host for share in hosts], arguments, settings)


def _copies(arguments: argparse.Namespace) -> Copies | None:
    if arguments.output_dir is not None and arguments.output_filename is not None:
        raise CommandError("--output-dir and --output-filename are both given; choose one")
    if arguments.output_dir is not None:
        names = ("rank-{rank}.out", "rank-{rank}.err")
        return Copies("--output-dir", arguments.output_dir, names, overwrite=False)
    if arguments.output_filename is not None:
        names = ("rank.{rank:0{width}}/stdout", "rank.{rank:0{width}}/stderr")
        return Copies("--output-filename", arguments.output_filename, names, overwrite=True)
    return None


def _ranks(text: str | None, command: list[str], slots: Sequence[Share] | None, name: str) -> int:
    ranks = _hosts.ranks_of(text, slots)
    if ranks is not None:
        return ranks
    import shlex

    cores = len(os.sched_getaffinity(0))
    raise CommandError(
        f"-np is missing; {cores} cores are usable here, so perhaps: "
        f"{name} -np {cores} -- {shlex.join(command)}"
    )
