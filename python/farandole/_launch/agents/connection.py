"""A started agent's stdin, stdout and stderr, as the launcher has them.

ssh and the shells that it starts may print before the agent does, so its stdout counts from a
marker on, which the launcher has made up for this job.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress

from farandole._launch.agents.frames import Decoder, FrameError, Message
from farandole._launch.agents.outbox import Outbox
from farandole._launch.polling import READ, WRITE
from farandole._launch.processes import descendants, die_with_parent, send
from farandole._words import printable

_MOST_NOISE = 64 * 1024  # of a shell, in front of the marker
_MOST_SAID = 64 * 1024  # on stderr, between two looks at it
_LAST_WORDS = 4096  # of these, in an error
_READ_SIZE = 1 << 18


class Connection:
    """From the start of the agent's starter (ssh, say) to its end."""

    def __init__(self, command: Sequence[str], marker: str) -> None:
        """Raises OSError if the command cannot be started."""
        launcher = os.getpid()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            preexec_fn=lambda: die_with_parent(launcher),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.outbox = Outbox(self._process.stdin.fileno())
        self._out, self._err = self._process.stdout.fileno(), self._process.stderr.fileno()
        for descriptor in (self._out, self._err):
            os.set_blocking(descriptor, False)
        self._marker = marker.encode()
        self._decoder = Decoder()
        self._noise = bytearray()
        self._said = bytearray()
        self.has_spoken = False  # it is an agent that speaks
        self.ended = False  # nothing more will come from it
        self.err_ended = False

    def descriptors(self) -> list[tuple[int, int]]:
        found = [] if self.ended else [(self._out, READ)]
        found += [] if self.err_ended else [(self._err, READ)]
        return found + ([(self.outbox.fd, WRITE)] if self.outbox.pending else [])

    def frames(self, ready: set[int]) -> Iterator[Message]:
        """The frames that have come on stdout. Raises FrameError for bytes that no agent sends."""
        if self.ended or self._out not in ready:
            return
        data = _read(self._out)
        self.ended = data == b""
        if data and not self.has_spoken:
            data = self._behind_noise(data)
        if data:
            yield from self._decoder.feed(data)

    def listen_to_stderr(self, ready: set[int]) -> None:
        if not self.err_ended and self._err in ready:
            data = _read(self._err)
            self.err_ended = data == b""
            self._said += data or b""
            del self._said[:-_MOST_SAID]

    def lines(self) -> list[str]:
        """Whole lines of stderr, each once."""
        whole, _, rest = bytes(self._said).rpartition(b"\n")
        self._said = bytearray(rest)
        return _shown(whole)

    def last_words(self) -> str:
        """The rest of stderr, in one line."""
        lines = _shown(bytes(self._said[-_LAST_WORDS:]))
        self._said.clear()
        return "; ".join(line.strip() for line in lines if line.strip())

    def exit_code(self) -> int | None:
        """The starter's exit code once it has ended; negative: minus the signal."""
        return self._process.poll()

    def hang_up(self) -> None:
        """Closes the agent's stdin, upon which the agent ends its ranks and itself."""
        self.outbox.drop()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def close(self, patience: float) -> None:
        """After hang_up(): kills the starter if it has not ended within `patience` seconds."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:  # an agent beside us that was stopped, say
            for process in descendants(self._process.pid):
                send(process, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def _behind_noise(self, data: bytes) -> bytes:
        self._noise += data
        before, marker, behind = bytes(self._noise).partition(self._marker)
        if marker:
            self.has_spoken = True
            self._noise.clear()
            return behind
        if len(before) > _MOST_NOISE:
            raise FrameError(f"{before[-200:]!r}, and more of that")
        return b""


def _read(fd: int) -> bytes | None:
    """None: nothing yet; empty: the end."""
    try:
        return os.read(fd, _READ_SIZE)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _shown(data: bytes) -> list[str]:
    return [printable(line) for line in data.decode(errors="backslashreplace").splitlines()]
