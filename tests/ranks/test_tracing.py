"""Traces by FARANDOLE_TRACE: ranks under `farandole run`, and the trace they leave behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from farandole import _core, _trace
from harness import launch

Event = dict[str, Any]

PRELUDE = """
import os, signal, sys
import numpy as np
import farandole as fd
from farandole import _core
fd.init()
rank = fd.rank()
"""

STEPS, PARAMETERS = 5, 8
TRAIN = f"""
for i in range(3):
    fd.all_reduce(np.ones(1, np.float32), name="loss")
fd.all_reduce(np.ones(1 << 16, np.float32))
gradients = [np.full(1 << 14, i, np.float32) for i in range({PARAMETERS})]
reducer = _core.Reducer(
    fd.world(),
    [(f"p{{i}}", g.size, "float32") for i, g in enumerate(gradients)],
    bucket_bytes=2 * gradients[0].nbytes,
    first_bucket_bytes=gradients[0].nbytes,
)
for step in range({STEPS}):
    with fd.trace_span("backward"):
        for i, g in enumerate(gradients):
            reducer.mark_ready(i, g.ctypes.data)
    reducer.wait()
"""


def run(
    ranks: int, script: str, directory: Path | str | None, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Runs a job to its end, traced when there is a directory."""
    traced = {"FARANDOLE_TRACE": str(directory)} if directory is not None else {}
    return launch(ranks, [sys.executable, "-c", PRELUDE + script], code=code, **traced)


def events_of(directory: Path) -> list[Event]:
    return list(json.loads((directory / "trace.json").read_text())["traceEvents"])


