"""Merging and summing up traces, on parts made by hand: every number here can be worked out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from farandole import _trace, cli

MAIN, STREAM, STEPS, DEVICE = 100, 1_000_000_000, 1_000_000_001, 1_000_000_002
GRADIENTS, PROGRAM = "00000000000000aa", "00000000000000bb"


class Part:
    """One rank's part, written event by event; times in microseconds."""

    def __init__(self, rank: int, size: int = 2, run: str = "r1", **header: Any) -> None:
        self.rank = rank
        about = {"run": run, "rank": rank, "size": size, "events": 0, "lost": 0}
        about |= {"complete_since": 0.0, **header}
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "farandole", "args": about}]

    def add(self, kind: str, tid: int, begin: float, end: float, name: str, **says: Any) -> Part:
        event = {"ph": "X", "pid": self.rank, "tid": tid, "ts": begin, "dur": end - begin}
        self.events.append({**event, "cat": kind, "name": name, "args": says})
        return self

    def operation(
        self, sequence: int, launched: float, begin: float, end: float, **says: Any
    ) -> Part:
        about = {"stream": GRADIENTS, "sequence": sequence, "bytes": 1024, "path": "mapped"}
        about |= {"collective": "all_reduce", "launched": launched, **says}
        return self.add("operation", STREAM, begin, end, f"bucket {sequence}", **about)

    def on_device(self, sequence: int, ready: float, begin: float, end: float) -> Part:
        about = {"stream": GRADIENTS, "sequence": sequence, "ready": ready}
        return self.add("device", DEVICE, begin, end, f"bucket {sequence}", **about)

    def used(self, sequence: int, begin: float, end: float) -> Part:
        """The end of a step on the host."""
        about = {"stream": GRADIENTS, "sequence": sequence, "bytes": 8, "path": "ll"}
        about |= {"collective": "all_reduce", "launched": begin}
        return self.add("operation", STREAM, begin, end, "used", **about)

    def step(self, begin: float, end: float) -> Part:
        return self.add("step", STEPS, begin, end, "step", stream=GRADIENTS)

    def wait(self, begin: float, end: float, *, final: bool = False, thread: int = MAIN) -> Part:
        return self.add("final_wait" if final else "wait", thread, begin, end, "gradients")

    def write(self, directory: Path, age: int = 0) -> Path:
        directory.mkdir(exist_ok=True)
        path = directory / f"rank-{self.rank}.jsonl"
        path.write_text("".join(json.dumps(event) + "\n" for event in self.events))
        stamp = 1_000_000_000 - age
        os.utime(path, (stamp, stamp))
        return path


def two_ranks(directory: Path) -> Path:
    """One step: rank 0 blocks for 40 of the 100 µs that gradients are on their way, rank 1 for 80;
    rank 1 enters the first operation 10 µs late, rank 0 the second one 5 µs."""
    Part(0).step(0, 210).operation(1, 100, 100, 160).operation(2, 120, 165, 200).wait(
        160, 200, final=True
    ).wait(162, 199).write(directory)
    Part(1).step(0, 211).operation(1, 100, 110, 160).operation(2, 130, 160, 200).wait(
        120, 200, final=True
    ).write(directory)
    return directory


# -- arithmetic ---------------------------------------------------------------------------------

UNIONS: list[tuple[list[tuple[float, float]], float]] = [
    ([], 0),
    ([(1, 3)], 2),
    ([(1, 3), (5, 6)], 3),
    ([(1, 3), (2, 5)], 4),
    ([(2, 5), (1, 3)], 4),
    ([(1, 9), (2, 3), (4, 5)], 8),
    ([(1, 3), (3, 4)], 3),
    ([(1, 3), (1, 3)], 2),
    ([(2, 2)], 0),
]


@pytest.mark.parametrize(("spans", "covered"), UNIONS)
def test_a_union_counts_every_moment_once(spans: list[tuple[float, float]], covered: float) -> None:
    assert _trace.union(spans) == covered


SHARES = [(0, 100, 1.0), (100, 100, 0.0), (25, 100, 0.75), (120, 100, 0.0), (5, 0, None)]


@pytest.mark.parametrize(("blocked", "communicating", "share"), SHARES)
def test_overlap_is_what_did_not_block(
    blocked: float, communicating: float, share: float | None
) -> None:
    assert _trace.overlap_share(blocked, communicating) == share


def test_a_summary_measures_steps_waits_and_overlap(tmp_path: Path) -> None:
    found = _trace.summary(two_ranks(tmp_path))
    assert (found.ranks, found.steps, found.step_median) == (2, 1, 210.5)
    assert [r.communicating for r in found.by_rank] == [100, 100]
    assert [r.final_wait for r in found.by_rank] == [40, 80]
    assert [r.overlap for r in found.by_rank] == [pytest.approx(0.6), pytest.approx(0.2)]
    assert found.overlap == pytest.approx(0.4)
    assert [r.other_waits for r in found.by_rank] == [0, 0]  # the inner wait is the final one's
    assert [r.reduced_bytes for r in found.by_rank] == [2048, 2048]
    assert found.final_wait_per_step == 60


