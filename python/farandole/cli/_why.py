"""``farandole info --why SIZE``: which path or planner would run an operation, and why."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from farandole.cli import CommandError, _why_devices, add_options, number_of
from farandole.cli._near import check_known, refused

if TYPE_CHECKING:
    from farandole._tune.table import Table

_DEFAULTS = {
    "collective": "all_reduce", "ranks": "2", "memory": "caller", "dtype": "float32", "level": "",
}  # fmt: skip
_KINDS = {"shm_direct": "path", "schedule": "planner", "mpi": "MPI"}


_OPTIONS = (
    ("--why", "SIZE",
     "bytes that one rank gives, such as 4M (of scatter: that it gets; of all_to_all: that it "
     "gives to each)"),
    ("--collective", None, "(all_reduce)"),
    ("--ranks", "N", "ranks on this host (2)"),
    ("--memory", None,
     "farandole.allocate's, your own, or that of CUDA devices: one for each rank, or one that "
     "ranks share (caller)", {"choices": ("ours", "caller", "device", "shared-device")}),
    ("--dtype", None, "element type (float32)"),
    ("--level", None, "of determinism (FARANDOLE_LEVEL)", {"choices": ("canonical", "fast")}),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("why", "what would run an operation, and why")
    add_options(group, *_OPTIONS)


def is_asked(arguments: argparse.Namespace) -> bool:
    """Whether ``--why`` is there; its options without it are a mistake."""
    if arguments.why is not None:
        return True
    for name in _DEFAULTS:
        if getattr(arguments, name) is not None:
            raise CommandError(f"--{name} belongs to --why SIZE")
    return False


def handle(arguments: argparse.Namespace) -> int:
    from farandole import _core

    on_devices = (arguments.memory or "").endswith("device")
    of_devices = _why_devices.answer, _why_devices.show
    find, tell = of_devices if on_devices else (answer, show)
    try:
        facts = find(*asked_of(arguments))
    except _core.InvalidArgument as error:
        raise refused(error) from None
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        tell(facts)
    return 0


def asked_of(arguments: argparse.Namespace) -> tuple[dict[str, str], int, int]:
    """The question in words, its number of ranks and its bytes."""
    from farandole import _core
    from farandole._bench import data
    from farandole._bench.statistics import parse_size
    from farandole._limits import setting

    asked = {name: getattr(arguments, name) or default for name, default in _DEFAULTS.items()}
    asked["level"] = asked["level"] or setting("FARANDOLE_LEVEL")
    ranks = number_of("--ranks", asked["ranks"], 1, 1024)
    check_known("--dtype", asked["dtype"], _core.dtypes)
    try:
        size = parse_size(arguments.why)
    except ValueError as error:
        raise CommandError(f"--why: {error}") from None
    item = data.storage(asked["dtype"]).itemsize
    if size % item or size > 1 << 50:
        raise CommandError(
            f"--why: {size} bytes are not a number of {asked['dtype']} ({item} bytes)"
        )
    return asked, ranks, size


def answer(asked: dict[str, str], ranks: int, size: int) -> dict[str, Any]:
    """Question, choice, candidates and table, as plain values."""
    from farandole import _core
    from farandole._bench import data
    from farandole._limits import setting
    from farandole._tune import table

    by_address = setting("FARANDOLE_CMA")
    transport = setting("FARANDOLE_TRANSPORT")
    item = data.storage(asked["dtype"]).itemsize
    found = table.find(ranks)
    reached, why_not = _by_address(ranks, by_address)
    rows = _core.tuning.explain(
        asked["collective"], size // item, asked["dtype"], ranks,
        shared=asked["memory"] == "ours", foreign=reached,
        demanded=by_address == "1", level=asked["level"], text=found.text,
        transport=transport,
    )  # fmt: skip
    candidates = [dict(row) for row in rows]
    measured = _core.tuning.is_measured(found.text) or transport in ("tcp", "mpi")
    return {
        "question": {**asked, "ranks": ranks, "bytes": size},
        "choice": next(c["name"] for c in candidates if c["chosen"]),
        "forced": setting("FARANDOLE_ALGORITHM") or None,
        "candidates": [
            {**c, "why": _verdict(c, candidates, measured=measured)} for c in candidates
        ],
        "by address": {"used": reached, "why not": why_not or None},
        "table": describe(found),
    }


def _by_address(ranks: int, setting: str) -> tuple[bool, str]:
    """As ranks would find out when they meet: two of them try."""
    if ranks == 1:
        return False, "there is one rank"
    if setting == "0":
        return False, "FARANDOLE_CMA=0"
    from farandole._tune import starting

    return starting.ask_by_address()


def describe(found: Table) -> dict[str, Any]:
    """Where the table comes from and how good it is."""
    return {
        "from": found.origin,
        "fingerprint": found.fingerprint,
        "file": found.path,
        "noise": found.kept.noise if found.kept else None,
        "median errors": found.kept.errors if found.kept else {},
        "not used": found.why_not or None,
    }


def show(facts: dict[str, Any]) -> None:
    from farandole._bench.statistics import format_microseconds, format_size
    from farandole.cli._terminal import print_table

    q = facts["question"]
    chosen = next(c for c in facts["candidates"] if c["chosen"])
    size = "" if q["collective"] == "barrier" else f" of {format_size(q['bytes'])} {q['dtype']}"
    title = (
        f"{q['collective']}{size}, {q['ranks']} ranks on this host, memory {q['memory']}, "
        f"level {q['level']}: {chosen['name']}"
    )
    rows = [
        (
            candidate["name"],
            _KINDS[candidate["backend"]],
            "-"
            if candidate["seconds"] is None
            else format_microseconds(1e9 * candidate["seconds"]).rjust(9),
            candidate["why"],
        )
        for candidate in facts["candidates"]
    ]
    print_table(title, ("name", "what", "us", "why"), rows)
    if why_not := facts["by address"]["why not"]:
        print(f"not by address: {why_not}")
    table = facts["table"]
    noise = "" if table["noise"] is None else f", noise {100 * table['noise']:.1f} %"
    print(f"table {table['fingerprint']}: {table['from']}{noise}")
    if table["file"]:
        print(f"file {table['file']}")
    if table["not used"]:
        print(f"not used: {table['not used']}")
    elif not table["file"]:
        off = os.environ.get("FARANDOLE_TUNING") == "off"
        print("FARANDOLE_TUNING=off" if off else "measure this host: farandole tune")
    if facts["forced"]:
        print(f"but FARANDOLE_ALGORITHM={facts['forced']} forces that one where it can run")


def _verdict(candidate: dict[str, Any], everybody: list[dict[str, Any]], *, measured: bool) -> str:
    """Why a candidate runs, or does not."""
    if candidate["refusal"]:
        return str(candidate["refusal"])
    allowed = [c for c in everybody if not c["refusal"]]
    chosen = next(c for c in everybody if c["chosen"])
    if not candidate["chosen"]:
        if not measured:
            return "comes later in the usual order"
        quicker = candidate["seconds"] < chosen["seconds"]
        return "predicted to save less than 10 %" if quicker else "predicted to take longer"
    if len(allowed) == 1:
        return "chosen: the only one allowed"
    if not measured:
        return "chosen: the first in the usual order (nothing is measured)"
    least = min(c["seconds"] for c in allowed)
    if candidate["seconds"] == least:
        return "chosen: least predicted time"
    return "chosen: the usual one, no other is predicted to save 10 %"