def check_nesting(events: list[Event]) -> None:
    """On one row, each interval lies within another or beside it."""
    rows: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        begins = [event["ts"] for event in row]
        assert begins == sorted(begins)
        open_ends: list[float] = []
        for event in row:
            while open_ends and open_ends[-1] <= event["ts"] + 0.0005:
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1] + 0.002, event  # rounded to 1 ns
            open_ends.append(end)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a training run of two ranks."""
    directory = tmp_path_factory.mktemp("traced") / "deep" / "trace"
    done = run(2, TRAIN, directory)
    assert "warning" not in done.stderr
    return directory


def test_every_rank_leaves_a_part_and_the_last_one_merges(traced: Path) -> None:
    assert sorted(p.name for p in traced.iterdir()) == [
        "rank-0.jsonl",
        "rank-1.jsonl",
        "trace.json",
    ]
    assert traced.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in traced.iterdir()} == {0o600}
    assert json.loads((traced / "trace.json").read_text())["otherData"]["missing_ranks"] == []


def test_the_rows_of_both_ranks_have_names(traced: Path) -> None:
    rows = defaultdict(set)
    for event in events_of(traced):
        if event["ph"] == "M" and event["name"] == "thread_name":
            rows[event["pid"]].add(event["args"]["name"])
    wanted = {"main", "program order", "gradients", "steps of gradients"}
    assert wanted <= rows[0]
    assert wanted <= rows[1]


def test_intervals_nest(traced: Path) -> None:
    check_nesting(events_of(traced))


def test_both_ranks_show_the_same_operations(traced: Path) -> None:
    seen: dict[int, list[tuple[Any, ...]]] = {0: [], 1: []}
    for event in events_of(traced):
        if event.get("cat") == "operation":
            says = event["args"]
            assert says["launched"] <= event["ts"]
            seen[event["pid"]].append(
                (says["stream"], says["sequence"], event["name"], says["bytes"], says["path"])
            )
    assert sorted(seen[0]) == sorted(seen[1])
    names = [name for _, _, name, _, _ in seen[0]]
    buckets = [f"bucket {i}" for i in range(len(names)) if f"bucket {i}" in names]
    assert len(buckets) > 2
    for name in [*buckets, "used"]:
        assert names.count(name) == STEPS
    assert names.count("loss") == 3
    assert names.count("all_reduce") == 1
    for stream in {s for s, *_ in seen[0]}:
        numbers = sorted(number for s, number, *_ in seen[0] if s == stream)
        assert numbers == list(range(1, len(numbers) + 1))


def test_an_operation_contains_its_phases_and_spans_from_launch_to_done(traced: Path) -> None:
    events = [e for e in events_of(traced) if e["pid"] == 0]
    operations = [e for e in events if e.get("cat") == "operation"]
    phases = [e for e in events if e.get("cat") == "phase"]
    assert {"agreeing", "running"} & {p["name"] for p in phases}
    for phase in phases:
        inside = [
            o
            for o in operations
            if o["tid"] == phase["tid"] and o["args"]["sequence"] == phase["args"]["sequence"]
        ]
        assert len(inside) == 1
        assert inside[0]["ts"] <= phase["ts"] + 0.002
    begins = [e for e in events if e["ph"] == "b"]
    ends = {e["id2"]["local"]: e["ts"] for e in events if e["ph"] == "e"}
    assert len(begins) == len(operations) == len(ends)
    for begin in begins:
        assert begin["ts"] == begin["args"]["launched"] <= ends[begin["id2"]["local"]]


def test_steps_hold_their_gradients_and_waits(traced: Path) -> None:
    for rank in (0, 1):
        events = [e for e in events_of(traced) if e["pid"] == rank]
        by_kind = defaultdict(list)
        for event in events:
            by_kind[event.get("cat")].append(event)
        assert [e["args"]["sequence"] for e in by_kind["step"]] == list(range(1, STEPS + 1))
        assert len(by_kind["ready"]) == STEPS * PARAMETERS
        assert [e["name"] for e in by_kind["user"]] == ["backward"] * STEPS
        assert len(by_kind["final_wait"]) >= STEPS
        for event in [*by_kind["ready"], *by_kind["final_wait"]]:
            assert any(
                s["ts"] <= event["ts"] + 0.002 and event["ts"] <= s["ts"] + s["dur"]
                for s in by_kind["step"]
            ), event
        assert by_kind["turn"]


def test_the_summary_counts_what_was_run(traced: Path) -> None:
    found = _trace.summary(traced)
    assert (found.ranks, found.steps, found.lost_events) == (2, STEPS, 0)
    for rank in found.by_rank:
        gradients = STEPS * PARAMETERS * (1 << 14) * 4
        assert gradients + (1 << 18) <= rank.reduced_bytes <= gradients + (1 << 18) + 100 * STEPS
        assert rank.overlap is not None
        assert 0 <= rank.overlap <= 1
        assert rank.failed_operations == 0
    # Operations between two ranks alone, such as the gathering of plans, are compared too.
    assert found.compared_operations == found.by_rank[0].operations
    assert "backward" in found.spans


def test_nothing_is_written_without_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(2, TRAIN, None)
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_directory_costs_a_warning_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(2, TRAIN + "\nprint('trained')", tmp_path / "file" / "trace")
    assert done.stdout.count("trained") == 2
    for rank in (0, 1):
        warnings = [s for s in done.stderr.splitlines() if f"rank {rank}: warning" in s]
        assert len(warnings) == 1
        assert "nothing is traced: mkdir" in warnings[0]


def test_a_full_ring_keeps_the_newest_events_and_counts_the_others(tmp_path: Path) -> None:
    script = """
x = np.ones(1, np.float32)
for i in range(20000):
    fd.all_reduce(x, name=f"number {i}")
"""
    run(1, script, tmp_path)
    found = _trace.summary(tmp_path)
    (rank,) = found.by_rank
    room = _core.trace_events_per_thread
    assert room <= rank.events < 2 * room  # the progress thread has a ring of its own
    assert rank.lost_events > 0
    operations = _trace.load(tmp_path).parts[0].operations
    numbers = [int(o.name.split()[1]) for o in operations]
    assert numbers == list(range(20000 - len(numbers), 20000))
    check_nesting(events_of(tmp_path))


def test_names_survive_quotes_and_are_cut_between_characters(tmp_path: Path) -> None:
    script = r"""
for name in ('a "b" \\ c\n\x01', 'ä' * 40, 'x' + 'ä' * 40, 'z' * 47, 'z' * 48):
    fd.all_reduce(np.ones(1, np.float32), name=name)
