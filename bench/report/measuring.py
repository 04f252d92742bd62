"""Helpers that the parts share: peers found once, runs of comparisons, cells of tables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from farandole._bench.comparing import OURS, Question, Variant, compare, start
from farandole._bench.peers.finding import Found, find
from farandole._bench.peers.table import PEERS, PeerError
from farandole._bench.statistics import Interval, format_microseconds, format_ratio, ratio_to_best

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
MPIS = ("mpi", "mpich", "mpich-mpir", "impi")


@dataclass
class Bench:
    """The settings and notes of a run, which every part gets."""

    quick: bool
    folder: Path  # of raw rows
    pythons: Mapping[str, str]  # of the peers that live in other environments
    notes: list[str] = field(default_factory=list)

    def tell(self, text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)
        if text not in self.notes:
            self.notes.append(text)

    def found(self, names: Iterable[str]) -> list[Found]:
        """The peers that are here; a note tells why another one is not."""
        here = []
        for name in names:
            peer = PEERS[name]
            try:
                here.append(find(peer, self.pythons.get(peer.home, sys.executable)))
            except PeerError as error:
                self.tell(str(error))
        return here

    def question(self, collective: str, sizes: Sequence[int], **rest: Any) -> Question:
        effort = {"rounds": 3, "block_seconds": 0.01} if self.quick else {"rounds": 15}
        return Question(collective, sizes, **{**effort, **rest})

    def script(self, words: Sequence[str], name: str) -> list[Row]:
        """The rows of another program of this folder; it takes ``--json``."""
        path = self.folder / f"{name}.rows.json"
        path.unlink(missing_ok=True)
        done = subprocess.run([sys.executable, *words, "--json", str(path)], cwd=ROOT, check=False)
        if not path.exists():
            raise PeerError(f"{' '.join(words)} ended with {done.returncode} and wrote no rows")
        rows: list[Row] = json.loads(path.read_text())
        return rows


@dataclass(frozen=True)
class Setting:
    """farandole as a variant: what is told to its call, and to its environment."""

    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    memory: tuple[str, ...] = ("ours", "caller")
    dtype: str = ""  # another than the question's, of as many elements


def run(
    bench: Bench,
    questions: Sequence[Question],
    peers: Sequence[str],
    settings: Sequence[Setting] = (Setting(),),
    more: Sequence[Found] = (),
) -> list[Row]:
    """All questions put to all peers, to farandole in every setting and to `more`, in turns."""
    rows: list[Row] = []
    ranks, hosts = questions[0].ranks, questions[0].hosts
    ours = bench.found([OURS])[0]
    with ExitStack() as stack:
        variants: list[Variant] = []
        for environment in _distinct(setting.environment for setting in settings):
            told = replace(ours, environment=environment)
            for workers in start([told], ranks, stack, bench.tell, hosts):
                variants += [
                    Variant(workers, memory, setting.options, setting.name, setting.dtype)
                    for setting in settings
                    if setting.environment == environment
                    for memory in setting.memory
                ]
        for workers in start([*bench.found(peers), *more], ranks, stack, bench.tell, hosts):
            variants += [Variant(workers, memory) for memory in workers.peer.memory]
        for question in questions:
            for found in compare(question, variants, bench.tell):
                rows += found
    return rows


def _distinct(environments: Iterable[Mapping[str, str]]) -> list[Mapping[str, str]]:
    return [dict(items) for items in dict.fromkeys(tuple(e.items()) for e in environments)]


# ---- reading rows ----


def select(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def only(rows: Iterable[Row], **wanted: Any) -> Row | None:
    """The one row, or none."""
    found = select(rows, **wanted)
    return found[0] if found else None


def time_of(row: Row | None) -> str:
    return format_microseconds(1e3 * row["p50_us"]) if row else "-"


def over(mine: Row, other: Row) -> dict[str, float]:
    """Time of one row over that of another of the same run, round by round."""
    found: Interval = ratio_to_best(mine["rounds_us"], [other["rounds_us"]])
    return {"ratio": found.median, "low": found.low, "high": found.high}


def ratio_cell(ratio: Mapping[str, Any]) -> str:
    return format_ratio(ratio["ratio"], ratio["low"], ratio["high"])


def versions(rows: Iterable[Row]) -> str:
    """'Open MPI 5.0.11, ...' of the libraries that were there."""
    others = [r for r in rows if r["peer"] != OURS and r["version"]]
    named = (f"{PEERS[r['peer']].label} {r['version']}" for r in others)
    return ", ".join(dict.fromkeys(named))
