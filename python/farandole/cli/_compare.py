"""``farandole bench COLLECTIVE -np N --compare …``: other libraries measured beside ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from farandole.cli import CommandError

if TYPE_CHECKING:
    from farandole._bench.comparing import Question, Variant
    from farandole._bench.peers.finding import Found

PEERS = ("mpi", "mpich", "mpich-mpir", "impi", "gloo")


def run(
    names: Sequence[str],
    pythons: str | None,
    question: Question,
    memory: Sequence[str],
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """Measures and shows; the rows. A peer that is not here is told of, and the others go on."""
    from farandole._bench.comparing import OURS, Variant, compare, start

    found = _found(names, pythons)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        running = start(found, question.ranks, stack, _tell)
        variants = [
            Variant(workers, kind, options if workers.peer.name == OURS else {})
            for workers in running
            for kind in (memory if workers.peer.name == OURS else workers.peer.memory)
        ]
        for more in compare(question, variants, _tell):
            rows += more
        _show(question, variants, rows)
    if not any(row["peer"] == OURS for row in rows):
        raise CommandError("farandole itself could not be measured (see above)", 1)
    return rows


def _found(names: Sequence[str], text: str | None) -> list[Found]:
    from farandole._bench.peers.finding import find, parse_pythons
    from farandole._bench.peers.table import PEERS as TABLE
    from farandole._bench.peers.table import PeerError

    if unknown := [name for name in names if name not in PEERS]:
        raise CommandError(f"--compare: there is no {unknown[0]}; there are {', '.join(PEERS)}")
    try:
        pythons = parse_pythons(text) if text else {}
    except ValueError as error:
        raise CommandError(f"--peer-python: {error}") from None
    homes = {TABLE[name].home for name in names}
    if unknown := sorted(set(pythons) - homes):
        raise CommandError(f"--peer-python: {unknown[0]} is not among --compare {','.join(names)}")
    found = [find(TABLE["farandole"])]
    for name in dict.fromkeys(names):
        peer = TABLE[name]
        try:
            found.append(find(peer, pythons.get(peer.home, sys.executable)))
        except PeerError as error:
            _tell(str(error))
    return found


def _tell(text: str) -> None:
    print(f"farandole bench: {text}", file=sys.stderr)


def _show(question: Question, variants: Sequence[Variant], rows: list[dict[str, Any]]) -> None:
    from farandole._bench import placement
    from farandole.cli._terminal import print_table

    if not rows:
        return
    columns = [
        "   size", "peer", "memory", "path", "min us", "p50 us", "p99 us", "busbw", "errors",
        "our time / best peer's", "best peer",
    ]  # fmt: skip
    workers = dict.fromkeys(variant.workers for variant in variants)
    versions = ", ".join(f"{w.peer.label} {w.version}" for w in workers)
    title = (
        f"{question.collective} {question.dtype}, {question.ranks} ranks, "
        f"{placement.describe(variants[0].workers.cores)}, {question.rounds} rounds"
        f"{', hot' if question.hot else ''}; {versions}"
    )
    print_table(title, columns, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    from farandole._bench.peers.table import PEERS as TABLE
    from farandole._bench.statistics import format_microseconds, format_ratio, format_size

    best = row["ratios"].get("best")
    times = [format_microseconds(1e3 * row[name]) for name in ("min_us", "p50_us", "p99_us")]
    return [
        format_size(row["bytes"]).rjust(7),
        TABLE[row["peer"]].label,
        row["memory"],
        row["algorithm"] or "",
        *(time.rjust(6) for time in times),
        f"{row['busbw_gbs']:.2f}".rjust(5),
        str(row["errors"]).rjust(6),
        format_ratio(best["ratio"], best["low"], best["high"]) if best else "",
        TABLE[best["peer"]].label if best else "",
    ]
