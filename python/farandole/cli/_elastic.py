"""Options of jobs whose ranks may come and go, as horovodrun has them."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.cli import CommandError, seconds_of

if TYPE_CHECKING:
    from farandole._launch import Elastic, Share

_MOST = 1 << 22  # processes of Linux


def add_arguments(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--min-np",
        "--min-num-proc",
        metavar="N",
        help="the job goes on while there are so many ranks (default: -np)",
    )
    parser.add_argument(
        "--max-np",
        "--max-num-proc",
        metavar="N",
        help="workers that come later join, up to so many (default: -np; with a discovery script "
        "all slots)",
    )
    parser.add_argument(
        "--host-discovery-script",
        metavar="FILE",
        help="prints the hosts that there are now, 'host:slots' in each line; run every second",
    )
    parser.add_argument(
        "--slots-per-host",
        metavar="N",
        help="slots of a host for which the script prints none (default: 1)",
    )
    parser.add_argument(
        "--elastic-timeout",
        metavar="SECONDS",
        help="how long the job waits for as many ranks as it needs (default: 600)",
    )
    parser.add_argument(
        "--reset-limit",
        metavar="N",
        help="how many worlds may follow the first one (default: as many as it takes)",
    )
    parser.add_argument(
        "--blacklist-cooldown-range",
        metavar=("MIN", "MAX"),
        nargs=2,
        help="seconds that a slot or host rests after a failure: twice as long after each, from "
        "the first to the second (default: 1 60)",
    )


def terms_of(
    arguments: argparse.Namespace, ranks: int, slots: Sequence[Share] | None, name: str
) -> Elastic | None:
    """None where the number of ranks is fixed."""
    script = arguments.host_discovery_script
    if arguments.min_np is None and arguments.max_np is None and script is None:
        _tell_idle(arguments, name)
        return None
    from farandole._launch import Elastic

    if script is not None:
        script = _checked(script, slots)
    elif arguments.slots_per_host is not None:
        raise CommandError("--slots-per-host goes with --host-discovery-script")
    least = _number("--min-np", arguments.min_np, ranks)
    most = _number("--max-np", arguments.max_np, ranks if script is None else _MOST)
    if not least <= ranks <= most:
        raise CommandError(
            f"--min-np {least}, -np {ranks}, --max-np {most}: each is at most the next"
        )
    if slots is not None and most > sum(share.ranks for share in slots):
        raise CommandError(
            f"--max-np is {most}, but the hosts have {sum(share.ranks for share in slots)} slots"
        )
    limit = arguments.reset_limit
    return Elastic(
        least=least,
        most=most,
        timeout=_seconds("--elastic-timeout", arguments.elastic_timeout, 600.0),
        worlds=None if limit is None else _number("--reset-limit", limit, 0, at_least=0),
        cooldown=_range(arguments.blacklist_cooldown_range),
        discovery=script or "",
        slots=_number("--slots-per-host", arguments.slots_per_host, 1),
    )


def _tell_idle(arguments: argparse.Namespace, name: str) -> None:
    options = (
        "--slots-per-host",
        "--elastic-timeout",
        "--reset-limit",
        "--blacklist-cooldown-range",
    )
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


def _number(option: str, text: str | None, default: int, at_least: int = 1) -> int:
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or not at_least <= int(text) <= _MOST:
        raise CommandError(f"{option} takes a whole number, at least {at_least}, not '{text}'")
    return int(text)


def _seconds(option: str, text: str | None, default: float) -> float:
    return default if text is None else seconds_of(option, text)


def _range(texts: Sequence[str] | None) -> tuple[float, float]:
    if texts is None:
        return 1.0, 60.0
    option = "--blacklist-cooldown-range"
    first, most = (_seconds(option, text, 0.0) for text in texts)
    if first > most:
        raise CommandError(f"{option} {texts[0]} {texts[1]}: the first is at most the second")
    return first, most
