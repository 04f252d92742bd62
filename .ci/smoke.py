"""What an installed wheel must do where there is nothing but numpy: `python smoke.py`. With
`--kernels` it must have been built with kernels for devices, with `--no-kernels` without."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import farandole as fd
from farandole import _core
from farandole.testing import run_ranks

ALLOWED = {"farandole", "numpy", "pip", "setuptools"}
VERBS = (
    "info",
    "plan all_reduce",
    "run -np 2 -- true",
    "bench all_reduce -np 2 --sizes 4K --seconds 0.01",
)


def check_collectives(count: int) -> None:
    n, r = fd.size(), fd.rank()
    base = np.arange(count, dtype=np.float32)
    mine, total = base + r, n * base + n * (n - 1) / 2
    np.testing.assert_array_equal(fd.all_reduce(mine), total)
    shared = fd.allocate(count)
    shared[:] = mine
    np.testing.assert_array_equal(fd.all_reduce(shared, async_op=True).wait(), total)
    np.testing.assert_array_equal(fd.broadcast(mine, root=n - 1), base + n - 1)
    everybody = np.concatenate([base + k for k in range(n)])
    np.testing.assert_array_equal(fd.all_gather(mine), everybody)


def as_a_rank() -> int:
    fd.init()
    for count in (0, 1, 1009, 300_000):
        check_collectives(count)
    fd.barrier()
    try:
        fd.all_reduce(np.ones(3 + fd.rank()))
    except fd.Mismatch:
        return fd.rank()
    raise AssertionError("ranks that disagree are not told so")


def check_instructions() -> None:
    """A build that does not find what the processor has would be slow in silence."""
    has = Path("/proc/cpuinfo").read_text().split()
    found = _core.instruction_sets()
    for flag, name in (("avx2", "avx2"), ("avx512dq", "avx512"), ("avx512_bf16", "avx512_bf16")):
        assert (flag in has) == (name in found), f"of {flag} there is {found}"


def check_kernels(has: bool) -> None:
    """A build that finds no compiler for them goes without them, and nothing else would tell."""
    compiler = _core.kernel_compiler()
    assert bool(compiler) == has, f"kernels for devices are there: {not has}"
    assert len([*Path(_core.__file__).parent.glob("kernels-*.fatbin")]) == has
    if has and "NVRTC_PACKAGES" in os.environ:
        assert compiler // 1000 == 12, f"kernels are of CUDA {compiler}, and need such a driver"


def main() -> None:
    check_instructions()
    if (has := "--kernels" in sys.argv) or "--no-kernels" in sys.argv:
        check_kernels(has)
    installed = {str(d.metadata["Name"]).lower() for d in importlib.metadata.distributions()}
    assert installed <= ALLOWED, f"more than numpy is installed: {installed - ALLOWED}"
    assert run_ranks(3, as_a_rank) == [0, 1, 2]
    for verb in VERBS:
        command = [sys.executable, "-m", "farandole", *verb.split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    version = importlib.metadata.version("farandole")
    print(f"farandole {version} works with Python {sys.version.split()[0]}, numpy {np.__version__}")


if __name__ == "__main__":
    import smoke  # ranks find functions by their module, which must not be __main__

    smoke.main()
