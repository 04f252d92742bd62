"""Options of jobs whose ranks may come and go, as horovodrun has them."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from farandole._launch import Elastic, Share
from farandole.cli import MOST_PROCESSES, CommandError, add_options, number_of, seconds_of

_TERMS = Elastic._field_defaults
_COUNT = {"reads": partial(number_of, most=MOST_PROCESSES)}
_OPTIONS = (
    ("--min-np --min-num-proc", "N",
     "the job goes on while there are so many ranks (default: -np)", _COUNT),
    ("--max-np --max-num-proc", "N",
     "workers that come later join, up to so many (default: -np; with a discovery script all "
     "slots)", _COUNT),
    ("--host-discovery-script", "FILE",
     "prints the hosts that there are now, 'host:slots' in each line; run every second"),
    ("--slots-per-host", "N",
     f"slots of a host for which the script prints none (default: {_TERMS['slots']})", _COUNT),
    ("--elastic-timeout", "SECONDS",
     f"how long the job waits for as many ranks as it needs (default: {_TERMS['timeout']:g})",
     {"reads": seconds_of}),
    ("--reset-limit", "N",
     "how many worlds may follow the first one (default: as many as it takes)",
     {"reads": partial(number_of, least=0)}),
    ("--blacklist-cooldown-range", ("MIN", "MAX"),
     "seconds that a slot or host rests after a failure: twice as long after each, from the first "
     "to the second (default: {:g} {:g})".format(*_TERMS["cooldown"]),
     {"reads": seconds_of, "nargs": 2}),
)  # fmt: skip


def add_arguments(parser: argparse._ActionsContainer) -> None:
    add_options(parser, *_OPTIONS)


def terms_of(
    arguments: argparse.Namespace, ranks: int, slots: Sequence[Share] | None, name: str
) -> Elastic | None:
    """None where the number of ranks is fixed."""
    script = arguments.host_discovery_script
    if arguments.min_np is None and arguments.max_np is None and script is None:
        _tell_idle(arguments, name)
        return None
    if script is not None:
        script = _checked(script, slots)
    elif arguments.slots_per_host is not None:
        raise CommandError("--slots-per-host goes with --host-discovery-script")
    least = arguments.min_np or ranks
    most = arguments.max_np or (ranks if script is None else MOST_PROCESSES)
    if not least <= ranks <= most:
        raise CommandError(
            f"--min-np {least}, -np {ranks}, --max-np {most}: each is at most the next"
        )
    if slots is not None and most > sum(share.ranks for share in slots):
        raise CommandError(
            f"--max-np is {most}, but the hosts have {sum(share.ranks for share in slots)} slots"
        )
    given = {
        "timeout": arguments.elastic_timeout,
        "worlds": arguments.reset_limit,
        "cooldown": _range(arguments.blacklist_cooldown_range),
        "discovery": script,
        "slots": arguments.slots_per_host,
    }
    return Elastic(least, most, **{name: of for name, of in given.items() if of is not None})


def _tell_idle(arguments: argparse.Namespace, name: str) -> None:
    words = "slots-per-host elastic-timeout reset-limit blacklist-cooldown-range"
    options = [f"--{word}" for word in words.split()]
    idle = [o for o in options if getattr(arguments, o[2:].replace("-", "_")) is not None]
    if idle:
        print(
            f"{name}: {', '.join(idle)} not used: the number of ranks is fixed without --min-np, "
            "--max-np and --host-discovery-script",
            file=sys.stderr,
        )


def _checked(script: str, slots: Sequence[Share] | None) -> str:
    if slots is not None:
        raise CommandError("-H or --hostfile and --host-discovery-script both say which hosts")
    found = shutil.which(script)
    if found is None:
        why = "is not executable" if Path(script).exists() else "is not there"
        raise CommandError(f"--host-discovery-script: {script} {why}")
    return found


def _range(seconds: Sequence[float] | None) -> tuple[float, float] | None:
    if seconds is None:
        return None
    first, most = seconds
    if first > most:
        raise CommandError(
            f"--blacklist-cooldown-range {first:g} {most:g}: the first is at most the second"
        )
    return first, most
