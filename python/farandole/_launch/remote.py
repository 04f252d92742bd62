"""The ranks of another host, as its agent (agent.py) tells of them.

What a rank writes comes in frames and goes on through a pipe, so that whoever reads a rank's output
does not know where it runs. A stream is sent no further than its reader has read.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from farandole._launch import frames
from farandole._launch.frames import Decoder, FrameError, Outbox, Output
from farandole._launch.job import LaunchError
from farandole._launch.leftovers import LONGEST
from farandole._launch.order import Order
from farandole._launch.place import Rank, Threads
from farandole._launch.polling import READ, WRITE, earliest
from farandole._launch.processes import die_with_parent
from farandole._launch.ranks import Rendezvous, describe_exit
from farandole._launch.words import Word

# An agent is asked so often, and given up when it has been silent for so long. At its end it may
# put a trace together, and then it is given more time.
_ASK_EVERY, SILENCE, _SILENCE_AT_END = 1.0, 5.0, 60.0
# A launcher that did not run for so long has no right to complain of the others' silence.
_OWN_PAUSE = 2.0
# From the end of an agent's output until its starter (ssh) has ended and said why.
_LAST_WORDS = 1.0
# At the end: until an agent, or ssh, has gone by itself.
_GOING = 5.0

_MOST_NOISE = 64 * 1024  # of a shell, in front of the agent's first byte
_MOST_SAID = 4096  # on stderr, kept for an error


class Inlet:
    """The pipe that one stream of a rank goes on through."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe2(os.O_CLOEXEC)
        self.box = Outbox(writer)
        self.ended = False  # at its source
        self.open = True

    def flush(self) -> int:
        """Returns how much was taken."""
        done = self.box.flush()
        if self.ended and not self.box.pending:
            self.close()
        return done

    def close(self) -> None:
        if self.open:
            os.close(self.box.fd)
            self.open = False


