"""Checks and measures farandole on a machine with a GPU: `make device`.

It needs a driver and a Python; no compiler and no network. If this Python cannot import farandole
or numpy, they are unpacked from wheels that were made elsewhere (`make device-wheels`: build).
Every way of collectives on the device's arrays is compared with the host's bits, and trainings by
each installed framework with the same in one process. Ranks are killed, and worse; kernels,
collectives and a training step are measured. A text reports the results, with the date, the device
and the commands. After an interruption, start it again with the same file: parts that were done
before are not done again. Parts that need a missing framework say so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import mps

from report import Report

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WAYS = ("staged", "step", "lanes", "spin", "nccl")
SETTINGS = {
    "lanes": {"FARANDOLE_DEVICE_PATH": "lanes"},
    "spin": {"FARANDOLE_DEVICE_PATH": "spin"},
    "nccl": {"FARANDOLE_LEVEL": "fast"},
}
TRAINING = ["run", "-np", "2", sys.executable, str(HERE / "train.py")]
FEW = 2  # ranks, as in most parts
BY_TURNS = "8K,1M,64M"  # sizes that say enough of ranks that take turns on a device
_STEP = {"FARANDOLE_DEVICE_PATH": "step"}  # small as these models are, others would be faster
PREDICTED = "PyTorch, by the way that is predicted to be the fastest"
PROGRAMS: tuple[tuple[str, dict[str, str], str, list[str]], ...] = (
    ("PyTorch", _STEP, "cases.py", ["torch_hooks"]),
    (PREDICTED, {}, "cases.py", ["torch_hooks"]),
    ("torch.distributed", _STEP, "cases.py", ["torch_groups"]),
    ("faults", {}, "faults.py", []),
    ("JAX", {}, "cases.py", ["jax_programs"]),
    ("TensorFlow", {}, "cases.py", ["tensorflow_programs"]),
)  # fmt: skip
# Under MPS ranks that share a device run at once.
UNDER_MPS = {"2": ("staged", "step", "lanes", "spin"), "4": ("step",)}


def find() -> None:
    """Makes farandole and numpy importable, for this process and those that it starts."""
    missing = [n for n in ("numpy", "farandole") if importlib.util.find_spec(n) is None]
    if not missing:
        return
    tag = f"-cp{sys.version_info[0]}{sys.version_info[1]}-"
    for name in missing:
        wheels = sorted(ROOT.glob(f"build/device-wheels/{name}-*{tag}*.whl"))
        if not wheels:
            sys.exit(
                f"there is no {name} to import, and no wheel of it for this Python in build "
                f"({tag}): make them by `make device-wheels` where there is a network"
            )
        folder = _unpacked(wheels[-1])
        sys.path.insert(0, str(folder))
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{before}" if before else str(folder)


def _unpacked(wheel: Path) -> Path:
    """Whole at any moment: another of these programs may run from it."""
    folder = ROOT / "build" / "device" / f"{wheel.stem}-{wheel.stat().st_mtime_ns}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as new:
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(Path(new) / "whole")
            with contextlib.suppress(OSError):  # another was faster
                (Path(new) / "whole").rename(folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="make device", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("device-report.txt"))
    parser.add_argument("--ranks", default="1,2,4,8", help="how many; they take devices in turn")
    parser.add_argument("--sizes", default="8K,1M,16M,64M,256M")
    parser.add_argument("--seconds", default="0.3", help="for a row")
    parser.add_argument("--kernels", default="", help="options of kernels.py, as one word")
    parser.add_argument("--training", default="", help="options of train.py, as one word")
    parser.add_argument("--most", type=int, default=3_000_001, help="elements of an array compared")
    parser.add_argument(
        "--device", default="cuda", help="that tensors of frameworks lie on; or cpu"
    )
    parser.add_argument("--without", default="", help="parts to leave out: words of their titles")
    parser.add_argument("--only", default="", help="parts to run: words of their titles")
    parser.add_argument(
        "--minutes", type=float, default=9.5, help="in all: whoever lends a device gives ten"
    )
    parser.add_argument("--dry", action="store_true", help="few and small, to see it work")
    arguments = parser.parse_args()
    if arguments.dry:
        vars(arguments).update(_DRY)
    find()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # with what it started
    only, without = (
        [word for word in words.split(",") if word] for words in (arguments.only, arguments.without)
    )
    report = Report(arguments.out, arguments.minutes * 60, only, without)
    report.part("machine", lambda: "\n".join(_machine()))
    counts = arguments.ranks.split(",")
    _compare_bits(report, [ranks for ranks in counts if int(ranks) <= FEW], arguments.most)
    _train_and_fail(report, arguments.device)
    report.script("kernels", 240, "kernels.py", arguments.kernels.split())
    _compare_bits(report, [ranks for ranks in counts if int(ranks) > FEW], arguments.most)
    for ranks in counts:
        if ranks != "1":
            _measure(report, ranks, arguments.sizes, arguments.seconds)
    for part in _training(arguments):
        report.run(part.title, part.limit, part.command, **part.settings)
    _under_mps(report, list(_parts_under_mps(arguments, counts)), dry=arguments.dry)
    return report.end()


def _compare_bits(report: Report, counts: list[str], most: int) -> None:
    for ranks in counts:
        checks = [sys.executable, str(HERE / "checks.py"), str(most)]
        report.run(f"bits on {ranks} ranks", 240, ["run", "-np", ranks, *checks])


def _train_and_fail(report: Report, device: str) -> None:
    for title, settings, program, options in PROGRAMS:
        if title == PREDICTED and device == "cpu":
            report.part(title, lambda: "not run: what lies on the host has one way")
            continue
        report.script(title, 150, program, [*options, "--device", device], **settings)


def _measure(report: Report, ranks: str, sizes: str, seconds: str) -> None:
    for way in WAYS:
        part = _bench(way, ranks, sizes, seconds)
        if why := _missing(way, int(ranks)):
            report.part(part.title, lambda why=why: f"not measured: {why}")
            continue
        report.run(part.title, part.limit, part.command, **part.settings)


class Part(NamedTuple):
    """A command of farandole's."""

    title: str
    limit: float
    command: list[str]
    settings: dict[str, str]


