"""`make device`, dry: over the fake driver, which is no measure of anything. And the bench."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import harness
from farandole import cuda

TREE = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def driver() -> dict[str, str]:
    """An environment in which the fake driver is found."""
    if not cuda._table().has_kernels:
        pytest.skip("this build has no kernels: there was no nvcc")
    harness.build("fake_libcuda")
    kept = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "RANK")}
    return {**kept, "LD_LIBRARY_PATH": str(harness.TREE / "fake_libcuda")}


def test_report(driver: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "report.txt"
    few = ["--ranks", "2", "--sizes", "8K", "--seconds", "0.01", "--most", "301"]
    command = [sys.executable, str(TREE / "bench" / "device"), "--out", str(out), *few]
    done = subprocess.run(command, env=driver, capture_output=True, text=True, timeout=300)
    report = out.read_text()
    assert done.returncode == 0, done.stdout + done.stderr + report
    assert "device 0: Fake GPU" in report
    assert "collectives have the host's bits" in report
    assert "WRONG" not in report
    for way in ("staged", "step", "spin"):
        assert f"== all_reduce by {way} on 2 ranks" in report
    before = report
    done = subprocess.run(command, env=driver, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert out.read_text() == before, "what was done is not done again"


def test_bench(driver: dict[str, str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    command = [sys.executable, "-m", "farandole", "bench", "all_gather", "-np", "2"]
    command += ["--device", "cuda", "--sizes", "64K", "--iterations", "3", "--json", str(rows)]
    done = subprocess.run(command, env=driver, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "copy" in done.stdout
    (row,) = json.loads(rows.read_text())
    assert (row["memory"], row["errors"]) == ("device", 0)
    assert row["copy_gbs"] > 0
    del driver["LD_LIBRARY_PATH"]
    done = subprocess.run(command, env=driver, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--device cuda: there is no CUDA driver" in done.stderr
