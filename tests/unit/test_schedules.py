"""Every planner is proved for every size, and the prover is proved to notice."""

from __future__ import annotations

import doctest
import math
from typing import Any

import pytest

from farandole import _core, _plan

schedule, testing = _core.schedule, _core.testing

PLANNERS = [(row["collective"], row["name"]) for row in schedule.planners()]
CANONICAL = ["direct", "binomial", "halving_doubling", "doubling"]
SIZES = list(range(1, 34))
COUNTS = [0, 1, 2, 7, 64, 133, 1000]

every_planner = pytest.mark.parametrize(("collective", "name"), PLANNERS)


def orders(size: int, count: int = 1000) -> dict[tuple[str, str], str]:
    return {
        (row["collective"], row["name"]): row["order"]
        for row in schedule.planners(size=size, count=count)
    }


def totals(collective: str, name: str, size: int, count: int, **how: int) -> _plan.Totals:
    return _plan.totals(_plan.plan_world(collective, name, size, count, **how), "")


def test_every_planner_says_in_one_sentence_what_it_does() -> None:
    for row in schedule.planners():
        assert row["summary"][0].isupper(), row["name"]
        assert row["summary"].endswith("."), row["name"]
        assert 40 < len(row["summary"]) < 240, row["name"]


# --- proofs


@every_planner
def test_every_size_is_proved_and_has_the_claimed_order(collective: str, name: str) -> None:
    proved, failures = testing.prove_all(collective, name, SIZES, COUNTS, [1, 2, 3], [1, 2, 5])
    assert failures == []
    assert proved == 2 * len(SIZES) * len(COUNTS) * 3 * 3


@pytest.mark.parametrize("name", ["binomial", "scatter_ring"])
def test_broadcast_is_proved_from_every_root(name: str) -> None:
    proved, failures = testing.prove_all(
        "broadcast", name, list(range(1, 14)), [0, 1, 7, 64], [1, 2], [1, 3], all_roots=True
    )
    assert failures == []
    assert proved == 2 * sum(range(1, 14)) * 4 * 2 * 2


def test_a_world_of_more_than_64_ranks_is_proved() -> None:
    for collective, name in PLANNERS:
        _, failures = testing.prove_all(collective, name, [65, 100, 130], [131], [1], [1])
        assert failures == []


@pytest.mark.parametrize("name", CANONICAL)
def test_canonical_planners_are_canonical_for_every_size(name: str) -> None:
    for size in SIZES:
        assert orders(size)["all_reduce", name] == "canonical"
        assert schedule.prove("all_reduce", name, size, 1000) == ("", "canonical")


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_ring_is_canonical_for_two_ranks_at_most(collective: str) -> None:
    for size in SIZES:
        expected = "canonical" if size <= 2 else "same_on_all_ranks"
        assert orders(size)[collective, "ring"] == expected
        assert schedule.prove(collective, "ring", size, 1000) == ("", expected)


# --- bytes and rounds


def test_at_level_canonical_every_size_has_few_rounds_and_few_bytes() -> None:
    count = 960
    for size in SIZES[1:]:
        allowed = [
            n for (c, n), o in orders(size).items() if c == "all_reduce" and o == "canonical"
        ]
        sums = [totals("all_reduce", name, size, count) for name in allowed]
        assert any(s.rounds <= 2 * math.ceil(math.log2(size)) for s in sums)
        assert any(max(s.sent) <= 2 * count for s in sums)


@pytest.mark.parametrize("name", ["binomial", "halving_doubling", "doubling"])
def test_rounds_are_twice_the_logarithm_at_most(name: str) -> None:
    for size in SIZES[1:]:
        rounds = totals("all_reduce", name, size, 960).rounds
        assert rounds <= 2 * math.ceil(math.log2(size)), size
        if name == "doubling" and size & (size - 1) == 0:
            assert rounds == math.log2(size)


