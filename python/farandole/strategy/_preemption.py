"""Training that is about to be ended saves a checkpoint, and ends on all ranks after the same step:
tf.distribute.experimental.PreemptionCheckpointHandler."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from farandole import _world
from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole.common._objects import agree_prepared
from farandole.keras import _host
from farandole.strategy._checkpoint import has_shared_variables
from farandole.strategy._checks import check_function, check_resolver

_T = TypeVar("_T")
_WHAT = "PreemptionCheckpointHandler"
_ADVICE = "every rank makes it with the same arguments, over the same folder"
_RESTART_CODE = 42  # with which TensorFlow's handler ends a process
_COUNT = "checkpointed_runs"  # of TensorFlow's handler, too: the one reads the other's checkpoints
_BETWEEN_QUESTIONS = 1.0  # seconds
_LAST_STEPS = 6  # of the time that is left, these are kept for the last step and its checkpoint


class PreemptionCheckpointHandler:
    """Saves a checkpoint and ends the program on all ranks once any of them is told to end.

    A rank is told by SIGTERM, or by ``termination_watcher_fn``. All ranks learn of it before their
    next step, which is the same one on all: they save, and call ``exit_fn``. A program that starts
    again goes on from there, with any number of ranks.

    Args:
        cluster_resolver: as TensorFlow's handler takes it; the ranks that have met are those of the
            strategy.
        checkpoint_or_checkpoint_manager: a ``tf.train.CheckpointManager``; or a
            ``tf.train.Checkpoint``, of which the newest one is kept in ``checkpoint_dir``. It has a
            variable of a strategy's scope at least. The newest checkpoint is restored now.
        checkpoint_dir: a folder that all ranks see.
        termination_config: a ``tf.distribute.experimental.TerminationConfig``. ``exit_fn`` ends the
            process, by default with exit code 42. With ``grace_period`` (seconds) training goes on
            for as long after a first checkpoint, until there is just time for a last one.
            ``save_fn`` is called instead of the manager's ``save``.

    Raises:
        InvalidArgument: an argument is wrong on some rank; on all ranks.
        Mismatch: ranks do not find the same checkpoint.
    """

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: Any,
        checkpoint_dir: Any = None,
        termination_config: Any = None,
    ) -> None:
        if not _world.is_initialized():
            raise InvalidArgument(f"{_WHAT} comes before the ranks have met: make a strategy first")
        error: Exception | None = None
        newest = None
        try:
            check_resolver(cluster_resolver)
            config = _complete(termination_config)
            self._manager = _manager_of(checkpoint_or_checkpoint_manager, checkpoint_dir)
            self._notice = _Notice(config.termination_watcher_fn)
            newest = self._manager.latest_checkpoint
        except Exception as failed:
            error = failed
        rows = [f"the newest checkpoint is {newest}"]
        agree_prepared(_WHAT, "what is restored", rows, error, _ADVICE, None)
        self._exit = config.exit_fn or _exit
        self._save = config.save_fn or self._manager.save
        self._grace = float(config.grace_period or 0.0)
        self._count = _counter_of(self._manager.checkpoint)
        self._manager.restore_or_initialize()
        self._runs = int(self._count.numpy())
        self._has_saved = False  # the grace period runs
        self._first = self._runs  # of this process
        self._began = time.monotonic()

    @property
    def total_run_calls(self) -> int:
        """How often ``run`` has run a function, also before the program started again."""
        return self._runs

    def run(self, distributed_train_function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Collective: ``distributed_train_function(*args, **kwargs)``, one step of training; unless
        a rank was told to end, and all do.

        Raises:
            SystemExit: they end; what ``exit_fn`` does.
            InvalidArgument: ``termination_watcher_fn`` failed on another rank.
        """
        check_function(f"{_WHAT}.run", "distributed_train_function", distributed_train_function)
        self._end_if_told()
        result = distributed_train_function(*args, **kwargs)
        self._runs += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Collective: what ``run`` does before a step, for loops that do not call it. The arguments
        are those of the manager's ``save``.

        Raises:
            SystemExit: the ranks end; what ``exit_fn`` does.
        """
        self._end_if_told(*args, **kwargs)
        self._runs += 1

    @contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Around a loop that calls ``run``, as with TensorFlow's TPUs; adds nothing here."""
        yield

    def _end_if_told(self, *args: Any, **kwargs: Any) -> None:
        notice = self._notice
        mine = np.array([[notice.is_given, self._is_time(), notice.error is not None]], np.uint8)
        told = _host.all_gather(mine, f"{_WHAT}.told")
        given, is_time, has_failed = (bool(column.any()) for column in told.T)
        if has_failed:
            agree_prepared(f"{_WHAT}'s next step", "", [], notice.error, "", None)
        if not given or (self._has_saved and not is_time):
            return
        self._count.assign(self._runs)
        self._save(*args, **kwargs)
        if self._grace <= 0 or self._has_saved:
            notice.stop()
            self._exit()
        self._has_saved = True

    def _is_time(self) -> bool:
        """The rank that was told knows when it ends."""
        if self._notice.at is None:
            return False
        now = time.monotonic()
        a_step = (now - self._began) / max(1, self._runs - self._first)
        return self._notice.at + self._grace - now < _LAST_STEPS * a_step


