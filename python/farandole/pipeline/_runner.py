"""One step of a pipeline on one rank: its actions one after the other, over messages.

Note [A stage that fails]
A rank whose stage raises goes through the rest of its actions without computing: it takes every
message that comes, and says in every one that it sends that the step has failed. So all ranks come
to the end of the step, where each tells all others how it fared; they raise one error, and can go
on with the next batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from farandole import _unreduced, _world
from farandole._core import Group, InvalidArgument, RemoteError
from farandole.pipeline._places import Place
from farandole.pipeline._schedules import Action
from farandole.pipeline._wire import Channel, Form, Message, Status, Tensors

KINDS = ("step", "evaluate", "predict")  # methods of a Pipeline

_FINE, _FAILED, _HEARD = 0, 1, 2  # how a rank fared; _HEARD: it was told of another's failure


class Work(Protocol):
    """The part of a step that a framework does."""

    kind: str  # one of KINDS

    def begin(self) -> Sequence[int | None]:
        """Samples of each micro-batch, where this rank has the batch; checks its arguments."""

    def forward(self, k: int, samples: int, received: Message | None) -> tuple[Form, list[Any]]:
        """Computes, and keeps what backward needs. The first stage receives nothing; what the last
        one returns is not sent."""

    def backward(self, k: int, gradients: Message | None) -> tuple[Form, list[Any]]:
        """Gradients of what was received. The last stage gets none."""

    def end(self, *, failed: bool) -> None:
        """Ends the step between the ranks of a stage. Called on all of them, also if one failed."""

    def loss(self) -> float:
        """This rank's share of it; 0 on other stages than the last."""

    def activations(self) -> int:
        """Bytes that this rank keeps of a micro-batch, at most; 0 where it does not know."""

    def has_gradient(self) -> bool:
        """Whether this rank's share of the loss can be differentiated, where the work knows."""

    def is_finite(self) -> bool:
        """Whether this rank's gradients are, before they are reduced."""

    def forget(self) -> None:
        """Drops what a step has left that failed on some rank."""


class Fared(NamedTuple):
    """The result of a step on one rank, which it sends to all others."""

    state: float
    loss: float  # its share
    seconds: float
    idle: float  # of these
    samples: float  # 0 where it does not know
    activations: float  # bytes of a micro-batch
    has_gradient: float  # its share of the loss
    is_finite: float  # its gradients


