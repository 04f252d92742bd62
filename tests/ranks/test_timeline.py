"""start_timeline and stop_timeline: a trace of part of a run, in one file."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness import launch

LIMIT = 60

PRELUDE = """
import sys
import numpy as np
import farandole as fd
fd.init()
def step(name):
    fd.all_reduce(np.ones(1000, np.float32), name=name)
    fd.barrier()
"""


def run(ranks: int, script: str, *options: str, code: int = 0, **environment: str) -> None:
    launch(ranks, [sys.executable, "-c", PRELUDE + script], *options, code=code, **environment)


def operations(file: Path) -> Counter[tuple[int, str]]:
    """How often (rank, name) is in the timeline."""
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return Counter(
        (e["pid"], e["name"]) for e in events if e["ph"] == "X" and e["cat"] == "operation"
    )


def of(names: str, ranks: int = 2) -> Counter[tuple[int, str]]:
    return Counter((r, n) for r in range(ranks) for n in names.split())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_shows_all_ranks_from_start_to_stop(tmp_path: Path, ranks: int) -> None:
    file = tmp_path / "timeline.json"
    run(
        ranks,
        "step('before')\n"
        f"fd.start_timeline({str(file)!r}, mark_cycles=True)\n"
        "step('inside')\n"
        "fd.stop_timeline()\n"
        "step('after')\n",
    )
    found = operations(file)
    assert {key for key in found if key[1] in ("before", "inside", "after")} == {
        (r, "inside") for r in range(ranks)
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["timeline.json"]
    assert file.stat().st_mode & 0o777 == 0o600


def test_times_are_plausible(tmp_path: Path) -> None:
    """Nothing that began before the timeline did is drawn from the beginning of time."""
    file = tmp_path / "timeline.json"
    run(
        2,
        "x = np.ones(1 << 20, np.float32)\n"
        "handles = [fd.all_reduce(x.copy(), async_op=True) for _ in range(20)]\n"
        f"fd.start_timeline({str(file)!r})\n"
        "for handle in handles: handle.wait()\n"
        "step('inside')\n"
        "fd.stop_timeline()\n",
    )
    events = json.loads(file.read_text())["traceEvents"]
    times = [e["ts"] for e in events if "ts" in e]
    assert max(times) - min(times) < LIMIT * 1e6
    assert all(e["dur"] < LIMIT * 1e6 for e in events if e["ph"] == "X")


def test_several_timelines_follow_each_other(tmp_path: Path) -> None:
    run(
        2,
        f"folder = {str(tmp_path)!r}\n"
        "for i in range(5):\n"
        "    fd.start_timeline(f'{folder}/t{i % 2}.json')\n"
        "    step(f'step{i}')\n"
        "    fd.stop_timeline()\n"
        "    fd.barrier()\n",
    )
    for i in (3, 4):
        mine = {key[1] for key in operations(tmp_path / f"t{i % 2}.json") if "step" in key[1]}
        assert mine == {f"step{i}"}


def test_rank_0_alone_shows_rank_0(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    run(
        2,
        f"if fd.rank() == 0: fd.start_timeline({str(file)!r})\n"
        "step('inside')\n"
        "if fd.rank() == 0: fd.stop_timeline()\n",
    )
    assert operations(file)[0, "inside"] == 1
    assert operations(file)[1, "inside"] == 0


def test_one_that_is_not_stopped_ends_with_the_world(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    run(2, f"fd.start_timeline({str(file)!r})\nstep('inside')\n")
    assert {(0, "inside"), (1, "inside")} <= set(operations(file))


@pytest.mark.parametrize("how", ["HOROVOD_TIMELINE", "FARANDOLE_TIMELINE", "option"])
def test_it_may_be_asked_for_from_outside(tmp_path: Path, how: str) -> None:
    file = tmp_path / "a" / "timeline"
    file.parent.mkdir()
    options = ["--timeline-filename", str(file)] if how == "option" else []
    environment = {} if how == "option" else {how: str(file)}
    run(2, "step('inside')\n", *options, **environment)
    assert {(0, "inside"), (1, "inside")} <= set(operations(file))


@pytest.mark.parametrize("killed", ["one", "all"])
def test_it_is_there_from_the_start_and_complete_after_a_crash(tmp_path: Path, killed: str) -> None:
    file = tmp_path / "timeline.json"
    run(
        2,
        "import json, os\n"
        f"json.loads(open({str(file)!r}).read())['traceEvents']\n"
        "step('inside')\n"
        f"if fd.rank() == 1 or {killed == 'all'}: os.kill(os.getpid(), 9)\n"
        "step('orphan')\n",
        code=128 + 9,
        HOROVOD_TIMELINE=str(file),
    )
    assert operations(file) >= of("inside")
    assert operations(file)[0, "orphan"] == (killed == "one")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["timeline.json"]


WAIT = """
import json, time
def wait_for(name, *ranks):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        events = json.loads(open(file).read())["traceEvents"]
        found = [e["pid"] for e in events if e["name"] == name and e.get("cat") == "operation"]
        if set(found) >= set(ranks): break
        time.sleep(0.05)
    assert sorted(found) == list(ranks), (name, found)
