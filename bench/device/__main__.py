"""What a machine with a GPU shows of farandole: `make device`.

It needs a driver and a Python; no compiler and no network. What this Python cannot import of
farandole and numpy is unpacked from wheels that were made elsewhere (`make device-wheels`:
build). Every way of collectives on the device's arrays is compared with the host's bits, and
trainings by each framework that is there with the same in one process; ranks are killed, and worse;
kernels, collectives and a training step are measured. A text says what came of it, with the date,
the device and the commands. Parts that were done before are not done again: whoever is cut off
starts it once more with the same file. What needs a framework says so where there is none.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from report import Report

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WAYS = ("staged", "step", "lanes", "spin", "nccl", "nvls")
_FAST = {"FARANDOLE_LEVEL": "fast"}
SETTINGS = {
    "lanes": {"FARANDOLE_DEVICE_PATH": "lanes"},
    "spin": {"FARANDOLE_DEVICE_PATH": "spin"},
    "nccl": _FAST,
    "nvls": _FAST,
}
TRAINING = ["run", "-np", "2", sys.executable, str(HERE / "train.py")]
FEW = 2  # ranks, as in most parts
PROGRAMS = (
    ("PyTorch", "cases.py", "torch_hooks"),
    ("torch.distributed", "cases.py", "torch_groups"),
    ("faults", "faults.py"),
    ("JAX", "cases.py", "jax_programs"),
    ("TensorFlow", "cases.py", "tensorflow_programs"),
)


def find() -> None:
    """Whatever farandole and numpy there are, for this process and those that it starts."""
    missing = [n for n in ("numpy", "farandole") if importlib.util.find_spec(n) is None]
    if not missing:
        return
    tag = f"-cp{sys.version_info[0]}{sys.version_info[1]}-"
    folder = ROOT / "build" / "device"
    for name in missing:
        wheels = sorted(ROOT.glob(f"build/device-wheels/{name}-*{tag}*.whl"))
        if not wheels:
            sys.exit(
                f"there is no {name} to import, and no wheel of it for this Python in build "
                f"({tag}): make them by `make device-wheels` where there is a network"
            )
        with zipfile.ZipFile(wheels[-1]) as wheel:
            wheel.extractall(folder)
    sys.path.insert(0, str(folder))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{before}" if before else str(folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make device", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("device-report.txt"))
    parser.add_argument("--ranks", default="1,2,4,8", help="how many; they take devices in turn")
    parser.add_argument("--sizes", default="4,8K,64K,1M,16M,64M,256M")
    parser.add_argument("--seconds", default="1", help="for a row")
    parser.add_argument("--kernels", default="", help="options of kernels.py, as one word")
    parser.add_argument("--training", default="", help="options of train.py, as one word")
    parser.add_argument("--most", type=int, default=3_000_001, help="elements of an array compared")
    parser.add_argument(
        "--device", default="cuda", help="that tensors of frameworks lie on; or cpu"
    )
    parser.add_argument("--without", default="", help="parts to leave out: words of their titles")
    parser.add_argument(
        "--minutes", type=float, default=9.5, help="in all: whoever lends a device gives ten"
    )
    parser.add_argument("--dry", action="store_true", help="few and small, to see it work")
    arguments = parser.parse_args()
    if arguments.dry:
        vars(arguments).update(_DRY)
    find()
    without = [word for word in arguments.without.split(",") if word]
    report = Report(arguments.out, arguments.minutes * 60, without)
    report.part("machine", lambda: "\n".join(_machine()))
    counts = arguments.ranks.split(",")
    _compare_bits(report, [ranks for ranks in counts if int(ranks) <= FEW], arguments.most)
    _train_and_fail(report, arguments.device)
    report.script("kernels", 120, "kernels.py", arguments.kernels.split())
    _compare_bits(report, [ranks for ranks in counts if int(ranks) > FEW], arguments.most)
    for ranks in counts:
        if ranks != "1":
            _measure(report, ranks, arguments.sizes, arguments.seconds)
    training = [*TRAINING, *arguments.training.split()]
    report.run("a training step of 2 ranks", 120, training)
    trace = str(ROOT / "build" / f"{arguments.out.stem}-trace")
    report.run("the same, traced", 120, [*training, "--blocks", "2"], FARANDOLE_TRACE=trace)
    report.run("what backward hides, by the device's clock", 60, ["trace", trace])
    return report.end()


def _compare_bits(report: Report, counts: list[str], most: int) -> None:
    for ranks in counts:
        checks = [sys.executable, str(HERE / "checks.py"), str(most)]
        report.run(f"bits on {ranks} ranks", 240, ["run", "-np", ranks, *checks])


def _train_and_fail(report: Report, device: str) -> None:
    for title, program, *options in PROGRAMS:
        report.script(title, 150, program, [*options, "--device", device])


def _measure(report: Report, ranks: str, sizes: str, seconds: str) -> None:
    for way in WAYS:
        title = f"all_reduce by {way} on {ranks} ranks"
        if why := _missing(way, int(ranks)):
            report.part(title, lambda why=why: f"not measured: {why}")
            continue
        asked = ["bench", "all_reduce", "-np", ranks, "--device", "cuda", "--algorithm", way]
        options = ["--sizes", _that_go(sizes, way, int(ranks)), "--seconds", seconds]
        report.run(title, 90, [*asked, *options], **SETTINGS.get(way, {}))


_DRY = {
    "device": "cpu",
    "ranks": "2",
    "sizes": "8K",
    "seconds": "0.01",
    "most": 301,
    "kernels": "--large 64K --small 8K --rounds 2",
    "training": "--device cpu --width 32 --layers 1 --batch 2 --length 16 --steps 2 --blocks 5",
}


def _missing(way: str, ranks: int) -> str:
    """Why it cannot be measured; empty: it can."""
    from farandole import _core, cuda

    if way not in ("nccl", "nvls"):
        return ""
    try:
        devices = cuda.devices()
        if len(devices) < ranks:
            return (
                f"{way.upper()} takes one rank on a device, and there are fewer devices than ranks"
            )
        if way == "nccl":
            cuda.nccl_library()
        elif not all(device.folds_by_switch for device in devices):
            return "the devices have no switch that folds (NVLS)"
    except _core.Error as error:
        return str(error).splitlines()[0]
    return ""


def _that_go(sizes: str, way: str, ranks: int) -> str:
    """A kernel that waits for others takes little; where ranks share a device each hand-over takes
    slices of its time, and lanes have many."""
    from farandole import _core, cuda
    from farandole._bench.statistics import parse_size

    try:
        shared = len(cuda.devices()) < ranks
    except _core.Error:
        shared = False
    most = {"spin": 64 << 10, "lanes": 1 << 20 if shared else None}.get(way)
    few = [size for size in sizes.split(",") if most is None or parse_size(size) <= most]
    return ",".join(few or sizes.split(",")[:1])


def _machine() -> Iterator[str]:
    import farandole as fd
    from farandole import cuda

    yield f"farandole {fd.__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield f"trees of csrc and python: {_trees('csrc', 'python')}"  # which outlive a rebase
    if why := cuda.why_not():
        yield f"no device: {why}"
        return
    if any(device.name.startswith("Fake") for device in cuda.devices()):
        yield (
            "DRY RUN over tests/cuda/fake_libcuda: bits are compared, times mean nothing, and "
            "frameworks have their tensors on the host"
        )
    yield "driver of CUDA {}.{}".format(*cuda.driver_version()) + _kernel_module()
    for device in cuda.devices():
        yield (
            f"device {device.ordinal}: {device.name}, {device.uuid}, compute capability "
            "{}.{}".format(*device.capability)
            + f", {device.multiprocessors} multiprocessors, {device.memory_bytes >> 20} MiB"
        )


def _kernel_module() -> str:
    """As the driver's own file says it, with its version."""
    try:
        return ", " + Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return ""


def _trees(*folders: str) -> str:
    """As git names them, and whether they were changed since."""
    git = ["git", "-C", str(ROOT)]
    named = _said([*git, "rev-parse", *(f"HEAD:{folder}" for folder in folders)])
    changed = _said([*git, "status", "--porcelain", "--", *folders])
    return " ".join(named.split()) + (", changed since" if changed else "")


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "not known"
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
