"""``farandole bench`` between real ranks: its rows, its mistakes, its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = [sys.executable, "-m", "farandole", "bench"]
ROW = {
    "collective", "ranks", "bytes", "dtype", "op", "memory", "peer", "algorithm", "level",
    "iterations", "min_us", "p50_us", "p99_us", "algbw_gbs", "busbw_gbs", "errors", "verified",
}  # fmt: skip


def run(*words: str, command: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    return subprocess.run(
        [*(command or BENCH), *words], env=environment, capture_output=True, text=True, timeout=60
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    for row in rows:
        assert set(row) == ROW
        assert row["verified"] is True
        assert row["errors"] == 0
        assert row["peer"] == "farandole"
        assert 0 < row["min_us"] <= row["p50_us"] <= row["p99_us"]
    return rows


def test_all_reduce_tells_a_row_per_size_and_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    done = run(
        "all_reduce", "-np", "2", "--sizes", "4,1K", "--iterations", "20", "--json", str(path)
    )
    assert done.returncode == 0, done.stderr
    rows = rows_of(path)
    assert [(row["bytes"], row["memory"]) for row in rows] == [
        (4, "ours"), (4, "caller"), (1024, "ours"), (1024, "caller"),
    ]  # fmt: skip
    for row in rows:
        assert (row["collective"], row["ranks"], row["dtype"]) == ("all_reduce", 2, "float32")
        assert (row["op"], row["level"], row["iterations"]) == ("sum", "canonical", 20)
        assert row["algorithm"] == "ll"
        assert row["algbw_gbs"] == pytest.approx(row["bytes"] / row["p50_us"] / 1e3)
        assert row["busbw_gbs"] == row["algbw_gbs"]  # 2 (n-1) / n is 1
    table = done.stdout.splitlines()
    assert table[0].startswith("all_reduce float32 sum canonical, 2 ranks, ")
    assert sum(" ll " in line for line in table) == len(rows)


@pytest.mark.parametrize("ranks", ["1", "3"])
@pytest.mark.parametrize("collective", ["broadcast", "all_gather", "reduce_scatter"])
def test_the_others_round_up_to_a_part_for_every_rank(
    tmp_path: Path, collective: str, ranks: str
) -> None:
    path = tmp_path / "rows.json"
    done = run(
        collective, "-np", ranks, "--sizes", "2,40K", "--dtype", "bfloat16", "--memory", "caller",
        "--iterations", "5", "--json", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole = 2 * int(ranks) if collective != "broadcast" else 2
    assert [row["bytes"] for row in rows_of(path)] == [whole, -(-40 * 1024 // whole) * whole]


@pytest.mark.parametrize("collective", ["all_to_all", "reduce", "gather", "scatter", "send_recv"])
def test_every_collective_is_measured(tmp_path: Path, collective: str) -> None:
    path = tmp_path / "rows.json"
    done = run(collective, "-np", "2", "--sizes", "64K", "--iterations", "5", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert [row["memory"] for row in rows_of(path)] == ["ours", "caller"]


def test_a_mean_of_halves_and_a_product_of_integers_are_verified(tmp_path: Path) -> None:
    for dtype, op in (("float16", "mean"), ("int8", "product"), ("bool", "max")):
        path = tmp_path / f"{dtype}.json"
        done = run(
            "all_reduce", "-np", "3", "--sizes", "20000", "--iterations", "5",
            "--dtype", dtype, "--op", op, "--json", str(path),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert {(row["dtype"], row["op"]) for row in rows_of(path)} == {(dtype, op)}


def test_a_barrier_has_no_size(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    done = run("barrier", "-np", "2", "--seconds", "0.05", "--json", str(path))
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(path)
    assert (row["bytes"], row["dtype"], row["memory"], row["busbw_gbs"]) == (0, None, None, None)


def test_ranks_that_are_there_measure_among_themselves(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    launcher = [sys.executable, "-m", "farandole", "run", "--no-prefix", "-np", "2", "--", *BENCH]
    done = run(
        "all_reduce", "--sizes", "64", "--iterations", "5", "--json", str(path), command=launcher
    )
    assert done.returncode == 0, done.stderr
    assert [row["ranks"] for row in rows_of(path)] == [2, 2]
    assert done.stdout.count("all_reduce") == 1  # one rank shows the table


def test_an_algorithm_that_cannot_run_is_named() -> None:
    done = run("all_reduce", "-np", "2", "--sizes", "4", "--algorithm", "no_such_algorithm")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "algorithm 'no_such_algorithm' does not exist for all_reduce" in done.stderr


WRONG = """
import sys
import farandole
from farandole._bench.__main__ import main

honest = farandole.all_reduce

def dishonest(x, op="sum", **options):
    result = honest(x, op, **options)
    if options.get("out") is x:
        x[-1] += 1
    return result