"""


def test_its_events_are_there_while_the_job_runs(tmp_path: Path) -> None:
    """Also of a rank that goes on when the one that wrote them has stopped."""
    file = tmp_path / "timeline.json"
    run(
        2,
        f"file = {str(file)!r}\n{WAIT}"
        "fd.start_timeline(file)\n"
        "for name in ('one', 'two'):\n"
        "    step(name)\n"
        "    wait_for(name, 0, 1)\n"
        "    fd.barrier()\n"
        "for r in range(2):\n"
        "    if fd.rank() == r: fd.stop_timeline()\n"
        "    step(f'after {r}')\n"
        "    if fd.rank() > r: wait_for(f'after {r}', 1)\n"
        "    fd.barrier()\n",
    )
    assert operations(file) >= of("one two")
    assert operations(file)[1, "after 0"] == 1
    assert operations(file)[1, "after 1"] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["timeline.json"]


def test_reducers_and_streams_made_before_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    run(
        2,
        "from farandole import _core\n"
        "g = np.ones(1000, np.float32)\n"
        "sizes = dict(bucket_bytes=1, first_bucket_bytes=1)\n"
        "reducer = _core.Reducer(fd.world(), [('p', g.size, 'float32')], **sizes)\n"
        "def backward():\n    reducer.mark_ready(0, g.ctypes.data)\n    reducer.wait()\n"
        "backward()\n"
        f"fd.start_timeline({str(file)!r})\n"
        "backward()\n"
        "fd.stop_timeline()\n"
        "backward()\n",
    )
    events = json.loads(file.read_text())["traceEvents"]
    steps = Counter(e["pid"] for e in events if e.get("cat") == "step")
    assert steps == {0: 1, 1: 1}


def test_mistakes_say_what_to_do(tmp_path: Path) -> None:
    run(
        1,
        "def refused(call, *words):\n"
        "    try:\n        call(*words)\n"
        "    except ValueError as error:\n        return str(error)\n"
        f"file = {str(tmp_path / 'timeline.json')!r}\n"
        "assert 'call start_timeline() first' in refused(fd.stop_timeline)\n"
        "fd.start_timeline(file)\n"
        "assert 'already' in refused(fd.start_timeline, file)\n"
        "fd.stop_timeline()\n"
        "try:\n    fd.start_timeline('/proc/no/such/timeline')\n"
        "except fd.ResourceError as error:\n    assert '/proc/no' in str(error)\n"
        "else:\n    raise AssertionError\n"
        "fd.start_timeline(file)\n"
        "fd.shutdown()\n"
        "try:\n    fd.start_timeline(file)\n"
        "except fd.NotInitialized:\n    pass\n"
        "else:\n    raise AssertionError\n",
        HOROVOD_TIMELINE="DYNAMIC",
    )


def test_a_traced_run_has_no_timeline_beside(tmp_path: Path) -> None:
    run(
        2,
        "try:\n    fd.start_timeline('x')\n"
        "except ValueError as error:\n    assert 'is traced into' in str(error)\n"
        "else:\n    raise AssertionError\n",
        FARANDOLE_TRACE=str(tmp_path / "trace"),
        HOROVOD_TIMELINE=str(tmp_path / "timeline"),
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace"]
