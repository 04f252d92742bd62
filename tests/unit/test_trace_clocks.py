"""Parts of hosts whose clocks differ, made by hand: one trace by rank 0's clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_trace import Part

from farandole import _trace, cli
from farandole._launch.agents import frames, parcels
from farandole._launch.agents.frames import Decoder, FrameError, Message
from farandole._trace import clocks
from farandole._trace.clocks import Clock

Reading = tuple[float, float, float]  # at, ahead, within: microseconds


def readings(directory: Path, rank: int, *lines: Reading, run: str = "r1") -> None:
    rows = [[round(1000 * number) for number in line] for line in lines]
    text = "\n".join(map(json.dumps, [{"run": run, "rank": rank}, *rows]))
    (directory / f"rank-{rank}.clock").write_text(f"{text}\n")


def two_hosts(directory: Path, ahead: float = 1e9) -> Path:
    """Rank 1's clock is ahead; by rank 0's, both enter the operation at 100 and leave it at 160."""
    Part(0, host="a").operation(1, 90, 100, 160).write(directory)
    Part(1, host="b").operation(1, ahead + 95, ahead + 100, ahead + 160).write(directory)
    readings(directory, 1, (ahead, ahead, 7.0), (ahead + 1000, ahead, 9.0))
    return directory


# ---- a clock ----


def test_between_readings_clocks_drift_evenly() -> None:
    clock = Clock([1000.0, 2000.0, 4000.0], [10.0, 20.0, 0.0], 1.0)
    times = [0.0, 1000.0, 1500.0, 2000.0, 3000.0, 4000.0, 9000.0]
    wanted = [-10.0, 990.0, 1485.0, 1980.0, 2990.0, 4000.0, 9000.0]
    assert [clock.to_rank_0(time) for time in times] == wanted


def test_a_round_trip_that_was_held_up_says_nothing(tmp_path: Path) -> None:
    part = Part(1).write(tmp_path)
    readings(tmp_path, 1, (0, 10, 5), (1000, 500, 900), (2000, 10, 4), (3000, 10, 6))
    clock = clocks.read(part, "r1")
    assert clock == Clock([0.0, 2000.0, 3000.0], [10.0, 10.0, 10.0], 6.0)


def test_what_was_written_when_the_rank_died_is_read(tmp_path: Path) -> None:
    part = Part(1).write(tmp_path)
    readings(tmp_path, 1, (0, 10, 5))
    with (tmp_path / "rank-1.clock").open("a") as file:
        file.write("[20000, 1")
    assert clocks.read(part, "r1") == Clock([0.0], [10.0], 5.0)


@pytest.mark.parametrize("text", ["", "[1,2,3]\n", '{"run": "r1"}\n', '{"run": "r1"}\n[1,2]\n'])
def test_what_is_no_reading_is_none(tmp_path: Path, text: str) -> None:
    part = Part(1).write(tmp_path)
    (tmp_path / "rank-1.clock").write_text(text)
    assert clocks.read(part, "r1") is None


def test_readings_of_another_run_are_none(tmp_path: Path) -> None:
    part = Part(1).write(tmp_path)
    readings(tmp_path, 1, (0, 10, 5), run="older")
    assert clocks.read(part, "r1") is None


# ---- a trace ----


def test_a_merged_trace_is_by_rank_0s_clock(tmp_path: Path) -> None:
    merged = json.loads(_trace.merge(two_hosts(tmp_path)).read_text())
    shares = [e for e in merged["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["ts"], e["dur"], e["args"]["launched"]) for e in shares] == [
        (0, 100, 60, 90),
        (1, 100, 60, 95),
    ]
    assert merged["otherData"]["clocks_within_us"] == {"b": 9.0}


def test_moments_of_a_device_are_by_rank_0s_clock_too(tmp_path: Path) -> None:
    directory = two_hosts(tmp_path)
    Part(1, host="b").on_device(1, 1e9 + 20, 1e9 + 30, 1e9 + 50).write(directory)
    (read,) = _trace.load(directory).parts[1].on_devices
    assert (read.ready, read.begin, read.end) == (20, 30, 50)
    merged = json.loads(_trace.merge(directory).read_text())
    (shown,) = (e for e in merged["traceEvents"] if e.get("cat") == "device")
    assert (shown["args"]["ready"], shown["ts"], shown["dur"]) == (20, 30, 20)


def test_a_summary_is_by_rank_0s_clock_and_says_how_well(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = _trace.summary(two_hosts(tmp_path))
    assert found.slowest[0].took == 60
    assert found.clocks_within == {"b": 9.0}
    assert cli.main(["trace", str(tmp_path)]) == 0
    assert "clocks of b lined up with rank 0's to within 9" in capfd.readouterr().out


def test_ranks_of_a_host_share_its_readings(tmp_path: Path) -> None:
    two_hosts(tmp_path)
    for rank in (0, 1):  # of a world of three now
        path = tmp_path / f"rank-{rank}.jsonl"
        path.write_text(path.read_text().replace('"size": 2', '"size": 3'))
    Part(2, size=3, host="b").operation(1, 1e9, 1e9 + 100, 1e9 + 160).write(tmp_path)
    found = _trace.load(tmp_path)
    assert [o.begin for part in found.parts for o in part.operations] == [100, 100, 100]


def test_a_host_without_readings_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (two_hosts(tmp_path) / "rank-1.clock").unlink()
    assert cli.main(["trace", str(tmp_path)]) == 0
    assert "times of b are by another clock" in capfd.readouterr().out
    merged = json.loads((tmp_path / "trace.json").read_text())
    assert merged["otherData"]["clocks_unknown"] == ["b"]


# ---- parts that other hosts have ----


def apart(tmp_path: Path) -> tuple[Path, Path]:
    """The same, each host's in a directory of its own."""
    here, there = two_hosts(tmp_path / "here"), tmp_path / "there"
    there.mkdir()
    for name in ("rank-1.jsonl", "rank-1.clock"):
        (here / name).rename(there / name)
    return here, there


