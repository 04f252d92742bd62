"""A server: it has shards of the variables, answers pulls and applies gradients as they come.

One thread for each worker receives and answers; the thread that called `serve()` writes snapshots.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from farandole._core import Aborted, EarlyExit, Error, LinkError, PeerLost, RemoteError
from farandole.parameter_server import _snapshots, _wire
from farandole.parameter_server._clocks import Clocks
from farandole.parameter_server._looking import Looking
from farandole.parameter_server._rows import Gradient, mean
from farandole.parameter_server._rules import Rule
from farandole.parameter_server._snapshots import Content, Snapshots
from farandole.parameter_server._tickets import NONE_NOW, Tickets
from farandole.parameter_server._wire import Message, Pair, Piece

# The errors of a worker that will not come back; Aborted if it has raised in its `with`.
GONE = (PeerLost, EarlyExit, RemoteError, LinkError, Aborted)


class Report(NamedTuple):
    """The record of a server's run."""

    updates: int  # in all, with those of before a restart
    pushes: list[int]  # of each worker, in this run
    lost: list[int]  # ranks of the workers that died or left without a word
    max_staleness: int  # updates between what a gradient was computed from and its own
    mean_staleness: float
    max_ahead: int  # steps that a worker was ahead of the slowest as it got weights
    snapshot: Path | None  # the last one