def _bench(way: str, ranks: str, sizes: str, seconds: str, under: str = "") -> Part:
    asked = ["bench", "all_reduce", "-np", ranks, "--device", "cuda", "--algorithm", way]
    by_turns = not under and _shared(int(ranks))
    options = ["--sizes", _that_go(sizes, way, by_turns=by_turns), "--seconds", seconds]
    title = f"all_reduce by {way} on {ranks} ranks{under}"
    return Part(title, 90, [*asked, *options], SETTINGS.get(way, {}))


def _training(arguments: argparse.Namespace, under: str = "") -> Iterator[Part]:
    """The parts that measure a training step, and where its time goes."""
    step = [*TRAINING, *arguments.training.split()]
    name = f"{arguments.out.stem}-trace{'-mps' if under else ''}"
    trace = str(ROOT / "build" / name)
    yield Part(f"a training step of 2 ranks{under}", 120, step, {})
    traced = {"FARANDOLE_TRACE": trace}
    yield Part(f"the same{under}, traced", 120, [*step, "--blocks", "2"], traced)
    yield Part(f"what backward hides{under}, by the device's clock", 60, ["trace", trace], {})


def _parts_under_mps(arguments: argparse.Namespace, counts: list[str]) -> Iterator[Part]:
    under = " under MPS"
    for ranks, ways in UNDER_MPS.items():
        if ranks in counts and _shared(int(ranks)):
            for way in ways:
                yield _bench(way, ranks, arguments.sizes, arguments.seconds, under)
    yield from _training(arguments, under)


def _under_mps(report: Report, parts: list[Part], *, dry: bool) -> None:
    """By a daemon that is there for them alone, so only where one of them is to be run."""
    parts = [part for part in parts if report.lacks(part.title)]
    if not parts:
        return
    try:
        if dry:
            raise mps.NoDaemon("a dry run has no MPS")
        with mps.daemon() as daemon:
            for part in parts:
                settings = {**daemon.settings, **part.settings}
                report.run(part.title, part.limit, part.command, **settings)
            report.part("what the daemon of MPS says", daemon.says)
    except mps.NoDaemon as error:
        why = f"not measured: {error}"
        for part in parts:
            report.part(part.title, lambda: why)


_DRY = {
    "device": "cpu",
    "ranks": "2",
    "sizes": "8K",
    "seconds": "0.01",
    "most": 301,
    "kernels": "--large 64K --rounds 2",
    "training": "--device cpu --width 32 --layers 1 --batch 2 --length 16 --steps 2 --blocks 5",
}


def _shared(ranks: int) -> bool:
    """Ranks have no device each."""
    from farandole import _core, cuda

    try:
        return len(cuda.devices()) < ranks
    except _core.Error:
        return False


def _missing(way: str, ranks: int) -> str:
    """Why it is not measured; empty: it is. Each hand-over of a kernel that waits for another takes
    slices of the device's time where ranks share it."""
    from farandole import _core, cuda

    if way in ("lanes", "spin") and _shared(ranks):
        return "ranks take turns on the device, and by this way they wait for each other's kernels"
    if way != "nccl":
        return ""
    if _shared(ranks):
        return "NCCL takes one rank on a device, and there are fewer devices than ranks"
    try:
        cuda.nccl_library()
    except _core.Error as error:
        return str(error).splitlines()[0]
    return ""


def _that_go(sizes: str, way: str, *, by_turns: bool) -> str:
    """One kernel takes little, and where ranks take turns a few sizes say enough."""
    from farandole._bench.statistics import parse_size

    few = sizes.split(",")
    if way == "spin":
        few = [size for size in few if parse_size(size) <= 64 << 10]
    elif by_turns:
        few = [size for size in few if size in BY_TURNS.split(",")]
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
    if not named:
        return "not known"
    changed = _said([*git, "status", "--porcelain", "--", *folders])
    return " ".join(named.split()) + (", changed since" if changed else "")


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
