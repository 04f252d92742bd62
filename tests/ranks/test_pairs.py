"""Send and receive: what arrives, in which order, and what waits for what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import farandole as fd
from farandole import _core
from harness import World

DTYPES = [name for name in _core.dtypes if name != "bfloat16"]
COUNTS = [0, 1, 7, 2049, 100_003]


def message(seed: int, count: int, dtype: str = "float64") -> Any:
    return np.random.default_rng(seed).integers(0, 100, count).astype(dtype)


def there_and_back(dtype: str, ours: bool) -> None:
    fd.init()
    rank, size = fd.rank(), fd.size()
    make = fd.allocate if ours else np.empty
    for count in COUNTS:
        right = message(count, count, dtype)
        x = make(count, dtype)
        if rank == 0:
            x[...] = right
            for peer in range(1, size):
                assert fd.send(x, peer) is None
                back = make(count, dtype)
                assert fd.recv(back, peer) is back
                assert (back == right).all()
        else:
            assert (fd.recv(x, 0) == right).all()
            fd.send(x, 0)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("ours", [False, True])
def test_every_size_and_type(standing: Callable[[int], World], size: int, ours: bool) -> None:
    world = standing(size)
    for dtype in DTYPES if size == 2 else ["float32"]:
        world.run(there_and_back, dtype, ours)


def everybody_to_everybody(tags: int, rounds: int) -> None:
    """Receives are posted in the opposite order of tags; collectives go on in between."""
    fd.init()
    rank, size = fd.rank(), fd.size()
    peers = [r for r in range(size) if r != rank]
    sent, expected = [], []
    for turn in range(rounds):
        for peer in peers:
            for tag in range(tags):
                count = 1 + (turn * 131 + tag * 17) % 900
                x = np.full(count, rank * 1000 + tag * 10 + turn)
                sent.append(fd.send(x, peer, tag, async_op=True))
    for turn in range(rounds):
        for peer in reversed(peers):
            for tag in reversed(range(tags)):
                out = np.empty(1 + (turn * 131 + tag * 17) % 900, int)
                handle = fd.recv(out, peer, tag, async_op=True)
                expected.append((handle, peer * 1000 + tag * 10 + turn))
        assert fd.all_reduce(1) == size
    for handle, value in reversed(expected):
        assert (handle.wait(20) == value).all()
    for handle in sent:
        assert handle.wait(20) is None


@pytest.mark.parametrize("size", [2, 4])
def test_many_tags_in_both_directions(standing: Callable[[int], World], size: int) -> None:
    standing(size).run(everybody_to_everybody, 10, 6)


def in_a_subgroup() -> None:
    fd.init()
    group = fd.split(fd.rank() % 2)
    assert group is not None
    if group.size < 2:
        return
    if group.rank == 0:
        fd.send(np.array([fd.rank()]), 1, group=group)
    elif group.rank == 1:
        assert fd.recv(np.empty(1, int), 0, group=group)[0] == fd.rank() - 2


def test_ranks_are_those_of_the_group(standing: Callable[[int], World]) -> None:
    standing(5).run(in_a_subgroup)


def refused() -> list[str]:
    fd.init()
    me, size = fd.rank(), fd.size()
    calls: list[Callable[[], Any]] = [
        lambda: fd.send(np.ones(1), me),
        lambda: fd.recv(np.ones(1), me),
        lambda: fd.send(np.ones(1), size),
        lambda: fd.recv(np.ones(1), -1),
        lambda: fd.send(np.ones(1), 1 - me, tag=-1),
        lambda: fd.send([1], 1 - me),
    ]
    words = []
    for call in calls:
        with pytest.raises(fd.InvalidArgument) as error:
            call()
        words.append(error.value.verdict)
    return words


def test_what_makes_no_sense_is_refused(standing: Callable[[int], World]) -> None:
    words = standing(2).run(refused)[1]
    assert words[0] == "send to rank 1, which is this one"
    assert words[2] == "send to rank 2: not a rank of this group of 2"
    assert words[4] == "tag -1 is negative"


def too_many_tags() -> None:
    fd.init()
    peer = 1 - fd.rank()
    group = fd.split(0)
    assert group is not None

    def exchange(tag: int) -> None:
        handle = fd.send(np.array([tag]), peer, tag, async_op=True, group=group)
        assert fd.recv(np.empty(1, int), peer, tag, group=group)[0] == tag
        handle.wait()

    for tag in range(128):  # both directions
        exchange(tag)
    with pytest.raises(fd.ResourceError, match="256 combinations"):
        exchange(128)
    exchange(0)


def test_channels_are_bounded(spawn: Callable[[int], World]) -> None:
    spawn(2).run(too_many_tags)
