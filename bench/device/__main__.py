"""What a machine with a GPU shows of farandole: `make device`.

It needs a driver and a Python; no compiler and no network. What this Python cannot import of
farandole and numpy is unpacked from wheels that were made elsewhere (`make device-wheels`:
build). Every way of collectives on the device's arrays is compared with the host's bits; then
kernels, collectives and a training step are measured. A text says what came of it, with the date,
the device and the commands. Parts that were done before are not done again: whoever is cut off
starts it once more with the same file. What needs PyTorch says so where there is none.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

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
PATIENCE = 540  # seconds for a part: whoever lends a device gives ten minutes


def find() -> None:
    """Whatever farandole and numpy there are, for this process and those that it starts."""
    missing = [n for n in ("numpy", "farandole") if importlib.util.find_spec(n) is None]
    if not missing:
        return
    tag = f"-cp{sys.version_info[0]}{sys.version_info[1]}-"
    folder = ROOT / "build" / "device"
    for name in missing:
        wheels = sorted(ROOT.glob(f"build/d*/{name}-*{tag}*.whl"))
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
    parser.add_argument("--dry", action="store_true", help="few and small, to see it work")
    arguments = parser.parse_args()
    if arguments.dry:
        vars(arguments).update(_DRY)
    find()
    report = Report(arguments.out)
    report.part("machine", lambda: "\n".join(_machine()))
    for ranks in arguments.ranks.split(","):
        checks = [str(HERE / "checks.py"), str(arguments.most)]
        report.run(f"bits on {ranks} ranks", ["run", "-np", ranks, sys.executable, *checks])
    report.script("kernels", "kernels.py", arguments.kernels.split())
    for ranks in arguments.ranks.split(","):
        if ranks == "1":
            continue
        for way in WAYS:
            sizes = _that_go(arguments.sizes, way, int(ranks))
            options = ["--sizes", sizes, "--seconds", arguments.seconds]
            asked = ["bench", "all_reduce", "-np", ranks, "--device", "cuda", "--algorithm", way]
            title = f"all_reduce by {way} on {ranks} ranks"
            if why := _missing(way, int(ranks)):
                report.part(title, lambda why=why: f"not measured: {why}")
                continue
            report.run(title, [*asked, *options], **SETTINGS.get(way, {}))
    training = [*TRAINING, *arguments.training.split()]
    report.run("a training step of 2 ranks", training)
    trace = str(ROOT / "build" / f"{arguments.out.stem}-trace")
    report.run("the same, traced", [*training, "--blocks", "2"], FARANDOLE_TRACE=trace)
    report.run("what backward hides, by the device's clock", ["trace", trace])
    return report.end()


_DRY = {
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
    yield f"commit {_said(['git', '-C', str(HERE), 'rev-parse', 'HEAD'])}"
    if why := cuda.why_not():
        yield f"no device: {why}"
        return
    if any(device.name.startswith("Fake") for device in cuda.devices()):
        yield "DRY RUN over tests/cuda/fake_libcuda: bits are compared, and times mean nothing"
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


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "not known"
    return done.stdout.strip()


def _did_well(part: str) -> bool:
    is_command = any(line.startswith("$ ") for line in part.splitlines())
    return not is_command or part.rstrip().endswith("\nexit code 0")


def _text(printed: bytes | str | None) -> str:
    """Of a command that took too long, Python keeps bytes."""
    return printed.decode(errors="replace") if isinstance(printed, bytes) else printed or ""


class Report:
    """A text with a part for each title. What stands in the file already is kept, but for commands
    that did not do well: they are run again."""

    def __init__(self, path: Path) -> None:
        self._path, self._failed = path, 0
        text = path.read_text() if path.exists() else ""
        parts = [part for part in re.split("(?m)^== ", text) if part.strip()]
        self._before = "".join(f"== {part}" for part in parts if _did_well(part))
        if self._before != text:
            path.write_text(self._before)

    def part(self, title: str, make: object) -> None:
        if self._has(title):
            return
        text = make()  # type: ignore[operator]
        self._add(title, text)

    def run(self, title: str, arguments: list[str], **settings: str) -> None:
        """A command of farandole's, with what it printed."""
        shown = " ".join([f"{name}={value}" for name, value in settings.items()] + ["farandole"])
        self._command(title, ["-m", "farandole", *arguments], [shown, *arguments], settings)

    def script(self, title: str, name: str, arguments: list[str]) -> None:
        """A program beside this one."""
        command = [str(HERE / name), *arguments]
        self._command(title, command, [sys.executable, *command], {})

    def _command(
        self, title: str, arguments: list[str], shown: list[str], settings: dict[str, str]
    ) -> None:
        if self._has(title):
            return
        command = [sys.executable, *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PATIENCE, check=False,
                env={**os.environ, **settings},
            )  # fmt: skip
            printed, ended = done.stdout + done.stderr, f"exit code {done.returncode}"
        except subprocess.TimeoutExpired as late:
            printed = "".join(_text(each) for each in (late.stdout, late.stderr))
            ended = f"not done after {PATIENCE} s"
        self._failed += ended != "exit code 0"
        text = f"$ {' '.join(shown).replace(sys.executable, 'python')}\n{printed.rstrip()}\n{ended}"
        self._add(title, text.replace(f"{ROOT}/", ""))

    def end(self) -> int:
        wrong = self._failed
        print(f"{self._path}: " + (f"{wrong} parts failed" if wrong else "all parts did well"))
        return 1 if wrong else 0

    def _has(self, title: str) -> bool:
        return f"\n== {title}, " in f"\n{self._before}"

    def _add(self, title: str, text: str) -> None:
        when = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        with self._path.open("a") as file:
            file.write(f"== {title}, {when}\n{text}\n\n")
        print(f"{title}: done", flush=True)


if __name__ == "__main__":
    sys.exit(main())
