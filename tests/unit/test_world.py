"""Where a process stands: from arguments, from the environment, or alone; and a world of one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import farandole as fd
from farandole._world_place import Place, find_place


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    fd.shutdown()


def place(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Place:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return find_place(None, None, None, None, epoch=0)


def test_a_program_started_by_nobody_is_a_world_of_one() -> None:
    fd.init()
    assert (fd.rank(), fd.size(), fd.local_rank(), fd.local_size()) == (0, 1, 0, 1)
    assert (fd.cross_rank(), fd.cross_size()) == (0, 1)
    x = np.arange(5.0)
    assert fd.all_reduce(x, "mean").tolist() == x.tolist()
    assert fd.all_gather(x).tolist() == x.tolist()
    assert fd.reduce_scatter(x, "max").tolist() == x.tolist()
    assert fd.broadcast(x).tolist() == x.tolist()
    fd.barrier()
    assert fd.all_reduce(x, prescale=2, postscale=3).tolist() == (6 * x).tolist()


def test_the_environment_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    found = place(
        monkeypatch, RANK="2", WORLD_SIZE="4", LOCAL_RANK="2", LOCAL_WORLD_SIZE="4",
        MASTER_ADDR="10.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="job",
        TORCHELASTIC_RESTART_COUNT="3",
    )  # fmt: skip
    assert (found.rank, found.size, found.local_rank, found.local_size) == (2, 4, 2, 4)
    assert found.job.startswith("10.0.0.1:29500:4:job:3:")


def test_our_own_run_id_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = place(
        monkeypatch, RANK="0", WORLD_SIZE="1", FARANDOLE_RUN_ID="ours", TORCHELASTIC_RUN_ID="theirs"
    )
    assert ":ours:" in found.job


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"RANK": "0"}, "RANK is given, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is given, but RANK is not"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x, which is not a number"),
        ({"RANK": "0", "WORLD_SIZE": str(2**40)}, "WORLD_SIZE=1099511627776, which is not"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT=x, which is not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 does not exist in a world of 2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 does not exist in a world of 0"),
    ],
)
def test_what_does_not_fit_is_said(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], reason: str
) -> None:
    with pytest.raises(fd.RendezvousError, match=reason):
        place(monkeypatch, **environment)
    with pytest.raises(fd.RendezvousError, match=reason):
        fd.init()
    assert not fd.is_initialized()


def test_arguments_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "5")
    fd.init(rank=0, size=1)
    assert (fd.rank(), fd.size(), fd.local_size()) == (0, 1, 1)


def test_a_bad_start_timeout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARANDOLE_START_TIMEOUT", "soon")
    with pytest.raises(fd.InvalidArgument, match="FARANDOLE_START_TIMEOUT=soon"):
        fd.init()