class _Notice:
    """Whether this process was told to end: by SIGTERM, or as a function says that is asked again
    and again."""

    def __init__(self, watcher: Callable[[], Any] | None) -> None:
        self.at: float | None = None  # time.monotonic()
        self.error: Exception | None = None  # of the function
        self._stopped = threading.Event()
        if watcher is None:
            self._take_signal()
        else:
            threading.Thread(target=self._ask, args=(watcher,), name=_WHAT, daemon=True).start()

    @property
    def is_given(self) -> bool:
        return self.at is not None

    def stop(self) -> None:
        self._stopped.set()

    def _take_signal(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise InvalidArgument(
                f"{_WHAT} is made on the thread {threading.current_thread().name!r}, and only the "
                "main one may handle SIGTERM\n  advice: make it there, or give a "
                "TerminationConfig(termination_watcher_fn=…)"
            )
        before = signal.getsignal(signal.SIGTERM)

        def handle(number: int, frame: Any) -> None:
            self._give()
            if callable(before):
                before(number, frame)

        signal.signal(signal.SIGTERM, handle)

    def _ask(self, watcher: Callable[[], Any]) -> None:
        try:
            while not watcher():
                if self._stopped.wait(_BETWEEN_QUESTIONS):
                    return
        except Exception as failed:
            self.error = failed
        else:
            self._give()

    def _give(self) -> None:
        if self.at is None:
            self.at = time.monotonic()


def _exit() -> None:
    sys.exit(_RESTART_CODE)


def _complete(config: Any) -> Any:
    kind = tf.distribute.experimental.TerminationConfig
    if config is not None and not isinstance(config, kind):
        raise InvalidArgument(
            f"termination_config is {shown(config)}; it is a "
            "tf.distribute.experimental.TerminationConfig, or None"
        )
    config = config or kind()
    for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
        if getattr(config, name) is not None:
            check_function("TerminationConfig", name, getattr(config, name))
    grace = config.grace_period
    is_number = isinstance(grace, int | float) and not isinstance(grace, bool)
    if grace is not None and not (is_number and grace >= 0):
        raise InvalidArgument(f"grace_period is {shown(grace)}; it is a number of seconds")
    return config


def _manager_of(given: Any, folder: Any) -> Any:
    if isinstance(given, tf.train.CheckpointManager):
        manager = given
    elif not isinstance(given, tf.train.Checkpoint):
        raise InvalidArgument(
            f"checkpoint_or_checkpoint_manager is {shown(given)}; it is a tf.train.Checkpoint or a "
            "tf.train.CheckpointManager"
        )
    elif not folder:
        raise InvalidArgument(
            f"checkpoint_dir is {shown(folder)}; a tf.train.Checkpoint needs a folder, which all "
            "ranks see"
        )
    else:
        manager = tf.train.CheckpointManager(given, str(folder), max_to_keep=1)
    if _world.size() > 1 and not has_shared_variables(manager.checkpoint):
        raise InvalidArgument(
            "the checkpoint has no variable of a strategy's scope: every rank would write it\n"
            "  advice: make the model and the optimizer in strategy.scope()"
        )
    return manager


def _counter_of(checkpoint: Any) -> Any:
    """The variable of the checkpoint in which it is kept how far the program was."""
    if not hasattr(checkpoint, _COUNT):
        setattr(checkpoint, _COUNT, tf.Variable(0, trainable=False, dtype=tf.int64, name=_COUNT))
    return getattr(checkpoint, _COUNT)
