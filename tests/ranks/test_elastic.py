"""One program in several worlds: ranks are lost and come, and the state goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import elastic_worlds
import farandole as fd
from elastic_worlds import Changes, Worlds
from farandole import _world
from farandole.common._worlds import Framework, ends_world
from farandole.common.elastic import ObjectState, run_fn
from harness import World

STEPS = 12
Train = Callable[[Any], Any]


def run(train: Train) -> Train:
    return run_fn(train, Framework(init=lambda: _world.init()))


def trained(dies: dict[int, int], hears: dict[int, tuple[int, Changes]]) -> dict[str, Any]:
    """Twelve steps, of which every second one is committed.

    Args:
        dies: on which rank in which step.
        hears: on which rank in which step what the launcher says.
    """
    elastic_worlds.begin()
    fd.init()
    me = fd.rank() if fd.size() > 1 else -1
    state = ObjectState(step=0, total=0.0, sizes=[])
    syncs, resets = [], []
    sync = state.sync
    state.sync = lambda: (syncs.append(fd.size()), sync())[1]  # type: ignore[method-assign]
    state.register_reset_callbacks([lambda: resets.append(fd.size())])

    @run
    def train(state: Any) -> None:
        nonlocal me
        while state.step < STEPS:
            if dies.get(me) == state.step:
                elastic_worlds.die()
            step = np.full(3, state.step * (fd.rank() + 1.0) / (fd.rank() + 1.0))
            state.total += float(fd.all_reduce(step, "mean")[0])
            state.sizes.append(fd.size())
            state.step += 1
            if me in hears and hears[me][0] == state.step:
                elastic_worlds.hear(hears[me][1])
            if state.step % 2 == 0:
                state.commit()

    train(state)
    return {
        "total": state.total, "sizes": state.sizes, "syncs": syncs, "resets": resets,
        "rank": fd.rank(),
    }  # fmt: skip


TOTAL = float(sum(range(STEPS)))


def test_survivors_go_on_from_the_last_commit(spawn: Callable[..., World]) -> None:
    ranks = spawn(3)
    ranks.start(trained, {2: 5}, {})
    worlds = Worlds(ranks)
    worlds.form(0, 1, 2)
    worlds.form(0, 1)
    for end in (ranks.outcome(0), ranks.outcome(1)):
        assert end.error is None, end.trace
        assert end.value["total"] == TOTAL
        assert end.value["sizes"] == [3] * 4 + [2] * 8, "step 4 was not committed"
        assert end.value["syncs"] == [3, 2]
        assert end.value["resets"] == [2]


def test_rank_0_may_be_the_one_that_is_lost(spawn: Callable[..., World]) -> None:
    ranks = spawn(3)
    ranks.start(trained, {0: 3}, {})
    worlds = Worlds(ranks)
    worlds.form(0, 1, 2)
    worlds.form(1, 2)
    ends = [ranks.outcome(1), ranks.outcome(2)]
    assert [end.value["total"] for end in ends] == [TOTAL] * 2
    assert [end.value["rank"] for end in ends] == [0, 1]


def test_one_may_be_left_alone(spawn: Callable[..., World]) -> None:
    ranks = spawn(2)
    ranks.start(trained, {0: 7}, {})
    worlds = Worlds(ranks)
    worlds.form(0, 1)
    worlds.form(1)
    assert ranks.outcome(1).value["sizes"] == [2] * 6 + [1] * 6


def test_new_ranks_come_at_a_commit_of_all(spawn: Callable[..., World]) -> None:
    """One rank alone has heard of them."""
    ranks = spawn(4)
    ranks.start(trained, {}, {1: (5, Changes(wanted=True, only_fewer=False))})
    worlds = Worlds(ranks)
    worlds.form(0, 1)
    worlds.form(0, 1, 2, 3)
    ends = [outcome.value for outcome in ranks.outcomes()]
    assert [end["total"] for end in ends] == [TOTAL] * 4
    assert all(end["sizes"] == [2] * 6 + [4] * 6 for end in ends)
    assert [end["resets"] for end in ends] == [[4], [4], [], []]


def test_who_stays_shares_nothing_where_ranks_only_leave(spawn: Callable[..., World]) -> None:
    ranks = spawn(3)
    ranks.start(trained, {}, {0: (4, Changes(wanted=True, only_fewer=True))})
    worlds = Worlds(ranks)
    worlds.form(0, 1, 2)
    worlds.form(0, 1)
    for end in (ranks.outcome(0), ranks.outcome(1)):
        assert (end.value["total"], end.value["syncs"]) == (TOTAL, [3])
    worlds.dismiss(2)  # it has left, and waits


def test_a_new_rank_gets_the_state_from_who_would_share_nothing(
    spawn: Callable[..., World],
) -> None:
    """It came when the others had heard that ranks only leave."""
    ranks = spawn(4)
    ranks.start(trained, {}, {0: (4, Changes(wanted=True, only_fewer=True))})
    worlds = Worlds(ranks)
    worlds.form(0, 1, 2)
    worlds.form(0, 1, 3)
    ends = [ranks.outcome(r).value for r in (0, 1, 3)]
    assert [end["total"] for end in ends] == [TOTAL] * 3
    assert [end["syncs"] for end in ends] == [[3, 3], [3, 3], [3]]
    worlds.dismiss(2)


def test_a_new_rank_does_not_give_its_own_state(spawn: Callable[..., World]) -> None:
    ranks = spawn(3)
    ranks.start(trained, {}, {0: (4, Changes(wanted=True, only_fewer=False))})
    worlds = Worlds(ranks)
    worlds.form(0, 1)
    worlds.form(2, 0, 1)
    ends = ranks.outcomes()
    assert [end.error for end in ends] == ["InternalError"] * 3
    assert "rank 0 has not got the job's state" in ends[0].text


def test_worlds_that_do_not_form_are_tried_again(spawn: Callable[..., World]) -> None:
    ranks = spawn(3)
    ranks.start(trained, {2: 5}, {})
    worlds = Worlds(ranks)
    worlds.form(0, 1, 2)
    for _ in range(3):
        worlds.refuse([0, 1])
    worlds.form(0, 1)
    assert [ranks.outcome(r).value["total"] for r in (0, 1)] == [TOTAL] * 2


def lost_in_sync(own: int) -> Any:
    """Rank 2 dies in the second world, when the others wait for its part of the state."""
    elastic_worlds.begin()
    fd.init()
    state = ObjectState(step=0)

    @run
    def train(state: Any) -> int:
        if own == 3:
            elastic_worlds.die()
        for state.step in range(state.step, 4):  # noqa: B020 - as Horovod's programs do
            fd.all_reduce(np.ones(2))
            state.commit()
        return fd.size()

    if own == 2:
        state.register_reset_callbacks([elastic_worlds.die])
    return train(state)


def test_a_rank_may_be_lost_while_the_state_is_shared(spawn: Callable[..., World]) -> None:
    ranks = spawn(4)
    for rank in range(4):
        ranks.start(lost_in_sync, rank, ranks=[rank])
    worlds = Worlds(ranks)
    worlds.form(0, 1, 2, 3)
    worlds.form(0, 1, 2)
    worlds.form(0, 1)
    assert [ranks.outcome(r).value for r in (0, 1)] == [2, 2]


def failing(kind: str, elastic: bool) -> Any:
    elastic_worlds.begin(elastic)
    fd.init()
    state = ObjectState(step=0)

    @run
    def train(state: Any) -> None:
        state.commit()
        if kind == "ValueError":
            raise ValueError("a bad sample")
        if kind == "Mismatch":
            fd.all_reduce(np.ones(1 + fd.rank()))
        if fd.rank() == 1:
            elastic_worlds.die()
        fd.all_reduce(np.ones(2))

    return train(state)


@pytest.mark.parametrize("kind", ["ValueError", "Mismatch"])
def test_faults_of_the_program_are_raised(spawn: Callable[..., World], kind: str) -> None:
    ranks = spawn(2)
    ranks.start(failing, kind, True)
    Worlds(ranks).form(0, 1)
    assert ranks.outcome(0).error == kind


def test_a_job_that_is_not_elastic_ends_with_a_lost_rank(spawn: Callable[..., World]) -> None:
    ranks = spawn(2)
    ranks.start(failing, "PeerLost", False)
    Worlds(ranks).form(0, 1)
    end = ranks.outcome(0)
    assert (end.error, end.rank) == ("PeerLost", 1)


def failing_callback() -> None:
    elastic_worlds.begin()
    fd.init()
    state = ObjectState(step=0)
    state.register_reset_callbacks([lambda: 1 // 0])  # type: ignore[list-item]

    @run
    def train(_: Any) -> None:
        if fd.rank() == 1:
            elastic_worlds.die()
        fd.all_reduce(np.ones(2))

    train(state)


def test_what_fails_between_worlds_shows_why_there_is_another(spawn: Callable[..., World]) -> None:
    ranks = spawn(2)
    ranks.start(failing_callback)
    worlds = Worlds(ranks)
    worlds.form(0, 1)
    worlds.form(0)
    end = ranks.outcome(0)
    assert end.error == "ZeroDivisionError"
    assert "PeerLost: rank 1" in end.trace


# ---- states, without ranks ----


@pytest.fixture
def alone(world_of_one: None) -> None:
    del world_of_one


@pytest.mark.usefixtures("alone")
def test_a_commit_is_not_touched_by_later_changes() -> None:
    state = ObjectState(losses=[1.0], epoch=0)
    state.losses.append(2.0)
    state.commit()
    for _ in range(2):
        state.losses.append(3.0)
        state.epoch = 5
        state.restore()
        assert (state.losses, state.epoch) == ([1.0, 2.0], 0)


@pytest.mark.usefixtures("alone")
def test_a_save_that_fails_keeps_the_former_commit() -> None:
    state = ObjectState(first=[0], second=[0])
    state.first.append(1)
    state.second = open("/dev/null")  # noqa: SIM115, PTH123
    with state.second, pytest.raises(fd.InvalidArgument, match="second of the state is"):
        state.commit()
    state.restore()
    assert (state.first, state.second) == ([0], [0])


@pytest.mark.usefixtures("alone")
def test_the_first_world_begins_with_what_the_program_has_set() -> None:
    state = ObjectState(epoch=0)
    state.epoch = 7  # of a checkpoint
    assert run(lambda state: state.epoch)(state) == 7
    state.restore()
    assert state.epoch == 7


HERE, PID = 2, os.getpid()


@pytest.mark.parametrize(
    ("kind", "facts", "rank", "ends"),
    [
        ("PeerLost", {}, HERE, True),
        ("Stalled", {"rank": HERE}, HERE, True),
        ("RendezvousError", {}, None, True),
        ("Deadlock", {"rank": 1}, HERE, False),
        ("NotInitialized", {}, HERE, False),
        ("Aborted", {"rank": 1}, HERE, False),
        ("DeviceError", {"rank": 1}, HERE, True),
        ("DeviceError", {"rank": HERE}, HERE, False),
        ("DeviceError", {}, HERE, False),
        ("ResourceError", {"rank": 1, "pid": PID + 1}, None, True),
        ("ResourceError", {"rank": 1, "pid": PID}, None, False),
    ],
)
def test_what_is_wrong_with_one_rank_is_not_taken_along(
    kind: str, facts: dict[str, int], rank: int | None, ends: bool
) -> None:
    error = getattr(fd, kind)("of a test")
    for name, value in facts.items():
        setattr(error, name, value)
    assert ends_world(error, rank) == ends


def test_names_of_the_state_itself_are_refused() -> None:
    with pytest.raises(fd.InvalidArgument, match="commit is a name of its own"):
        ObjectState(commit=1)


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(fd.InvalidArgument, match=r"first argument is a str.*no sync"):
        run(len)("model")


def test_callbacks_that_are_none_are_refused() -> None:
    with pytest.raises(fd.InvalidArgument, match="3 is no function"):
        ObjectState().register_reset_callbacks([3])  # type: ignore[list-item]
