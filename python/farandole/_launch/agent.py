"""One host's part of a job: starts its ranks, watches them, and does what the launcher says.

    python -m farandole._launch.agent       by ssh, ip netns exec, or the launcher itself

The order comes over stdin, and all else as frames (frames.py) over stdin and stdout. The end of
stdin is the end of the launcher, or of the way to it: then the ranks are ended here, by SIGTERM and
SIGKILL, with all that they started, and nothing is left. Like the launcher, an agent is two
processes that watch each other (watchdog.py).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import farandole
from farandole._launch import frames
from farandole._launch.frames import PIECE, WINDOW, Decoder, FrameError, Message, Outbox
from farandole._launch.here import Here
from farandole._launch.job import LaunchError
from farandole._launch.leftovers import LEAVE_KILL
from farandole._launch.order import Order, version
from farandole._launch.place import Rank
from farandole._launch.polling import READ, WRITE, earliest, wait
from farandole._launch.ranks import Rendezvous, check_command
from farandole._launch.secret import VARIABLE, SecretFile
from farandole._launch.signals import STOPPING, Escalation, SignalPipe
from farandole._launch.watchdog import WatchdogLost, guarded

# More than this on its way to the launcher, and ranks are not read until it is less.
_ENOUGH = 1 << 20

# From the start of this process to the whole order.
_ORDER_TIMEOUT = 60.0


class Tap:
    """One rank's stdout or stderr, read no further than the launcher has room for."""

    def __init__(self, rank: int, which: int, fd: int) -> None:
        self.rank, self.which, self.fd = rank, which, fd
        self.room = WINDOW
        self.open = True

    def read(self, most: int = PIECE) -> bytes:
        return os.read(self.fd, min(most, PIECE))

    def close(self) -> None:
        if self.open:
            os.close(self.fd)
            self.open = False


class Agent:
    """From an order that can be carried out to the end of its ranks."""

    def __init__(
        self, order: Order, here: Here, streams: tuple[int, int], lifeline: int, signals: SignalPipe
    ) -> None:
        self._order = order
        self._here = here
        self._in = streams[0]
        self._decoder = Decoder()
        self._outbox = Outbox(streams[1])
        self._lifeline = lifeline
        self._signals = signals
        self._taps: dict[tuple[int, int], Tap] = {}
        self._alone = False  # nobody tells us any more what to do
        self._plan = Escalation()  # then
        self._given_up = False  # a rank cannot be killed
        self._finishing = self._left = self._dry = False
        self._commands: dict[str, Callable[..., None]] = {
            "start": self._start,
            "pass_on": lambda number: here.pass_on(signal.Signals(number)),
            "signal_groups": lambda number: here.signal_groups(signal.Signals(number)),
            "end": lambda number: here.end(signal.Signals(number)),
            "finish": self._finish,
            "hurry": here.hurry,
            "credit": self._credit,
            "shut": self._shut,
            "ping": self._pong,
        }

    def run(self) -> int:
        os.set_blocking(self._in, False)
        threads = self._here.threads
        self._tell(
            "ready", address=self._here.address, port=self._here.port,
            threads=list(threads) if threads else None,
        )  # fmt: skip
        while not self._is_over():
            self._turn()
        self._here.close()
        return 0

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
        self._here.turn(ready, now)
        self._take_news()
        self._take_output(ready)
        if self._alone:
            self._go_on_alone(now)
        elif self._finishing:
            self._come_to_an_end()
        self._outbox.flush()
        if self._outbox.gone:
            self._leave_launcher()

    def _descriptors(self) -> list[tuple[int, int]]:
        found = [(self._signals.fd, READ), (self._lifeline, READ), *self._here.descriptors()]
        found += [(tap.fd, READ) for tap in self._readable_taps()]
        if not self._alone:
            found.append((self._in, READ))
        if self._outbox.pending:
            found.append((self._outbox.fd, WRITE))
        return found

    def _due(self) -> float | None:
        return earliest([self._here.due(), self._plan.due()])

    def _readable_taps(self) -> list[Tap]:
        if self._outbox.pending > _ENOUGH:
            return []
        return [tap for tap in self._taps.values() if tap.open and tap.room > 0]

    def _handle(self, number: signal.Signals) -> None:
        if number == signal.SIGCHLD:
            self._here.child_ended()
        elif number in STOPPING and not self._alone:
            self._tell("remark", text=f"the agent on {self._order.host} got {number.name}")
            self._outbox.flush()
            self._leave_launcher()

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
        for frame in self._decoder.feed(data):
            if isinstance(frame, Message) and frame.kind in self._commands:
                self._commands[frame.kind](**frame.content)
            else:
                raise FrameError(f"the launcher said {frame!r:.80}, which no agent knows")

    # -- what the launcher says ---------------------------------------------------------------

    def _start(self, address: str, port: int, run_id: str) -> None:
        try:
            self._here.start(Rendezvous(address, port, run_id))
        except LaunchError as error:
            self._tell("refused", why=str(error), exit_code=error.exit_code)
            return
        for rank, pipes in zip(self._here.ranks, self._here.pipes, strict=True):
            for which, fd in enumerate(pipes):
                self._taps[rank.number, which] = Tap(rank.number, which, fd)
        self._tell("started", pids=[rank.pid for rank in self._here.ranks])

    def _finish(self, at_once: bool) -> None:
        self._finishing = True
        self._here.finish(at_once)

    def _credit(self, rank: int, which: int, count: int) -> None:
        self._taps[rank, which].room += count

    def _shut(self, rank: int, which: int) -> None:
        self._taps[rank, which].close()

    def _pong(self) -> None:
        ended = any(not rank.alive for rank in self._here.ranks)
        self._tell("pong", orphans=ended and not self._finishing and self._here.has_orphans())

    # -- what it is told ----------------------------------------------------------------------

    def _take_news(self) -> None:
        for item in self._here.news():
            if isinstance(item, Rank):
                self._tell("died", rank=item.number, exit_code=item.exit_code)
            else:
                self._tell("word", rank=item.rank, pid=item.pid, parts=item.parts)
        for line in self._here.remarks():
            self._tell("remark", text=line)

    def _take_output(self, ready: set[int]) -> None:
        for tap in self._readable_taps():
            if tap.fd not in ready:
                continue
            data = tap.read(tap.room)
            tap.room -= 0 if self._alone else len(data)
            self._outbox.put(frames.output(tap.rank, tap.which, data))
            if not data:
                tap.close()

    def _come_to_an_end(self) -> None:
        """What ranks left is ended; then what they wrote is sent, up to where each pipe is dry."""
        if self._here.finished and not self._left:
            self._left = True
            self._tell("left", out_of_memory=self._here.out_of_memory)
        if not self._left or self._dry:
            return
        for tap in self._taps.values():
            if tap.open and not wait([(tap.fd, READ)], 0.0):
                self._outbox.put(frames.output(tap.rank, tap.which, b""))
                tap.close()
        if not any(tap.open for tap in self._taps.values()):
            self._dry = True
            self._tell("dry")

    # -- without a launcher -------------------------------------------------------------------

    def _leave_launcher(self) -> None:
        if self._alone:
            return
        self._alone = True
        self._outbox.gone = True  # nobody reads; ranks may write, so that they can end
        self._outbox.flush()
        for tap in self._taps.values():
            tap.room = WINDOW
        now = time.monotonic()
        kill = now + self._order.patience
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


