"""Every planner is proved for every size, and the prover is proved to notice."""

from __future__ import annotations

import doctest
import math
from typing import Any

import numpy as np
import pytest

from core_testing import testing
from farandole import _core, _plan

schedule = _core.schedule

PLANNERS = [(row["collective"], row["name"]) for row in schedule.planners()]
CANONICAL = ["direct", "binomial", "halving_doubling", "doubling"]
SIZES = list(range(1, 34))
COUNTS = [0, 1, 2, 7, 64, 133, 1000]
ROOTED = ["broadcast", "reduce", "gather", "scatter"]
UNEVEN = ["reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"]

every_planner = pytest.mark.parametrize(("collective", "name"), PLANNERS)


def orders(size: int, count: int = 1000) -> dict[tuple[str, str], str]:
    return {
        (row["collective"], row["name"]): row["order"]
        for row in schedule.planners(size=size, count=count)
    }


def places(collective: str) -> int:
    """Apart and, for most collectives, in place."""
    return 1 + schedule.goes_in_place(collective)


def totals(collective: str, name: str, size: int, count: int, **how: int) -> _plan.Totals:
    return _plan.totals(_plan.plan_world(_plan.Shape(collective, name, size, count, **how)), "")


def test_every_planner_says_in_one_sentence_what_it_does() -> None:
    for row in schedule.planners():
        assert row["summary"][0].isupper(), row["name"]
        assert row["summary"].endswith("."), row["name"]
        assert 40 < len(row["summary"]) < 240, row["name"]


# --- proofs


@every_planner
def test_every_size_is_proved_and_has_the_claimed_order(collective: str, name: str) -> None:
    # Where the whole is as large as size times count, 33 ranks would take long.
    sizes = SIZES[:17] if collective in UNEVEN[1:] else SIZES
    counts = COUNTS[:6] if collective in UNEVEN[1:] else COUNTS
    proved, failures = testing.prove_all(collective, name, sizes, counts, [1, 2, 3], [1, 2, 3])
    assert failures == []
    assert proved == places(collective) * len(sizes) * len(counts) * 3 * 3


@pytest.mark.parametrize(("collective", "name"), [(c, n) for c, n in PLANNERS if c in ROOTED])
def test_rooted_collectives_are_proved_from_every_root(collective: str, name: str) -> None:
    proved, failures = testing.prove_all(
        collective, name, list(range(1, 14)), [0, 1, 7, 64], [1, 2], [1, 3], all_roots=True
    )
    assert failures == []
    assert proved == 2 * sum(range(1, 14)) * 4 * 2 * 2


