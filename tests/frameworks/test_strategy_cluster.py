"""farandole.strategy where ranks are a cluster's tasks: how they meet, and what is left of training
where one of them dies or is told to end."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from keras_model_cases import BATCH, X, Y, compiled, net
from keras_work import Late, keras
from rank_cases import needs, raises, refused

import farandole as fd
import harness
from harness import World

needs("tensorflow", "keras")

tf: Any = Late("tensorflow")
strategies: Any = Late("farandole.strategy")
Spawn = Callable[..., World]
START = 100.0  # seconds: ranks trace their functions, and others want the cores

# ---- who starts the ranks ----


def resolver_of(kind: str) -> Any:
    if kind == "TF_CONFIG":
        return None
    if kind == "Slurm":  # on hosts without a GPU TensorFlow's fails by itself
        return tf.distribute.cluster_resolver.SlurmClusterResolver(
            gpus_per_node=2, gpus_per_task=1, auto_set_gpu=False
        )
    if kind == "Kubernetes":
        return of_pods(int(os.environ["POD_NUMBER"]))
    told = json.loads(os.environ.pop("TF_CONFIG"))
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(told["cluster"]), task_type=told["task"]["type"],
        task_id=told["task"]["index"],
    )  # fmt: skip


def of_pods(number: int) -> Any:
    """A resolver for two pods on this host, as the Kubernetes client lists them."""

    class Client:
        def list_pod_for_all_namespaces(self, label_selector: str) -> Any:
            assert label_selector == "job-name=train"
            status = SimpleNamespace(phase="Running", host_ip="localhost")
            names = [SimpleNamespace(name=f"train-{i}") for i in (1, 0)]
            return SimpleNamespace(
                items=[SimpleNamespace(status=status, metadata=n) for n in names]
            )

    resolver = tf.distribute.cluster_resolver.KubernetesClusterResolver(
        {"worker": ["job-name=train"]}, override_client=Client()
    )
    resolver.task_type, resolver.task_id = "worker", number
    return resolver


def work_of_two(kind: str) -> tuple[int, int, float]:
    resolver = resolver_of(kind)
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=77)
    strategy = strategies.MultiWorkerMirroredStrategy(resolver, options)
    total = float(strategy.reduce("SUM", strategy.run(lambda: tf.constant(2.0)), axis=None))
    assert strategy.cluster_resolver is resolver
    return fd.rank(), strategy.num_replicas_in_sync, total


NOT_BY_THE_HARNESS: dict[str, str | None] = dict.fromkeys(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FARANDOLE_RUN_ID")
)


def by_config(role: str) -> dict[str, str | None]:
    cluster = {"chief": ["localhost:23456"], "worker": ["localhost:23457"]}
    told = json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}})
    return NOT_BY_THE_HARNESS | {"TF_CONFIG": told}


def by_srun(task: int) -> dict[str, str | None]:
    """The environment of a Slurm step with two tasks on this host."""
    return NOT_BY_THE_HARNESS | {
        "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0",
    }  # fmt: skip


def by_pod(number: int) -> dict[str, str | None]:
    return NOT_BY_THE_HARNESS | {"POD_NUMBER": str(number)}


ENVIRONMENTS: dict[str, Callable[[int], dict[str, str | None]]] = {
    "TF_CONFIG": lambda r: by_config(("chief", "worker")[r]),
    "a resolver": lambda r: by_config(("chief", "worker")[r]),
    "Slurm": by_srun,
    "Kubernetes": by_pod,
}


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_workers_meet_by_a_cluster(spawn: Spawn, kind: str) -> None:
    world = spawn(2, "keras on tensorflow", each=[ENVIRONMENTS[kind](r) for r in range(2)])
    assert world.run(work_of_two, kind) == [(0, 2, 4.0), (1, 2, 4.0)]


def waits_no_longer_than_its_options_say() -> None:
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=1)
    strategy = strategies.MultiWorkerMirroredStrategy(communication_options=options)
    if fd.rank() == 1:
        harness.listen()
        return
    with raises(tf.errors.DeadlineExceededError, "farandole.Stalled"):
        strategy.reduce("SUM", tf.constant(1.0), axis=None)
    harness.tell("late")


def test_timeout_seconds_is_the_deadline_of_operations(spawn: Spawn) -> None:
    world = spawn(2, "keras on tensorflow")
    world.start(waits_no_longer_than_its_options_say)
    assert world.hear(0) == "late"
    world.say(1, "go on")
    assert [outcome.error for outcome in world.outcomes()] == [None, None]


# ---- a rank that dies ----


def fit_until_a_rank_dies() -> str:
    """The error that ends `fit` on a survivor."""
    strategy = strategies.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = compiled(net())
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    model.fit(dataset, verbose=0)
    harness.tell("trains")

    class Waits(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
            if epoch == 0:
                harness.listen()

    with pytest.raises(Exception) as caught:  # noqa: PT011  # TensorFlow's or ours
        model.fit(dataset, epochs=10_000, verbose=0, callbacks=[Waits()])
    return str(caught.value)


def test_a_peer_that_dies_ends_fit_and_is_named(spawn: Spawn) -> None:
    world = spawn(2, "keras on tensorflow", each=[by_config("chief"), by_config("worker")])
    world.start(fit_until_a_rank_dies)
    assert [world.hear(r, START) for r in range(2)] == ["trains"] * 2
    world.signal(1, signal.SIGKILL)
    world.say(0, "go on")
    outcome = world.outcome(0, START)
    assert outcome.error is None, outcome.trace
    assert "rank 1 (pid " in outcome.value, outcome.value
    assert "was killed by SIGKILL" in outcome.value, outcome.value


# ---- a rank that is told to end ----

STEPS = 3


def handler_of(folder: str, **options: Any) -> tuple[Any, Callable[[], Any]]:
    """With a step of training: its variable counts them."""
    strategy = strategies.MirroredStrategy()
    with strategy.scope():
        counted = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
    handler = strategies.PreemptionCheckpointHandler(
        None,
        tf.train.Checkpoint(counted=counted),
        folder,
        tf.distribute.experimental.TerminationConfig(**options),
    )

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        strategy.run(lambda: counted.assign_add(1.0 / strategy.num_replicas_in_sync))
        return counted.read_value()

    return handler, step


def train_until_told(folder: str) -> None:
    handler, step = handler_of(folder)
    for done in range(1, STEPS + 1):
        assert float(handler.run(step)) == done
    harness.tell("trains")
    harness.listen()
    handler.run(step)
    harness.tell("went on")


def go_on(folder: str) -> tuple[int, float]:
    handler, step = handler_of(folder)
    with handler.watch_preemption_scope():
        return handler.total_run_calls, float(handler.run(step))


def test_a_rank_that_gets_sigterm_ends_training_for_all_and_it_goes_on(
    spawn: Spawn, tmp_path: Path
) -> None:
    world = spawn(3, "keras on tensorflow")
    world.start(train_until_told, str(tmp_path))
    assert [world.hear(r, START) for r in range(3)] == ["trains"] * 3
    world.signal(1, signal.SIGTERM)
    for rank in range(3):
        world.say(rank, "go on")
    outcomes = world.outcomes(timeout=START)
    assert [(o.error, o.text) for o in outcomes] == [("SystemExit", "42")] * 3, outcomes
    again = spawn(2, "keras on tensorflow")
    assert again.run(go_on, str(tmp_path), timeout=START) == [(STEPS, STEPS + 1.0)] * 2


def train_through_the_grace_period(folder: str) -> list[int]:
    """After how many steps rank 0, which is told by a function, and the others saved."""
    saved: list[int] = []
    handler, step = handler_of(
        folder, termination_watcher_fn=lambda: fd.rank() == 0, grace_period=1.0,
        save_fn=lambda: saved.append(handler.total_run_calls),
    )  # fmt: skip

    def train() -> None:
        while True:
            handler.run(step)

    with pytest.raises(SystemExit):
        train()
    return saved


def test_training_goes_on_for_the_grace_period(spawn: Spawn, tmp_path: Path) -> None:
    saved = spawn(2, "keras on tensorflow").run(
        train_through_the_grace_period, str(tmp_path), timeout=START
    )
    assert saved[0] == saved[1]
    first, last = saved[0]
    assert first < last


def what_a_handler_refuses(folder: str) -> None:
    kind = strategies.PreemptionCheckpointHandler
    refused(lambda: kind(None, tf.train.Checkpoint(), folder), "before the ranks have met")
    handler, step = handler_of(folder)
    checkpoint = handler._manager.checkpoint
    refused(lambda: kind(None, checkpoint), "checkpoint_dir is None")
    refused(lambda: kind("a:1", checkpoint, folder), "cluster_resolver is 'a:1'")
    refused(lambda: kind(None, folder), "checkpoint_or_checkpoint_manager is")
    refused(lambda: kind(None, checkpoint, folder, 7), "termination_config is 7")
    theirs = tf.distribute.experimental.PreemptionCheckpointHandler
    refused(lambda: theirs(None, checkpoint, folder), "would save on one alone")
    alone = tf.train.Checkpoint(v=tf.Variable(1.0))
    refused(lambda: kind(None, alone, folder), "no variable of a strategy's scope")
    refused(lambda: handler_of(folder, grace_period="1"), "grace_period is '1'")
    refused(lambda: handler_of(folder, exit_fn=3), "exit_fn is 3", kind=Exception)
    refused(lambda: handler.run(3), "distributed_train_function is 3", kind=Exception)
    only_here = folder if fd.rank() == 0 else ""
    says = "checkpoint_dir is ''" if fd.rank() == 1 else "rank 1: InvalidArgument: checkpoint_dir"
    refused(lambda: kind(None, checkpoint, only_here), says)

    def on_a_thread() -> None:
        refused(lambda: kind(None, checkpoint, folder), "on the thread 'a helper'")

    thread = threading.Thread(target=on_a_thread, name="a helper")
    thread.start()
    thread.join()

    def watch() -> bool:
        raise OSError("no answer")

    handler, step = handler_of(
        folder, termination_watcher_fn=watch if fd.rank() == 1 else lambda: False
    )
    with raises(Exception, "no answer") as caught:
        while True:
            handler.run(step)
    assert isinstance(caught.value, OSError if fd.rank() == 1 else fd.InvalidArgument)


def test_mistakes_are_told_on_every_rank(spawn: Spawn, tmp_path: Path) -> None:
    spawn(2, "keras on tensorflow").run(what_a_handler_refuses, str(tmp_path), timeout=START)
