"""The protocol between launcher and agent, over the agent's stdin and stdout.

A frame is its length (4 bytes, big-endian), its kind (1 byte) and its content: a JSON object; a
rank's output after the numbers of the rank and the stream; or a piece of a file after its name in
JSON and a zero byte. Output without bytes is the end of that stream. A length is checked before
that many bytes are buffered.

    launcher to agent   order (the job), start, pass_on, signal_groups, tell_death (of a rank
                        elsewhere, too), end, finish, hurry, credit (so much of a stream was
                        shown), shut (nobody reads it), ping
    agent to launcher   ready or refused, started, word, died, pong, left, remark, dry, output,
                        parcel (of a trace)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from farandole import _json

PIECE = 32 * 1024  # of a rank's output, in one frame
WINDOW = 256 * 1024  # of one stream, on its way and not shown yet
LARGEST = 16 << 20  # a job's environment may be large
_HEAD = struct.Struct(">IB")
_OUTPUT = struct.Struct(">IB")
_JSON, _BYTES, _PARCEL = 0, 1, 2


class Message(NamedTuple):
    kind: str
    content: dict[str, Any]


class Output(NamedTuple):
    rank: int
    which: int  # 0: stdout, 1: stderr
    data: bytes


class Parcel(NamedTuple):
    """A piece of a file that a rank left (parcels.py)."""

    what: str  # it belongs to
    name: str  # of the file
    last: bool  # piece
    data: bytes


class FrameError(Exception):
    """The other end violates the protocol."""


def message(kind: str, **content: Any) -> bytes:
    text = json.dumps({"kind": kind, **content}).encode()
    return _HEAD.pack(len(text), _JSON) + text


def output(rank: int, which: int, data: bytes) -> bytes:
    content = _OUTPUT.pack(rank, which) + data
    return _HEAD.pack(len(content), _BYTES) + content


def parcel(piece: Parcel) -> bytes:
    about = json.dumps([piece.what, piece.name, piece.last]).encode()
    content = about + b"\0" + piece.data
    return _HEAD.pack(len(content), _PARCEL) + content


class Decoder:
    """Assembles frames from bytes as they arrive."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Message | Output | Parcel]:
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            length, kind = _HEAD.unpack_from(self._bytes)
            if length > LARGEST or kind not in _DECODERS:
                raise FrameError(f"{bytes(self._bytes[:40])!r} is no frame")
            end = _HEAD.size + length
            if len(self._bytes) < end:
                return
            content = bytes(self._bytes[_HEAD.size : end])
            del self._bytes[:end]
            yield _DECODERS[kind](content)


def _decoded(content: bytes) -> Message:
    try:
        found = _json.read(content)
        return Message(str(found.pop("kind")), found)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise FrameError(f"{content[:40]!r} is no message") from error


def _output(content: bytes) -> Output:
    if len(content) < _OUTPUT.size:
        raise FrameError(f"{content!r} is no output")
    rank, which = _OUTPUT.unpack_from(content)
    return Output(rank, which, content[_OUTPUT.size :])


def _parcel(content: bytes) -> Parcel:
    about, _, data = content.partition(b"\0")
    try:
        what, name, last = _json.read(about)
        return Parcel(str(what), str(name), bool(last), data)
    except (ValueError, TypeError) as error:
        raise FrameError(f"{content[:40]!r} is no parcel") from error


_DECODERS: dict[int, Callable[[bytes], Message | Output | Parcel]] = {
    _JSON: _decoded,
    _BYTES: _output,
    _PARCEL: _parcel,
}
