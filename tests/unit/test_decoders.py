"""Decoders of bytes from other processes and files raise only the errors that they promise, however
the bytes are damaged. tests/fuzz does the same for decoders of the core."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import grid
from farandole import Error, InternalError, InvalidArgument, _json, _launchers
from farandole._core import tuning
from farandole._launch.agents import frames
from farandole._meeting import errors, members, rounds
from farandole._trace import parts
from farandole._trace.parts import TraceError
from farandole.parameter_server import _snapshots, _wire
from farandole.parameter_server._rows import Rows

MUTATIONS = 400  # per decoder
# Values that generic damage seldom hits: numbers at the limits of fields, and deep nesting.
WORDS = [
    *(b"1e999", b"-1", b"NaN", b"null", b"true", b'""', b"{}", b"18446744073709551616"),
    *(b"[" * 5000, b'{"a":' * 3000, b"9" * 5000, b"\xff\xff\xff\xff", b"\x00" * 8),
]


class Decoder(NamedTuple):
    sample: bytes
    read: Callable[[bytes], object]
    raises: tuple[type[BaseException], ...]


def words_of_a_rank() -> bytes:
    failed = errors.could_not_meet(members.who(1, 2), OSError(24, "Too many open files"))
    words = members.who(0, 2) | members.alike("word") | {"cpus": [0, 1], "addresses": "00ff"}
    return json.dumps(words | {"failed": errors.told_of(failed)}).encode()


def meet(data: bytes) -> None:
    words = members.checked(_json.read(data))
    first = members.who(0, 2) | members.alike("word")
    if (why := members.objection([first, words])) is not None:
        assert isinstance(why, Error)


def frames_of(data: bytes) -> list[object]:
    return list(frames.Decoder().feed(data))


FRAMES = (
    frames.message("died", rank=3, exit_code=1)
    + frames.output(2, 1, b"what it wrote")
    + frames.message("parcel", b"{}", what="trace", name="rank-0.jsonl", last=True)
)

TF_CONFIG = json.dumps(
    {
        "cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]},
        "task": {"type": "worker", "index": 1},
    }
).encode()


def cluster(data: bytes) -> None:
    _launchers._cluster({"TF_CONFIG": data.decode("utf-8", "surrogateescape")})


PIECES = [_wire.Piece("w", (4, 3), "float32"), _wire.Piece("b", (), "float64")]
GRADIENTS = _wire.packed(
    [
        (0, Rows([1, 3], np.ones((2, 3), np.float32))),
        (1, np.ones((), np.float64)),
        (0, np.ones((4, 3), np.float32)),
    ]
)
NEW = _wire.described([(piece, np.ones(piece.shape, piece.dtype)) for piece in PIECES])


def gradients(data: bytes) -> None:
    """Decodes a message: its table, then the values that the table describes."""
    numbers = np.frombuffer(data[: len(data) // 8 * 8], np.int64)
    split = len(GRADIENTS[0])
    table, values = numbers[:split], numbers[split:].view(np.uint8)
    for gradient in _wire.unpacked(PIECES, _wire.Message((0,) * 5, 0, table, values)).values():
        values_of = gradient.values if isinstance(gradient, Rows) else gradient
        assert values_of.nbytes <= len(data)


def new_variables(data: bytes) -> None:
    numbers = (NEW[0][0], 0, 0, 0, 0)
    found = _wire.new_pieces(
        _wire.Message(numbers, 0, _wire.NOTHING, np.frombuffer(data, np.uint8))
    )
    assert sum(value.nbytes for _, value in found) <= len(data)


def snapshot(tmp_path: Path) -> Decoder:
    snapshots = _snapshots.Snapshots(tmp_path, keep=1)
    content = _snapshots.Content(3, {"w": np.ones((4, 3))}, {"m": np.zeros(3)}, {"tickets": []})
    path = _snapshots.write(snapshots, 0, 1, content)
    sample = path.read_bytes()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        _snapshots.read(path)

    return Decoder(sample, read, (InvalidArgument,))


def head_of_a_trace(tmp_path: Path) -> Decoder:
    says = {"run": "r", "rank": 0, "size": 2, "events": 5, "lost": 0, "complete_since": 1.5}
    path = tmp_path / "rank-0.jsonl"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        parts.headers(tmp_path)

    return Decoder(json.dumps({"args": says}).encode() + b"\n", read, (TraceError,))


DECODERS: dict[str, Decoder | Callable[[Path], Decoder]] = {
    "words of a rank that meets others": Decoder(words_of_a_rank(), meet, (ValueError,)),
    "rank 0's answer in a store": Decoder(
        b'{"refused": null, "ranks": [' + words_of_a_rank() + b"]}",
        lambda data: rounds.checked_answer(_json.read(data)),
        (ValueError,),
    ),
    "frames of an agent": Decoder(FRAMES, frames_of, (frames.FrameError,)),
    "TF_CONFIG": Decoder(TF_CONFIG, cluster, (_launchers.PlaceError,)),
    "gradients for a parameter server": Decoder(
        GRADIENTS[0].tobytes() + GRADIENTS[1].tobytes(), gradients, (InternalError,)
    ),
    "new variables for a parameter server": Decoder(
        NEW[1].tobytes(), new_variables, (InternalError,)
    ),
    "a tuning table": Decoder(
        tuning.text(tuning.numbers(), "here").encode(),
        lambda data: tuning.fingerprint(data.decode("latin-1")),
        (InvalidArgument,),
    ),
    "a snapshot of a parameter server": snapshot,
    "the head of a trace": head_of_a_trace,
}


def damaged(sample: bytes, draw: random.Random) -> bytes:
    """The sample after one to four random changes."""
    data = bytearray(sample)
    for _ in range(draw.randint(1, 4)):
        at, end = sorted(draw.randint(0, len(data)) for _ in range(2))
        match draw.randrange(6):
            case 0:
                data[at:] = b""
            case 1:
                data[at:end] = b""
            case 2:
                data[at:at] = data[at:end]
            case 3:
                data[at : at + draw.choice((0, 1, 4, 8))] = draw.choice(WORDS)
            case 4:
                data[at : at + 8] = draw.randbytes(draw.choice((1, 8)))
            case _:
                if data:
                    data[at % len(data)] ^= 1 << draw.randrange(8)
    return bytes(data)


@pytest.mark.parametrize("name", DECODERS)
def test_damaged_bytes_raise_what_is_promised(name: str, tmp_path: Path) -> None:
    row = DECODERS[name]
    decoder = row if isinstance(row, Decoder) else row(tmp_path)
    decoder.read(decoder.sample)
    draw = random.Random(f"{grid.seed()} {name}")
    refused = 0
    for _ in range(MUTATIONS):
        data = damaged(decoder.sample, draw)
        try:
            decoder.read(data)
        except decoder.raises:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__} for {data[:300]!r}") from error
    assert refused > MUTATIONS // 8


def test_numbers_of_others_are_finite_and_nesting_is_bounded() -> None:
    assert _json.read('[1.5, -2e3, 7, "NaN"]') == [1.5, -2000.0, 7, "NaN"]
    for text in ("1e999", "-1e999", "NaN", "-Infinity", "[" * 100_000, "1" * 5000, "{"):
        with pytest.raises(ValueError, match=r"."):
            _json.read(text)
