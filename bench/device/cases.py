"""Cases that ranks run one after the other: python bench/device/cases.py torch_hooks --device cuda

Each is a line: "ok" with what it shows, "differs", "failed", or "skipped" with why. A case that
raises, dies or takes longer than its limit costs itself alone: ranks are started anew for those
after it.

A program of ranks has CASES, functions by name, begin() and end(), and calls main().
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import farandole as fd

HERE = Path(__file__).resolve().parent
STARTING = 90  # seconds that ranks have to import a framework, and to begin on their devices
TOLD = 12  # lines of what a case that failed has printed
ALL = "all"  # in place of a case's name
LINE = re.compile(r"(?m)^(?:\[(\d+)\] )?case ([^:\n]+): (.*)$")


class Differs(Exception):
    """The result differs from that of training alone, or of numpy."""


class Skipped(Exception):
    """It cannot be run here, and why."""


# ---- what a rank does ----


@dataclass
class Asked:
    """Where tensors lie, by the first word; `host`: the host stands in for devices."""

    device: str = "cuda"
    limit: float = 40.0
    cases: list[str] = field(default_factory=list)

    @property
    def host(self) -> bool:
        return self.device == "cpu"


asked = Asked()
Case = Callable[[], str]


def main(cases: dict[str, Case], begin: Callable[[], None], end: Callable[[], None]) -> int:
    """As a rank: each case's line is printed when it is done."""
    parser = _arguments()
    vars(asked).update(vars(parser.parse_args()))
    with _limited(STARTING):
        try:
            begin()
        except Skipped as why:
            _say(ALL, f"skipped: {why}")
            return 0
    for name in asked.cases:
        with _limited(asked.limit):
            _say(name, outcome(cases[name]))
    with _limited(asked.limit):
        end()
    return 0


def outcome(case: Case) -> str:
    """The outcome of a case, as its line shows it."""
    try:
        return f"ok: {case()}"
    except Differs as error:
        return f"differs: {error}"
    except Skipped as why:
        return f"skipped: {why}"


def _say(name: str, said: str) -> None:
    print(f"case {name}: {said}", flush=True)


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Ends a process that takes longer, with a traceback: nothing else ends a wait for a device."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def needs(*modules: str) -> None:
    """Raises Skipped."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise Skipped(f"there is no {module}")


def my_device(count: int) -> int:
    """Ranks of a host take devices in turn."""
    return fd.local_rank() % count


def compared(mine: Iterable[Any], wanted: Iterable[Any], tolerance: float, with_what: str) -> str:
    """Compares arrays; returns the words of a case that is right. Raises Differs."""
    most = 0.0
    for i, (one, other) in enumerate(zip(mine, wanted, strict=True)):
        one, other = np.asarray(one), np.asarray(other)
        if one.shape != other.shape or one.dtype != other.dtype:
            raise Differs(f"number {i} is {one.dtype} {one.shape}, not {other.dtype} {other.shape}")
        if one.tobytes() == other.tobytes():
            continue
        scale = float(np.abs(other).max()) or 1.0
        apart = float(np.abs(one.astype(np.float64) - other.astype(np.float64)).max()) / scale
        if not apart <= tolerance:  # NaNs, too
            raise Differs(f"number {i} is {apart:.1e} of its largest away from {with_what}")
        most = max(most, apart)
    return f"{with_what}, to {most:.0e}" if most else f"the bits of {with_what}"


# ---- who starts them ----


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--limit", type=float, default=40.0, help="seconds for a case")
    parser.add_argument("cases", nargs="*")
    return parser


def ran(command: list[str], limit: float, **settings: str) -> str:
    """The output of the command; ranks end with their launcher."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit, check=False,
            env={**os.environ, **settings},
        )  # fmt: skip
        printed = done.stdout
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
    return printed.decode(errors="replace")


def _judged(said: dict[str, str], ranks: int) -> str:
    """One line of what ranks said, by rank: the worst of them."""
    for kind in ("differs", "skipped"):
        for rank, line in sorted(said.items()):
            if line.startswith(kind):
                return line if kind == "skipped" else f"{line} (rank {rank})"
    return said["0"] if len(said) == ranks else ""


def last_words(printed: str) -> str:
    lines = [line for line in printed.splitlines() if not LINE.match(line) and line.strip()]
    return "".join(f"\n    {line}" for line in lines[-TOLD:])


def supervise(program: str, names: list[str], ranks: int, options: list[str], limit: float) -> bool:
    """Whether no case differs or fails."""
    script = str(HERE / f"{program}.py")
    well, left = True, list(names)
    while left:
        launcher = [sys.executable, "-m", "farandole", "run", "-np", str(ranks), "--"]
        command = [*launcher, sys.executable, script, *options, *left]
        printed = ran(command, STARTING + limit * len(left))
        said: dict[str, dict[str, str]] = {}
        for rank, name, line in LINE.findall(printed):
            said.setdefault(name, {})[rank] = line
        if (why := said.get(ALL, {}).get("0")) is not None:
            print(why)
            return well
        while left and (line := _judged(said.get(left[0], {}), ranks)):
            well = well and not line.startswith("differs")
            print(f"{left.pop(0)}: {line}", flush=True)
        if left:
            well = False
            print(f"{left.pop(0)}: failed{last_words(printed)}", flush=True)
    return well


def supervisor() -> int:
    parser = _arguments()
    parser.add_argument("--ranks", type=int, default=2)
    program, *arguments = sys.argv[1:]
    given = parser.parse_args(arguments)
    names = given.cases or list(importlib.import_module(program).CASES)
    options = ["--device", given.device, "--limit", str(given.limit)]
    return 0 if supervise(program, names, given.ranks, options, given.limit) else 1


if __name__ == "__main__":
    sys.exit(supervisor())