"""
    run(1, script, tmp_path)
    names = [o.name for o in _trace.load(tmp_path).parts[0].operations]
    assert names == ['a "b" \\ c\n\x01', "ä" * 23, "x" + "ä" * 23, "z" * 47, "z" * 47]


def test_one_trace_holds_all_worlds_of_a_process(tmp_path: Path) -> None:
    script = """
fd.all_reduce(np.ones(1, np.float32), name="first")
fd.shutdown()
fd.init()
fd.all_reduce(np.ones(1, np.float32), name="second")
"""
    run(2, script, tmp_path)
    for part in _trace.load(tmp_path).parts:
        assert [o.name for o in part.operations] == ["first", "second"]
    assert _trace.summary(tmp_path).compared_operations == 2  # though both have number 1


def names_of(directory: Path) -> list[list[str]]:
    return [[o.name for o in part.operations] for part in _trace.load(directory).parts]


KILLED = """
fd.all_reduce(np.ones(1, np.float32), name="first")
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_rank_did_is_in_the_trace(tmp_path: Path) -> None:
    script = """
try:
    fd.all_reduce(np.ones(1, np.float32), name="orphan")
except fd.Error as error:
    sys.exit(3)
"""
    run(2, KILLED + script, tmp_path, code=128 + 9)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "rank-0.jsonl",
        "rank-1.jsonl",
        "trace.json",
    ]
    assert names_of(tmp_path) == [["first", "orphan"], ["first"]]
    assert _trace.summary(tmp_path).by_rank[0].failed_operations == 1
    check_nesting(events_of(tmp_path))


def test_a_trace_is_complete_when_no_rank_is_left_to_write_it(tmp_path: Path) -> None:
    run(2, KILLED + "os.kill(os.getpid(), signal.SIGKILL)", tmp_path, code=128 + 9)
    assert names_of(tmp_path) == [["first"], ["first"]]
    assert {e["pid"] for e in events_of(tmp_path) if e["name"] == "first"} == {0, 1}


def test_events_of_an_older_run_are_left_out(tmp_path: Path) -> None:
    """The older run left no rank to merge its events."""
    old, new = tmp_path / "old", tmp_path / "new"
    new.mkdir()
    script = f"""
import shutil
fd.all_reduce(np.ones(1, np.float32), name="old")
if rank == 1:
    shutil.copy2({str(old / ".rank-1.events")!r}, {str(new)!r})
"""
    run(2, script, old)
    run(1, 'fd.all_reduce(np.ones(1, np.float32), name="new")', new)
    assert names_of(new) == [["new"]]
    assert _trace.load(new).stale == [new / "rank-1.jsonl"]
    assert {e["pid"] for e in events_of(new)} == {0}


def test_a_trace_is_there_and_can_be_read_while_ranks_run(tmp_path: Path) -> None:
    script = f"""
import json, subprocess
from pathlib import Path
fd.all_reduce(np.ones(1, np.float32), name="first")
if rank == 0:
    folder = Path({str(tmp_path)!r})
    assert json.loads((folder / "trace.json").read_text())["traceEvents"] == []
    subprocess.run([sys.executable, "-m", "farandole", "trace", str(folder)], check=True)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {{e["pid"] for e in events if e["name"] == "first"}} == {{0, 1}}
fd.all_reduce(np.ones(1, np.float32), name="second")
"""
    run(2, script, tmp_path)
    assert names_of(tmp_path) == [["first", "second"]] * 2


def test_a_forked_child_leaves_its_parents_trace_alone(tmp_path: Path) -> None:
    script = """
fd.all_reduce(np.ones(1, np.float32), name="parent")
child = os.fork()
if child == 0:
    with fd.trace_span("child"):
        pass
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
fd.all_reduce(np.ones(1, np.float32), name="still parent")
"""
    run(1, script, tmp_path)
    part = _trace.load(tmp_path).parts[0]
    assert [o.name for o in part.operations] == ["parent", "still parent"]
    assert part.spans == {}
