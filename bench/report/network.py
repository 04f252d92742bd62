"""All-reduce between two hosts, which are network namespaces: beside all peers and the network.

The TCP copy is what the network carries both ways at once; the floor is an all-reduce over the same
bare connection: the same bytes, and the fold.
"""

from __future__ import annotations

from collections.abc import Callable

import bars
from document import table
from measuring import (
    MPIS,
    Bench,
    Row,
    Setting,
    only,
    over,
    ratio_cell,
    run,
    select,
    time_of,
    versions,
)

from farandole._bench.peers.hosts import Hosts
from farandole._bench.peers.table import PEERS
from farandole._bench.statistics import format_size
from namespaces import cable

_MIB = 1 << 20
_PEERS = (*(name for name in MPIS if name != "mpich-mpir"), "gloo", "copy", "floor")
_OURS = (Setting(memory=("caller",)),)
_GIGABIT = "1gbit"
_ALGORITHMS = ("ring", "direct", "halving_doubling", "hierarchical")


# ---- as fast as the kernel copies ----


def measure_free(bench: Bench) -> list[Row]:
    sizes = [4, _MIB] if bench.quick else [4, 1 << 10, 64 << 10, _MIB, 16 * _MIB]
    with cable() as ends:
        hosts = Hosts("netns", [(end, 1) for end in ends])
        return run(bench, [bench.question("all_reduce", sizes, hosts=hosts)], _PEERS, _OURS)


def render_free(rows: list[Row]) -> str:
    return _render(rows, _judge_free)


def _judge_free(row: Row, rows: list[Row]) -> list[str]:
    best, floor = row["ratios"].get("best_mpi"), row["ratios"].get("floor")
    if not best or not floor:
        return ["-", "-", ""]
    cells = [ratio_cell(best), ratio_cell(floor)]
    if row["bytes"] == 4:
        return [*cells, bars.verdict(best, bars.NETWORK_SMALL)]
    if row["bytes"] < 16 * _MIB:
        return [*cells, ""]
    mpi = only(rows, peer=best["peer"], bytes=row["bytes"])
    least = only(rows, peer="floor", bytes=row["bytes"])
    if mpi and least and over(least, mpi)["ratio"] > bars.NETWORK_FLOOR_IS_NEAR:
        return [*cells, f"of the floor {bars.verdict(floor, bars.NETWORK_FLOOR)}"]
    return [*cells, f"of MPI {bars.verdict(best, bars.NETWORK_LARGE)}"]


# ---- a link of 1 Gbit/s ----


def measure_gigabit(bench: Bench) -> list[Row]:
    sizes = [_MIB] if bench.quick else [_MIB, 16 * _MIB, 64 * _MIB]
    effort = {} if bench.quick else {"rounds": 7}
    with cable(_GIGABIT) as ends:
        hosts = Hosts("netns", [(end, 1) for end in ends])
        question = bench.question("all_reduce", sizes, hosts=hosts, patience=5.0, **effort)
        return run(bench, [question], _PEERS, _OURS)


def render_gigabit(rows: list[Row]) -> str:
    return _render(rows, _judge_gigabit)


def _judge_gigabit(row: Row, rows: list[Row]) -> list[str]:  # noqa: ARG001
    best, copy = row["ratios"].get("best_mpi"), row["ratios"].get("copy")
    if not best or not copy:
        return ["-", "-", ""]
    limit = bars.GIGABIT.get(row["bytes"])
    judged = f"of the copy {bars.verdict(copy, limit)}" if limit else ""
    return [ratio_cell(best), ratio_cell(copy), judged]


def _render(rows: list[Row], judge: Callable[[Row, list[Row]], list[str]]) -> str:
    peers = [name for name in PEERS if any(r["peer"] == name for r in rows) and name != "farandole"]
    against = "copy" if judge is _judge_gigabit else "floor"
    columns = ["Size", "algorithm", "farandole", *(PEERS[p].label for p in peers)]
    columns += ["farandole / best MPI", f"farandole / TCP {against}", "bar"]
    cells = [
        [
            format_size(row["bytes"]),
            row["algorithm"],
            time_of(row),
            *(time_of(only(rows, peer=peer, bytes=row["bytes"])) for peer in peers),
            *judge(row, rows),
        ]
        for row in select(rows, peer="farandole")
    ]
    return f"p50 in µs; {versions(rows)}.\n\n{table(columns, cells)}"


# ---- two levels ----


def measure_levels(bench: Bench) -> list[Row]:
    """Two ranks on each of two hosts, with a link that is slow beside memory."""
    sizes = [_MIB] if bench.quick else [16 * _MIB]
    effort = {} if bench.quick else {"rounds": 7}
    settings = [Setting("auto", memory=("caller",))]
    for name in _ALGORITHMS:  # a ring of more than two ranks has an order of its own
        level = "fast" if name == "ring" else "canonical"
        settings.append(Setting(name, {"algorithm": name, "level": level}, memory=("caller",)))
    with cable(_GIGABIT) as ends:
        hosts = Hosts("netns", [(end, 2) for end in ends])
        question = bench.question("all_reduce", sizes, ranks=4, hosts=hosts, patience=5.0, **effort)
        return run(bench, [question], ["mpi", "mpich", "gloo"], settings)


def render_levels(rows: list[Row]) -> str:
    ring = only(rows, setting="ring")
    assert ring is not None
    columns = ["Size", "", "algorithm", "p50 µs", "sent / size", "over the ring", "bar"]
    said = f"{versions(rows)}. *sent* is what leaves both hosts, in packets."
    return f"{said}\n\n{table(columns, [_level(row, ring) for row in rows])}"


def _level(row: Row, ring: Row) -> list[str]:
    ratio = over(row, ring)
    name = row["setting"]
    return [
        format_size(row["bytes"]),
        PEERS[row["peer"]].label,
        f"auto ({row['algorithm']})" if name == "auto" else name,
        time_of(row),
        f"{row['network_bytes'] / row['bytes']:.2f}",
        ratio_cell(ratio),
        bars.verdict(ratio, bars.LEVELS) if name in ("auto", "hierarchical") else "",
    ]
