"""A trace of several hosts: one file, by one clock, though each host has files and a clock of its
own. Hosts are agents in namespaces: of mounts, with a folder for traces that nobody else sees, and
of time, where one clock is ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from harness import launch

AHEAD = 5000  # seconds
CALLS = 40
HOST = """\
#!/bin/sh
# One host's agent: the first to come has this machine's clock.
ahead=0
mkdir {first} 2>/dev/null || ahead={ahead}
exec unshare --mount --time --monotonic $ahead sh -c \
    'mount -t tmpfs none {folder} && exec {python} "$@"' agent "$@"
"""
PROGRAM = """
import os, signal, sys
import numpy as np
import farandole as fd
fd.init()
for i in range({calls}):
    with fd.trace_span("turn"):
        fd.all_reduce(np.full(70_000, i, np.float32), name=f"turn {{i}}")
if fd.rank() == {dies}:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def can_have_a_clock_of_its_own() -> bool:
    words = ["unshare", "--mount", "--time", "--monotonic", str(AHEAD), sys.executable, "-c"]
    ask = ["import time; print(time.monotonic())"]
    told = subprocess.run([*words, *ask], capture_output=True, text=True, check=False)
    return told.returncode == 0 and float(told.stdout) > time.monotonic() + AHEAD / 2


needs_namespaces = pytest.mark.skipif(
    not can_have_a_clock_of_its_own(), reason="no right to make namespaces of mounts and time"
)


def run_on_two_hosts(tmp_path: Path, *, dies: int = -1, **asked: str) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    python = tmp_path / "python"
    python.write_text(
        HOST.format(first=tmp_path / "first", ahead=AHEAD, folder=folder, python=sys.executable)
    )
    python.chmod(0o700)
    hosts = ["-H", "a:1,b:1", "--launcher=local", f"--remote-python={python}"]
    program = PROGRAM.format(calls=CALLS, dies=dies)
    launch(2, [sys.executable, "-c", program], *hosts, code=0 if dies < 0 else 137, **asked)


def check_that_ranks_met(merged: dict[str, Any]) -> None:
    """No rank ends an operation before the other has begun it."""
    (within,) = merged["otherData"]["clocks_within_us"].values()  # of rank 1's host
    assert within < 1e6, "a round trip within this machine"
    shares = defaultdict(dict)
    for event in merged["traceEvents"]:
        if event.get("cat") == "operation" and event["name"].startswith("turn"):
            shares[event["name"]][event["pid"]] = (event["ts"], event["ts"] + event["dur"])
    assert len(shares) == CALLS
    for name, by_rank in shares.items():
        (first, second) = (by_rank[0], by_rank[1])
        assert first[1] + within > second[0], name
        assert second[1] + within > first[0], name


@needs_namespaces
@pytest.mark.parametrize("dies", [-1, 1])
def test_all_hosts_are_in_one_file_by_one_clock(tmp_path: Path, dies: int) -> None:
    folder = tmp_path / "traces"
    run_on_two_hosts(tmp_path, dies=dies, FARANDOLE_TRACE=str(folder))
    merged = json.loads((folder / "trace.json").read_text())
    assert merged["otherData"]["missing_ranks"] == []
    assert "clocks_unknown" not in merged["otherData"]
    check_that_ranks_met(merged)
    assert {p.name for p in folder.iterdir()} == {
        "rank-0.jsonl",
        "rank-1.clock",
        "rank-1.jsonl",
        "trace.json",
    }
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o600}
    shown = subprocess.run(
        [sys.executable, "-m", "farandole", "trace", "--json", str(folder)],
        capture_output=True, text=True, check=True, env=os.environ,
    ).stdout  # fmt: skip
    assert json.loads(shown)["clocks_within"] == merged["otherData"]["clocks_within_us"]


@needs_namespaces
@pytest.mark.parametrize("dies", [-1, 0])
def test_a_timeline_of_all_hosts_is_one_file(tmp_path: Path, dies: int) -> None:
    folder = tmp_path / "traces"
    run_on_two_hosts(tmp_path, dies=dies, FARANDOLE_TIMELINE=str(folder / "line.json"))
    merged = json.loads((folder / "line.json").read_text())
    assert merged["otherData"]["missing_ranks"] == []
    check_that_ranks_met(merged)
    assert [p.name for p in folder.iterdir()] == ["line.json"]
