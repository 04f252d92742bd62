"""Training under a strategy of tf.distribute, in a process of its own, since a strategy changes
settings of all of TensorFlow. A rank asks for blocks through standard input and output: a line of
JSON each way.

    python strategies.py mirrored MODEL RANKS             fit; one process is all replicas
    python strategies.py multi_worker MODEL RANK ADDRESS… a loop of one's own; a process a rank
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np
from models import BATCH, MODELS, Arrays, Model, plain_optimizer
from steps import own_gradients, step_of
from trainers import Fit, Loop, Trainer


def mirrored(model: Model, count: str) -> Trainer:
    """Over as many logical CPUs as there are ranks beside it."""
    import tensorflow as tf

    ranks = int(count)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2 * ranks)  # fewer may deadlock
    (cpu,) = tf.config.list_physical_devices("CPU")
    cpus = [tf.config.LogicalDeviceConfiguration()] * ranks
    tf.config.set_logical_device_configuration(cpu, cpus)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{r}" for r in range(ranks)])
    data = _joined([model.batches(r, model.steps + 1) for r in range(ranks)])
    with strategy.scope():
        return Fit(model.build_alike(), plain_optimizer(), data, BATCH * ranks)


def _joined(data: list[Arrays]) -> Arrays:
    """Batches of all ranks, each followed by that of the next rank: a replica gets a rank's."""
    parts = []
    for arrays in zip(*data, strict=True):
        rows = [array.reshape(-1, BATCH, *array.shape[1:]) for array in arrays]
        parts.append(np.stack(rows, 1).reshape(-1, *arrays[0].shape[1:]))
    return parts[0], parts[1]


def multi_worker(model: Model, rank: str, *addresses: str) -> Trainer:
    import tensorflow as tf

    task = {"type": "worker", "index": int(rank)}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        net = model.build_alike()
        step = step_of(net, own_gradients)  # Keras divides losses, and adds gradients up
    data = model.batches(int(rank), model.steps + 1)
    return Loop(net, tf.function(lambda x, y: strategy.run(step, args=(x, y))), data)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # what TensorFlow prints is no answer
    os.dup2(2, 1)
    name, model, *rest = sys.argv[1:]
    trainer = {"mirrored": mirrored, "multi_worker": multi_worker}[name](MODELS[model], *rest)
    for line in sys.stdin:
        steps = json.loads(line).get("steps")
        answer = trainer.weights().tolist() if steps is None else trainer.train(steps)
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
