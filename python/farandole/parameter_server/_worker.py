"""A worker: it pulls weights, and pushes gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from farandole import _endings
from farandole._arguments import shown
from farandole._core import Error, Handle, InvalidArgument
from farandole.parameter_server import _wire
from farandole.parameter_server._checks import checked_gradient, checked_rows
from farandole.parameter_server._looking import Looking, told
from farandole.parameter_server._losses import ServerLost
from farandole.parameter_server._rows import Gradient
from farandole.parameter_server._shards import (
    Shard,
    Variable,
    asked_of,
    described,
    inside,
    part_of,
    place,
    rows_of,
)
from farandole.parameter_server._snapshots import Snapshots
from farandole.parameter_server._tickets import ALL_DONE, NONE_NOW, OTHER_TOTAL
from farandole.parameter_server._wire import Message, Pair, Piece


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
        dispensable: bool = True,
        without_snapshots: str = "no snapshots were asked for (join(…, snapshots=))",
    ) -> None:
        """
        Args:
            pairs: by the servers' ranks.
            dispensable: whether the job goes on without it.
            without_snapshots: said when a server is lost.
        """
        self.index = index
        self.workers = workers
        self.versions = [0] * len(pairs)
        self._ranks = list(pairs)
        self._pairs = list(pairs.values())
        self._variables: dict[str, Variable] = {}
        self._on_server: list[list[tuple[str, Shard]]] = [[] for _ in pairs]
        self._load = [0] * len(pairs)  # bytes on each server, of variables that were added
        self._list(variables, shards)
        self._dispensable = dispensable
        self._without_snapshot = "it wrote no snapshot" if snapshots else without_snapshots
        self._looking = Looking()
        self._snapshots = snapshots
        self._saved = [-1] * len(pairs)
        self._run = -1
        self._closed = False
        self._needed = True
        self._is_needed(False)

    def _list(self, variables: Sequence[Variable], shards: Sequence[Shard]) -> None:
        self._variables |= {each.name: each for each in variables}
        for shard in shards:
            self._on_server[shard.server].append((variables[shard.variable].name, shard))

    # ---- weights ----

    def pull(
        self, rows: Mapping[str, Any] | None = None, only: Collection[str] | None = None
    ) -> dict[str, np.ndarray]:
        """The weights as they are now, in new arrays. Waits only where this worker is further
        ahead of the slowest than ``max_staleness`` allows.

        Of one server they are from one moment; servers are asked one by one.

        Args:
            rows: by name, the indices, (n,), of the rows that are wanted of a variable; of other
                variables all rows come. The result has these rows in this order, (n, …).
            only: names; variables that are not among them do not come. None: all come.

        Raises:
            InvalidArgument: an unknown variable, or an index out of range; or rows of a variable
                that is not wanted.
            ServerLost: a server is gone; names its last snapshot.
        """
        self._check_open()
        wanted = {
            name: checked_rows(self._variable(name, "pull"), at)
            for name, at in (rows or {}).items()
        }
        chosen = self._variables
        if only is not None:
            chosen = {name: self._variable(name, "pull") for name in only}
            if others := [name for name in wanted if name not in chosen]:
                raise InvalidArgument(f"pull: rows of '{others[0]}', which is not among only=")
        result = {
            name: np.empty((len(wanted[name]), *v.row) if name in wanted else v.shape, v.dtype)
            for name, v in chosen.items()
        }
        asked: dict[int, list[Handle[None]]] = {}
        for server, pair in enumerate(self._pairs):
            table = np.empty(0, np.int64)
            if wanted or only is not None:
                table = asked_of(self._on_server[server], wanted, chosen)
                if len(table) == 0:  # which would mean all
                    continue
            with self._or_lost(server):
                asked[server] = pair.start(_wire.PULL, (), table)
        for server, handles in asked.items():
            answer = self._answer(server, handles)
            self.versions[server] = answer.numbers[0]
            self._take(server, answer.data, wanted, result)
        return result

    def _take(
        self,
        server: int,
        data: np.ndarray,
        wanted: Mapping[str, np.ndarray],
        result: dict[str, np.ndarray],
    ) -> None:
        """Copies the values that a server has sent into the result."""
        offset = 0
        for name, shard in self._on_server[server]:
            if name not in result:
                continue
            into = result[name] if self._variables[name].shape else result[name].reshape(1)
            at: Any = slice(shard.begin, shard.end)
            if name in wanted:
                at = np.flatnonzero(inside(wanted[name], shard))
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
            NumericsError: by ``FARANDOLE_NUMERICS=error``, a gradient is NaN or infinite; likewise.
            ServerLost: a server is gone; names its last snapshot.
        """
        self._check_open()
        checked = {
            name: checked_gradient(self._variable(name, "push"), each, "push")
            for name, each in gradients.items()
        }
        found = self._looking.found(checked)
        # The first server is last: it counts the step as done.
        for server in reversed(range(len(self._pairs))):
            table, data = _wire.packed(self._parts_on(server, checked))
            numbers = self.versions[server], *told(found, [n for n, _ in self._on_server[server]])
            with self._or_lost(server):
                self._pairs[server].send(_wire.PUSH, numbers, table, data)

    def assign(self, values: Mapping[str, Any]) -> None:
        """Servers take these values as they are, past the rule. Returns when they have received
        them.

        Args:
            values: by name, an array of the variable's shape and dtype.

        Raises:
            InvalidArgument: an unknown variable, or a value that does not fit it; nothing was sent.
            ServerLost: a server is gone; names its last snapshot.
        """
        self._check_open()
        checked = {
            name: checked_gradient(self._variable(name, "assign"), np.asarray(each), "assign")
            for name, each in values.items()
        }
        for server, pair in enumerate(self._pairs):
            if parts := self._parts_on(server, checked):
                table, data = _wire.packed(parts)
                with self._or_lost(server):
                    pair.send(_wire.ASSIGN, (), table, data)

    def flush(self) -> None:
        """Returns when the servers have applied what this worker has sent. Any later pull gets it.

        Raises:
            ServerLost: a server is gone; names its last snapshot.
        """
        self._check_open()
        self._flush(_wire.NOTHING)

    def _flush(self, pushes: np.ndarray) -> None:
        """Waits until every server has also applied so many pushes of each worker: the first
        server, which counts steps, may be ahead of the others."""
        asked = []
        for server, pair in enumerate(self._pairs):
            with self._or_lost(server):
                asked.append(pair.start(_wire.FLUSH, (), pushes))
        for server, handles in enumerate(asked):
            self._answer(server, handles)

    def _add(self, variables: Mapping[str, Any], parts: Sequence[int]) -> None:
        """More variables, where ranks have joined without any. All workers add the same ones in the
        same order, and the first worker before the others: its values count, and only it sends.

        Args:
            variables: numpy arrays by name.
            parts: into how many parts each is cut, by rows; at most as many as there are servers.

        Raises:
            InvalidArgument: a name that is there already, or a dtype that is not moved.
            ServerLost: a server is gone.
        """
        self._check_open()
        listed = described(variables)
        for each in listed:
            if each.name in self._variables:
                raise InvalidArgument(f"variable '{each.name}' is there already")
        counts = [
            max(1, min(n, len(self._pairs), rows_of(v))) for n, v in zip(parts, listed, strict=True)
        ]
        shards = place(listed, counts, self._load)
        self._list(listed, shards)
        if self.index == 0:
            self._send_new([np.asarray(each) for each in variables.values()], listed, shards)

    def _send_new(
        self, values: Sequence[np.ndarray], listed: Sequence[Variable], shards: Sequence[Shard]
    ) -> None:
        for server, pair in enumerate(self._pairs):
            new = []
            for at in (each for each in shards if each.server == server):
                variable = listed[at.variable]
                part = np.asarray(part_of(values[at.variable], variable, at))
                new.append((Piece(variable.name, part.shape, variable.dtype), part))
            if new:
                numbers, data = _wire.described(new)
                with self._or_lost(server):
                    handles = pair.start(_wire.ADD, numbers, data=data)
                self._answer(server, handles)

    def _parts_on(
        self, server: int, gradients: Mapping[str, Gradient]
    ) -> list[tuple[int, Gradient]]:
        """With their places there."""
        return [
            (at, part_of(gradients[name], self._variables[name], shard))
            for at, (name, shard) in enumerate(self._on_server[server])
            if name in gradients
        ]

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
        iterator ends when all steps are done and every server has applied them. Nobody waits for
        a worker that waits for the last ones. After a restart from a snapshot, those that were
        done are left out.

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
            step, others, pushes = self._ticket(_wire.TICKET, run, total)
            if step == NONE_NOW:
                self.rest()
                step, others, pushes = self._ticket(_wire.WAIT, run, total)
            if step == OTHER_TOTAL:
                raise InvalidArgument(
                    f"steps: total is {total} on worker {self.index}, and {others} on another one"
                )
            if step == ALL_DONE:
                self.rest()
                self._flush(pushes)
                return
            yield step

    def _ticket(self, kind: int, run: int, total: int) -> tuple[int, int, np.ndarray]:
        """The step, the total of others, and each worker's pushes that the first server has."""
        with self._or_lost(0):
            handles = self._pairs[0].start(kind, [run, total])
        answer = self._answer(0, handles)
        return answer.numbers[0], answer.numbers[1], answer.table

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

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        elif not self._closed:
            self._leave(kind, error)

    def _leave(self, kind: type[BaseException], error: object) -> None:
        """Servers learn that it raised, even if the program catches the error and goes on."""
        self._closed = True
        what = f"{kind.__name__}: {error}".partition("\n")[0]
        for pair in self._pairs:
            pair.group.abort(f"worker {self.index} has raised {what}")

    def _is_needed(self, needed: bool) -> None:
        """The launcher ends the job if a rank dies that is needed."""
        needed = needed or not self._dispensable
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
        file, rank = self._snapshot(server), self._ranks[server]
        return ServerLost.because(server, rank, error, file, self._without_snapshot)
