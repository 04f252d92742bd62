"""The ranks of another host, as its agent reports them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farandole._launch.agents import frames
from farandole._launch.agents.connection import Connection
from farandole._launch.agents.frames import FrameError, Message
from farandole._launch.agents.inlets import Inlets
from farandole._launch.agents.order import Order
from farandole._launch.agents.parcels import Delivery
from farandole._launch.agents.silence import SILENCE, SILENCE_AT_END, Next, Silence
from farandole._launch.job import LaunchError
from farandole._launch.leftovers import LONGEST
from farandole._launch.place import NotStarted, Place, Rank, Threads
from farandole._launch.polling import earliest
from farandole._launch.ranks import Rendezvous, describe_exit
from farandole._launch.words import Word
from farandole._live.pages import Status, from_fields
from farandole._words import printable

# Seconds that a starter (ssh) has to end and say why, once its agent's output has ended.
_LAST_WORDS = 1.0
# At the end: seconds that the starter of a lost agent has to end by itself.
_GOING_LOST = 1.0

_MOST_SIGNAL, _MOST_CODE = 64, 255


class Remote(Place):
    """A place behind an agent."""

    def __init__(
        self,
        order: Order,
        command: Sequence[str],
        advise: Callable[[int | None, str], str],
        address: str = "",
        delivery: Delivery | None = None,
    ) -> None:
        """`command` starts the agent; `advise`: of the starter's exit code and what it said;
        `address`: of the host, where it is known without the agent; `delivery`: where parts of a
        trace go."""
        super().__init__(order.counts, order.number, order.host)
        self.address = address
        self._order = order
        self._command = command
        self._advise = advise
        self._delivery = delivery
        self._connection: Connection | None = None
        self._inlets = Inlets()
        self._silence = Silence(SILENCE)
        self._patience = 0.0  # how long what is waited for may take
        self._deadline: float | None = None  # of what is waited for: ready, started, finished
        self._last_words: float | None = None  # when the wait for them ends
        self._orphans = self._out_of_memory = self._finishing = False
        self._is_over = False  # nothing more will be said
        self._statuses: list[Status] = []

    @property
    def out_of_memory(self) -> bool:
        return self._out_of_memory

    def statuses(self) -> list[Status]:
        return [] if self._is_over else self._statuses

    # -- what is asked of it ------------------------------------------------------------------

    def open(self, timeout: float) -> None:
        try:
            self._connection = Connection(self._command, self._order.marker)
        except OSError as error:
            raise LaunchError(
                f"host {self.host}: {self._command[0]} cannot be started: {error.strerror}; "
                f"{self._advise(127, '')}",
                1,
            ) from error
        self._connection.outbox.put(self._order.frame())
        self._patience = timeout
        self._deadline = time.monotonic() + timeout

    def start(self, rendezvous: Rendezvous) -> None:
        self._deadline = time.monotonic() + self._patience
        self._tell("start", **rendezvous._asdict())

    def prepare(self, run_id: str) -> None:
        self.count = 0  # of those that start at once
        self._deadline = time.monotonic() + self._patience
        self._tell("prepare", run_id=run_id)

    def add(self, number: int, own: Mapping[str, str]) -> None:
        self._tell("add", number=number, own=dict(own))

    def kill(self, number: int) -> None:
        self._tell("kill", number=number)

    def say(self, pid: int, words: str) -> None:
        self._tell("say", pid=pid, words=words)

    def pass_on(self, number: signal.Signals) -> None:
        self._tell("pass_on", number=number)

    def signal_groups(self, number: signal.Signals) -> None:
        self._tell("signal_groups", number=number)

    def tell_death(self, dead: Rank) -> None:
        self._tell("tell_death", rank=dead.number, pid=dead.pid, exit_code=dead.exit_code)

    def end(self, number: signal.Signals) -> None:
        self._tell("end", number=number)

    def finish(self, at_once: bool) -> None:
        self._finishing = True
        if not self.started:
            self.finished = self.dry = True
        if self.finished:
            return
        self._silence.limit = SILENCE_AT_END
        self._patience = LONGEST + SILENCE_AT_END
        self._deadline = time.monotonic() + self._patience
        self._tell("finish", at_once=at_once)

    def hurry(self) -> None:
        self._tell("hurry")

    def has_orphans(self) -> bool:
        return self._orphans

    def leave(self) -> None:
        self._inlets.close()
        if self._connection is None:
            return
        if not self._is_over:
            self._tell("end", number=signal.SIGKILL)
            self._connection.outbox.flush()
        self._connection.hang_up()

    def close(self, deadline: float) -> None:
        if self._connection is not None:
            patience = _GOING_LOST if self.trouble else deadline - time.monotonic()
            self._connection.close(max(0.0, patience))

    def _tell(self, kind: str, **content: Any) -> None:
        if self._connection is not None and not self.trouble:
            self._connection.outbox.put(frames.message(kind, **content))

    # -- turns --------------------------------------------------------------------------------

    def descriptors(self) -> list[tuple[int, int]]:
        found = self._inlets.descriptors()
        if self._connection is not None and not self.trouble:
            found += self._connection.descriptors()
        return found

    def due(self) -> float | None:
        if self._is_over:
            return None
        ask = self._silence.due() if self._is_asked() else None
        return earliest([self._deadline, self._last_words, ask])

    def turn(self, ready: set[int], now: float) -> None:
        if self._connection is None:
            return
        if not self.trouble:
            self._listen(self._connection, ready, now)
        if not self.trouble:
            self._look_at_clocks(self._connection, now)
        for taken in self._inlets.flush():
            where = {"rank": taken.rank, "which": taken.which}
            if taken.size:
                self._tell("credit", count=taken.size, **where)
            if taken.shut:  # the rank is to know it
                self._tell("shut", **where)
        self._connection.outbox.flush()
        self.dry = self._is_over and not self._inlets.pending

    def child_ended(self) -> None:
        """Nothing to do: the end of the starter's stdout is noticed, too."""

    def _listen(self, connection: Connection, ready: set[int], now: float) -> None:
        connection.listen_to_stderr(ready)
        if self.started:
            self._remarks += [f"host {self.host}: {line}" for line in connection.lines()]
        try:
            for frame in connection.frames(ready):
                self._silence.hear(now)
                self._take(frame)
        except (FrameError, KeyError, IndexError, TypeError, ValueError) as error:
            self._lose(f"its agent said what no agent says: {error}")

    # -- what the agent says ------------------------------------------------------------------

    def _take(self, said: Message) -> None:
        content = said.content
        match said.kind:
            case "ready":
                self._take_readiness(content)
            case "refused":
                self.exit_code = _code(content, 0)
                self._lose(printable(str(content["why"])))
            case "started":
                self._take_start([int(pid) for pid in content["pids"]])
            case "added":
                self._take_rank(int(content["number"]), int(content["pid"]))
            case "not_added":
                self._remarks.append(printable(str(content["why"])))
                self._news.append(NotStarted(int(content["number"])))
            case "died":
                self._take_death(int(content["rank"]), _code(content, -_MOST_SIGNAL))
            case "word":
                parts = [printable(str(part)) for part in content["parts"]]
                self._news.append(Word(int(content["rank"]), int(content["pid"]), parts))
            case "output":
                self._inlets.take(said)
            case "parcel":
                self._take_parcel(said)
            case "pong":
                self._orphans = bool(content["orphans"])
                self._statuses = [from_fields(fields) for fields in content["ranks"]]
            case "remark":
                self._remarks.append(printable(str(content["text"])))
            case "left":
                self._out_of_memory = bool(content["out_of_memory"])
                self.finished, self._deadline = True, None
            case "dry":
                self._is_over = True
            case _:
                raise FrameError(f"'{said.kind}'")

    def _take_readiness(self, content: dict[str, Any]) -> None:
        self.ready, self._deadline = True, None
        self.address = self.address or str(content["address"])
        self.launchers_address = str(content["launchers_address"])
        self.port = int(content["port"])
        if content["threads"]:
            self.threads = Threads(*map(int, content["threads"]))

    def _take_start(self, pids: list[int]) -> None:
        if len(pids) != self.count:
            raise FrameError(f"{len(pids)} ranks started, instead of {self.count}")
        for number, pid in enumerate(pids, self.first):
            self._take_rank(number, pid)
        self.started, self._deadline = True, None

    def _take_rank(self, number: int, pid: int) -> None:
        self._take_up(Rank(number, pid, self.host), self._inlets.add(number))

    def _take_death(self, number: int, exit_code: int) -> None:
        rank = next((rank for rank in self.ranks if rank.number == number), None)
        if rank is None:
            raise FrameError(f"rank {number} died, which is not there")
        rank.exit_code = exit_code
        self._orphans = True  # until the agent says otherwise
        self._news.append(rank)

    def _take_parcel(self, parcel: Message) -> None:
        if self._delivery is None:
            raise FrameError("a parcel that nobody asked for")
        try:
            self._delivery.take(parcel, range(self.first, self.first + self.count))
        except OSError as error:
            self._delivery = None
            self._remarks.append(f"the trace is not complete: {error}")

    # -- losing it ----------------------------------------------------------------------------

    def _is_asked(self) -> bool:
        return self.ready and self._connection is not None and not self._connection.ended

    def _look_at_clocks(self, connection: Connection, now: float) -> None:
        if connection.ended:
            self._wait_for_last_words(connection, now)
        elif self._deadline is not None and now >= self._deadline:
            what = "did not end what its ranks left" if self._finishing else "was not ready"
            self._lose(f"its agent {what} within {self._patience:g} s")
        elif self._is_asked():
            step = self._silence.look(now)
            if step is Next.ASK:
                self._tell("ping")
            elif step is Next.GIVE_UP:
                self._lose(f"its agent has not answered for {self._silence.limit:g} s")

    def _wait_for_last_words(self, connection: Connection, now: float) -> None:
        """The agent's output has ended, which is an error unless the agent was done."""
        if self._is_over:
            self._last_words = None
            return
        if self._last_words is None:
            self._last_words = now + _LAST_WORDS
        code = connection.exit_code()
        if (code is None or not connection.err_ended) and now < self._last_words:
            return
        how = "" if code is None else f" ({self._command[0]} {describe_exit(code)})"
        self._lose(f"its agent is gone{how}" if self.ready else f"no agent started there{how}")

    def _lose(self, why: str) -> None:
        """Reports the loss with the starter's last words and with advice, and hangs up."""
        if self.trouble:
            return
        assert self._connection is not None
        said = self._connection.last_words()
        parts = [f"host {self.host}: {why}{f': {said}' if said else ''}"]
        if not self._connection.has_spoken:
            parts.append(self._advise(self._connection.exit_code(), said))
        if lost := [rank for rank in self.ranks if rank.alive]:
            numbers = ", ".join(str(rank.number) for rank in lost)
            parts.append(f"what became of its ranks ({numbers}) is not known")
        self.trouble = "; ".join(parts)
        self._connection.hang_up()
        for rank in lost:
            rank.lost = True
        self.finished = self._is_over = True
        self._inlets.end()


def _code(content: dict[str, Any], least: int) -> int:
    code = int(content["exit_code"])
    if not least <= code <= _MOST_CODE:
        raise FrameError(f"exit code {code}")
    return code
