"""The name that somebody probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def did_you_mean(written: str, known: Iterable[str]) -> str:
    """'; did you mean NAME?', or nothing."""
    near = difflib.get_close_matches(written, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def of_arguments(message: str, options: Iterable[str]) -> str:
    """The suggestion for argparse's message about an unknown option or choice."""
    if found := re.search(r"unrecognized arguments: .*?(--[\w-]+)", message):
        return did_you_mean(found[1], (option for option in options if option.startswith("--")))
    if found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
        return did_you_mean(found[1], re.findall(r"[\w-]+", found[2]))
    return ""


def of_verdict(verdict: str) -> str:
    """The suggestion for the core's message about an unknown collective or algorithm."""
    if "did you mean" in verdict:
        return ""
    from farandole import _core

    planners = _core.schedule.planners()
    if found := re.search(r"there is no collective '(.*?)'", verdict):
        return did_you_mean(found[1], {row["collective"] for row in planners})
    if found := re.search(r"algorithm '(.*?)' does not exist for (\w+)", verdict):
        names = [row["name"] for row in planners if row["collective"] == found[2]]
        names += [p["name"] for p in _core.tuning.paths() if found[2] in p["collectives"]]
        return did_you_mean(found[1], names)
    return ""
