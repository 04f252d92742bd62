"""`make device`, dry: over the fake driver, which is no measure of anything. And the bench."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_device import Machine

import farandole as fd
import harness
from farandole import _core
from farandole._bench import torch_own
from farandole._bench.ranks import Request, measure

TREE = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def driver() -> dict[str, str]:
    """An environment in which the fake driver is found."""
    if not _core.kernel_compiler():
        pytest.skip("this build has no kernels: there was no compiler for them")
    harness.build("fake_libcuda")
    kept = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "RANK")}
    return {**kept, "LD_LIBRARY_PATH": str(harness.TREE / "fake_libcuda")}


# Parts that tests/frameworks/test_device_programs.py runs.
ELSEWHERE = ("PyTorch", "torch.distributed", "JAX", "TensorFlow")


def parts(report: str) -> list[str]:
    """Titles without their time, commands and, where there is PyTorch, cases."""
    parts = [part for part in re.split("(?m)^== ", report) if not part.startswith(ELSEWHERE)]
    cases = "|[^:\n]+: ok: " if importlib.util.find_spec("torch") else ""
    lines = re.findall(rf"(?m)^(?:.*, 20\d\d-|\$ {cases}).*$", "".join(parts))
    return [re.sub(", 20.*|build/[a-z-]*-trace|: ok: .*", "", line) for line in lines]


def test_report(driver: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "report.txt"
    command = [sys.executable, str(TREE / "bench" / "device"), "--out", str(out), "--dry"]
    command += ["--without", ",".join(ELSEWHERE)]
    done = subprocess.run(command, env=driver, capture_output=True, text=True, timeout=300)
    report = out.read_text()
    assert done.returncode == 0, done.stdout + done.stderr + report
    assert "device 0: Fake GPU" in report
    assert "collectives have the host's bits" in report
    assert "WRONG" not in report
    assert "a kernel has used a wrong address: ok: DeviceError on all" in report
    assert "no memory left on the device: ok: results are right, by mapped and step" in report
    assert "of copy" in report
    assert "overhead" in report or "not done: there is no PyTorch" in report
    for way in ("staged", "step", "lanes", "spin", "nccl"):
        assert f"== all_reduce by {way} on 2 ranks, 20" in report
    assert "by lanes on 2 ranks under MPS, 20" in report
    assert report.count("not measured: a dry run has no MPS") == 7
    assert parts(report) == parts((TREE / "bench" / "device" / "dry-run.txt").read_text()), (
        "what is committed is of another program: make device-dry"
    )
    before = report
    done = subprocess.run(command, env=driver, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert out.read_text() == before, "what was done is not done again"

    bits = "== bits on 2 ranks"
    begin = before.index(bits)
    end = before.index("\n== ", begin)
    late = before[begin:end].replace("exit code 0", "not done after 540 s")
    out.write_text(before[:begin] + late + before[end:])
    done = subprocess.run(command, env=driver, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert "bits on 2 ranks: done" in done.stdout
    assert "kernels: done" not in done.stdout
    assert out.read_text().count(bits) == 1, "what did not do well is run again"
    assert "not done after" not in out.read_text()


def test_only_parts_that_are_asked_for(driver: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "report.txt"
    command = [sys.executable, str(TREE / "bench" / "device"), "--out", str(out), "--dry"]
    command += ["--only", "machine,by staged", "--without", "MPS"]
    done = subprocess.run(command, env=driver, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    titles = re.findall("(?m)^== (.*), 20", out.read_text())
    assert titles == ["machine", "all_reduce by staged on 2 ranks"]


KERNELS = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import kernels

kernels.ROWS = (kernels.Row("of nothing", "fold", "nothing"), kernels.Row("fold", "fold"))
kernels.LIMIT = float(sys.argv.pop(1))
sys.exit(kernels.main())
"""


