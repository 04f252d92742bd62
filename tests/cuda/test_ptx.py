"""The code that nvcc and NVRTC (where installed) make of the kernels has no faults; check_ptx finds
faults."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

import check_ptx
import pytest

ROOT = Path(__file__).parents[2]

GOOD = """
.visible .entry farandole_lanes_int8(
	.param .align 8 .b8 farandole_lanes_int8_param_0[2184]
)
{
	ld.acquire.sys.global.u32 %r1, [%rd1];
	ld.relaxed.sys.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd2];
	add.f32 %f3, %f1, %f2; // not fma.rn.f32
	st.relaxed.sys.global.v4.u32 [%rd3], {%r2, %r3, %r4, %r5};
	st.release.sys.global.u32 [%rd4], %r6;
}
"""


def test_what_is_right_has_no_faults() -> None:
    assert check_ptx.faults(GOOD) == []


@pytest.mark.parametrize(
    ("right", "wrong", "why"),
    [
        ("ld.acquire.sys", "ld.acquire.gpu", "stays on the device"),
        ("st.release.sys", "st.release.cta", "stays on the device"),
        ("ld.relaxed.sys.global.v4", "ld.global.nc.v4", "nobody invalidates"),
        ("ld.relaxed.sys.global.v4", "ld.global.v4", "past load_peer"),
        ("st.relaxed.sys.global.v4", "st.v4", "past load_peer and store_peer"),
        ("ld.relaxed.sys.global.v4", "ld.volatile.global.v4", "no stated scope"),
        ("add.f32 %f3, %f1, %f2;", "fma.rn.f32 %f3, %f1, %f2, %f4;", "rounds once"),
        ("add.f32", "add.ftz.f32", "flushes"),
        ("add.f32", "div.approx.f32", "not rounded"),
        ("st.release.sys", "st.relaxed.sys", "has no st.release"),
        ("[2184]\n", "[2184],\n.param .u32 more\n", "2 parameters"),
        (".entry", ".func", "no kernel"),
    ],
)
def test_a_fault_is_seen(right: str, wrong: str, why: str) -> None:
    assert right in GOOD
    assert any(why in line for line in check_ptx.faults(GOOD.replace(right, wrong)))


NVRTC = ROOT / "build" / "nvrtc"  # as the Makefile installs it
needs_nvrtc = pytest.mark.skipif(not NVRTC.exists(), reason="NVRTC is not there: make build/nvrtc")
BY = {"nvcc": ["-DFARANDOLE_NVRTC=off"], "nvrtc": [f"-DFARANDOLE_NVRTC={NVRTC}"]}


@pytest.mark.parametrize("by", ["nvcc", pytest.param("nvrtc", marks=needs_nvrtc)])
def test_the_kernels_have_no_faults(by: str, tmp_path: Path) -> None:
    """Configured as a build is, without one: only the PTX is made."""
    configure = ["cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", "-DFARANDOLE_MODULE=OFF"]
    options = [f"-DPython_EXECUTABLE={sys.executable}", *BY[by]]
    told = subprocess.run([*configure, *options], check=True, capture_output=True, text=True).stdout
    if "Kernels for" not in told:
        pytest.skip("there is no nvcc")
    assert ("nvrtc.py" in told) == (by == "nvrtc")
    subprocess.run(["cmake", "--build", tmp_path, "--target", "farandole_cuda_ptx"], check=True)
    ptx = (tmp_path / "farandole_cuda.ptx").read_text()
    assert check_ptx.faults(ptx) == []
    assert by == "nvcc" or ".target sm_70" in ptx
    table = (ROOT / "csrc" / "cuda" / "kernels" / "table.h").read_text()
    dtypes = re.findall(r"^FARANDOLE_CUDA_OF_ONE\((\w+),", table, re.MULTILINE)
    kernels = check_ptx.entries(ptx)
    assert len(dtypes) == 13
    for dtype in dtypes:
        assert {f"farandole_{what}_{dtype}" for what in ("one_shot", "fold")} <= set(kernels)


def by_nvrtc(source: Path, into: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "csrc" / "cuda" / "nvrtc.py"
    flags = ["-std=c++20", "-fmad=false", f"-I{ROOT / 'csrc'}"]
    command = [sys.executable, script, "--packages", NVRTC, *flags, *options, source, "-o", into]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def images(fatbin: bytes) -> list[tuple[str, int, bool]]:
    """The kind of each image, its architecture, and whether LZ4 compressed it."""
    magic, _, at, size = struct.unpack_from("<IHHQ", fatbin)
    assert (magic, at + size) == (0xBA55ED50, len(fatbin))
    found = []
    while at < len(fatbin):
        kind, _, header, size = struct.unpack_from("<HHIQ", fatbin, at)
        architecture, flags = struct.unpack_from("<I8xQ", fatbin, at + 28)
        found.append(({1: "ptx", 2: "code"}[kind], architecture, bool(flags & 0x2000)))
        at += header + size
    return found


ONE_KERNEL = """
#include "cuda/kernels/norm.cuh"
namespace farandole::cuda {
extern "C" __global__ void one(const __grid_constant__ Norms p) { norms<float>(p); }
}
"""


@needs_nvrtc
def test_an_image_has_code_for_each_architecture_that_old_drivers_unpack(tmp_path: Path) -> None:
    kernels, image = tmp_path / "one.cu", tmp_path / "image"
    kernels.write_text(ONE_KERNEL)
    codes = "arch=compute_90,code=[sm_90,sm_100,sm_120,compute_90]"
    done = by_nvrtc(kernels, image, "-fatbin", "-gencode", codes)
    assert done.returncode == 0, done.stderr
    code = [("code", architecture, True) for architecture in (90, 100, 120)]
    assert images(image.read_bytes()) == [*code, ("ptx", 90, True)]


@needs_nvrtc
def test_what_does_not_compile_leaves_the_compilers_words_and_no_file(tmp_path: Path) -> None:
    kernels, into = tmp_path / "kernels.cu", tmp_path / "image"
    kernels.write_text("__global__ void kernel() { nowhere(); }")
    done = by_nvrtc(kernels, into, "-ptx", "-arch=compute_70")
    assert done.returncode == 1
    assert 'identifier "nowhere" is undefined' in done.stderr
    kernels.write_text('__global__ void kernel() { asm("no.such.instruction;"); }')
    codes = "arch=compute_70,code=[sm_70,compute_70]"
    done = by_nvrtc(kernels, into, "-fatbin", "-gencode", codes)
    assert done.returncode == 1
    assert "ptxas makes no code for sm_70" in done.stderr
    assert "no.such" in done.stderr or "known instruction" in done.stderr
    assert not into.exists()
