"""Running jobs, looked at from outside: `farandole top`, `farandole run --metrics`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest
from test_launcher import PRELUDE, running

from harness import launch, wait_until

# Rank 1 is slow. The job goes on until its file is there.
TRAINING = """
import numpy as np
import farandole as fd
fd.init()
stop = here / "stop"
while not fd.all_reduce(np.array([float(stop.exists())]), op="max", name="stop")[0]:
    time.sleep(0.05 if fd.rank() == 1 else 0.001)
    fd.all_reduce(np.ones(1000), name="gradients")
"""


def top(*options: str) -> list[dict[str, Any]]:
    """The ranks of all jobs of this user, as one look at them shows."""
    words = [sys.executable, "-m", "farandole", "top", "--times", "1", "--json", *options]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    return json.loads(done.stdout) if done.returncode == 0 and done.stdout else []


def pids_of(job: int) -> set[int]:
    """Its ranks' processes, on all pretended hosts."""
    text = subprocess.run(
        ["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True
    ).stdout
    parents = dict(map(int, line.split()) for line in text.splitlines()[1:])
    below = {job}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return below


def ranks_of(job: int, *options: str) -> list[dict[str, Any]]:
    mine = pids_of(job)
    return [rank for rank in top(*options) if rank["pid"] in mine]


@pytest.fixture(params=[(), ("-H", "a:1,b:1", "--launcher=local")], ids=["here", "two hosts"])
def where(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


def test_ranks_are_seen_from_outside_with_the_one_that_is_late(
    where: tuple[str, ...], tmp_path: Any
) -> None:
    program = [sys.executable, "-c", PRELUDE + TRAINING]
    options = ["--metrics", "0", "-x", "HERE", *where]
    with running(2, program, *options, env={"HERE": str(tmp_path)}) as job:
        wait_until(lambda: len(ranks_of(job.process.pid, "--every", "0.5")) == 2, "both to be seen")
        first, second = ranks_of(job.process.pid, "--every", "2")
        assert [first["rank"], second["rank"], first["size"]] == [0, 1, 2]
        assert first["operations_per_second"] > 0
        assert first["bytes"] > 0
        assert first["share_for_ranks"] > second["share_for_ranks"]
        assert second["share_late"] > 0 == first["share_late"]

        os.kill(second["pid"], signal.SIGSTOP)

        def stands() -> bool:
            one, other = ranks_of(job.process.pid, "--every", "0.5")
            return other["state"] == "stopped" and one["waits_for"] == [1]

        wait_until(stands, "rank 0 to wait for the stopped one")
        one, _ = ranks_of(job.process.pid, "--every", "0.5")
        assert one["waits_in"].startswith("all_reduce #")
        os.kill(second["pid"], signal.SIGCONT)
        (tmp_path / "stop").touch()
        code, _, errors = job.end()
        assert code == 0, errors
        assert re.search(r"metrics at http://127\.0\.0\.1:\d+/metrics", errors)
    assert not ranks_of(job.process.pid)


# It asks the launcher's server, as a cluster would from outside, and prints what it says.
ASKING = """
import urllib.request, urllib.error
import numpy as np
import farandole as fd
fd.init()
def get(path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{os.environ['PORT']}{path}") as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
for _ in range(5): fd.all_reduce(np.ones(10), name="x")
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def asked(script: str, *options: str, code: int = 0) -> str:
    port = str(free_port())
    done = launch(
        2,
        [sys.executable, "-c", f"import os, time\n{ASKING}{script}"],
        "--no-prefix", "--metrics", port, *options,
        code=code, PORT=port,
    )  # fmt: skip
    return done.stdout


def test_metrics_and_health_of_a_job(where: tuple[str, ...]) -> None:
    # Ranks of other hosts are told of once a second.
    out = asked(
        """
fd.barrier()
while fd.rank() == 0:
    text = get("/metrics")
    if text.count("farandole_operations_total{") == 2: break
    time.sleep(0.1)
if fd.rank() == 0: print(text, get("/healthz"))
fd.barrier()
""",
        *where,
    )
    values = re.findall(
        r'^farandole_operations_total\{rank="(\d)",host="[^"]+"\} (\d+)$', out, re.M
    )
    assert [rank for rank, _ in values] == ["0", "1"]
    assert all(int(count) >= 5 for _, count in values)
    assert '"state": "' in out


def test_a_job_that_has_failed_is_not_healthy() -> None:
    out = asked(
        """
if fd.rank() == 1: os._exit(3)
try:
    fd.barrier()
except fd.Error:
    print(fd.metrics()["failed"], get("/healthz"))
""",
        "--grace=10",
        code=3,
    )
    assert out.startswith("1.0 503 ")
    assert '"state": "failed", "rank": 0, "verdict": "rank 1 ' in out


def test_a_port_that_is_taken_ends_the_job_before_it_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = launch(2, [sys.executable, "-c", "print('ran')"], "--metrics", port, code=1)
    assert done.stderr == (
        f"farandole run: --metrics {port}: cannot listen there: Address already in use\n"
    )
    assert "ran" not in done.stdout


def test_top_says_if_there_is_no_job(capfd: pytest.CaptureFixture[str]) -> None:
    from farandole.cli import main

    assert main(["top", "no such job"]) == 1
    assert capfd.readouterr().err == (
        "farandole top: no job of yours whose name begins with 'no such job' runs here\n"
    )