def test_parts_of_other_hosts_are_added(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    here, there = apart(tmp_path)
    assert cli.main(["trace", str(here), "--add", str(there)]) == 0
    assert "clocks of b lined up" in capfd.readouterr().out
    merged = json.loads((here / "trace.json").read_text())
    assert merged["otherData"]["missing_ranks"] == []
    assert (there / "rank-1.jsonl").exists()


def test_what_belongs_to_another_run_is_not_added(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    here, there = apart(tmp_path)
    Part(1, run="another").write(there)
    assert cli.main(["trace", str(here), "--add", str(there)]) == 1
    assert f"{there} holds no part of the run in {here}" in capfd.readouterr().err


def test_an_agent_sends_what_its_ranks_left(tmp_path: Path) -> None:
    here, there = apart(tmp_path)
    decoder, delivery = Decoder(), parcels.Delivery({"FARANDOLE_TRACE": str(here)})
    for frame in parcels.packed({"FARANDOLE_TRACE": str(there)}, range(1, 2), since=0.0):
        for parcel in decoder.feed(frame):
            delivery.take(parcel, range(1, 2))
    delivery.put_together()
    assert json.loads((here / "trace.json").read_text())["otherData"]["missing_ranks"] == []
    later = (there / "rank-1.clock").stat().st_mtime + 100
    assert list(parcels.packed({"FARANDOLE_TRACE": str(there)}, range(2), since=later)) == []


def a_parcel(name: str) -> Message:
    return Message("parcel", {"what": "trace", "name": name, "last": True})


@pytest.mark.parametrize("name", ["../rank-1.jsonl", "rank-0.jsonl", ".profile", "rank-1.events"])
def test_an_agent_sends_nothing_else(tmp_path: Path, name: str) -> None:
    delivery = parcels.Delivery({"FARANDOLE_TRACE": str(tmp_path)})
    with pytest.raises(FrameError, match="a parcel"):
        delivery.take(a_parcel(name), range(1, 2))
    with pytest.raises(FrameError):
        parcels.Delivery({}).take(a_parcel("rank-1.jsonl"), range(1, 2))
    assert list(tmp_path.iterdir()) == []


def test_a_parcel_travels_whole() -> None:
    sent = a_parcel("rank-3.jsonl")._replace(data=b"\0bytes\n\0")
    assert list(Decoder().feed(frames.message("parcel", sent.data, **sent.content))) == [sent]