def uneven_counts(collective: str, size: int) -> list[list[int]]:
    """All that one rank has, nothing at all, every third nothing, and large steps."""
    number = size * size if collective == "all_to_all" else size
    return [
        [9 if i == number // 2 else 0 for i in range(number)],
        [0] * number,
        [(5 * i + 2) % 7 if i % 3 else 0 for i in range(number)],
        [1 << (i % 6) for i in range(number)],
    ]


@pytest.mark.parametrize(("collective", "name"), [(c, n) for c, n in PLANNERS if c in UNEVEN])
def test_shares_that_differ_are_proved_for_every_size(collective: str, name: str) -> None:
    fits = (collective, name) != ("all_to_all", "bruck")
    for size in range(1, 18):
        proved, failures = testing.prove_all(
            collective,
            name,
            [size],
            [],
            [1, 2, 3],
            [1, 2],
            all_roots=collective in ROOTED and size < 10,
            uneven=uneven_counts(collective, size),
        )
        assert failures == []
        roots = size if collective in ROOTED and size < 10 else 1
        assert proved == fits * places(collective) * 4 * 3 * 2 * roots


def test_bruck_does_not_fit_blocks_that_differ() -> None:
    assert schedule.require("all_to_all", "direct", 2, 0, counts=[1, 2, 3, 4]) == "direct"
    with pytest.raises(_core.InvalidArgument, match="does not fit") as caught:
        schedule.require("all_to_all", "bruck", 2, 0, counts=[1, 2, 3, 4])
    assert "direct" in caught.value.advice
    assert "bruck" not in caught.value.advice


@pytest.mark.parametrize(
    ("collective", "counts", "problem"),
    [
        ("gather", [1, 2], "gather over 3 ranks takes 3 counts, one for each rank, not 2"),
        ("all_to_all", [1] * 3, "takes 9 counts, from * size + to, not 3"),
        ("all_reduce", [1, 2, 3], "all_reduce has no uneven form"),
        ("broadcast", [1, 2, 3], "broadcast has no uneven form"),
        ("scatter", [1 << 63, 1 << 63, 0], "more than any memory holds"),
    ],
)
def test_counts_that_make_no_sense_are_refused(
    collective: str, counts: list[int], problem: str
) -> None:
    with pytest.raises(_core.InvalidArgument) as caught:
        schedule.require(collective, "direct", 3, 1, counts=counts)
    assert problem in str(caught.value)
    with pytest.raises(_core.InvalidArgument) as caught:
        schedule.choose(collective, 3, 1, counts=counts)
    assert problem in str(caught.value)


# --- several leaves on a rank

FOLDING = ["all_reduce", "reduce_scatter", "reduce"]


def deals(leaves: int, size: int) -> list[list[int]]:
    """As equal as can be, all on one rank, in falling numbers, and some anyhow."""
    equal = [leaves // size + (r < leaves % size) for r in range(size)]
    one = [leaves if r == size // 2 else 0 for r in range(size)]
    halves = [leaves // 2 ** (r + 1) for r in range(size)]
    halves[0] += leaves - sum(halves)
    anyhow = [0] * size
    for leaf in range(leaves):
        anyhow[leaf * leaf * 7 % size] += 1
    return [equal, one, halves, anyhow]


@pytest.mark.parametrize("collective", FOLDING)
def test_any_deal_of_leaves_is_folded_as_one_leaf_each(collective: str) -> None:
    for leaves in range(1, 17):
        for size in range(1, 9):
            proved, failures = testing.prove_all(
                collective,
                "direct",
                [size],
                [0, 1, 7, 33],
                [1, 2],
                [1, 3],
                all_roots=collective == "reduce" and size < 5,
                leaves=deals(leaves, size),
            )
            assert failures == []
            roots = size if collective == "reduce" and size < 5 else 1
            assert proved == 2 * 4 * 4 * 2 * 2 * roots


@pytest.mark.parametrize(("collective", "name"), [(c, n) for c, n in PLANNERS if c in FOLDING])
def test_every_planner_takes_equal_powers_of_two_of_leaves(collective: str, name: str) -> None:
    for size in range(1, 9):
        for each in (1, 2, 4):
            proved, failures = testing.prove_all(
                collective, name, [size], [0, 1, 33], [1, 2], [1, 3], leaves=[[each] * size]
            )
            assert failures == []
            assert proved == 2 * 3 * 2 * 2
    if name == "direct":
        assert schedule.require(collective, name, 2, 7, leaves=[3, 4]) == name
    else:
        with pytest.raises(_core.InvalidArgument, match="does not fit"):
            schedule.require(collective, name, 2, 7, "fast", leaves=[3, 3])


@pytest.mark.parametrize(
    ("collective", "leaves", "problem"),
    [
        ("all_reduce", [1, 2], "leaves are told for 2 of 3 ranks"),
        ("all_reduce", [1, -1, 2], "rank 1 cannot hold -1 leaves"),
        ("all_reduce", [0, 0, 0], "no leaves at all"),
        ("broadcast", [1, 1, 1], "broadcast folds nothing"),
    ],
)
def test_leaves_that_make_no_sense_are_refused(
    collective: str, leaves: list[int], problem: str
) -> None:
    with pytest.raises(_core.InvalidArgument, match=problem):
        schedule.choose(collective, 3, 7, leaves=leaves)


Memory = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]


def run(
    world: list[_plan.Lanes], memories: list[Memory], prescale: float, postscale: float
) -> None:
    """Does what the schedules say, a step when both ends have come to it."""
    at = [0] * len(world)
    steps = [[step for lane in lanes for step in lane] for lanes in world]
    travelling: dict[tuple[int, int], list[Any]] = {}
    sent = [False] * len(world)
    moved = True
    while moved:
        moved = False
        for rank, lane in enumerate(steps):
            if at[rank] == len(lane):
                continue
            step = lane[at[rank]]

            def place(name: str, step: _plan.Step = step, rank: int = rank) -> Any:
                space, offset, count = step[name]
                return memories[rank][space][offset : offset + count]

            if step["to"] is not None and not sent[rank]:
                travelling.setdefault((rank, step["to"]), []).append(place("send").copy())
                sent[rank] = moved = True
            if step["from"] is not None:
                arrived = travelling.get((step["from"], rank))
                if not arrived:
                    continue
                value = arrived.pop(0) * np.float32(prescale if step["leaf_arrived"] else 1)
                if step["action"] != "store":
                    held = place("held") * np.float32(prescale if step["leaf_held"] else 1)
                    value = held + value if step["action"] == "fold_upper" else value + held
                place("recv")[:] = value * np.float32(postscale if step["finish"] else 1)
            at[rank] += 1
            sent[rank] = False
            moved = True
    assert at == [len(lane) for lane in steps]


def test_eight_leaves_have_the_same_bits_on_any_number_of_ranks() -> None:
    count = 37
    random = np.random.default_rng(8)
    data = (random.standard_normal((8, count)) * 10.0 ** random.integers(-6, 6, (8, count))).astype(
        np.float32
    )
    scaled = data * np.float32(0.3)
    pairs = [scaled[i] + scaled[i + 1] for i in range(0, 8, 2)]
    expected = ((pairs[0] + pairs[1]) + (pairs[2] + pairs[3])) * np.float32(0.125)
    assert not np.array_equal(scaled.sum(axis=0) * np.float32(0.125), expected)  # order shows
    for size in (1, 2, 3, 5, 8):
        for leaves in deals(8, size):
            for row in schedule.planners(size, count, collective="all_reduce", leaves=leaves):
                if row["order"] != "canonical":
                    continue
                world = [
                    schedule.plan("all_reduce", row["name"], r, size, count, leaves=leaves)
                    for r in range(size)
                ]
                first = np.cumsum([0, *leaves])
                memories: list[Memory] = [
                    {
                        "input": data[first[r] : first[r + 1]].ravel(),
                        "output": np.full(count, np.nan, np.float32),
                        "scratch": np.full(20 * count, np.nan, np.float32),
                    }
                    for r in range(size)
                ]
                run(world, memories, 0.3, 0.125)
                for memory in memories:
                    assert memory["output"].tobytes() == expected.tobytes(), (row["name"], leaves)


# --- large worlds


def test_a_world_of_more_than_64_ranks_is_proved() -> None:
    for collective, name in PLANNERS:
        count = 3 if collective == "all_to_all" else 131
        _, failures = testing.prove_all(collective, name, [65, 100, 130], [count], [1], [1])
        assert failures == []


@pytest.mark.parametrize("name", CANONICAL)
def test_canonical_planners_are_canonical_for_every_size(name: str) -> None:
    for size in SIZES:
        assert orders(size)["all_reduce", name] == "canonical"
        assert schedule.prove("all_reduce", name, size, 1000) == ("", "canonical")


@pytest.mark.parametrize(
    ("collective", "name"),
    [("all_reduce", "ring"), ("reduce_scatter", "ring"), ("all_reduce", "double_tree")],
)
def test_rings_and_two_trees_are_canonical_for_two_ranks_at_most(
    collective: str, name: str
) -> None:
    for size in SIZES:
        expected = "canonical" if size <= 2 else "same_on_all_ranks"
        assert orders(size)[collective, name] == expected
        assert schedule.prove(collective, name, size, 1000) == ("", expected)


def test_reduce_is_canonical_at_every_root() -> None:
    for name in ("direct", "binomial"):
        for root in range(7):
            assert schedule.prove("reduce", name, 7, 100, root=root) == ("", "canonical")


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
            world = _plan.plan_world(_plan.Shape(collective, name, size, 960, segments=segments))
            counted = _plan.totals(world, "").rounds
            rows = schedule.planners(size=size, count=960, segments=segments)
            (row,) = (r for r in rows if (r["collective"], r["name"]) == (collective, name))
            assert counted <= row["rounds"] <= max(2 * counted, counted + 2)
            if name in ("ring", "halving_doubling", "bruck", "dissemination"):
                assert counted == row["rounds"]


@pytest.mark.parametrize(
    ("collective", "log_rounds", "least_bytes", "factor"),
    [
        ("reduce_scatter", "binomial", "direct", 1),
        ("all_gather", "bruck", "bruck", 33),
        ("broadcast", "binomial", "scatter_ring", 2),
        ("barrier", "dissemination", "dissemination", 1),
        ("reduce", "binomial", "direct", 2),
        ("gather", "binomial", "direct", 1),
        ("scatter", "binomial", "direct", 33),
        ("all_to_all", "bruck", "direct", 33),
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


def longest_path(world: list[_plan.Lanes]) -> int:
    """Bytes, or elements, on the critical path of one lane. A transfer begins when both its ends
    have reached it, and a step ends when both its halves have ended."""
    steps = [lanes[0] for lanes in world]
    at, now = [0] * len(world), [0] * len(world)
    ends: list[dict[str, int]] = [{} for _ in world]  # of the halves of the present step
    moved = True
    while moved:
        moved = False
        for rank, lane in enumerate(steps):
            if at[rank] == len(lane):
                continue
            step, done = lane[at[rank]], ends[rank]
            for half in ("to", "from"):
                if step[half] in (None, rank):
                    done.setdefault(half, now[rank])
            peer = step["to"]
            if "to" not in done and at[peer] < len(steps[peer]):
                other = steps[peer][at[peer]]
                if other["from"] == rank and "from" not in ends[peer]:
                    end = max(now[rank], now[peer]) + step["send"][2]
                    done["to"] = ends[peer]["from"] = end
            if len(done) == 2:
                now[rank] = max(done.values())
                at[rank] += 1
                ends[rank] = {}
                moved = True
    assert at == [len(lane) for lane in steps], "these schedules do not fit together"
    return max(now)


def is_regular(collective: str, name: str, size: int) -> bool:
    """Every rank does the same at the same time, so that nobody waits for another's turn."""
    if name == "bruck":
        return collective == "all_to_all"
    return name in ("direct", "ring") or (name == "halving_doubling" and size in (2, 4, 8, 16))


@every_planner
def test_predicted_bytes_are_those_of_the_longest_path(collective: str, name: str) -> None:
    for size in (2, 3, 4, 5, 6, 7, 8, 9, 15, 16):
        for segments in (1, 3):
            count = 720 * 7
            world = _plan.plan_world(_plan.Shape(collective, name, size, count, segments=segments))
            rows = schedule.planners(size, count, 1, segments, 1, collective=collective)
            (predicted,) = (row["bytes"] for row in rows if row["name"] == name)
            counted = longest_path(world)
            if collective == "barrier":
                assert predicted == 0
            elif is_regular(collective, name, size):
                assert counted == pytest.approx(predicted, rel=0.01), (size, segments)
            else:
                assert counted / 2 <= predicted <= 2 * counted, (size, segments)


def test_two_trees_share_the_load() -> None:
    for size in (4, 5, 8, 13, 16):
        together = totals("all_reduce", "double_tree", size, 960, lanes=2, segments=4).sent
        alone = totals("all_reduce", "double_tree", size, 960, lanes=1, segments=4).sent
        assert max(together) <= 2 * 960
        assert max(alone) >= 2.5 * 960


def test_segments_do_not_add_bytes() -> None:
    for collective, name in PLANNERS:
        if name == "double_tree":
            continue  # its lanes are two trees
        once = totals(collective, name, 6, 960)
        assert totals(collective, name, 6, 960, lanes=2, segments=3).sent == once.sent


def test_no_step_has_an_empty_half() -> None:
    for collective, name in PLANNERS:
        for lanes in _plan.plan_world(_plan.Shape(collective, name, 5, 3, lanes=2, segments=3)):
            for step in (step for lane in lanes for step in lane):
                assert (step["to"] is None) == (step["send"] is None)
                assert (step["from"] is None) == (step["recv"] is None)
                assert step["to"] is not None or step["from"] is not None


# --- the prover notices


def survives(collective: str, name: str, mutation: str) -> bool:
    """Whether the fault is none: a ring turned around is a ring, two trees fold in any order, a
    token means nothing, and a copy of what nobody else is sent is as right in another lane."""
    return (
        (name in ("ring", "double_tree") and mutation == "swap_action")
        or (collective, mutation) == ("barrier", "send_unset")
        or (
            (name, mutation) == ("direct", "other_lane")
            and collective in ("gather", "scatter", "all_to_all")
        )
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
    assert problem.endswith("folds the contribution of leaf 1 a second time")
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
    assert schedule.choose("reduce", 16, 16) == "binomial"
    assert schedule.choose("reduce", 16, 1 << 24) == "direct"
    assert schedule.choose("gather", 128, 1) == "binomial"
    assert schedule.choose("gather", 8, 1 << 20) == "direct"
    assert schedule.choose("all_to_all", 16, 16) == "bruck"
    assert schedule.choose("all_to_all", 16, 1 << 20) == "direct"
    # One rank has it all: a ring passes it on from rank to rank.
    assert schedule.choose("all_gather", 8, 0, counts=[1 << 24] + [0] * 7) == "bruck"


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
        _plan.render(_plan.Shape("all_reduce", None, 2, -1))


def test_a_rendered_plan_shows_operands_in_order_and_what_it_adds_up_to() -> None:
    text = _plan.render(_plan.Shape("all_reduce", "halving_doubling", 3, 8), itemsize=2)
    assert "output[0:4] = prescale(input[0:4]) ⊕ prescale(from 1)" in text
    assert "output[0:4] = postscale(output[0:4] ⊕ prescale(from 2))" in text
    assert "rounds  2" in text
    assert "order   canonical" in text


def test_a_rendered_plan_of_uneven_shares_names_them() -> None:
    text = _plan.render(_plan.Shape("gather", "direct", 3, 0, root=2, counts=[3, 0, 5]))
    assert "gather by direct: 3 ranks, counts 3,0,5" in text
    assert "output[0:3] = from 0" in text
    assert "from 1" not in text
    assert "output[3:8] = input[0:5]" in text
    text = _plan.render(_plan.Shape("all_to_all", None, 2, 0, counts=[0, 1, 2, 3]))
    assert "order   canonical (proved, apart)" in text
    with pytest.raises(_core.InvalidArgument, match="at least 0 elements, not -1"):
        _plan.render(_plan.Shape("gather", None, 2, 0, counts=[3, -1]))


def test_every_planner_can_be_rendered() -> None:
    for collective, name in PLANNERS:
        text = _plan.render(_plan.Shape(collective, name, 5, 7, lanes=2, segments=2, root=3))
        assert f"{collective} by {name}: 5 ranks" in text
        assert "rank 4" in text
