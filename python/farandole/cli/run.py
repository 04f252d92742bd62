"""Starts a command once per rank on this host, shows their output with the rank in front of every
line, and ends them all when one fails. No process outlives it, also when it is killed itself."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from farandole.cli import CommandError

EPILOG = """\
examples:
  farandole run -np 4 -- python train.py --epochs 3
  farandole run -np 2 --output-dir logs -- python train.py
  farandole run -np 4 -- bash -c 'echo I am rank $RANK of $WORLD_SIZE'

what the ranks find:
  environment   RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK CROSS_RANK
                CROSS_SIZE MASTER_ADDR MASTER_PORT, the HOROVOD_ names of these, FARANDOLE_RUN_ID,
                PYTHONUNBUFFERED=1; OMP_NUM_THREADS = cores / ranks unless it is set
  stdin         empty (/dev/null)

before they start: the first time on a kind of host, about 2 s measure what its memory does, for all
later jobs too (farandole tune); not if it is busy, CI is set, or FARANDOLE_TUNING=kept or off

how it ends:
  one rank fails    the others have --grace seconds to say what they saw, then SIGTERM and SIGKILL;
                    the last line names the rank that failed first, whose exit code is returned
                    (128 + n for signal n)
  Ctrl-C            SIGINT to all, after --patience SIGTERM, then SIGKILL; Ctrl-C again: SIGKILL now
  SIGTERM, SIGHUP   passed on, then likewise; SIGUSR1, SIGUSR2 (to the ranks alone), Ctrl-Z too
  exit codes        2 wrong arguments, 126 the command cannot be executed, 127 it is not found
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "farandole run -np N [options] -- COMMAND [ARGUMENT …]"
    parser.add_argument(
        "-np", "--num-proc", metavar="N", dest="ranks", help="how many ranks to start"
    )
    parser.add_argument(
        "--no-prefix", action="store_true", help="show lines as they are, without '[rank] '"
    )
    parser.add_argument(
        "--output-dir",
        metavar="DIR",
        type=Path,
        help="also write DIR/rank-N.out and DIR/rank-N.err, byte for byte (created; 0600)",
    )
    parser.add_argument(
        "--grace",
        metavar="SECONDS",
        default="1",
        help="time for the other ranks to react to a failed one (default: 1)",
    )
    parser.add_argument(
        "--patience",
        metavar="SECONDS",
        default="5",
        help="time between a signal and the next harsher one (default: 5)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def handle(arguments: argparse.Namespace) -> int:
    command = arguments.command
    if command[:1] == ["--"]:
        command = command[1:]
    if command and command[0].startswith("-"):
        raise CommandError(f"unknown option {command[0]} (see: farandole run --help)")
    if not command:
        raise CommandError("the command is missing: farandole run -np 4 -- python train.py")

    from farandole import _launch
    from farandole._tune.first_use import measure_if_unknown
    from farandole.cli._terminal import wants_colour

    job = _launch.Job(
        command=command,
        ranks=_ranks(arguments.ranks, command),
        prefix=not arguments.no_prefix,
        colours=(wants_colour(1), wants_colour(2)),
        output_dir=arguments.output_dir,
        grace=_seconds("--grace", arguments.grace),
        patience=_seconds("--patience", arguments.patience),
    )
    try:
        _launch.check_command(command)  # before anything that takes time
        measure_if_unknown(job.ranks)
        return _launch.launch(job)
    except _launch.LaunchError as error:
        raise CommandError(str(error), error.exit_code) from error


def _ranks(text: str | None, command: list[str]) -> int:
    cores = len(os.sched_getaffinity(0))
    if text is None:
        import shlex

        raise CommandError(
            f"-np is missing; {cores} cores are usable here, so perhaps: "
            f"farandole run -np {cores} -- {shlex.join(command)}"
        )
    try:
        ranks = int(text)
    except ValueError:
        raise CommandError(f"-np takes a number of ranks, not '{text}'") from None
    if ranks < 1:
        raise CommandError(f"-np must be at least 1, not {ranks}; {cores} cores are usable here")
    return ranks


def _seconds(option: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:  # also refuses nan
        raise CommandError(f"{option} takes a number of seconds, not '{text}'")
    return seconds
