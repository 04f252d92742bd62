"""Trains examples/digits.py on one rank and on two, compares, and draws what happened.

    make demo

Fails unless two ranks learn what one does, and unless the same check notices ranks that do not talk
to each other.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from bisect import bisect
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from farandole._progress import Progress
from farandole.cli._terminal import columns

HERE = Path(__file__).resolve().parent
SAME = 1e-4  # largest relative difference between equal loss curves
ACCURATE = 0.97  # of the held-out digits


@dataclass
class Run:
    """The results of one training."""

    losses: list[float]
    accuracy: float
    seconds: list[float]

    @property
    def step_ms(self) -> float:
        return 1000 * median(self.seconds)


class Failed(Exception):
    """A part of the demo failed; the lines above tell why."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(f"{what} failed with exit code {exit_code}; the lines above tell why")
        self.exit_code = exit_code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("demo-output"), metavar="DIR")
    output = parser.parse_args().output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    try:
        results, good = measure(output)
    except Failed as failure:
        print(f"demo: {failure}", file=sys.stderr)
        return failure.exit_code
    import demo_pictures

    demo_pictures.draw(output, results)
    print(f"\n{'done' if good else 'FAILED'}: pictures, trace and numbers are in\n{output}")
    return 0 if good else 1


def measure(output: Path) -> tuple[dict[str, Any], bool]:
    """Trains three times, measures bandwidth, prints the verdicts."""
    from farandole import _trace

    trace = output / "trace"
    one = train("1 rank", 1, output / "one-rank.json")
    two = train("2 ranks", 2, output / "two-ranks.json", trace=trace)
    apart = train("2 ranks, communication off", 2, output / "apart.json", "--alone")
    sweep = output / "all_reduce.json"
    call("measuring all-reduce over size", farandole("bench", "all_reduce", "-np", "2"), sweep)
    summary = _trace.summary(trace)

    same, different = difference(one, two), difference(one, apart)
    accuracy = min(one.accuracy, two.accuracy)
    verdicts = [same <= SAME, different > SAME, accuracy >= ACCURATE]
    hidden = hidden_share(json.loads(_trace.merge(trace).read_text())["traceEvents"])
    overlap = "-" if summary.overlap is None else f"{summary.overlap:.0%}"
    print(f"""
loss curves of 1 rank and 2 ranks differ by at most {same:.1e}, relatively (limit {SAME:.0e}): \
{word(verdicts[0], "the same", "NOT THE SAME")}
with communication off, the same check finds {different:.1e}: \
{word(verdicts[1], "it fails, as it must", "IT SHOULD FAIL AND DOES NOT")}
accuracy on digits not seen in training: {one.accuracy:.3f}, {two.accuracy:.3f} \
(at least {ACCURATE}): {word(verdicts[2], "good", "NOT GOOD ENOUGH")}
step of {one.step_ms:.2f} ms on 1 rank, {two.step_ms:.2f} ms on 2 ranks, \
{apart.step_ms:.2f} ms with communication off (medians, 64 digits a step)
{overlap} of the time between a bucket's launch and its end did not hold up the program;
{hidden:.0%} of the time in which buckets were being reduced lay within backward
(with as many ranks as cores, a bucket moves on in backward only when a gradient is ready)""")
    results = {
        "one": vars(one), "two": vars(two), "apart": vars(apart),
        "difference": same, "difference_apart": different, "overlap": summary.overlap,
        "hidden": hidden,
        "bandwidth": json.loads(sweep.read_text()),
        "trace": str(_trace.merge(trace)),
    }  # fmt: skip
    (output / "results.json").write_text(json.dumps(results))
    return results, all(verdicts)


def word(good: bool, yes: str, no: str) -> str:
    return yes if good else no


def difference(a: Run, b: Run) -> float:
    """The largest relative difference between two loss curves."""
    return max(abs(x - y) / abs(x) for x, y in zip(a.losses, b.losses, strict=True))


def hidden_share(events: list[dict[str, Any]]) -> float:
    """How much of the time in which buckets were running lay outside of the final waits."""
    streams = {e["args"]["stream"] for e in events if e.get("cat") == "step"}
    running = hidden = 0.0
    for rank in {e["pid"] for e in events}:
        mine = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        waits = sorted((e["ts"], e["ts"] + e["dur"]) for e in mine if e["cat"] == "final_wait")
        begins = [begin for begin, _ in waits]
        for phase in mine:
            if phase["cat"] != "phase" or phase["name"] != "running":
                continue
            if phase["args"]["stream"] not in streams:
                continue
            begin, end = phase["ts"], phase["ts"] + phase["dur"]
            near = waits[max(0, bisect(begins, begin) - 1) : bisect(begins, end)]
            blocked = sum(max(0.0, min(end, e) - max(begin, b)) for b, e in near)
            running += end - begin
            hidden += end - begin - blocked
    return hidden / running if running else 0.0


# ---- running programs ----


def farandole(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "farandole", *arguments]


def train(title: str, ranks: int, result: Path, *options: str, trace: Path | None = None) -> Run:
    command = [sys.executable, str(HERE / "digits.py"), "--json", str(result), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if trace is not None:
        environment["FARANDOLE_TRACE"] = str(trace)
    result.unlink(missing_ok=True)
    command = farandole("run", "-np", str(ranks), "--no-prefix", "--", *command)
    follow(f"training on {title}", command, environment)
    return Run(**json.loads(result.read_text()))


def follow(title: str, command: list[str], environment: dict[str, str]) -> None:
    """Runs a training; shows its lines 'epoch 3/12: loss 0.17' as they come, and how far it is."""
    progress = Progress(1.0, columns())
    progress.now(title, 0.0)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if epoch := re.match(r"epoch (\d+)/(\d+): ", line):
                progress.show(f"{title}: {line.rstrip()}")
                progress.now(title, int(epoch[1]) / int(epoch[2]))
    progress.clear()
    if job.returncode:
        raise Failed(title, job.returncode)


def call(title: str, command: list[str], result: Path) -> None:
    """Runs a command that shows by itself how far it is."""
    print(f"\n{title}", flush=True)
    done = subprocess.run([*command, "--json", str(result)], check=False)
    if done.returncode:
        raise Failed(title, done.returncode)


if __name__ == "__main__":
    sys.exit(main())