class Runner:
    """Runs the steps of one rank.

    Args:
        group: all ranks of all replicas.
        dynamic_shapes: what is sent may have other shapes in each micro-batch.
    """

    def __init__(
        self, group: Group, place: Place, tensors: Tensors, *, dynamic_shapes: bool
    ) -> None:
        self._group, self._place, self._dynamic = group, place, dynamic_shapes
        self._before: Channel | None = None
        self._after: Channel | None = None
        stage = place.stage
        if not place.is_first:
            self._before = self._channel(stage - 1, tensors)
        if not place.is_last:
            self._after = self._channel(stage + 1, tensors)
        self._forms: dict[int, Form] = {}  # what this stage made, by the number of samples
        self._steps = 0
        self._running = False
        self._idle = 0.0
        self._failure: Exception | None = None
        self._heard = False
        self._at: Action | None = None  # where it failed
        self._counts: list[int | None] = []  # samples of each micro-batch
        self._empty = set[int]()  # micro-batches

    def _channel(self, other: int, tensors: Tensors) -> Channel:
        _unreduced.note_training()
        peer = self._place.rank_of(other, self._place.replica)
        low, high = sorted((other, self._place.stage))
        return Channel(self._group, peer, tensors, f"stages {low} and {high}")

    def run(self, actions: Sequence[Action], work: Work) -> list[Fared]:
        """Collective: a step, and how all ranks fared.

        Raises:
            RemoteError: another rank's stage has raised; says which, and what. On that rank, its
                own error.
            Error: the group has failed.
        """
        if self._running:
            raise InvalidArgument(
                "a step of this Pipeline was interrupted, and its ranks are no longer in step\n"
                "  advice: make the Pipeline again, on all ranks"
            )
        self._running = True
        try:
            rows = self._run(actions, work)
        except Exception:  # of the engine: the group has failed, and says so in every further step
            self._running = False
            raise
        except BaseException as error:
            self._group.abort(f"a step of a Pipeline was interrupted by {type(error).__name__}")
            raise
        self._running = False
        self._raise_failure(rows, work)
        return rows

    def _run(self, actions: Sequence[Action], work: Work) -> list[Fared]:
        began = time.perf_counter()
        self._idle, self._failure, self._heard, self._at = 0.0, None, False, None
        self._steps += 1
        self._empty.clear()
        self._counts = list(self._trying(None, work.begin) or [])
        for action in actions:
            self._do(action, work)
        self._settle()
        self._trying(None, lambda: work.end(failed=self._is_over))
        return self._tell(work, sum(each or 0 for each in self._counts), began)

    def _do(self, action: Action, work: Work) -> None:
        kind, k = action
        source, target = (self._before, self._after)
        if kind == "backward":
            source, target = target, source
        step = self._steps, KINDS.index(work.kind)
        received = None if source is None else self._receive(source, action, step)
        made = None
        if received is not None and received.status == Status.FAILED and not self._is_over:
            self._heard = True
        if not self._is_over:
            made = self._trying(action, lambda: self._made(action, work, received, target))
        if target is None:
            return
        if self._is_over:
            target.send(Status.FAILED, k, 0, step)
        elif k in self._empty:
            target.send(Status.EMPTY, k, 0, step)
        else:
            assert made is not None
            target.send(Status.FULL, k, self._counts[k] or 0, step, *made)
        target.let_go()

    @property
    def _is_over(self) -> bool:
        """Whether this step has failed, here or on another rank."""
        return self._heard or self._failure is not None

    def _trying(self, action: Action | None, call: Callable[[], Any]) -> Any:
        """The result of the call; a failure is kept. See Note [A stage that fails]."""
        try:
            return call()
        except Exception as error:
            if not self._is_over:
                self._failure, self._at = error, action
                # Outside of an action, another rank of this stage has abandoned the step.
                self._heard = action is None and isinstance(error, RemoteError)
            return None

    def _made(
        self, action: Action, work: Work, received: Message | None, target: Channel | None
    ) -> tuple[Form, list[Any]] | None:
        made = self._compute(action, work, received)
        if made is not None and target is not None:
            target.prepare(made[0])  # what cannot be sent is this stage's failure
        return made

    def _compute(
        self, action: Action, work: Work, received: Message | None
    ) -> tuple[Form, list[Any]] | None:
        kind, k = action
        if kind == "backward":
            return None if k in self._empty else work.backward(k, received)
        if received is not None:
            self._check_samples(k, received.samples)
        samples = self._counts[k]
        assert samples is not None
        if samples == 0:
            self._empty.add(k)
            return None
        form, tensors = work.forward(k, samples, received)
        if not self._place.is_last and not self._dynamic:
            self._check_form(k, samples, form)
        return form, tensors

    def _check_samples(self, k: int, samples: int) -> None:
        counts = self._counts
        if counts[k] is None:
            counts[k] = samples
        elif counts[k] != samples:
            raise InvalidArgument(
                f"micro-batch {k} has {samples} samples on stage {self._place.stage - 1}, and "
                f"{counts[k]} here\n  advice: pass the same batch on every rank"
            )

    def _check_form(self, k: int, samples: int, form: Form) -> None:
        """Outputs of a stage keep the shapes of its first step, but for the number of samples."""
        known = self._forms.get(samples)
        rows = 0 if known else 1  # dimensions from there on are compared
        known = known or next(iter(self._forms.values()), form)
        if _shapes(known, rows) != _shapes(form, rows):
            raise InvalidArgument(
                f"what this stage makes of micro-batch {k} is {form}, and was {known} before\n"
                "  advice: batches of one shape; or dynamic_shapes=True, where they do differ, or "
                "where samples are not the first dimension"
            )
        self._forms[samples] = form

    # ---- waiting ----

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._idle += time.perf_counter() - began

    def _receive(self, source: Channel, action: Action, step: tuple[int, int]) -> Message:
        """Aborts if the neighbour is in another step, as the next message is then unknown."""
        with self._waiting():
            received = source.receive()
        if (received.step, received.micro_batch) == (step, action.micro_batch):
            return received
        theirs, mine = (
            f"{KINDS[kind]}() number {number}" for number, kind in (received.step, step)
        )
        why = (
            f"rank {_world.rank()} ({self._place}) is in {mine} of its Pipeline, and a neighbour "
            f"in {theirs}"
        )
        self._group.abort(why)
        raise InvalidArgument(
            f"{why}\n  advice: call the same methods, in the same order, on all ranks"
        )

    def _settle(self) -> None:
        with self._waiting():
            for channel in (self._before, self._after):
                if channel is not None:
                    channel.settle()

    # ---- the end of a step ----

    def _tell(self, work: Work, samples: int, began: float) -> list[Fared]:
        state = _HEARD if self._heard else _FAILED if self._failure is not None else _FINE
        loss = work.loss() if state == _FINE else 0.0
        seconds = time.perf_counter() - began
        told = Fared(
            state, loss, seconds, self._idle, samples, work.activations(), work.has_gradient(),
            work.is_finite(),
        )  # fmt: skip
        mine = np.array(told, np.float64)
        theirs = np.empty((self._group.size, len(mine)))
        self._group.run("all_gather", mine, theirs, name="a step of a Pipeline")
        rows = [Fared(*row) for row in theirs.tolist()]
        # A stage that has done its part waits for the slowest, which is idle time, too.
        longest = max(row.seconds for row in rows)
        return [
            row._replace(seconds=longest, idle=row.idle + longest - row.seconds) for row in rows
        ]

    def _raise_failure(self, rows: Sequence[Fared], work: Work) -> None:
        if all(row.state == _FINE for row in rows):
            return
        work.forget()
        states = [row.state for row in rows]
        blamed = states.index(_FAILED if _FAILED in states else _HEARD)
        text = self._words_of(blamed)
        if states[self._group.rank] == _FAILED and self._failure is not None:
            raise self._failure
        raise RemoteError(text)

    def _words_of(self, blamed: int) -> str:
        """That rank's description of its failure. Collective."""
        words = b""
        if self._group.rank == blamed:
            where = "" if self._at is None else f" in the {self._at}"
            why = f"{type(self._failure).__name__}: {self._failure}"
            words = f"rank {_world.rank()} ({self._place}) failed{where}: {why}".encode()
        size = np.array([len(words)])
        self._group.run("broadcast", size, size, root=blamed, name="length of a failure")
        data = np.frombuffer(bytearray(words.ljust(int(size[0]))), np.uint8)
        self._group.run("broadcast", data, data, root=blamed, name="a failure")
        return data.tobytes().decode()


def _shapes(form: Form, begin: int) -> Any:
    return form.structure, [(leaf.dtype, leaf.shape[begin:]) for leaf in form.leaves]