# -- before the ranks -----------------------------------------------------------------------------


def main() -> int:
    """The whole agent; returns its exit code, which nobody but a reader of logs needs."""
    streams = _take_streams()
    secret: SecretFile | None = None
    try:
        content = _receive_order(streams[0])
        os.write(streams[1], content["marker"].encode())
        order = _understood(content)
        inherited = _environment(order)
        os.environ.clear()
        os.environ.update(inherited)
        _enter(order)
        secret = SecretFile(order.secret)
        added = {VARIABLE: str(secret.path)}
        here = Here(
            order.command, order.counts, inherited, added=added, index=order.index, host=order.host
        )
        return guarded(_body(order, here, streams, secret), "farandole agent")
    except FrameError as error:
        print(f"farandole agent: {error}", file=sys.stderr)
        return 2
    except LaunchError as error:
        os.write(streams[1], frames.message("refused", why=str(error), exit_code=error.exit_code))
        return error.exit_code
    finally:
        if secret is not None:
            secret.remove()


def _body(
    order: Order, here: Here, streams: tuple[int, int], secret: SecretFile
) -> Callable[[int, SignalPipe], int]:
    def run(lifeline: int, signals: SignalPipe) -> int:
        try:
            return Agent(order, here, streams, lifeline, signals).run()
        finally:
            secret.remove()  # also where the watchdog, which does it too, is gone

    return run


def _take_streams() -> tuple[int, int]:
    """Copies of stdin and stdout; what prints by mistake prints to stderr and tears no frame."""
    found = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return found


def _receive_order(fd: int) -> dict[str, Any]:
    """The first frame, behind which nothing comes before we have answered."""
    deadline = time.monotonic() + _ORDER_TIMEOUT
    decoder = Decoder()
    while True:
        if not wait([(fd, READ)], deadline):
            raise FrameError(f"no order came within {_ORDER_TIMEOUT:g} s")
        data = os.read(fd, 1 << 16)
        if not data:
            raise FrameError("stdin ended before there was an order; 'farandole run' starts agents")
        for frame in decoder.feed(data):
            if isinstance(frame, Message) and frame.kind == "order":
                return frame.content
            raise FrameError("the first frame is no order; 'farandole run' starts agents")


def _understood(content: dict[str, Any]) -> Order:
    if content["version"] != version():
        raise LaunchError(
            f"farandole is {version()} there and {content['version']} here; install one version"
        )
    return Order.of(content)


def _environment(order: Order) -> dict[str, str]:
    """This host's own, and over it what came along."""
    environment = {**os.environ, **order.environment}
    if path := order.environment.get("PYTHONPATH"):
        ours = str(Path(farandole.__file__).parent)
        entries = [
            ours + entry[len(order.package) :] if entry.startswith(order.package) else entry
            for entry in path.split(os.pathsep)
        ]
        environment["PYTHONPATH"] = os.pathsep.join(entries)
    return environment


def _enter(order: Order) -> None:
    """Whether the order can be carried out here."""
    try:
        os.chdir(order.directory)
    except OSError as error:
        raise LaunchError(
            f"the working directory {order.directory} cannot be entered there: {error.strerror}; "
            "create it, or start from a directory that all hosts have"
        ) from error
    check_command(order.command)


if __name__ == "__main__":
    sys.exit(main())
