"""``farandole bench COLLECTIVE -np N --compare …``: other libraries measured beside ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from farandole.cli import CommandError
from farandole.cli._near import did_you_mean

if TYPE_CHECKING:
    from farandole._bench.comparing import Question, Variant
    from farandole._bench.peers.finding import Found
    from farandole._tables import Column

PEERS = ("mpi", "mpich", "mpich-mpir", "impi", "gloo", "copy", "floor")


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
        running = start(found, question.ranks, stack, _tell, question.hosts)
        variants = [
            Variant(workers, kind, options if workers.peer.name == OURS else {})
            for workers in running
            for kind in (memory if workers.peer.name == OURS else workers.peer.memory)
        ]
        table = _Table(question, variants)
        stack.callback(table.clear)
        for more in compare(question, variants, table.tell, table.watch):
            table.show(more)
            rows += more
    if not any(row["peer"] == OURS for row in rows):
        raise CommandError("farandole itself could not be measured (see above)", 1)
    return rows


def _found(names: Sequence[str], text: str | None) -> list[Found]:
    from farandole._bench.peers.finding import find, parse_pythons
    from farandole._bench.peers.table import PEERS as TABLE
    from farandole._bench.peers.table import PeerError

    if unknown := [name for name in names if name not in PEERS]:
        near = did_you_mean(unknown[0], PEERS)
        raise CommandError(
            f"--compare: there is no {unknown[0]}; there are {', '.join(PEERS)}{near}"
        )
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


class _Table:
    """Shows the rows of a size when it is measured, and on a terminal how far it is."""

    def __init__(self, question: Question, variants: Sequence[Variant]) -> None:
        from farandole._progress import Progress
        from farandole.cli._terminal import columns

        self._question = question
        self._progress = Progress(len(question.sizes) * question.rounds, columns())
        self._columns = _columns(variants)
        self._title = _title(question, variants) if variants else ""

    def watch(self, size: int, rounds: int) -> None:
        from farandole._bench.statistics import format_size

        each = self._question.rounds
        what = f"{self._question.collective} of {format_size(size)}, round {rounds % each + 1}"
        self._progress.now(what, rounds)

    def show(self, rows: Sequence[dict[str, Any]]) -> None:
        from farandole._tables import head_of, row_of

        if self._title and rows:
            self._progress.show(f"{self._title}\n\n{head_of(self._columns)}")
            self._title = ""
        for row in rows:
            self._progress.show(row_of(self._columns, _cells(row)))

    def tell(self, text: str) -> None:
        self.clear()
        _tell(text)

    def clear(self) -> None:
        self._progress.clear()


def _title(question: Question, variants: Sequence[Variant]) -> str:
    from farandole._bench import placement

    workers = dict.fromkeys(variant.workers for variant in variants)
    versions = ", ".join(f"{w.peer.label} {w.version}".rstrip() for w in workers)
    where = f" on {question.hosts}" if question.hosts else ""
    return (
        f"{question.collective} {question.dtype}, {question.ranks} ranks{where}, "
        f"{placement.describe(variants[0].workers.cores)}, {question.rounds} rounds"
        f"{', hot' if question.hot else ''}; {versions}"
    )


def _columns(variants: Sequence[Variant]) -> list[Column]:
    from farandole._tables import Column

    longest = max((len(variant.workers.peer.label) for variant in variants), default=0)
    return [
        Column("size", len("256 KiB"), right=True),
        Column("peer", longest),
        Column("memory"),
        Column("path", len("one_shot")),
        *(Column(name, right=True) for name in ("min us", "p50 us", "p99 us")),
        Column("busbw", right=True),
        Column("errors", right=True),
        Column("our time / best peer's", len("no difference (0.95 to 1.05)")),
        Column("best peer"),
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    from farandole._bench.peers.table import PEERS as TABLE
    from farandole._bench.statistics import format_microseconds, format_ratio, format_size

    best = row["ratios"].get("best")
    return [
        format_size(row["bytes"]),
        TABLE[row["peer"]].label,
        row["memory"],
        row["algorithm"] or "",
        *(format_microseconds(1e3 * row[name]) for name in ("min_us", "p50_us", "p99_us")),
        f"{row['busbw_gbs']:.2f}",
        str(row["errors"]),
        format_ratio(best["ratio"], best["low"], best["high"]) if best else "",
        TABLE[best["peer"]].label if best else "",
    ]