def test_halving_doubling_sends_no_more_than_the_data_each_way() -> None:
    for size in SIZES[1:]:
        sent = totals("all_reduce", "halving_doubling", size, 960).sent
        assert max(sent) <= 2 * 960, size
    assert totals("all_reduce", "halving_doubling", 8, 960).sent == [2 * 960 * 7 // 8] * 8


@pytest.mark.parametrize("name", ["direct", "ring"])
def test_direct_and_ring_send_the_least_there_is(name: str) -> None:
    for size in (2, 3, 4, 5, 6, 8, 10, 12, 15, 16):
        assert totals("all_reduce", name, size, 960).sent == [2 * 960 * (size - 1) // size] * size


@every_planner
def test_predicted_rounds_are_near_those_of_the_schedule(collective: str, name: str) -> None:
    for size in (2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33):
        for segments in (1, 2, 3):
            world = _plan.plan_world(collective, name, size, 960, segments=segments)
            counted = _plan.totals(world, "").rounds
            rows = schedule.planners(size=size, count=960, segments=segments)
            (row,) = (r for r in rows if (r["collective"], r["name"]) == (collective, name))
            assert counted <= row["rounds"] <= max(2 * counted, counted + 2)
            if name in ("direct", "ring", "halving_doubling", "bruck", "dissemination"):
                assert counted == row["rounds"]


@pytest.mark.parametrize(
    ("collective", "log_rounds", "least_bytes", "factor"),
    [
        ("reduce_scatter", "binomial", "direct", 1),
        ("all_gather", "bruck", "bruck", 33),
        ("broadcast", "binomial", "scatter_ring", 2),
        ("barrier", "dissemination", "dissemination", 1),
    ],
)
def test_every_collective_has_a_quick_and_a_sparing_planner(
    collective: str, log_rounds: str, least_bytes: str, factor: int
) -> None:
    for size in SIZES[1:]:
        logarithm = math.ceil(math.log2(size))
        twice = 2 if collective == "reduce_scatter" else 1
        assert totals(collective, log_rounds, size, 960).rounds <= twice * logarithm
        assert max(totals(collective, least_bytes, size, 960).sent) <= factor * 960


def test_segments_do_not_add_bytes() -> None:
    for collective, name in PLANNERS:
        once = totals(collective, name, 6, 960)
        assert totals(collective, name, 6, 960, lanes=2, segments=3).sent == once.sent


def test_no_step_has_an_empty_half() -> None:
    for collective, name in PLANNERS:
        for lanes in _plan.plan_world(collective, name, 5, 3, lanes=2, segments=3):
            for step in (step for lane in lanes for step in lane):
                assert (step["to"] is None) == (step["send"] is None)
                assert (step["from"] is None) == (step["recv"] is None)
                assert step["to"] is not None or step["from"] is not None


# --- the prover notices


def survives(collective: str, name: str, mutation: str) -> bool:
    """Whether the fault is none: a ring turned around is a ring, and a token means nothing."""
    return (name, mutation) == ("ring", "swap_action") or (
        (collective, mutation) == ("barrier", "send_unset")
    )


SMALL_WORLDS = [1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize("mutation", testing.mutations())
def test_every_fault_in_every_step_is_noticed(mutation: str) -> None:
    made = 0
    for collective, name in PLANNERS:
        if survives(collective, name, mutation):
            continue
        for size in SMALL_WORLDS:
            if size == 1 and mutation == "other_lane":
                continue  # a local copy is as right in another lane
            for lanes, segments, root in ((1, 1, 0), (2, 2, size - 1)):
                worlds, survivors, _ = testing.mutate(
                    collective, name, size, 25, mutation, lanes, segments, root
                )
                assert survivors == [], f"{collective} by {name}, {size} ranks"
                made += worlds
    assert made > 100


SEND = {"to": 1, "send": ("input", 0, 4)}
FOLD = {
    "from": 1,
    "recv": ("output", 0, 4),
    "held": ("input", 0, 4),
    "action": "fold_upper",
    "leaf_arrived": True,
    "leaf_held": True,
    "finish": True,
}
GOOD = [
    [[{**SEND, "to": 1}, FOLD]],
    [[{**FOLD, "from": 0, "action": "fold_lower"}, {**SEND, "to": 0}]],
]


def edited(rank: int, step: int, **changes: Any) -> list[list[list[dict[str, Any]]]]:
    world = [[[dict(s) for s in lane] for lane in lanes] for lanes in GOOD]
    world[rank][0][step].update(changes)
    return world


def test_a_schedule_written_by_hand_is_proved_apart() -> None:
    assert testing.check("all_reduce", 4, GOOD) == ("", "canonical")


def test_what_works_apart_may_fail_in_place() -> None:
    # Rank 1 has overwritten its input, which is its output, before it sends it.
    problem, order = testing.check("all_reduce", 4, GOOD, in_place=True)
    assert problem == "rank 0, lane 0, step 1: scales a leaf a second time"
    assert order == "none"


@pytest.mark.parametrize(
    ("world", "problem"),
    [
        (edited(0, 0, to=None, send=None), "deadlock"),
        (edited(0, 0, to=5), "names a rank that does not exist"),
        (edited(0, 0, send=("input", 0, 3)), "expects 4 elements of rank 0, who sends 3"),
        (edited(0, 0, send=("input", 1, 4)), "sends from outside the buffer"),
        (edited(0, 0, send=("output", 0, 4)), "reads what was never set"),
        (edited(0, 0, send=("scratch", 0, 4)), "reads what was never set"),
        (edited(0, 1, recv=("output", 2, 4)), "receives outside the buffer"),
        (edited(0, 1, recv=("input", 0, 4)), "writes to input"),
        (edited(0, 1, recv=("scratch", 0, 4)), "was never set"),
        (edited(0, 1, leaf_arrived=False), "takes a leaf without scaling it"),
        (edited(0, 1, leaf_held=False), "takes a leaf without scaling it"),
        (edited(0, 1, finish=False), "was never finished"),
        (edited(0, 1, action="store"), "holds an operand but does not fold"),
        (edited(0, 1, action="store", held=None, leaf_held=False), "lacks contributions"),
        (edited(0, 1, action="fold_lower"), "differs from that of a lower rank"),
        (edited(1, 0, to=0, send=("output", 0, 4)), "overlapping slices"),
        (edited(0, 0, **{"from": 0, "recv": ("output", 0, 4)}), "itself and to another"),
    ],
)
def test_each_fault_is_named(world: Any, problem: str) -> None:
    found, order = testing.check("all_reduce", 4, world, scratch=4)
    assert problem in found
    assert order == "none"


def test_doubled_contributions_and_scales_are_named() -> None:
    again = {**FOLD, "held": None, "leaf_held": False}
    world = [[[SEND, {**FOLD, "finish": False}, again]], [[*GOOD[1][0], {**SEND, "to": 0}]]]
    problem, _ = testing.check("all_reduce", 4, world)
    assert problem.endswith("folds the contribution of rank 1 a second time")
    world[0][0][2] = {**again, "action": "store", "finish": False, "recv": ("scratch", 0, 4)}
    assert testing.check("all_reduce", 4, world, scratch=4)[0].endswith("was never finished")
    once_more = {"to": 0, "send": ("output", 0, 4), "from": 0, "recv": ("output", 0, 4)}
    alone = {**once_more, "send": ("input", 0, 4), "leaf_arrived": True, "finish": True}
    assert testing.check("all_reduce", 4, [[[alone]]]) == ("", "canonical")
    for flag, problem in (
        ("leaf_arrived", "scales a leaf a second time"),
        ("finish", "finishes a slice a second time"),
    ):
        found, _ = testing.check("all_reduce", 4, [[[alone, {**once_more, flag: True}]]])
        assert found.endswith(problem)


def test_lanes_that_touch_each_others_data_are_named() -> None:
    copy = {"to": 0, "send": ("input", 0, 4), "from": 0, "recv": ("output", 0, 4)}
    assert testing.check("broadcast", 4, [[[copy]]]) == ("", "canonical")
    assert "another lane writes" in testing.check("broadcast", 4, [[[copy], [copy]]])[0]
    back = {**copy, "send": ("output", 0, 4), "recv": ("scratch", 0, 4)}
    assert "another lane" in testing.check("broadcast", 4, [[[copy], [back]]], scratch=4)[0]


def test_a_deadlock_names_who_waits_for_whom() -> None:
    wait = [{"from": 1 - r, "recv": ("scratch", 1, 1)} for r in range(2)]
    send = [{"to": 1 - r, "send": ("scratch", 0, 1)} for r in range(2)]
    problem, _ = testing.check("barrier", 0, [[[wait[r], send[r]]] for r in range(2)], scratch=2)
    assert problem == (
        "deadlock: rank 0, lane 0, step 0: waits for ever to receive from rank 1 "
        "(2 lanes are stuck)"
    )
    # Nothing is buffered, so sending first is no better.
    problem, _ = testing.check("barrier", 0, [[[send[r], wait[r]]] for r in range(2)], scratch=2)
    assert problem.startswith("deadlock")
    both = [[[{**send[r], **wait[r]}]] for r in range(2)]
    assert testing.check("barrier", 0, both, scratch=2) == ("", "canonical")


def test_a_barrier_that_lets_somebody_leave_early_is_named() -> None:
    token, place = ("scratch", 0, 1), ("scratch", 1, 1)
    world = [
        [[{"to": (r + 1) % 3, "send": token, "from": (r + 2) % 3, "recv": place}]] for r in range(3)
    ]
    problem, _ = testing.check("barrier", 0, world, scratch=2)
    assert problem == "rank 0 leaves without having heard of rank 1"


# --- choosing


def test_the_model_prefers_rounds_for_small_and_bytes_for_large_data() -> None:
    assert schedule.choose("all_reduce", 8, 16) == "doubling"
    assert schedule.choose("all_reduce", 8, 1 << 24) in ("halving_doubling", "direct")
    assert schedule.choose("broadcast", 16, 4) == "binomial"
    assert schedule.choose("broadcast", 16, 1 << 24) == "scatter_ring"


def test_the_choice_is_always_allowed_and_does_not_depend_on_the_rank() -> None:
    for level in ("canonical", "fast"):
        for size in SIZES:
            for count in (1, 1 << 12, 1 << 24):
                for collective in dict.fromkeys(c for c, _ in PLANNERS):
                    name = schedule.choose(collective, size, count, 4, level)
                    assert schedule.require(collective, name, size, count, level) == name


def test_a_forced_planner_below_the_level_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(_core.InvalidArgument, match="only same_on_all_ranks") as caught:
        schedule.require("all_reduce", "ring", 3, 100, "canonical")
    assert "direct, binomial, halving_doubling, doubling" in caught.value.advice
    assert "ring" not in caught.value.advice
    assert schedule.require("all_reduce", "ring", 3, 100, "fast") == "ring"
    assert schedule.require("all_reduce", "ring", 2, 100, "canonical") == "ring"


def test_unknown_names_are_refused_with_the_allowed_ones() -> None:
    with pytest.raises(_core.InvalidArgument, match="'magic' does not exist") as caught:
        schedule.require("broadcast", "magic", 3, 100)
    assert "binomial, scatter_ring" in caught.value.advice
    with pytest.raises(_core.InvalidArgument, match="no collective 'all_magic'"):
        schedule.plan("all_magic", "ring", 0, 2, 10)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 2},
        {"rank": -1},
        {"size": 0, "rank": 0},
        {"lanes": 0},
        {"segments": 0},
        {"root": 2},
    ],
)
def test_shapes_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    shape = {"rank": 0, "size": 2, "count": 10} | wrong
    with pytest.raises(_core.InvalidArgument):
        schedule.plan("all_reduce", "ring", **shape)


# --- text


def test_the_example_of_render_is_right() -> None:
    results = doctest.testmod(_plan)
    assert results.attempted == 1
    assert results.failed == 0


def test_a_plan_of_less_than_nothing_is_refused() -> None:
    with pytest.raises(_core.InvalidArgument, match="at least 0 elements, not -1"):
        _plan.render("all_reduce", None, 2, -1)


def test_a_rendered_plan_shows_operands_in_order_and_what_it_adds_up_to() -> None:
    text = _plan.render("all_reduce", "halving_doubling", 3, 8, itemsize=2)
    assert "output[0:4] = prescale(input[0:4]) ⊕ prescale(from 1)" in text
    assert "output[0:4] = postscale(output[0:4] ⊕ prescale(from 2))" in text
    assert "rounds  2" in text
    assert "order   canonical" in text


def test_every_planner_can_be_rendered() -> None:
    for collective, name in PLANNERS:
        text = _plan.render(collective, name, 5, 7, lanes=2, segments=2, root=3)
        assert f"{collective} by {name}: 5 ranks" in text
        assert "rank 4" in text
