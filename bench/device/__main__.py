"""What a machine with a GPU shows of farandole: `make device`.

It needs a driver, and a Python with numpy; no compiler and no network. It takes the farandole that
this Python imports, or else unpacks a wheel that was built elsewhere (build/dist). Every way of
collectives on the device's arrays is compared with the host's bits, then measured, and a text says
what came of it, with the date, the device and the commands. Parts that were done before are not
done again: whoever is cut off starts it once more with the same file.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
WAYS = ("staged", "step", "spin")
PATIENCE = 540  # seconds for a part: whoever lends a device gives ten minutes


def find() -> None:
    """Whatever farandole there is, for this process and those that it starts."""
    if importlib.util.find_spec("farandole") is not None:
        return
    tag = f"-cp{sys.version_info[0]}{sys.version_info[1]}-"
    wheels = sorted(HERE.parent.parent.glob(f"build/dist/farandole-*{tag}*.whl"))
    if not wheels:
        sys.exit(
            f"there is no farandole to import, and no wheel for this Python in build/dist ({tag})"
        )
    folder = HERE.parent.parent / "build" / "device"
    with zipfile.ZipFile(wheels[-1]) as wheel:
        wheel.extractall(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make device", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("device-report.txt"))
    parser.add_argument("--ranks", default="1,2,4", help="how many; they take devices in turn")
    parser.add_argument("--sizes", default="4,8K,64K,1M,16M,64M,256M")
    parser.add_argument("--seconds", default="1", help="for a row")
    parser.add_argument("--most", type=int, default=3_000_001, help="elements of an array compared")
    arguments = parser.parse_args()
    find()
    report = Report(arguments.out)
    report.part("machine", lambda: "\n".join(_machine()))
    for ranks in arguments.ranks.split(","):
        checks = [str(HERE / "checks.py"), str(arguments.most)]
        report.run(f"bits on {ranks} ranks", ["run", "-np", ranks, sys.executable, *checks])
    for ranks in arguments.ranks.split(","):
        if ranks == "1":
            continue
        for way in WAYS:
            options = ["--sizes", _that_go(arguments.sizes, way), "--seconds", arguments.seconds]
            asked = ["bench", "all_reduce", "-np", ranks, "--device", "cuda", "--algorithm", way]
            report.run(f"all_reduce by {way} on {ranks} ranks", [*asked, *options])
    report.part("NCCL", lambda: _NCCL)
    return report.end()


_NCCL = (
    "not measured here: it refuses two ranks on a device. Where each rank has one, nccl-tests "
    "shows the same bandwidths (algbw, busbw) for the same sizes"
)


def _that_go(sizes: str, way: str) -> str:
    """A kernel that waits for others takes little."""
    from farandole._bench.statistics import parse_size

    few = [size for size in sizes.split(",") if way != "spin" or parse_size(size) <= 64 << 10]
    return ",".join(few or sizes.split(",")[:1])


def _machine() -> Iterator[str]:
    import farandole as fd
    from farandole import cuda

    yield f"farandole {fd.__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield f"commit {_said(['git', '-C', str(HERE), 'rev-parse', 'HEAD'])}"
    if why := cuda.why_not():
        yield f"no device: {why}"
        return
    yield "driver of CUDA {}.{}".format(*cuda.driver_version())
    for device in cuda.devices():
        yield (
            f"device {device.ordinal}: {device.name}, {device.uuid}, compute capability "
            "{}.{}".format(*device.capability)
            + f", {device.multiprocessors} multiprocessors, {device.memory_bytes >> 20} MiB"
        )


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "not known"
    return done.stdout.strip()


class Report:
    """A text with a part for each title; what stands in the file already is kept."""

    def __init__(self, path: Path) -> None:
        self._path, self._failed = path, 0
        self._before = path.read_text() if path.exists() else ""

    def part(self, title: str, make: object) -> None:
        if self._has(title):
            return
        text = make()  # type: ignore[operator]
        self._add(title, text)

    def run(self, title: str, arguments: list[str]) -> None:
        """A command of farandole's, with what it printed."""
        if self._has(title):
            return
        command = [sys.executable, "-m", "farandole", *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PATIENCE, check=False,
                env={**os.environ, "FARANDOLE_DEVICE_PATH": "spin" if "spin" in title else "auto"},
            )  # fmt: skip
            printed, ended = done.stdout + done.stderr, f"exit code {done.returncode}"
        except subprocess.TimeoutExpired as late:
            printed, ended = str(late.stdout or ""), f"not done after {PATIENCE} s"
        self._failed += ended != "exit code 0"
        shown = " ".join(["farandole", *arguments]).replace(sys.executable, "python")
        self._add(
            title, f"$ {shown.replace(str(HERE), 'bench/device')}\n{printed.rstrip()}\n{ended}"
        )

    def end(self) -> int:
        text = self._path.read_text()
        wrong = self._failed or text.count("exit code ") - text.count("exit code 0")
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
