"""The memory that a strategy takes in each process: farandole run -np 2 -- python
bench/strategy_memory.py CentralStorageStrategy

A model of 64 MiB of weights trains with Adam for a few steps. Each rank says how much its
proportional set size (of /proc/self/smaps_rollup: memory that n processes share counts 1/n in
each) has grown since before the model was made, and what of that are weights and optimizer state.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import farandole as fd
from farandole import strategy as strategies
from farandole.common._objects import allgather_object

WIDTH, LAYERS, STEPS = 2048, 4, 4
MIB = 1 << 20


def proportional_set() -> float:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    rows = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    return next(int(row[1]) / 1024 for row in rows if row[0] == "Pss:")


def main(name: str) -> None:
    strategy = getattr(strategies, name)()
    x = np.ones((8, WIDTH), "float32")
    before = proportional_set()
    with strategy.scope():
        dense = [keras.layers.Dense(WIDTH, use_bias=False) for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *dense])
        model.compile(keras.optimizers.Adam(1e-6), "mse")
    model.fit(x, x, batch_size=8, epochs=STEPS, verbose=0)
    fd.barrier()
    grown = proportional_set() - before
    fd.barrier()
    state = [v.value.values[0] for v in model.optimizer.variables if v.shape.rank]
    here = [v for v in state if type(v).__name__ != "AbsentVariable"]
    row = (grown, sum(v.shape.num_elements() * 4 for v in here) / MIB)
    rows = allgather_object(row, "memory")
    if fd.rank() == 0:
        for rank, (all_of_it, slots) in enumerate(rows):
            print(f"rank {rank}: {all_of_it:.0f} MiB more; state of the optimizer {slots:.0f} MiB")
        print(f"{name}: {sum(row[0] for row in rows):.0f} MiB more in all")


if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(1)
    main(*sys.argv[1:])