farandole.all_reduce = dishonest
sys.exit(main(*sys.argv[1:]))
"""


def test_one_wrong_element_a_call_is_seen(tmp_path: Path) -> None:
    request = {
        "collective": "all_reduce", "sizes": [40000], "dtype": "float32", "memory": ["caller"],
        "options": {}, "iterations": 7, "seconds": 1.0,
    }  # fmt: skip
    path = tmp_path / "result.json"
    done = run(
        "-np", "2", "--no-prefix", "--", sys.executable, "-c", WRONG, str(path),
        json.dumps(request), command=[sys.executable, "-m", "farandole", "run"],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(path.read_text())["rows"]
    assert row["errors"] == 2 * 7  # both ranks, every call
    assert row["verified"] is False


STEPWISE = """
import sys, time
from pathlib import Path
from farandole._bench import ranks
from farandole._bench.__main__ import main

measured, seen = ranks._row, Path(sys.argv.pop())

def row(request, collective, size, memory):
    while size > 4 and not seen.exists():
        time.sleep(0.005)
    return measured(request, collective, size, memory)

ranks._row = row
sys.exit(main(*sys.argv[1:]))
"""


def test_a_row_is_shown_before_the_next_one_is_measured(tmp_path: Path) -> None:
    request = {
        "collective": "all_reduce", "sizes": [4, 64], "dtype": "float32", "memory": ["caller"],
        "options": {}, "iterations": 5, "seconds": 1.0,
    }  # fmt: skip
    words = [str(tmp_path / "result.json"), json.dumps(request), str(tmp_path / "seen")]
    launcher = [sys.executable, "-m", "farandole", "run", "-np", "2", "--no-prefix", "--"]
    command = [*launcher, sys.executable, "-c", STEPWISE, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if " 4 B " in line:
                break
        (tmp_path / "seen").touch()
        rest = job.stdout.read()
    assert job.returncode == 0
    assert rest.startswith("   64 B  caller  ll ")
    assert "\x1b" not in rest


# -- beside others --------------------------------------------------------------------------------


def test_gloo_is_measured_beside_ours(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="gloo needs torch")
    path = tmp_path / "rows.json"
    done = run(
        "all_reduce", "-np", "2", "--compare", "gloo", "--sizes", "4,1K", "--rounds", "2",
        "--seconds", "0.01", "--dtype", "float16", "--json", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    assert [(row["bytes"], row["peer"], row["memory"]) for row in rows] == [
        (size, *who)
        for size in (4, 1024)
        for who in (("farandole", "ours"), ("farandole", "caller"), ("gloo", "caller"))
    ]
    for row in rows:
        assert row["verified"] is True
        assert len(row["rounds_us"]) == row["rounds"] == 2
        assert set(row["ratios"]) == ({"gloo", "best"} if row["peer"] == "farandole" else set())
    assert "our time / best peer's" in done.stdout


def test_hosts_are_measured_beside_what_their_network_carries(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    done = run(
        "all_reduce", "-H", "a:1,b:1", "--launcher", "local", "--compare", "copy,floor",
        "--sizes", "4,300012", "--rounds", "2", "--seconds", "0.01", "--json", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    assert [row["peer"] for row in rows] == ["farandole", "farandole", "copy", "floor"] * 2
    for row in rows:
        assert row["verified"] is True
        assert row["hosts"] == "a:1,b:1"
        assert row["network_bytes"] >= 2 * row["bytes"]  # each rank sends as much
        if row["peer"] == "farandole":
            assert row["algorithm"] == ("eager" if row["bytes"] == 4 else "schedule")
            assert set(row["ratios"]) == {"copy", "floor"}


def test_ranks_of_hosts_measure_ours_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    done = run(
        "broadcast", "-H", "a:2,b:1", "--launcher", "local", "--sizes", "1K", "--iterations", "5",
        "--json", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {(row["ranks"], row["algorithm"]) for row in rows_of(path)} == {(3, "eager")}


@pytest.mark.parametrize("collective", ["broadcast", "all_gather", "reduce_scatter"])
def test_a_missing_peer_is_told_of_and_the_others_go_on(tmp_path: Path, collective: str) -> None:
    path = tmp_path / "rows.json"
    bare = tmp_path / "python"  # one that has no mpi4py
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    done = run(
        collective, "-np", "3", "--compare", "impi", "--peer-python", f"impi={bare}", "--sizes",
        "40", "--rounds", "2", "--seconds", "0.01", "--hot", "--json", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Intel MPI is not here: " in done.stderr
    rows = json.loads(path.read_text())
    assert [row["memory"] for row in rows] == ["ours", "caller"]
    assert all(row["verified"] and row["hot"] for row in rows)
    assert [row["bytes"] for row in rows] == [48 if collective != "broadcast" else 40] * 2
