"""A worker: it pulls weights, and pushes gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from farandole import _endings
from farandole._arguments import shown
from farandole._core import Error, Handle, InvalidArgument, PeerLost
from farandole.parameter_server import _wire
from farandole.parameter_server._rows import Gradient, Rows
from farandole.parameter_server._shards import Shard, Variable, rows_of
from farandole.parameter_server._snapshots import Snapshots
from farandole.parameter_server._tickets import ALL_DONE, NONE_NOW, OTHER_TOTAL
from farandole.parameter_server._wire import Message, Pair


class ServerLost(PeerLost):
    """A server has ended or failed, and with it its part of the variables.

    Attributes:
        rank: the server's, in the world.
        snapshot: the last file that it wrote, as a Path; None if it wrote none.
    """

    snapshot: Path | None = None


class Worker:
    """This rank is a worker: :func:`join` makes it. A context manager, which closes it at the end.

    Not to be used by several threads at once.

    Attributes:
        is_server: False.
        index: which of the workers, from 0.
        workers: how many there were at the start.
        versions: of each server, how many updates were in what was last pulled.
    """

    is_server = False

    def __init__(
        self,
        index: int,
        workers: int,
        pairs: Mapping[int, Pair],
        variables: Sequence[Variable],
        shards: Sequence[Shard],
        snapshots: Snapshots | None,
    ) -> None:
        """`pairs`: by the servers' ranks."""
        self.index = index
        self.workers = workers
        self.versions = [0] * len(pairs)
        self._ranks = list(pairs)
        self._pairs = list(pairs.values())
        self._variables = {each.name: each for each in variables}
        self._shards: dict[str, list[tuple[int, Shard]]] = {each.name: [] for each in variables}
        self._on_server: list[list[tuple[str, Shard]]] = [[] for _ in pairs]
        for shard in shards:
            mine = self._on_server[shard.server]
            name = variables[shard.variable].name
            self._shards[name].append((len(mine), shard))
            mine.append((name, shard))
        self._snapshots = snapshots
        self._saved = [-1] * len(pairs)
        self._run = -1
        self._closed = False
        self._needed = True
        self._is_needed(False)

    # ---- weights ----

    def pull(self, rows: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
        """The weights as they are now, in new arrays. Waits only where this worker is further
        ahead of the slowest than ``max_staleness`` allows.

        Of one server they are from one moment; servers are asked one by one.

        Args:
            rows: by name, the indices, (n,), of the rows that are wanted of a variable; of other
                variables all rows come. The result has these rows in this order, (n, …).

        Raises:
            InvalidArgument: an unknown variable, or an index out of range.
            ServerLost: a server is gone; names its last snapshot.
        """
        self._check_open()
        wanted = {name: self._checked_rows(name, at) for name, at in (rows or {}).items()}
        result = {
            name: np.empty((len(wanted[name]), *v.row) if name in wanted else v.shape, v.dtype)
            for name, v in self._variables.items()
        }
        asked: list[list[Handle[None]]] = []
        for server, pair in enumerate(self._pairs):
            table = self._asked_of(server, wanted) if wanted else np.empty(0, np.int64)
            with self._or_lost(server):
                asked.append(pair.start(_wire.PULL, (), table))
        for server, handles in enumerate(asked):
            answer = self._answer(server, handles)
            self.versions[server] = answer.numbers[0]
            self._take(server, answer.data, wanted, result)
        return result

    def _checked_rows(self, name: str, at: Any) -> np.ndarray:
        variable = self._variable(name, "pull")
        indices = np.asarray(at)
        if indices.ndim != 1 or indices.dtype.kind not in "iu" or not variable.shape:
            raise InvalidArgument(f"pull: rows of '{name}' are {shown(at)}; they are indices, (n,)")
        if len(indices) and not 0 <= indices.min() <= indices.max() < variable.shape[0]:
            raise InvalidArgument(
                f"pull: rows of '{name}' from {indices.min()} to {indices.max()}; it has "
                f"{variable.shape[0]}"
            )
        return indices.astype(np.int64)

    def _asked_of(self, server: int, wanted: Mapping[str, np.ndarray]) -> np.ndarray:
        table = []
        for place, (name, shard) in enumerate(self._on_server[server]):
            if name in wanted:
                here = _inside(wanted[name], shard)
                table += [np.array([place, here.sum()]), wanted[name][here] - shard.begin]
            else:
                table.append(np.array([place, -1]))
        return np.concatenate(table) if table else np.empty(0, np.int64)

    def _take(
        self,
        server: int,
        data: np.ndarray,
        wanted: Mapping[str, np.ndarray],
        result: dict[str, np.ndarray],
    ) -> None:
        """What a server has sent, to where it belongs."""
        offset = 0
        for name, shard in self._on_server[server]:
            into = result[name] if self._variables[name].shape else result[name].reshape(1)
            at: Any = slice(shard.begin, shard.end)
            if name in wanted:
                at = np.flatnonzero(_inside(wanted[name], shard))
            part = np.empty_like(into[at])
            part.reshape(-1).view(np.uint8)[...] = data[offset : offset + part.nbytes]
            into[at] = part
            offset += part.nbytes

    # ---- gradients ----

    def push(self, gradients: Mapping[str, Any]) -> None:
        """Sends gradients to the servers, which apply them as they come, once each; with
        ``max_staleness=0`` when those of all workers have come, and then their mean.

        Returns when the servers have received them. They belong to the weights that were pulled
        last.

        Args:
            gradients: by name, an array of the variable's shape and dtype, or :class:`Rows`. A
                variable may have none.

        Raises:
            InvalidArgument: an unknown variable, or a gradient that does not fit it; nothing was
                sent.
            ServerLost: a server is gone; names its last snapshot.
        """
        self._check_open()
        checked = {name: self._checked(name, each) for name, each in gradients.items()}
        # The first server is last: it counts the step as done.
        for server in reversed(range(len(self._pairs))):
            pieces = [
                (place, _part(checked[name], self._variables[name], shard))
                for place, (name, shard) in enumerate(self._on_server[server])
                if name in checked
            ]
            table, data = _wire.packed(pieces)
            with self._or_lost(server):
                self._pairs[server].send(_wire.PUSH, [self.versions[server]], table, data)

    def _checked(self, name: str, gradient: Any) -> Gradient:
        variable = self._variable(name, "push")
        if isinstance(gradient, Rows):
            fits = variable.shape and gradient.values.shape[1:] == variable.row
            dtype, shape = gradient.values.dtype, gradient.values.shape
            if fits and len(gradient.indices) and gradient.indices.max() >= variable.shape[0]:
                raise InvalidArgument(
                    f"push: gradient of '{name}' has row {gradient.indices.max()}; the variable "
                    f"has {variable.shape[0]}"
                )
        else:
            gradient = np.asarray(gradient)
            dtype, shape = gradient.dtype, gradient.shape
            fits = shape == variable.shape
        if not fits or dtype.name != variable.dtype:
            raise InvalidArgument(
                f"push: gradient of '{name}' is {dtype} of shape {shape}; the variable is "
                f"{variable.dtype} of shape {variable.shape}"
            )
        return gradient.summed() if isinstance(gradient, Rows) else gradient

    def _variable(self, name: str, verb: str) -> Variable:
        if name not in self._variables:
            raise InvalidArgument(
                f"{verb}: there is no variable {shown(name)}; there are "
                f"{', '.join(repr(each) for each in self._variables)}"
            )
        return self._variables[name]

    # ---- steps ----

    def steps(self, total: int) -> Iterator[int]:
        """Numbers of steps, from 0 to below ``total``, of which each goes to one worker: a faster
        worker gets more of them. All workers call it, in the same order, with the same total.

        If a worker dies, its step is given to another one; so a step is done at least once. The
        iterator ends when all steps are done. A worker that waits for the last ones is waited for
        by nobody. After a restart from a snapshot, those that were done are left out.

        Raises:
            InvalidArgument: a negative total, or another one than other workers gave.
            ServerLost: a server is gone; names its last snapshot.
        """
        self._check_open()
        if not isinstance(total, int) or total < 0:
            raise InvalidArgument(f"steps: total is {shown(total)}; it is a whole number from 0")
        self._run += 1
        return self._numbers(self._run, total)

    def _numbers(self, run: int, total: int) -> Iterator[int]:
        while True:
            step, others = self._ticket(_wire.TICKET, run, total)
            if step == NONE_NOW:
                self.rest()
                step, others = self._ticket(_wire.WAIT, run, total)
            if step == OTHER_TOTAL:
                raise InvalidArgument(
                    f"steps: total is {total} on worker {self.index}, and {others} on another one"
                )
            if step == ALL_DONE:
                self.rest()
                return
            yield step

    def _ticket(self, kind: int, run: int, total: int) -> tuple[int, int]:
        with self._or_lost(0):
            handles = self._pairs[0].start(kind, [run, total])
        answer = self._answer(0, handles)
        return answer.numbers[0], answer.numbers[1]

    def rest(self) -> None:
        """Others do not wait for this worker until it pulls or pushes again: before it evaluates,
        say, where ``max_staleness`` is given."""
        self._check_open()
        for server, pair in enumerate(self._pairs):
            with self._or_lost(server):
                pair.send(_wire.REST)

    # ---- the rest ----

    def save(self) -> list[Path]:
        """Has every server write a snapshot, and waits for them; returns the files.

        Raises:
            InvalidArgument: :func:`join` was given no ``snapshots``; or a file was not written.
            ServerLost: a server is gone; names its last snapshot.
        """
        self._check_open()
        if self._snapshots is None:
            raise InvalidArgument("save: join() was given no snapshots=")
        for server, pair in enumerate(self._pairs):
            with self._or_lost(server):
                handles = pair.start(_wire.SAVE)
            answer = self._answer(server, handles)
            if answer.numbers[2] < answer.numbers[0]:
                raise InvalidArgument(
                    f"save: server {server} could not write version {answer.numbers[0]} to "
                    f"{self._snapshots.folder}; its stderr says why"
                )
        return [path for s in range(len(self._pairs)) if (path := self._snapshot(s)) is not None]

    def pause(self) -> None:
        """Lets ``serve()`` return on the servers, once all workers have paused or ended. What this
        worker asks for after it waits until they serve again.

        Raises:
            ServerLost: a server is gone; names its last snapshot.
        """
        self._check_open()
        for server, pair in enumerate(self._pairs):
            with self._or_lost(server):
                pair.send(_wire.PAUSE)
        self._is_needed(True)

    def close(self) -> None:
        """This worker has done its part. The servers end when all have."""
        if self._closed:
            return
        self._closed = True
        self._is_needed(True)
        for server, pair in enumerate(self._pairs):
            with self._or_lost(server):
                pair.send(_wire.BYE)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()

    def _is_needed(self, needed: bool) -> None:
        """The launcher ends the job if a rank dies that is needed."""
        if needed != self._needed:
            self._needed = needed
            _endings.tell_dispensable(not needed)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument(f"worker {self.index} has been closed")
        self._is_needed(False)

    def _answer(self, server: int, handles: Sequence[Handle[None]]) -> Message:
        """To what was asked by these handles."""
        with self._or_lost(server):
            for handle in handles:
                handle.wait()
            answer = self._pairs[server].receive()
        self._saved[server] = answer.numbers[2]
        return answer

    def _snapshot(self, server: int) -> Path | None:
        if self._snapshots is None or self._saved[server] < 0:
            return None
        return self._snapshots.path(server, len(self._pairs), self._saved[server])

    @contextmanager
    def _or_lost(self, server: int) -> Iterator[None]:
        try:
            yield
        except InvalidArgument:
            raise
        except Error as error:
            raise self._lost(server, error) from error

    def _lost(self, server: int, error: Error) -> ServerLost:
        snapshot = self._snapshot(server)
        known = (
            f"its last snapshot is {snapshot}" if snapshot is not None
            else "it wrote no snapshot" if self._snapshots is not None
            else "no snapshots were asked for (join(…, snapshots=))"
        )  # fmt: skip
        again = "; start all again, and they go on from it" if snapshot is not None else ""
        verdict = f"server {server} (rank {self._ranks[server]}) is lost: {error.verdict}"
        lost = ServerLost(f"{verdict}\n  evidence: {error.evidence}\n  advice: {known}{again}")
        lost.evidence, lost.advice = error.evidence, known + again  # verdict: the first line
        lost.rank, lost.snapshot = self._ranks[server], snapshot
        lost.pid, lost.signal, lost.host = error.pid, error.signal, error.host
        return lost


def _inside(indices: np.ndarray, shard: Shard) -> np.ndarray:
    return (indices >= shard.begin) & (indices < shard.end)


def _part(gradient: Gradient, variable: Variable, shard: Shard) -> Gradient:
    if shard.end - shard.begin == rows_of(variable):
        return gradient
    if isinstance(gradient, Rows):
        return gradient.between(shard.begin, shard.end)
    return gradient[shard.begin : shard.end]
