"""A model that is trained in blocks of steps: by `fit`, by a loop over a tape, or elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from models import BATCH, Arrays, loss_of, weights_of


class Trainer(Protocol):
    def train(self, steps: int) -> float:
        """So many steps after one that is not timed; the mean step in milliseconds."""

    def weights(self) -> np.ndarray[Any, Any]: ...


class Fit:
    """``model.fit()``; a block is one epoch of it. `parts`: batches of a step."""

    def __init__(
        self, model: Any, optimizer: Any, data: Arrays, batch: int = BATCH, parts: int = 1
    ) -> None:
        import keras

        class Clock(keras.callbacks.Callback):  # type: ignore[misc]
            """From the end of the first step to that of the epoch, when all is computed."""

            begin = end = 0.0

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                del logs
                if batch == parts - 1:
                    self.begin = time.perf_counter()

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                del epoch, logs
                self.end = time.perf_counter()

        self._model, self._data, self._batch, self._clock = model, data, batch, Clock()
        self._parts = parts
        # TensorFlow's XLA cannot call our ops, and ways are to be alike.
        jit = False if keras.backend.backend() == "tensorflow" else "auto"
        model.compile(optimizer, loss_of(), jit_compile=jit)

    def train(self, steps: int) -> float:
        x, y = (part[: (steps + 1) * self._batch * self._parts] for part in self._data)
        clock = self._clock
        self._model.fit(x, y, batch_size=self._batch, shuffle=False, verbose=0, callbacks=[clock])
        return 1e3 * (clock.end - clock.begin) / steps

    def weights(self) -> np.ndarray[Any, Any]:
        return weights_of(self._model)


class Loop:
    """A loop of one's own over a ``tf.function`` of a batch."""

    def __init__(self, model: Any, step: Callable[[Any, Any], Any], data: Arrays) -> None:
        import tensorflow as tf

        x, y = data
        ends = range(BATCH, len(x) + 1, BATCH)
        self._batches = [
            tuple(map(tf.constant, (x[e - BATCH : e], y[e - BATCH : e]))) for e in ends
        ]
        self._model, self._step = model, step

    def train(self, steps: int) -> float:
        begin = 0.0
        for batch in self._batches[: steps + 1]:
            self._step(*batch).numpy()
            begin = begin or time.perf_counter()
        return 1e3 * (time.perf_counter() - begin) / steps

    def weights(self) -> np.ndarray[Any, Any]:
        return weights_of(self._model)


class Elsewhere:
    """Runs strategies.py in a process beside this rank; without words, another rank has done so."""

    def __init__(self, words: list[str], cores: list[int] | None = None) -> None:
        self._child = None
        if not words:
            return
        program = Path(__file__).with_name("strategies.py")
        pin = os.sched_getaffinity(0) if cores is None else cores
        self._child = subprocess.Popen(
            [sys.executable, str(program), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, pin),
        )

    def train(self, steps: int) -> float:
        return float(self._ask({"steps": steps})) if self._child else 0.0

    def weights(self) -> np.ndarray[Any, Any]:
        return np.array(self._ask({}), np.float32) if self._child else np.empty(0, np.float32)

    def close(self) -> None:
        if self._child and self._child.stdin:
            self._child.stdin.close()
            self._child.wait(timeout=30)

    def _ask(self, question: dict[str, int]) -> Any:
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(json.dumps(question), file=self._child.stdin, flush=True)
        answer = self._child.stdout.readline()
        if not answer:
            raise SystemExit(f"a strategy's process ended with {self._child.wait()}")
        return json.loads(answer)