DEVICE_STEPS = [  # of two buckets each: ready, begin, end
    ((100, 200, 240), (101, 300, 350)),
    ((400, 400, 440), (450, 452, 462)),
    ((500, 502, 560), (542, 560, 567)),
]


def test_overlap_on_a_device_is_what_was_done_before_its_last_gradient(tmp_path: Path) -> None:
    """The host ends all steps before the device begins one. In the first, which sets up, each of
    90 µs comes after the last gradient, with a gap; then it is 10 of 50, and 25 of 65."""
    part = Part(0, size=1)
    for step, (first, second) in enumerate(DEVICE_STEPS):
        host, sequence = 20 * step, 1 + 3 * step
        part.step(host, host + 10).on_device(sequence, *first).on_device(sequence + 1, *second)
        part.used(sequence + 2, host + 9, host + 10)
    part.write(tmp_path)
    found = _trace.summary(tmp_path)
    rank = found.by_rank[0]
    assert (rank.on_devices, rank.after_the_last, rank.most_after_the_last) == (65, 25, 90)
    assert found.device_overlap == rank.device_overlap == pytest.approx(1 - 25 / 65)
    text = _trace.render(found)
    assert "after the last gradient" in text
    assert "tell of the host" in text


def test_a_summary_names_who_is_late(tmp_path: Path) -> None:
    first, second = _trace.summary(two_ranks(tmp_path)).by_rank
    assert (first.last_to_arrive, first.late_by_median, first.late_by_total) == (1, 5, 5)
    assert (second.last_to_arrive, second.late_by_median, second.late_by_total) == (1, 10, 10)


def test_lateness_is_what_all_others_waited(tmp_path: Path) -> None:
    for rank, begin in enumerate((10, 100, 70)):
        Part(rank, size=3).operation(1, begin, begin, 120).write(tmp_path)
    found = _trace.summary(tmp_path)
    assert [r.last_to_arrive for r in found.by_rank] == [0, 1, 0]
    assert found.by_rank[1].late_by_total == 30
    assert (found.slowest[0].took, found.slowest[0].waited) == (110, 90)
    assert found.slowest[0].last_rank == 1


def test_the_slowest_operations_come_first(tmp_path: Path) -> None:
    for rank in range(2):
        part = Part(rank)
        for sequence in range(1, 9):
            part.operation(sequence, 0, 1000 * sequence, 1000 * sequence + 10 * sequence)
        part.write(tmp_path)
    slowest = _trace.summary(tmp_path).slowest
    assert [o.sequence for o in slowest] == [8, 7, 6, 5, 4]


def test_waits_for_the_programs_own_operations_are_counted_apart(tmp_path: Path) -> None:
    part = Part(0, size=1).step(0, 100).operation(1, 0, 0, 50)
    part.wait(40, 60, final=True).wait(41, 59).wait(70, 80)
    part.wait(70, 75, thread=MAIN + 1)
    part.operation(2, 60, 70, 80, stream=PROGRAM)  # no gradients: not on their way
    found = _trace.summary(part.write(tmp_path).parent).by_rank[0]
    assert (found.final_wait, found.other_waits, found.communicating) == (20, 15, 50)


def test_failed_operations_reduce_nothing(tmp_path: Path) -> None:
    part = Part(0, size=1).operation(1, 0, 0, 5).operation(2, 5, 5, 9, failed=True)
    found = _trace.summary(part.write(tmp_path).parent).by_rank[0]
    assert (found.operations, found.failed_operations, found.reduced_bytes) == (2, 1, 1024)


def test_what_one_rank_has_lost_is_left_out_of_all(tmp_path: Path) -> None:
    Part(0).operation(1, 0, 0, 5).operation(2, 10, 10, 15).write(tmp_path)
    Part(1, lost=7, complete_since=5.0).operation(2, 10, 11, 15).write(tmp_path)
    found = _trace.summary(tmp_path)
    assert [r.operations for r in found.by_rank] == [1, 1]
    assert found.compared_operations == 1
    assert found.lost_events == 7
    assert "7 older events were overwritten" in _trace.render(_trace.summary(tmp_path))


def test_a_program_without_steps_has_no_overlap(tmp_path: Path) -> None:
    folder = Part(0, size=1).operation(1, 0, 0, 5).write(tmp_path).parent
    text = _trace.render(_trace.summary(folder))
    assert text.startswith(f"{tmp_path}: 1 rank, no training steps")


