"""One host's part of a job: starts its ranks, watches them, does what the launcher says, and tells.

The end of stdin is the end of the launcher, or of the way to it, and so is a long silence: then the
ranks are ended here, by SIGTERM and SIGKILL, with all that they started.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from farandole._launch.agents import frames, silence
from farandole._launch.agents.frames import Decoder, FrameError
from farandole._launch.agents.outbox import Outbox
from farandole._launch.agents.silence import Next, Silence
from farandole._launch.agents.taps import Taps
from farandole._launch.here import Here
from farandole._launch.job import LaunchError
from farandole._launch.leftovers import LEAVE_KILL
from farandole._launch.place import Rank
from farandole._launch.polling import READ, WRITE, earliest, wait
from farandole._launch.ranks import Rendezvous
from farandole._launch.signals import STOPPING, Escalation, SignalPipe
from farandole._launch.watchdog import WatchdogLost
from farandole._launch.words import Word

# Bytes queued for the launcher beyond which the ranks' output is not read.
_ENOUGH = 1 << 20


class Agent:
    """Carries out one order, from the start of its ranks to their end."""

    def __init__(
        self, here: Here, patience: float, streams: tuple[int, int], lifeline: int,
        signals: SignalPipe, launchers_address: str,
    ) -> None:  # fmt: skip
        """`streams`: from and to the launcher; `patience`: between SIGTERM and SIGKILL."""
        self._here = here
        self._patience = patience
        self._in, self._outbox = streams[0], Outbox(streams[1])
        self._lifeline = lifeline
        self._signals = signals
        self._launchers_address = launchers_address
        self._decoder = Decoder()
        self._taps = Taps()
        self._silence = Silence(silence.SILENCE_OF_LAUNCHER)
        self._alone = False  # nobody tells us any more what to do
        self._plan = Escalation()  # then
        self._given_up = False  # a rank cannot be killed
        self._finishing = self._left = self._dry = False
        self._began = time.time()
        self._parcels: Iterator[bytes] | None = None  # once all ranks have ended
        self._commands: dict[str, Callable[..., None]] = {
            "start": self._start,
            "prepare": self._prepare,
            "add": self._add,
            "kill": here.kill,
            "say": here.say,
            "pass_on": lambda number: here.pass_on(signal.Signals(number)),
            "signal_groups": lambda number: here.signal_groups(signal.Signals(number)),
            "tell_death": self._tell_death,
            "end": lambda number: here.end(signal.Signals(number)),
            "finish": self._finish,
            "hurry": here.hurry,
            "credit": self._taps.give_room,
            "shut": self._taps.shut,
            "ping": self._answer,
        }

    def run(self) -> None:
        os.set_blocking(self._in, False)
        threads = self._here.threads
        self._tell(
            "ready",
            address=self._here.address,
            port=self._here.port,
            launchers_address=self._launchers_address,
            threads=list(threads) if threads else None,
        )
        while not self._is_over():
            self._turn()
        self._here.close(time.monotonic())

    def _is_over(self) -> bool:
        if self._alone:
            return self._here.finished or self._given_up
        return self._dry and not self._outbox.pending

    def _tell(self, kind: str, **content: Any) -> None:
        self._outbox.put(frames.message(kind, **content))

    # -- one turn -----------------------------------------------------------------------------

    def _turn(self) -> None:
        ready = wait(self._descriptors(), self._due())
        if self._signals.fd in ready:
            for number in self._signals.take():
                self._handle(number)
        if self._lifeline in ready:
            raise WatchdogLost
        if self._in in ready and not self._alone:
            self._take_commands()
        now = time.monotonic()
        if self._silence.look(now) is Next.GIVE_UP:
            self._leave_launcher()
        self._here.turn(ready, now)
        self._tell_news()
        if not self._is_backlogged():
            for tap, data in self._taps.read(ready):
                self._outbox.put(frames.output(tap.rank, tap.which, data))
        if self._alone:
            self._go_on_alone(now)
        elif self._finishing:
            self._come_to_an_end()
        self._outbox.flush()
        if self._outbox.gone:
            self._leave_launcher()

    def _descriptors(self) -> list[tuple[int, int]]:
        found = [(self._signals.fd, READ), (self._lifeline, READ), *self._here.descriptors()]
        if not self._is_backlogged():
            found += [(tap.fd, READ) for tap in self._taps.readable()]
        if not self._alone:
            found.append((self._in, READ))
        if self._outbox.pending:
            found.append((self._outbox.fd, WRITE))
        return found

    def _due(self) -> float | None:
        look = None if self._alone else self._silence.due()
        return earliest([self._here.due(), self._plan.due(), look])

    def _is_backlogged(self) -> bool:
        return self._outbox.pending > _ENOUGH

    def _handle(self, number: signal.Signals) -> None:
        if number == signal.SIGCHLD:
            self._here.child_ended()
        elif number in STOPPING and not self._alone:
            self._tell("remark", text=f"the agent on {self._here.host} got {number.name}")
            self._outbox.flush()
            self._leave_launcher()

    # -- what the launcher says ---------------------------------------------------------------

    def _take_commands(self) -> None:
        try:
            data = os.read(self._in, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._leave_launcher()
            return
        self._silence.hear(time.monotonic())
        for frame in self._decoder.feed(data):
            if frame.kind not in self._commands:
                raise FrameError(f"the launcher said {frame!r:.80}, which no agent knows")
            self._commands[frame.kind](**frame.content)

    def _start(self, address: str, port: int, run_id: str) -> None:
        self._trying(lambda: self._here.start(Rendezvous(address, port, run_id)))

    def _prepare(self, run_id: str) -> None:
        self._trying(lambda: self._here.prepare(run_id))

    def _trying(self, start: Callable[[], None]) -> None:
        try:
            start()
        except LaunchError as error:
            self._tell("refused", why=str(error), exit_code=error.exit_code)
            return
        self._tell("started", pids=self._tapped())

    def _add(self, number: int, own: dict[str, str]) -> None:
        try:
            self._here.add(number, own)
        except LaunchError as error:
            self._tell("not_added", number=number, why=str(error))
            return
        (pid,) = self._tapped()
        self._tell("added", number=number, pid=pid)

    def _tapped(self) -> list[int]:
        """The processes of new ranks, whose output is read from now on."""
        new = self._here.new_ranks()
        for rank, pipes in new:
            self._taps.add(rank.number, pipes)
        return [rank.pid for rank, _ in new]

    def _finish(self, at_once: bool) -> None:
        self._finishing = True
        self._here.finish(at_once)

    def _tell_death(self, rank: int, pid: int, exit_code: int) -> None:
        dead = Rank(rank, pid)
        dead.exit_code = exit_code
        self._here.tell_death(dead)

    def _answer(self) -> None:
        ended = any(not rank.alive for rank in self._here.ranks)
        self._tell(
            "pong",
            orphans=ended and not self._finishing and self._here.has_orphans(),
            ranks=[status._asdict() for status in self._here.statuses()],
        )

    # -- what it is told ----------------------------------------------------------------------

    def _tell_news(self) -> None:
        for item in self._here.news():
            if isinstance(item, Rank):
                self._tell("died", rank=item.number, exit_code=item.exit_code)
            elif isinstance(item, Word):
                self._tell("word", rank=item.rank, pid=item.pid, parts=item.parts)
        for line in self._here.remarks():
            self._tell("remark", text=line)

    def _come_to_an_end(self) -> None:
        """Once no leftover process runs, sends the trace's files, then the rest of the output."""
        if self._here.finished and not self._left:
            self._left = True
            self._tell("left", out_of_memory=self._here.out_of_memory)
            self._parcels = self._here.parcels(self._began)
        if not self._left or self._dry or not self._are_parcels_sent():
            return
        for tap in self._taps.close_dry():
            self._outbox.put(frames.output(tap.rank, tap.which, b""))
        if not self._taps.any_open:
            self._dry = True
            self._tell("dry")

    def _are_parcels_sent(self) -> bool:
        """Queues parcels until the outbox is backlogged; returns whether all are queued."""
        while self._parcels is not None and not self._is_backlogged():
            if (piece := next(self._parcels, None)) is None:
                self._parcels = None
            else:
                self._outbox.put(piece)
                self._outbox.flush()
        return self._parcels is None

    # -- without a launcher -------------------------------------------------------------------

    def _leave_launcher(self) -> None:
        if self._alone:
            return
        self._alone = True
        self._outbox.drop()
        self._taps.unlimit()
        now = time.monotonic()
        kill = now + self._patience
        self._plan.plan((now, signal.SIGTERM), (kill, signal.SIGKILL), (kill + LEAVE_KILL, None))

    def _go_on_alone(self, now: float) -> None:
        living = any(rank.alive for rank in self._here.ranks)
        for number in self._plan.take(now):
            if number is None:
                self._given_up = living
            elif living:
                self._here.end(number)
        if not living and not self._finishing:
            self._finish(at_once=True)
