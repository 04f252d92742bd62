"""The time that a strategy's `run` adds to a call, eagerly: python bench/strategy_run.py

    farandole run -np 2 -- python bench/strategy_run.py        the same with other replicas

The same small `tf.function`, which exchanges nothing, is called in several ways that take turns in
blocks of calls:

    plain          by itself
    in a scope     by itself, in `with strategy.scope()`
    OneDevice      TensorFlow's OneDeviceStrategy.run(function, args)
    run            MirroredStrategy.run(function, args) of farandole
    run in scope   the same in `with strategy.scope()`

    nothing        run of farandole with a function that does nothing
    OneDevice, n.  the same of OneDeviceStrategy

What is shown is the median over the blocks of a block's median call, and what it is above the plain
one of the same block, in µs; and the same of a block's fastest call, which other programs on the
machine do not change.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

import farandole as fd
import farandole.strategy
from farandole._bench.statistics import median, median_interval

BAR = 50.0  # µs above a plain call


def ways() -> dict[str, Callable[[], Any]]:
    """By name."""
    step = tf.function(lambda x, y: tf.reduce_sum(x * y))
    arguments = (tf.ones([8, 4]), tf.ones([8, 4]))
    ours = farandole.strategy.MirroredStrategy()
    theirs = tf.distribute.OneDeviceStrategy("/cpu:0")

    def nothing(*_: Any) -> None:
        pass

    def within(call: Callable[[], Any]) -> Callable[[], Any]:
        def calls() -> Any:
            return call()

        calls.scope = ours.scope  # type: ignore[attr-defined]
        return calls

    return {
        "plain": lambda: step(*arguments),
        "in a scope": within(lambda: step(*arguments)),
        "OneDevice": lambda: theirs.run(step, arguments),
        "run": lambda: ours.run(step, arguments),
        "run in scope": within(lambda: ours.run(step, arguments)),
        "nothing": lambda: ours.run(nothing, arguments),
        "OneDevice, n.": lambda: theirs.run(nothing, arguments),
    }


def block(way: Callable[[], Any], calls: int) -> tuple[float, float]:
    """µs of the median call, and of the fastest one."""
    times = []
    scope = getattr(way, "scope", None)
    if scope is not None:
        entered = scope()
        entered.__enter__()
    for _ in range(calls):
        began = time.perf_counter_ns()
        way()
        times.append((time.perf_counter_ns() - began) / 1000)
    if scope is not None:
        entered.__exit__(None, None, None)
    return median(times), min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=31)
    parser.add_argument("--calls", type=int, default=100, help="in a block")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    called = ways()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in called}
    names = list(called)
    for number in range(-1, arguments.blocks):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            taken = block(called[name], arguments.calls)
            if number >= 0:  # the first one traces
                times[name].append(taken)
    rows = [row(name, times) for name in names]
    if fd.rank() == 0:
        for each in rows:
            low, high = each["above_low"], each["above_high"]
            print(
                f"{each['way']:<13} {each['p50_us']:7.1f} µs, {each['above']:+7.1f} "
                f"[{low:+.1f}, {high:+.1f}]; fastest {each['fastest_us']:7.1f} µs, "
                f"{each['fastest_above']:+7.1f}"
            )
        if arguments.json is not None:
            arguments.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return 0


def row(name: str, times: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """One way, alone and beside the plain calls of the same blocks."""
    pairs = list(zip(times[name], times["plain"], strict=True))
    above = median_interval([mine[0] - plain[0] for mine, plain in pairs])
    return {
        "benchmark": "strategy_run",
        "ranks": fd.size(),
        "way": name,
        "p50_us": median([p50 for p50, _ in times[name]]),
        "above": above.median,
        "above_low": above.low,
        "above_high": above.high,
        "fastest_us": median([fastest for _, fastest in times[name]]),
        "fastest_above": median([mine[1] - plain[1] for mine, plain in pairs]),
        "bar": BAR if name.startswith("run") else None,
    }


if __name__ == "__main__":
    raise SystemExit(main())