# -- merging ------------------------------------------------------------------------------------


def test_merging_keeps_every_event_of_every_rank(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    merged = _trace.merge(tmp_path)
    assert merged.stat().st_mode & 0o777 == 0o600
    document = json.loads(merged.read_text())
    parts = [(tmp_path / f"rank-{rank}.jsonl").read_text() for rank in (0, 1)]
    assert document["traceEvents"] == [json.loads(s) for part in parts for s in part.splitlines()]
    assert document["otherData"] == {"run": "r1", "ranks": 2, "missing_ranks": []}
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "rank-0.jsonl",
        "rank-1.jsonl",
        "trace.json",
    ]


def test_a_rank_without_a_part_is_named(tmp_path: Path) -> None:
    Part(0, size=3).operation(1, 0, 0, 5).write(tmp_path)
    Part(2, size=3).operation(1, 0, 0, 5).write(tmp_path)
    events = json.loads(_trace.merge(tmp_path).read_text())["traceEvents"]
    assert {"rank 1 (left no trace)"} == {
        e["args"]["name"] for e in events if e["name"] == "process_name"
    }
    assert "nothing of rank 1:" in _trace.render(_trace.summary(tmp_path))


def test_parts_of_an_older_run_are_left_out(tmp_path: Path) -> None:
    Part(0, run="old").operation(1, 0, 0, 900).write(tmp_path, age=9)
    Part(1, run="old").operation(1, 0, 0, 900).write(tmp_path, age=9)
    Part(0, size=1, run="new").operation(1, 0, 0, 5).write(tmp_path)
    found = _trace.summary(tmp_path)
    assert (found.ranks, found.missing_ranks, found.stale_parts) == (1, [], ["rank-1.jsonl"])
    assert found.slowest == []
    _trace.merge(tmp_path)
    assert "old" not in (tmp_path / "trace.json").read_text()


def test_the_last_rank_to_leave_merges(tmp_path: Path) -> None:
    Part(0, run="old").write(tmp_path, age=9)
    Part(1).write(tmp_path)
    _trace.merge_if_complete(str(tmp_path), 2, 1)
    assert not (tmp_path / "trace.json").exists()
    Part(0).write(tmp_path)
    _trace.merge_if_complete(str(tmp_path), 2, 1)
    assert (tmp_path / "trace.json").exists()


# -- the command line ---------------------------------------------------------------------------


def test_the_verb_prints_the_summary(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", str(two_ranks(tmp_path))]) == 0
    out, err = capfd.readouterr()
    assert "1 step of 210 µs (median); for 40% of the time" in out
    assert f"open {tmp_path}/trace.json" in out
    assert err == ""


def test_the_verb_speaks_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "--json", str(two_ranks(tmp_path))]) == 0
    says = json.loads(capfd.readouterr().out)
    assert says["overlap"] == pytest.approx(0.4)
    assert [r["rank"] for r in says["by_rank"]] == [0, 1]


@pytest.mark.parametrize("named", [True, False])
def test_two_runs_are_shown_side_by_side(
    named: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    two_ranks(tmp_path / "with")
    part = Part(0, size=1).step(0, 421).operation(1, 0, 0, 100).wait(0, 100, final=True)
    part.write(tmp_path / "without")
    words = [str(tmp_path / "with"), str(tmp_path / "without")] if named else [str(tmp_path)]
    assert cli.main(["trace", *words]) == 0
    rows = {s[:35].strip(): s[35:].split() for s in capfd.readouterr().out.splitlines()}
    assert rows["overlap"] == ["40%", "0%", "-100%"]
    assert rows["step, median"] == ["210", "µs", "421", "µs", "+100%"]


def mistakes(tmp_path: Path) -> list[tuple[Path, str]]:
    empty, broken, torn, many = (tmp_path / name for name in ("empty", "broken", "torn", "many"))
    empty.mkdir()
    broken.mkdir()
    (broken / "rank-0.jsonl").write_text("{}\n")
    with Part(0).write(torn).open("a") as file:
        file.write('{"ph": "X"')
    many.mkdir()
    for name in "abc":
        Part(0).write(many / name)
    (tmp_path / "file").touch()
    return [
        (tmp_path / "nowhere", "there is no directory"),
        (tmp_path / "file", "cannot be read: Not a directory"),
        (empty, f"run the job with FARANDOLE_TRACE={empty}"),
        (broken, "rank-0.jsonl is not part of a trace"),
        (torn, "rank-0.jsonl, line 2 is not an event"),
        (many, f"but these do: {many}/a, {many}/b, {many}/c"),
    ]


@pytest.mark.parametrize("case", range(6))
def test_a_mistake_is_one_clear_line(
    case: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory, words = mistakes(tmp_path)[case]
    assert cli.main(["trace", str(directory)]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert words in err
