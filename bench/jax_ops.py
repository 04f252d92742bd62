"""The cost of collectives in JAX's programs: farandole run -np 2 -- python bench/jax_ops.py

Calls: programs of 1 and of 101 all-reduces of 16 floats; the difference, by 100, is a call, and the
program of one beside the same program without is what starting it costs more. Overlap: backward of
a deep network and all-reduces that take long without work (FARANDOLE_FAULT gives every call of
"gradients" a latency), each by itself and together. Without overlap a step is the sum of the two.

Overlap needs a build with -DFARANDOLE_FAULT_POINTS=ON; the script sets the latency itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LATENCY = 0.008  # of a call, in the overlap part
LAYERS, WIDTH, BATCH = 12, 512, 256


def median_seconds(step: Callable[[], Any], times: int, settle: Callable[[], None]) -> float:
    import jax

    jax.block_until_ready(step())
    taken = []
    for _ in range(times):
        settle()
        begin = time.perf_counter()
        jax.block_until_ready(step())
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def calls() -> dict[str, float]:
    import jax
    import jax.numpy as jnp

    import farandole as fd
    import farandole.jax as fdj

    x = jnp.ones(16)

    def program(reductions: int) -> Callable[[], Any]:
        def body(x: Any) -> Any:
            for _ in range(reductions):
                x = fdj.allreduce(x * 1.5)
            return x * 1.5

        compiled = jax.jit(body)
        return lambda: compiled(x)

    def measured(step: Callable[[], Any]) -> float:
        return 1e6 * median_seconds(step, 200, fd.barrier)

    none, one, many = (measured(program(n)) for n in (0, 1, 101))
    at_once = measured(lambda: fdj.allreduce(x))
    return {
        "program without, us": none,
        "program of one, us": one,
        "each further call, us": (many - one) / 100,
        "at once, us": at_once,
    }


def overlap() -> dict[str, float]:
    import jax
    import jax.numpy as jnp

    import farandole as fd
    import farandole.jax as fdj

    keys = jax.random.split(jax.random.key(0), LAYERS)
    weights = {
        f"layer_{i}": 0.04 * jax.random.normal(key, (WIDTH, WIDTH)) for i, key in enumerate(keys)
    }
    x = jnp.ones((BATCH, WIDTH))

    def loss(weights: dict[str, Any]) -> Any:
        h = x
        for i in range(LAYERS):
            h = jax.nn.relu(h @ weights[f"layer_{i}"])
        return (h * h).mean()

    def reduce(tree: Any) -> Any:
        return fdj.allreduce_gradients(tree, bucket_bytes=WIDTH * WIDTH * 4)

    backward = jax.jit(jax.grad(loss))
    together = jax.jit(lambda weights: reduce(jax.grad(loss)(weights)))
    alone = jax.jit(reduce)
    steps = {
        "backward, ms": lambda: backward(weights),
        "communication, ms": lambda: alone(weights),
        "together, ms": lambda: together(weights),
    }
    found = {name: 1e3 * median_seconds(step, 9, fd.barrier) for name, step in steps.items()}
    both = found["backward, ms"] + found["communication, ms"]
    hidden = (both - found["together, ms"]) / min(list(found.values())[:2])
    return found | {"hidden, % of the shorter": 100 * hidden}


def _with_unit(name: str, value: float) -> dict[str, Any]:
    """'at once, us' is what took so many us."""
    what, _, unit = name.rpartition(", ")
    return {"what": what, unit: value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["calls", "overlap"], default="calls")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if arguments.part == "overlap":
        os.environ["FARANDOLE_FAULT"] = f"rank=any,at=gradients,do=delay:{LATENCY}"

    import farandole.jax as fdj

    fdj.init()
    found = {"calls": calls, "overlap": overlap}[arguments.part]()
    if fdj.rank() == 0:
        for name, value in found.items():
            print(f"{name:28} {value:9.1f}")
        if arguments.json:
            rows = [
                {"benchmark": "jax_ops", "part": arguments.part, "ranks": fdj.size()}
                | _with_unit(name, value)
                for name, value in found.items()
            ]
            arguments.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
