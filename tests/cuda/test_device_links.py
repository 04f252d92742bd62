"""Links between devices are proved before anything goes over them: what a link loses is noticed by
all ranks, which take another way together. Ranks over the fake driver, each with a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_device import Rank

import farandole as fd
from harness import Nursery, World

Start = Callable[..., World]

SAYS = "collectives on devices have no steps: "
KERNELS = "what streams write to other ranks' devices does not arrive: kernels do so"


def sums() -> tuple[str, int]:
    """The way of an all-reduce with the host's bits, and the calls by which streams wrote words."""
    rank = Rank()
    rank.device = fd.rank()
    words = 0
    for _ in range(2):  # the first one finds the way
        x, on_host = rank.pair(40_000, "float32")
        fd.all_reduce(on_host.array, out=on_host.array)
        rank.machine.control.clear_log()
        assert fd.all_reduce(x, out=x).get() == on_host.get()
        words = rank.machine.calls("cuStreamBatchMemOp")
    went = fd.world().last_path
    rank.end()
    return went, words


@pytest.mark.parametrize(
    ("drops", "rank", "says"),
    [
        ("writes:0>1", 1, "device 1 (Fake GPU) gets nothing of what device 0 (Fake GPU) writes"),
        ("writes:2>0", 0, "device 0 (Fake GPU) gets nothing of what device 2 (Fake GPU) writes"),
        ("reads:1>2", 1, "device 1 (Fake GPU) does not read what is in the memory of device 2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("older", [False, True])
def test_one_link_that_loses_data_sends_all_ranks_another_way(
    by_steps: Start, drops: str, rank: int, says: str, older: bool
) -> None:
    """Memory is shared by descriptors, or by the older handles."""
    env = {"FAKE_CUDA_DEVICES": "3", "FAKE_CUDA_DROPS": drops}
    world = by_steps(3, **env, FAKE_CUDA_VIRTUAL_MEMORY="0" if older else "1")
    went = world.run(sums)
    assert all(path != "step" for path, _ in went), went
    for each in range(3):
        assert f"{SAYS}rank {rank}: {says}" in world.output(each)


def test_words_that_are_lost_are_written_by_kernels(by_steps: Start) -> None:
    """By those of all ranks: an exchange has one way."""
    world = by_steps(3, FAKE_CUDA_DEVICES="3", FAKE_CUDA_DROPS="words:0>1")
    assert world.run(sums) == [("step", 0)] * 3
    for each in range(3):
        assert KERNELS in world.output(each)


def test_links_that_work_say_nothing(by_steps: Start) -> None:
    world = by_steps(3, FAKE_CUDA_DEVICES="3")
    for path, words in world.run(sums):
        assert path == "step"
        assert words > 0
    assert not any(SAYS in world.output(each) or KERNELS in world.output(each) for each in range(3))


def test_each_exchange_is_proved(by_steps: Start) -> None:
    """A group of ranks whose links work goes by steps beside one whose links do not."""
    world = by_steps(3, FAKE_CUDA_DEVICES="3", FAKE_CUDA_DROPS="writes:0>2")
    assert world.run(in_part) == ["step", "step", "alone"]


def in_part() -> str:
    rank = Rank()
    rank.device = fd.rank()
    group = fd.split(fd.rank() // 2)
    x, on_host = rank.pair(40_000, "float32")
    fd.all_reduce(on_host.array, out=on_host.array, group=group)
    assert fd.all_reduce(x, out=x, group=group).get() == on_host.get()
    went = group.last_path if group.size > 1 else "alone"
    del group
    y, on_host = rank.pair(40_000, "float32")
    fd.all_reduce(on_host.array, out=on_host.array)
    assert fd.all_reduce(y, out=y).get() == on_host.get()
    assert fd.world().last_path != "step"
    rank.end()
    return went


def blocks_of_folds() -> int:
    rank = Rank()
    rank.device = fd.rank() if "FAKE_CUDA_DEVICES" in os.environ else 0
    x = rank.array(1 << 20, "float32")  # two parts of 2 MiB, of which a block takes 16 KiB
    fd.all_reduce(x, out=x)
    x.get()
    _, blocks = rank.machine.launches()["farandole_fold_float32"]
    rank.end()
    return blocks


@pytest.mark.parametrize(
    ("env", "blocks"),
    [
        ({"FAKE_CUDA_DEVICES": "2"}, 41),
        ({"FAKE_CUDA_DEVICES": "2", "FARANDOLE_DEVICE_LINK_BLOCKS": "7"}, 7),
        ({"FARANDOLE_DEVICE_LINK_BLOCKS": "7"}, 128),  # of a device that they share
    ],
)
def test_folds_over_links_leave_room_for_backward(
    by_steps: Start, env: dict[str, str], blocks: int
) -> None:
    world = by_steps(2, FARANDOLE_DEVICE_BUCKET_BYTES="4M", **env)
    assert world.run(blocks_of_folds) == [blocks] * 2


def test_kernels_that_are_not_there_send_all_ranks_another_way(
    by_steps: Start, fake_driver: str, tmp_path: Path
) -> None:
    del by_steps  # it skips without kernels
    installed, package = Path(fd.__file__).parent, tmp_path / "farandole"
    package.mkdir()
    for entry in installed.iterdir():
        if not entry.name.startswith("kernels-"):
            (package / entry.name).symlink_to(entry)
    nursery = Nursery([tmp_path])
    told = {"FARANDOLE_DEVICE_PATH": "step", "FAKE_LIBCUDA": fake_driver, "FAKE_CUDA_DEVICES": "2"}
    world = World(2, nursery, env={"CUDA_VISIBLE_DEVICES": None, **told})
    try:
        assert all(path != "step" for path, _ in world.run(sums))
        for each in range(2):
            where = f"the kernels of this farandole cannot be read: {package}/kernels-"
            assert f"{SAYS}rank 0: {where}" in world.output(each)
    finally:
        world.close()
        nursery.close()