class Remote:
    """A place (place.py) behind an agent."""

    def __init__(
        self,
        order: Order,
        command: Sequence[str],
        address: str,
        advise: Callable[[int | None, str], str],
    ) -> None:
        """`command` starts the agent; `address`: by which others reach the host, or empty where the
        agent knows it; `advise`: of the starter's exit code and what it said."""
        self.host = order.host
        self.count = order.counts[order.index]
        self.ranks: list[Rank] = []
        self.pipes: list[tuple[int, int]] = []
        self.threads: Threads | None = None
        self.address, self.port = address, 0
        self.ready = self.started = self.finished = self.dry = False
        self.out_of_memory = False
        self.trouble, self.exit_code = "", 1
        self._order = order
        self._command = command
        self._advise = advise
        self._first = sum(order.counts[: order.index])
        self._inlets: dict[tuple[int, int], Inlet] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: Outbox | None = None
        self._out, self._err = -1, -1  # the agent's, while they are open
        self._decoder = Decoder()
        self._noise: bytearray | None = bytearray()  # None: the agent has begun to speak
        self._said = bytearray()  # on stderr, not shown yet
        self._deadline: float | None = None  # of what is waited for: ready, finished, last words
        self._allowed = 0.0  # how long it may take to get ready
        self._ends_at: float | None = None  # when the wait for its last words ends
        self._last_turn = time.monotonic()
        self._heard = self._asked = 0.0
        self._orphans = False
        self._finishing = False
        self._news: list[Word | Rank] = []
        self._remarks: list[str] = []

    # -- start --------------------------------------------------------------------------------

    def open(self, deadline: float) -> None:
        launcher = os.getpid()
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                preexec_fn=lambda: die_with_parent(launcher),
            )
        except OSError as error:
            advice = self._advise(127, "")
            raise LaunchError(
                f"host {self.host}: {self._command[0]} cannot be started: {error.strerror}; "
                f"{advice}",
                1,
            ) from error
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._outbox = Outbox(process.stdin.fileno())
        self._out, self._err = process.stdout.fileno(), process.stderr.fileno()
        for descriptor in (self._out, self._err):
            os.set_blocking(descriptor, False)
        self._outbox.put(self._order.frame())
        self._deadline = deadline
        self._allowed = deadline - time.monotonic()

    def start(self, rendezvous: Rendezvous) -> None:
        self._deadline = time.monotonic() + self._allowed
        self._tell("start", **rendezvous._asdict())

    # -- turns --------------------------------------------------------------------------------

    def descriptors(self) -> list[tuple[int, int]]:
        found = [(fd, READ) for fd in (self._out, self._err) if fd >= 0]
        if self._outbox is not None and self._outbox.pending:
            found.append((self._outbox.fd, WRITE))
        boxes = [inlet.box for inlet in self._inlets.values() if inlet.open]
        return found + [(box.fd, WRITE) for box in boxes if box.pending]

    def due(self) -> float | None:
        if self.trouble or self.dry:
            return None
        ask = self._asked + _ASK_EVERY if self._is_asked() else None
        return earliest([self._deadline, self._ends_at, ask])

    def turn(self, ready: set[int], now: float) -> None:
        if self._err in ready:
            self._read_stderr()
        if self._out in ready:
            self._read_stdout(now)
        if not self.trouble:
            self._look_at_clocks(now)
        self._last_turn = now
        if self._outbox is not None:
            self._outbox.flush()
        self._pass_output_on()

    def child_ended(self) -> None:
        """Its stdout ends, too, and that is looked at."""

    def news(self) -> list[Word | Rank]:
        news, self._news = self._news, []
        return news

    def remarks(self) -> list[str]:
        remarks, self._remarks = self._remarks, []
        return remarks

    def has_orphans(self) -> bool:
        return self._orphans

    # -- what is asked of it ------------------------------------------------------------------

    def pass_on(self, number: signal.Signals) -> None:
        self._tell("pass_on", number=number)

    def signal_groups(self, number: signal.Signals) -> None:
        self._tell("signal_groups", number=number)

    def end(self, number: signal.Signals) -> None:
        self._tell("end", number=number)

    def finish(self, at_once: bool) -> None:
        self._finishing = True
        if self.trouble or not self.started:
            self.finished = self.dry = True
            return
        self._deadline = time.monotonic() + LONGEST + _SILENCE_AT_END
        self._tell("finish", at_once=at_once)

    def hurry(self) -> None:
        self._tell("hurry")

    def close(self) -> None:
        """An agent goes when its stdin ends; what does not is killed."""
        for inlet in self._inlets.values():
            inlet.close()
        if self._process is None:
            return
        if not self.dry and not self.trouble:
            self._tell("end", number=signal.SIGKILL)
            assert self._outbox is not None
            self._outbox.flush()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(0 if self.trouble else _GOING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, kind: str, **content: Any) -> None:
        if self._outbox is not None and not self.trouble:
            self._outbox.put(frames.message(kind, **content))

    # -- what the agent says ------------------------------------------------------------------

    def _read_stdout(self, now: float) -> None:
        data = _read(self._out)
        if data is None:
            return
        self._heard = now
        if not data:
            self._out = -1
            self._ends_at = now + _LAST_WORDS
            return
        try:
            if self._noise is not None:
                data = self._behind_noise(data)
            for frame in self._decoder.feed(data):
                self._take(frame)
        except (FrameError, KeyError, TypeError, ValueError) as error:
            self._lose(f"its agent said what no agent says: {error}")

    def _behind_noise(self, data: bytes) -> bytes:
        """What follows the agent's first word; a shell's files may have printed before it."""
        assert self._noise is not None
        self._noise += data
        before, marker, behind = bytes(self._noise).partition(self._order.marker.encode())
        if marker:
            self._noise = None
            return behind
        if len(before) > _MOST_NOISE:
            raise FrameError(f"{before[-200:]!r}, and more of that")
        return b""

    def _take(self, frame: frames.Message | Output) -> None:
        if isinstance(frame, Output):
            self._take_output(frame)
            return
        content = frame.content
        match frame.kind:
            case "ready":
                self.ready, self._deadline = True, None
                self.address = self.address or str(content["address"])
                self.port = int(content["port"])
                if content["threads"]:
                    self.threads = Threads(*map(int, content["threads"]))
            case "refused":
                self.exit_code = int(content["exit_code"])
                self._lose(str(content["why"]))
            case "started":
                self._take_start([int(pid) for pid in content["pids"]])
            case "died":
                self._take_death(int(content["rank"]), int(content["exit_code"]))
            case "word":
                parts = [str(part) for part in content["parts"]]
                self._news.append(Word(int(content["rank"]), int(content["pid"]), parts))
            case "pong":
                self._orphans = bool(content["orphans"])
            case "remark":
                self._remarks.append(str(content["text"]))
            case "left":
                self.out_of_memory = bool(content["out_of_memory"])
                self.finished, self._deadline = True, None
            case "dry":
                self.dry = True
            case unknown:
                raise FrameError(f"'{unknown}'")

    def _take_start(self, pids: list[int]) -> None:
        if len(pids) != self.count:
            raise FrameError(f"{len(pids)} ranks started, instead of {self.count}")
        for number, pid in enumerate(pids, self._first):
            self.ranks.append(Rank(number, pid, self.host))
            out, err = Inlet(), Inlet()
            self._inlets[number, 0], self._inlets[number, 1] = out, err
            self.pipes.append((out.reader, err.reader))
        self.started, self._deadline = True, None

    def _take_death(self, number: int, exit_code: int) -> None:
        rank = self.ranks[number - self._first]
        rank.exit_code = exit_code
        self._orphans = True  # until the agent says otherwise
        self._news.append(rank)

    def _take_output(self, frame: Output) -> None:
        inlet = self._inlets[frame.rank, frame.which]
        inlet.ended = not frame.data
        if len(frame.data) + inlet.box.pending > frames.WINDOW:
            raise FrameError(f"more output of rank {frame.rank} than was asked for")
        inlet.box.put(frame.data)

    def _pass_output_on(self) -> None:
        for (rank, which), inlet in self._inlets.items():
            if not inlet.open:
                continue
            if done := inlet.flush():
                self._tell("credit", rank=rank, which=which, count=done)
            if inlet.box.gone:  # nobody reads it, and the rank is to know
                inlet.close()
                self._tell("shut", rank=rank, which=which)

    def _read_stderr(self) -> None:
        data = _read(self._err)
        if data is None:
            return
        if not data:
            self._err = -1
        self._said += data
        if not self.started:
            del self._said[:-_MOST_SAID]
            return
        *lines, rest = self._said.split(b"\n")
        self._said = bytearray(rest)
        self._remarks += [f"host {self.host}: {_text(line)}" for line in lines]

    # -- losing it ----------------------------------------------------------------------------

    def _is_asked(self) -> bool:
        return self.ready and self._out >= 0

    def _look_at_clocks(self, now: float) -> None:
        if self._ends_at is not None:
            self._look_for_last_words(now)
            return
        if self._deadline is not None and now >= self._deadline:
            what = "ended nothing of what its ranks left" if self._finishing else "was not ready"
            self._lose(f"its agent {what} within {self._allowed:g} s")
        elif self._is_asked():
            self._ask(now)

    def _ask(self, now: float) -> None:
        if not self._asked or now - self._last_turn > _OWN_PAUSE:
            self._heard = now  # we did not listen
        limit = _SILENCE_AT_END if self._finishing else SILENCE
        if now - self._heard > limit:
            self._lose(f"its agent has not answered for {limit:g} s")
        elif now >= self._asked + _ASK_EVERY:
            self._asked = now
            self._tell("ping")

    def _look_for_last_words(self, now: float) -> None:
        """The agent's output has ended: that is well only when all was said."""
        assert self._process is not None
        assert self._ends_at is not None
        if self.dry:
            self._ends_at = None
            return
        code = self._process.poll()
        if (code is None or self._err >= 0) and now < self._ends_at:
            return
        how = "" if code is None else f" ({self._command[0]} {describe_exit(code)})"
        self._lose(f"its agent is gone{how}" if self.ready else f"no agent started there{how}")

    def _lose(self, why: str) -> None:
        """What the starter said belongs to it, and what can be done."""
        if self.trouble:
            return
        code = self._process.poll() if self._process is not None else None
        said = "; ".join(line.strip() for line in _text(bytes(self._said)).splitlines() if line)
        self._said.clear()
        text = f"host {self.host}: {why}"
        if said:
            text += f": {said}"
        if self._noise is not None:
            text += f"; {self._advise(code, said)}"
        if lost := [rank for rank in self.ranks if rank.alive]:
            text += f"; what became of its ranks ({_numbers(lost)}) is not known"
        self.trouble = text
        for rank in lost:
            rank.lost = True
        self.finished = self.dry = True
        for inlet in self._inlets.values():
            inlet.ended = True


def _read(fd: int) -> bytes | None:
    """None: nothing yet; empty: the end."""
    try:
        return os.read(fd, 1 << 18)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _text(data: bytes) -> str:
    """What may be shown on a terminal."""
    text = data.decode(errors="backslashreplace")
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _numbers(ranks: Sequence[Rank]) -> str:
    return ", ".join(str(rank.number) for rank in ranks)
