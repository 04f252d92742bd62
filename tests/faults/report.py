"""Writes docs/reliability.md: faults, what is told of them, and when (`make faults`)."""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import pytest  # noqa: E402
from report_rows import ELSEWHERE, ROWS, TWO, Row  # noqa: E402

import namespaces  # noqa: E402

PAGE = ROOT / "docs" / "reliability.md"
PROGRAM = Path(__file__).with_name("report_program.py")
_LIMIT = 300  # seconds for one job
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "FARANDOLE_TIMEOUT": "5"}

_HEAD = """# Faults

This page says what ranks and `farandole run` tell of a fault, and after which time. `make faults`
wrote it ({runs} of each row on {cores} cores, load {load} at the start).

Jobs have 3 ranks, or 2 + 2 on two hosts, which are {hosts}. They reduce arrays of 400 kB and of
4 kB in turns. *Error* is the time from the fault until the slowest rank that gets an error has it,
*end* that until `farandole run` has ended; both are medians. [Errors](errors.md) explains the
classes.
"""
_ELSEWHERE = """
## What else is tested

Faults that need more than a job of three ranks, or no job at all:

| row | fault | test |
|---:|---|---|
"""


class Outcome(NamedTuple):
    error: float | None  # seconds from the fault
    end: float
    told: str  # the errors of ranks, without what differs from run to run
    last: str  # the launcher's last line


def _plain(text: str, hosts: Sequence[str]) -> str:
    """Without numbers of processes, operations and times, and names of hosts and files."""
    for name, host in zip("ab", hosts, strict=False):
        text = text.replace(host, name)
    text = re.sub(r"pid \d+( on [^\s)]+)?", "pid …", text)
    text = re.sub(r"#\d+", "#…", re.sub(r"\d+\.\d+ s", "… s", text))
    return re.sub(r" \(/[^()]*, line \d+\)", "", text).replace("|", "\\|")


def run_once(row: Row, hosts: Sequence[str], launcher: str) -> Outcome:
    where = ["-H", f"{hosts[0]}:2,{hosts[1]}:2", f"--launcher={launcher}"] if row.hosts else []
    ranks = 4 if row.hosts else 3
    command = [sys.executable, "-m", "farandole", "run", "-np", str(ranks), "--no-prefix", *where]
    if row.needs_a_cable:  # which the run before has cut
        for host in hosts:
            subprocess.run(["ip", "-n", host, "link", "set", host, "up"], check=True)
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            [*command, "--grace=20", "--", sys.executable, PROGRAM, row.how, str(row.culprit)],
            stdout=subprocess.PIPE, stderr=errors, text=True, timeout=_LIMIT, check=False,
            env=os.environ | _ENVIRONMENT | dict(row.environment),
        )  # fmt: skip
        end = time.monotonic_ns()
        errors.seek(0)
        lines = errors.read().splitlines()
    said = [line[1:].split(" ", 2) for line in done.stdout.splitlines() if line.startswith("@")]
    began = [int(time_) for word, time_, _ in said if word == "fault"]
    told = [(int(time_), text) for word, time_, text in said if word == "told"]
    if not began:
        raise SystemExit(f"{row.done}: no rank says that it was done\n" + "\n".join(lines))
    texts = dict.fromkeys(_plain(text, hosts) for _, text in sorted(told))
    last = lines[-1].removeprefix("farandole: ") if lines and done.returncode else "(exit code 0)"
    return Outcome(
        (max(t for t, _ in told) - max(began)) / 1e9 if told else None,
        (end - max(began)) / 1e9, "<br>".join(f"`{text}`" for text in texts), _plain(last, hosts),
    )  # fmt: skip


def _cells(row: Row, outcomes: Sequence[Outcome]) -> str:
    errors = [one.error for one in outcomes if one.error is not None]
    error = f"{statistics.median(errors):.3f} s" if errors else "none"
    end = statistics.median(one.end for one in outcomes)
    told = "<br>".join(dict.fromkeys(one.told for one in outcomes if one.told)) or "nothing"
    last = "<br>".join(dict.fromkeys(f"`{one.last}`" for one in outcomes))
    return f"| {row.number} | {row.done} | {told} | {last} | {error} | {end:.1f} s |"


@contextmanager
def _two_hosts() -> Iterator[tuple[list[str], str]]:
    """Their names, and how `farandole run` reaches them."""
    with ExitStack() as stack:
        try:
            yield stack.enter_context(namespaces.two()), "netns"
        except pytest.skip.Exception:
            yield ["a", "b"], "local"


def page(runs: int, rows: Sequence[Row]) -> str:
    load = f"{os.getloadavg()[0]:.1f}"
    with _two_hosts() as (hosts, launcher):
        told = "network namespaces" if launcher == "netns" else "pretended"
        times = f"{runs} run{'s' if runs > 1 else ''}"
        text = _HEAD.format(runs=times, cores=os.cpu_count(), load=load, hosts=told)
        for title, kind in (("On one host", ""), ("On two hosts", TWO)):
            text += f"\n## {title}\n\n| row | fault | ranks are told | `farandole run` ends with "
            text += "| error | end |\n|---:|---|---|---|---:|---:|\n"
            for row in rows:
                if row.hosts == kind and (launcher == "netns" or not row.needs_a_cable):
                    outcomes = [run_once(row, hosts, launcher) for _ in range(runs)]
                    text += _cells(row, outcomes) + "\n"
                    print(text.splitlines()[-1], flush=True)
    text += _ELSEWHERE
    for number, what, tests in ELSEWHERE:
        text += f"| {number} | {what} | {'<br>'.join(f'`{test}`' for test in tests)} |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="of every row (5)")
    parser.add_argument("--rows", nargs="+", help="only these, by number; writes no page")
    arguments = parser.parse_args()
    asked = [row for row in ROWS if arguments.rows is None or row.number in arguments.rows]
    text = page(arguments.runs, asked)
    if arguments.rows is None:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
