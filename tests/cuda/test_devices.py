"""farandole.cuda over the fake driver (fake_libcuda): each machine in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import harness
from farandole import _core


@pytest.fixture(scope="module")
def fake() -> str:
    """The folder of the fake driver."""
    harness.build("fake_libcuda")
    return str(harness.TREE / "fake_libcuda")


def run(arguments: list[str], driver: str, **env: str) -> str:
    """The output of a Python whose dynamic linker finds the driver in that folder; the fake driver
    must have nothing to complain of."""
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | env
    environment["LD_LIBRARY_PATH"] = driver
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout


def ask(expression: str, driver: str, **env: str) -> Any:
    script = f"import json; from farandole import cuda; print(json.dumps({expression}))"
    return json.loads(run(["-c", script], driver, **env))


def test_devices_are_described(fake: str) -> None:
    found = ask("[vars(d) for d in cuda.devices()]", fake, FAKE_CUDA_DEVICES="2")
    assert [device["ordinal"] for device in found] == [0, 1]
    assert found[1] == {
        "ordinal": 1,
        "name": "Fake GPU",
        "uuid": "GPU-fafafafa-fafa-fafa-fafa-fafafafafa01",
        "bus_id": "0000:02:00.0",
        "capability": [9, 0],
        "memory_bytes": 2**30,
        "multiprocessors": 4,
        "is_instance": False,
        "exports_memory": True,
        "folds_by_switch": False,
        "unfit": "",
    }
    assert ask("cuda.driver_version()", fake, FAKE_CUDA_VERSION="13000") == [13, 0]


def test_a_device_is_available(fake: str) -> None:
    assert ask("[cuda.is_available(), cuda.why_not()]", fake) == [True, ""]


NO_DRIVER = "there is no CUDA driver: libcuda.so.1 cannot be opened"
UNAVAILABLE = [
    ({"FAKE_CUDA_DEVICES": "0"}, "the CUDA driver finds no device"),
    (
        {"CUDA_VISIBLE_DEVICES": ""},
        "CUDA_VISIBLE_DEVICES is '': it hides all devices from this process",
    ),
    (
        {"FAKE_CUDA_VERSION": "11040"},
        "the CUDA driver is too old: it is of CUDA 11.4, and the kernels need 12.0",
    ),
    (
        {"FAKE_CUDA_FAIL": "cuInit#1=803"},
        "cannot use CUDA: the driver's library and its kernel module are of different versions",
    ),
]


@pytest.mark.parametrize(("machine", "why"), UNAVAILABLE)
def test_what_keeps_from_using_cuda_is_one_sentence(
    fake: str, machine: dict[str, str], why: str
) -> None:
    assert ask("cuda.why_not()", fake, **machine) == why
    script = "from farandole import cuda, DeviceError\ntry: cuda.devices()\n"
    script += "except DeviceError as error: print(error.verdict, error.advice != '', sep='\\n')"
    assert run(["-c", script], fake, **machine).splitlines() == [why, "True"]
    assert f"machine CUDA: no: {why}\n" in run(["-m", "farandole", "info"], fake, **machine)


def test_a_device_that_is_too_old_is_seen_and_not_used(fake: str) -> None:
    why = "device 0 (Fake GPU) is too old: it has compute capability 6.1, and the kernels need 7.0"
    old = {"FAKE_CUDA_CAPABILITY": "61"}
    assert ask("[cuda.why_not(), cuda.devices()[0].unfit]", fake, **old) == [why, why]


def test_a_device_for_which_this_build_has_no_kernels(fake: str) -> None:
    nvcc = _core.kernel_compiler()
    if nvcc < 13000:
        pytest.skip("this nvcc, if there is one, may have compiled for all that farandole takes")
    old = {"FAKE_CUDA_CAPABILITY": "72"}
    there = "cuda.is_available(), cuda.why_not(), cuda.devices()[0].unfit"
    available, why, unfit = ask(f"[{there}]", fake, **old)
    assert [available, unfit] == [False, why]
    says = "device 0 (Fake GPU) has compute capability 7.2, for which this build has no kernels: "
    assert why.startswith(f"{says}CUDA {nvcc // 1000}.{nvcc % 1000 // 10} has made code for ")
    assert f"machine CUDA: no: {why}\n" in run(["-m", "farandole", "info"], fake, **old)


def test_a_driver_that_is_too_old_for_the_kernels(fake: str) -> None:
    nvcc = _core.kernel_compiler()
    if nvcc < 13000:
        pytest.skip("no driver that farandole takes is too old for kernels by this nvcc, or none")
    why = "the CUDA driver is too old: it is of CUDA 12.8, and the kernels, compiled by CUDA "
    why += f"{nvcc // 1000}.{nvcc % 1000 // 10}, need {nvcc // 1000}.0"
    old = {"FAKE_CUDA_VERSION": "12080"}
    assert ask("[cuda.why_not(), cuda.devices()[0].unfit]", fake, **old) == [why, why]
    assert f"machine CUDA: no: {why}\n" in run(["-m", "farandole", "info"], fake, **old)
    new = {"FAKE_CUDA_VERSION": str(nvcc)}
    assert ask("cuda.why_not()", fake, **new) == ""


def test_a_machine_without_a_driver(tmp_path: Path) -> None:
    if any(Path(folder, "libcuda.so.1").exists() for folder in ("/usr/lib64", *_folders())):
        pytest.skip("this machine has a driver")
    assert ask("[cuda.is_available(), cuda.why_not()]", str(tmp_path)) == [False, NO_DRIVER]
    assert f"machine CUDA: no: {NO_DRIVER}\n" in run(["-m", "farandole", "info"], str(tmp_path))


def _folders() -> list[str]:
    return [str(path) for path in Path("/usr/lib").glob("*-linux-gnu")]


def test_neither_import_nor_init_opens_the_driver(fake: str) -> None:
    script = (
        "import farandole, farandole.cuda; farandole.init(rank=0, size=1);"
        "print('libcuda' in open('/proc/self/maps').read());"
        "farandole.cuda.devices();"
        "print('libcuda' in open('/proc/self/maps').read())"
    )
    assert run(["-c", script], fake).split() == ["False", "True"]


def test_a_forked_child_is_refused(fake: str) -> None:
    script = """
import os
from farandole import ForkedEngine, cuda
cuda.devices()
if os.fork() == 0:
    try:
        cuda.devices()
    except ForkedEngine as error:
        assert "was forked from one that uses CUDA" in error.verdict
        assert not cuda.is_available()
        os._exit(7)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.wait()[1]), len(cuda.devices()))
"""
    assert run(["-c", script], fake).split() == ["7", "1"]
