"""The protocol between launcher and agent, over the agent's stdin and stdout.

A frame is its length (4 bytes, big-endian), a zero byte and its content: a JSON object, and where
bytes go with it (a rank's output, a piece of a file), a zero byte and these. Output without bytes
is the end of that stream. A length is checked before that many bytes are buffered.

    launcher to agent   order (the job), start, pass_on, signal_groups, tell_death (of a rank
                        elsewhere, too), end, finish, hurry, credit (so much of a stream was
                        shown), shut (nobody reads it), ping
    agent to launcher   ready or refused, started, word, died, pong, left, remark, dry, output,
                        parcel (of a trace); with each pong go the counters of its ranks
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from farandole import _json

PIECE = 32 * 1024  # of a rank's output, in one frame
WINDOW = 256 * 1024  # of one stream, on its way and not shown yet
LARGEST = 16 << 20  # a job's environment may be large
_HEAD = struct.Struct(">IB")


class Message(NamedTuple):
    kind: str
    content: dict[str, Any]
    data: bytes = b""


class FrameError(Exception):
    """The other end violates the protocol."""


def message(kind: str, data: bytes = b"", /, **content: Any) -> bytes:
    text = json.dumps({"kind": kind, **content}).encode()
    whole = text + b"\0" + data if data else text
    return _HEAD.pack(len(whole), 0) + whole


def output(rank: int, which: int, data: bytes) -> bytes:
    """`which`: 0 is stdout, 1 stderr."""
    return message("output", data, rank=rank, which=which)


class Decoder:
    """Assembles frames from bytes as they arrive."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            length, zero = _HEAD.unpack_from(self._bytes)
            if length > LARGEST or zero:
                raise FrameError(f"{bytes(self._bytes[:40])!r} is no frame")
            end = _HEAD.size + length
            if len(self._bytes) < end:
                return
            content = bytes(self._bytes[_HEAD.size : end])
            del self._bytes[:end]
            yield _decoded(content)


def _decoded(content: bytes) -> Message:
    text, _, data = content.partition(b"\0")
    try:
        found = _json.read(text)
        return Message(str(found.pop("kind")), found, data)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise FrameError(f"{content[:40]!r} is no message") from error