class Server:
    """This rank is a server: :func:`join` makes it. Call :meth:`serve`.

    Attributes:
        is_server: True.
        index: which of the servers, from 0.
        variables: what it has, by name; of a variable that is split, its rows.
    """

    is_server = True

    def __init__(
        self,
        index: int,
        servers: int,
        pairs: Mapping[int, Pair],
        variables: dict[str, np.ndarray],
        rule: Rule,
        max_staleness: int | None,
        snapshots: Snapshots | None,
        content: Content | None,
    ) -> None:
        """`pairs`: by the workers' ranks. `content`: of the snapshot to go on from."""
        self.index = index
        self.variables = variables
        self._servers = servers
        self._ranks = list(pairs)
        self._pairs = list(pairs.values())
        self._workers = range(len(pairs))
        self._rule = rule
        self._pieces = [Piece(n, v.shape, v.dtype.name) for n, v in variables.items()]
        self._bound = max_staleness
        self._snapshots = snapshots
        self._clocks = Clocks(len(pairs), max_staleness)
        self._tickets = Tickets()
        self._looking = Looking()
        self._changed = threading.Condition()  # guards all that follows, and variables and rule
        self._version = 0
        self._round: dict[
            int, dict[str, Gradient]
        ] = {}  # pushed and not applied yet, if bound is 0
        self._pushes = [0] * len(pairs)
        self._lost: list[int] = []
        self._stalenesses = [0, 0, 0]  # greatest, sum, number
        self._saved = -1  # the version of the last snapshot
        self._tried = 0  # the version when one was last begun
        self._saves_asked = self._saves_done = 0
        self._failure: BaseException | None = None
        self._paused: set[int] = set()
        if content is not None:
            self._go_on_from(content)

    # ---- the thread that serves ----

    def serve(self) -> Report:
        """Serves until every worker has ended, by ``close()`` or in another way, or has called
        ``pause()``; then it may be called again.

        Raises:
            PeerLost, EarlyExit, RemoteError, LinkError, Aborted: all workers were lost, none has
                closed.
            Exception: what the rule raised; all workers get a :class:`ServerLost` with its text.
        """
        threads = [
            threading.Thread(target=self._attend, args=(w,), name=f"worker {rank}", daemon=True)
            for w, rank in enumerate(self._ranks)
            if not self._clocks.has_left(w)
        ]
        self._paused.clear()
        for thread in threads:
            thread.start()
        try:
            while not self._rest_or_save():
                pass
        except BaseException as error:
            self._abort(error)
            raise
        for thread in threads:
            thread.join()
        self._save_if_new()
        if self._failure is not None:
            raise self._failure
        return self._report()

    def _rest_or_save(self) -> bool:
        """Waits for something to do; True at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or self._is_due())
            if self._failure is not None and not isinstance(self._failure, GONE):
                raise self._failure
            if self._is_over():
                return True
        self._save_if_new()
        return False

    def _is_over(self) -> bool:
        gone_or_paused = (self._clocks.has_left(w) or w in self._paused for w in self._workers)
        return self._failure is not None or all(gone_or_paused)

    def _is_due(self) -> bool:
        if self._snapshots is None:
            return False
        asked = self._saves_asked > self._saves_done
        return asked or self._version - self._tried >= self._snapshots.every

    def _save_if_new(self) -> None:
        """Writes a snapshot of a new version. A disk error is reported, and training goes on."""
        if self._snapshots is None:
            return
        with self._changed:
            asked, self._tried = self._saves_asked, self._version
            content = Content(
                self._version,
                {name: value.copy() for name, value in self.variables.items()},
                {name: np.array(value) for name, value in self._rule.state().items()},
                {"tickets": self._tickets.state()},
            )
        if content.version != self._saved and self._wrote(content, self._snapshots):
            self._saved = content.version
        with self._changed:
            self._saves_done = asked
            self._changed.notify_all()

    def _wrote(self, content: Content, snapshots: Snapshots) -> bool:
        try:
            _snapshots.write(snapshots, self.index, self._servers, content)
        except OSError as error:
            self._say(f"snapshot {content.version} was not written: {error}; training goes on")
            return False
        return True

    def _abort(self, error: BaseException) -> None:
        """Workers learn why, even if the program catches the error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        for pair in self._pairs:
            pair.group.abort(f"server {self.index} has failed: {what}")

    def _report(self) -> Report:
        greatest, total, count = self._stalenesses
        return Report(
            self._version, list(self._pushes), list(self._lost), greatest, total / max(count, 1),
            self._clocks.most_ahead, self._last_snapshot(),
        )  # fmt: skip

    def _last_snapshot(self) -> Path | None:
        if self._snapshots is None or self._saved < 0:
            return None
        return self._snapshots.path(self.index, self._servers, self._saved)

    def _go_on_from(self, content: Content) -> None:
        for name, value in content.variables.items():
            self.variables[name][...] = value
        self._rule.restore(content.rule)
        self._tickets.restore(content.told["tickets"])
        self._version = self._saved = content.version

    def _say(self, what: str) -> None:
        sys.stderr.write(f"parameter server {self.index}: {what}\n")  # in one piece, of any thread
        sys.stderr.flush()

    # ---- the thread of a worker ----

    def _attend(self, worker: int) -> None:
        pair = self._pairs[worker]
        try:
            while True:
                message = pair.receive(timeout=0)
                if message.kind in (_wire.BYE, _wire.PAUSE):
                    self._end(worker, for_good=message.kind == _wire.BYE)
                    return
                self._handle(worker, pair, message)
        except GONE as error:
            self._lose(worker, error)
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _handle(self, worker: int, pair: Pair, message: Message) -> None:
        first, second, third, *_ = message.numbers
        if message.kind == _wire.PULL:
            pair.send(_wire.ANSWER, *self._pulled(worker, message.table))
        elif message.kind == _wire.PUSH:
            names = [piece.name for piece in self._pieces]
            self._looking.hear(self._ranks[worker], second, third, names)
            self._push(worker, _wire.unpacked(self._pieces, message), first)
        elif message.kind == _wire.ASSIGN:
            self._assign(_wire.unpacked(self._pieces, message))
        elif message.kind in (_wire.ADD, _wire.FLUSH):
            if message.kind == _wire.ADD:
                self._add(_wire.new_pieces(message))
            else:
                self._flush(message.table)
            pair.send(_wire.ANSWER, [0, 0, self._saved])
        elif message.kind == _wire.REST:
            self._rest(worker)
        elif message.kind == _wire.SAVE:
            pair.send(_wire.ANSWER, self._after_saving())
        else:
            wait = message.kind == _wire.WAIT
            pair.send(_wire.ANSWER, *self._ticket(worker, first, second, wait))

    def _end(self, worker: int, for_good: bool) -> None:
        with self._changed:
            self._paused.add(worker)
            self._clocks.rest(worker)
            if for_good:
                self._clocks.leave(worker)
            self._tickets.finish(worker)
            self._move_on()

    def _lose(self, worker: int, error: Error) -> None:
        with self._changed:
            if self._failure is not None:  # it was this server that gave up
                return
            self._clocks.leave(worker)
            self._tickets.lose(worker)
            self._lost.append(self._ranks[worker])
            left = sum(not self._clocks.has_left(w) for w in self._workers)
            if len(self._lost) == len(self._pairs):
                self._failure = error
            self._move_on()
        self._say(f"{error.verdict}; {left} of {len(self._pairs)} workers go on")

    def _rest(self, worker: int) -> None:
        with self._changed:
            self._clocks.rest(worker)
            self._move_on()

    def _ticket(
        self, worker: int, run: int, total: int, wait: bool
    ) -> tuple[list[int], np.ndarray]:
        with self._changed:
            step = self._tickets.take(worker, run, total)
            self._changed.notify_all()
            while wait and step == NONE_NOW and self._failure is None:
                self._changed.wait()
                step = self._tickets.take(worker, run, total)
            if step >= 0:
                self._clocks.wake(worker)
            numbers = [step, self._tickets.total or 0, self._saved]
            return numbers, np.array(self._pushes, np.int64)

    def _flush(self, pushes: np.ndarray) -> None:
        """Waits until so many pushes of each worker that has not left are applied."""
        with self._changed:
            self._wait_until(
                lambda: all(
                    self._pushes[w] - (w in self._round) >= wanted or self._clocks.has_left(w)
                    for w, wanted in enumerate(pushes.tolist())
                )
            )

    def _after_saving(self) -> list[int]:
        with self._changed:
            wanted = self._version
            self._saves_asked += 1
            mine = self._saves_asked
            self._changed.notify_all()
            self._wait_until(lambda: self._saves_done >= mine)
            return [wanted, 0, self._saved]

    # ---- weights ----

    def _pulled(self, worker: int, table: np.ndarray) -> tuple[list[int], np.ndarray, np.ndarray]:
        """The answer to a pull: numbers, an empty table, and the bytes that it asks for."""
        with self._changed:
            self._clocks.wake(worker)
            self._wait_until(lambda: self._may_go_on(worker))
            self._clocks.note_going(worker)
            parts = [np.copy(each) for each in self._asked_for(table)]
            numbers = [self._version, 0, self._saved]
        return numbers, np.empty(0, np.int64), _wire.joined(parts)

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._failure is not None or ready())

    def _may_go_on(self, worker: int) -> bool:
        if self._bound == 0:
            return worker not in self._round  # what it pushed is in
        return self._clocks.may_go_on(worker)

    def _asked_for(self, table: np.ndarray) -> Sequence[np.ndarray]:
        """The values that a pull's table asks for. It has the position of each piece and the number
        of rows with their indices, or -1 for all rows. An empty table asks for all pieces."""
        if len(table) == 0:
            return list(self.variables.values())
        parts, at = [], 0
        while at < len(table):
            place, rows = (int(each) for each in table[at : at + 2])
            value = self.variables[self._pieces[place].name]
            at += 2
            if rows >= 0:
                parts.append(value[table[at : at + rows]])
                at += rows
            else:
                parts.append(value)
        return parts

    def _add(self, new: list[tuple[Piece, np.ndarray]]) -> None:
        with self._changed:
            for piece, value in new:
                self._pieces.append(piece)
                self.variables[piece.name] = value

    def _assign(self, values: Mapping[str, Gradient]) -> None:
        with self._changed:
            for name, value in values.items():
                self.variables[name][...] = value

    # ---- gradients ----

    def _push(self, worker: int, gradients: dict[str, Gradient], pulled: int) -> None:
        with self._changed:
            self._clocks.wake(worker)
            self._wait_until(lambda: self._may_go_on(worker))  # where it did not pull before
            self._clocks.tick(worker)
            self._tickets.finish(worker)
            self._pushes[worker] += 1
            if self._bound == 0:
                self._round[worker] = gradients
            else:
                self._note_staleness(self._version - pulled)
                self._apply(gradients)
            self._move_on()

    def _move_on(self) -> None:
        """A round is complete when all that are awaited have pushed."""
        if self._round and self._clocks.awaited <= self._round.keys():
            together = [self._round[worker] for worker in sorted(self._round)]
            self._round = {}
            for _ in together:
                self._note_staleness(0)
            self._apply(self._mean(together))
        self._changed.notify_all()

    def _mean(self, together: list[dict[str, Gradient]]) -> dict[str, Gradient]:
        return {
            piece.name: mean(given, len(together), piece.shape)
            for piece in self._pieces
            if (given := [each[piece.name] for each in together if piece.name in each])
        }

    def _apply(self, gradients: dict[str, Gradient]) -> None:
        self._rule.apply(self.variables, gradients, self._version)
        self._version += 1

    def _note_staleness(self, staleness: int) -> None:
        greatest, total, count = self._stalenesses
        self._stalenesses = [max(greatest, staleness), total + staleness, count + 1]