def rows_of_kernels(driver: dict[str, str], limit: str, *options: str) -> list[str]:
    """The rows of a run in which some fail."""
    folder = str(TREE / "bench" / "device")
    command = [sys.executable, "-c", KERNELS, folder, limit, *options]
    done = subprocess.run(command, env=driver, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stdout + done.stderr
    return [" ".join(line.split()) for line in done.stdout.splitlines()]


def test_a_row_that_goes_wrong_costs_itself_alone(driver: dict[str, str]) -> None:
    rows = rows_of_kernels(driver, "60", "--large", "64K", "--rounds", "2")
    assert any(re.fullmatch("the device's copy 64 KiB [0-9.]+ 1.00", row) for row in rows), rows
    assert "of nothing 64 KiB cuModuleGetFunction came to CUDA_ERROR_NOT_FOUND" in rows
    assert any(re.fullmatch("fold 64 KiB [0-9.]+ [0-9.]+", row) for row in rows), rows


def test_a_row_that_takes_too_long(driver: dict[str, str]) -> None:
    rows = rows_of_kernels(driver, "1", "--large", "64K", "--rounds", "1000000")
    assert "the device's copy 64 KiB not done after 1.0 s" in rows
    assert "fold 64 KiB not done after 1.0 s" in rows


def test_bench_beside_nccl(driver: dict[str, str], tmp_path: Path) -> None:
    """Where each rank has a device."""
    harness.build("fake_libnccl")
    rows = tmp_path / "rows.json"
    command = [sys.executable, "-m", "farandole", "bench", "all_reduce", "-np", "2"]
    command += ["--device", "cuda", "--sizes", "64K", "--iterations", "3", "--json", str(rows)]
    nccl = str(harness.TREE / "fake_libnccl" / "libnccl.so.2")
    env = {**driver, "FAKE_CUDA_DEVICES": "2", "FARANDOLE_NCCL": nccl}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, beside = json.loads(rows.read_text())
    assert ours["algorithm"] != "nccl"
    assert (beside["algorithm"], beside["level"], beside["errors"]) == ("nccl", "fast", 0)


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


def beside_torch(collective: str) -> list[dict[str, Any]]:
    """With PyTorch's operation on the processor, which stands for that on the device."""
    machine = Machine()
    torch_own.place = lambda _: "cpu"  # type: ignore[assignment]
    request = Request(collective, (65536,), "float32", ("device",), {}, iterations=3, seconds=1)
    rows = measure(request)
    fd.shutdown()
    assert machine.misuse() == ""
    return rows


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
def test_bench_beside_torch(start: Callable[..., harness.World], collective: str) -> None:
    world = start(1, "torch")
    (row,) = world.run(beside_torch, collective)[0]
    assert row["errors"] == 0
    assert min(row["copy_gbs"], row["torch_gbs"]) > 0
    title = {"all_reduce": "add", "all_gather": "cat"}[collective]
    assert ["busbw", "copy", title] == world.output(0).splitlines()[2].split()[-4:-1]


# In place of NVIDIA's. `quit` ends it, where it is said how.
MPS = """#!/bin/sh
pid=$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid
echo "$*" > $CUDA_MPS_LOG_DIRECTORY/control.log
if [ "$1" = -d ]; then
    [ -z "$REFUSES" ] || { echo "no permission"; exit 1; }
    sleep 1000 &
    echo $! > $pid
    exit
fi
read asked
case $asked in
    get_server_list) echo 4711 ;;
    quit) [ -n "$DEAF" ] || kill $(cat $pid) ;;
esac
"""


@pytest.fixture
def mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with that tool."""
    tool = tmp_path / "nvidia-cuda-mps-control"
    tool.write_text(MPS)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.syspath_prepend(str(TREE / "bench" / "device"))
    module = importlib.import_module("mps")
    monkeypatch.setattr(module, "LIMIT", 1)
    return module


def pid_of(daemon: Any) -> int:
    return int(
        (
            Path(daemon.settings["CUDA_MPS_PIPE_DIRECTORY"]) / "nvidia-cuda-mps-control.pid"
        ).read_text()
    )


@pytest.mark.parametrize("deaf", ["", "yes"])
def test_no_daemon_of_mps_is_left(mps: Any, monkeypatch: pytest.MonkeyPatch, deaf: str) -> None:
    monkeypatch.setenv("DEAF", deaf)
    with contextlib.suppress(KeyboardInterrupt), mps.daemon() as daemon:
        pid, folders = pid_of(daemon), list(map(Path, daemon.settings.values()))
        assert mps._runs(pid)
        assert all(folder.is_dir() for folder in folders)
        assert daemon.says().startswith("servers: 4711\ncontrol.log: ")
        raise KeyboardInterrupt
    assert not mps._runs(pid)
    assert not any(folder.exists() for folder in folders)


def test_why_there_is_no_daemon_of_mps(mps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSES", "yes")
    with pytest.raises(mps.NoDaemon, match="control -d: no permission"), mps.daemon():
        pass
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(mps, "PLACES", ())
    with pytest.raises(mps.NoDaemon, match="there is no nvidia-cuda-mps-control"), mps.daemon():
        pass


def test_a_fault_to_which_no_rank_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TREE / "bench" / "device"))
    faults = importlib.import_module("faults")
    seen = {rank: {"rank": rank, "kind": "DeviceError", "verdict": "rank 1: no"} for rank in (0, 2)}
    with pytest.raises(Exception, match="it did not come to that fault; rank 0 saw "):
        faults.judged(faults.FAULTS["killed, others by steps"], seen)


CASES = """
import os, sys, time
import cases
import farandole as fd

CASES = {
    "right": lambda: "the sum",
    "apart": lambda: cases.compared([fd.rank()], [0], 0.5, "zero"),
    "NaN": lambda: cases.compared([float("nan")], [0.0], 0.5, "zero"),
    "raises": lambda: {}["nothing"],
    "dies": lambda: os._exit(3) if fd.rank() == 1 else time.sleep(60),
    "hangs": lambda: time.sleep(60),
    "needs": lambda: cases.needs("no_such_module"),
    "near": lambda: cases.compared([1.0], [1.01], 0.5, "one"),
}

if __name__ == "__main__":
    sys.exit(cases.main(CASES, fd.init, fd.shutdown))
"""


def test_a_case_that_goes_wrong_costs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "some_cases.py").write_text(CASES)
    (tmp_path / "cases.py").write_text((TREE / "bench" / "device" / "cases.py").read_text())
    command = [sys.executable, str(tmp_path / "cases.py"), "some_cases", "--limit", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert lines == [
        "right: ok: the sum",
        "apart: differs: number 0 is 1.0e+00 of its largest away from zero (rank 1)",
        "NaN: differs: number 0 is nan of its largest away from zero (rank 0)",
        "raises: failed",
        "dies: failed",
        "hangs: failed",
        "needs: skipped: there is no no_such_module",
        "near: ok: one, to 1e-02",
    ]
    assert "    farandole: rank 1 (pid" in done.stdout
    assert "in <lambda>" in done.stdout, "where one hangs"


# In a Python that has the standard library alone; and in one that this one starts.
FINDS = """
import pathlib, runpy, subprocess, sys
sys.path.insert(0, str(pathlib.Path(sys.argv[1]).parent))
find = runpy.run_path(sys.argv[1])["find"]
find.__globals__["ROOT"] = pathlib.Path(sys.argv[2])
find()
import farandole, numpy
print(farandole.here, numpy.here)
child = "import farandole, numpy; print(farandole.here, numpy.here)"
print(subprocess.run([sys.executable, "-S", "-c", child], capture_output=True, text=True).stdout)
"""


def finds(root: Path) -> subprocess.CompletedProcess[str]:
    main = str(TREE / "bench" / "device" / "__main__.py")
    command = [sys.executable, "-I", "-S", "-c", FINDS, main, str(root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def put_wheel(root: Path, folder: str, name: str, tag: str) -> None:
    """That says where it comes from."""
    wheel = root / "build" / folder / f"{name}-1.0-{tag}-{tag}-any.whl"
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr(f"{name}/__init__.py", f"here = '{folder} {tag}'\n")


def test_what_cannot_be_imported_is_unpacked_from_wheels(tmp_path: Path) -> None:
    this = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    put_wheel(tmp_path, "device-wheels", "numpy", this)
    put_wheel(tmp_path, "device-wheels", "farandole", "cp27")
    put_wheel(tmp_path, "dist", "farandole", this)  # has not all kernels
    done = finds(tmp_path)
    assert done.returncode == 1
    assert "there is no farandole to import, and no wheel of it for this Python" in done.stderr
    assert "make device-wheels" in done.stderr
    put_wheel(tmp_path, "device-wheels", "farandole", this)
    done = finds(tmp_path)
    assert done.stderr == ""
    assert done.stdout.splitlines()[:2] == [f"device-wheels {this} device-wheels {this}"] * 2
