"""Schedules over hosts: proofs for any ranks on any hosts, and the load of their links."""

from __future__ import annotations

import itertools

import pytest

from core_testing import testing
from farandole import _core, _plan
from farandole._host_parts import host_of_each

schedule = _core.schedule

# In a row, uneven, alternating, the lowest rank alone, and three hosts anyhow; numbered anyhow.
LAYOUTS = [
    "1,2",
    "2,2",
    "1,3",
    "3,5",
    "2,2,1",
    "0:1:0:1",
    "0:1:1:0",
    "7:3:7:3:9:9:9",
    "2:0:1:0:2:2",
]
LEVELLED = ["hierarchical", "whole_host"]


def link_share(name: str, host_of: list[int], count: int = 960) -> float:
    """Elements that the busiest link carries, as a fraction of the count."""
    world = _plan.plan_world(_plan.Shape("all_reduce", name, len(host_of), count, host_of=host_of))
    return _plan.link_elements(world, host_of) / count


def rows(host_of: list[int], count: int = 960) -> dict[str, str]:
    """The order of each planner that fits."""
    return {
        row["name"]: row["order"]
        for row in schedule.planners(len(host_of), count, collective="all_reduce", host_of=host_of)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_size_is_proved_on_any_hosts(layout: str) -> None:
    host_of, counts = host_of_each(layout), [0, 1, 2, 7, 64, 133]
    fitting = [name for name in LEVELLED if name in rows(host_of)]
    assert "hierarchical" in fitting
    for name in fitting:
        proved, failures = testing.prove_all(
            "all_reduce", name, [len(host_of)], counts, [1, 2], [1, 3], host_of=[host_of]
        )
        assert failures == []
        assert proved == 2 * len(counts) * 2 * 2


def test_every_deal_of_five_ranks_among_hosts_is_proved() -> None:
    deals = [list(deal) for deal in itertools.product(range(3), repeat=5)]
    for name in LEVELLED:
        proved, failures = testing.prove_all(
            "all_reduce", name, [5], [1, 13], [1], [2], host_of=deals
        )
        assert failures == []
        fitting = [deal for deal in deals if name in rows(deal)]
        assert proved == 2 * 2 * len(fitting)
        assert len(fitting) > 100, name


def test_levels_are_for_hosts_that_ranks_share() -> None:
    for host_of in ([], [0] * 4, [0, 1, 2, 3]):
        with pytest.raises(_core.InvalidArgument, match="does not fit") as caught:
            schedule.plan("all_reduce", "hierarchical", 0, 4, 10, host_of=host_of)
        assert "hierarchical" not in caught.value.advice
    # Where each host is a node of the canonical tree, the two would be the same.
    assert "whole_host" not in rows(host_of_each("2,2"))
    scattered = rows(host_of_each("0:1:0:1"))
    assert scattered | {"hierarchical": "canonical"} == scattered
    assert scattered["whole_host"] == "same_on_all_ranks"
    with pytest.raises(_core.InvalidArgument, match="hosts are told for 3 of 4 ranks"):
        schedule.choose("all_reduce", 4, 10, host_of=[0, 0, 1])


@pytest.mark.parametrize(("hosts", "each"), [(2, 2), (2, 4), (4, 2), (3, 4)])
def test_a_link_carries_what_an_all_reduce_of_whole_hosts_would(hosts: int, each: int) -> None:
    least = 2 * (hosts - 1) / hosts
    in_a_row = [rank // each for rank in range(hosts * each)]
    if "whole_host" not in rows(in_a_row):
        assert link_share("hierarchical", in_a_row) == least
    alternating = [rank % hosts for rank in range(hosts * each)]
    assert link_share("whole_host", alternating) == least
    assert link_share("ring", alternating) == 2 * each * (hosts * each - 1) / (hosts * each)


def test_the_choice_follows_what_links_carry() -> None:
    alternating = host_of_each("0:1:0:1")
    assert schedule.choose("all_reduce", 4, 16, host_of=alternating) == "doubling"
    assert schedule.choose("all_reduce", 4, 1 << 22, host_of=alternating) == "hierarchical"
    assert (
        schedule.choose("all_reduce", 4, 1 << 22, level="fast", host_of=alternating) == "whole_host"
    )
    for layout in LAYOUTS:
        host_of = host_of_each(layout)
        for collective in ("all_reduce", "all_gather", "broadcast", "reduce", "all_to_all"):
            name = schedule.choose(collective, len(host_of), 1 << 16, host_of=host_of)
            schedule.plan(collective, name, 0, len(host_of), 10, host_of=host_of)


@pytest.mark.parametrize("mutation", testing.mutations())
def test_every_fault_in_every_step_is_noticed(mutation: str) -> None:
    made = 0
    for name, layout in (
        ("hierarchical", "0:1:1:0"),
        ("hierarchical", "2,1"),
        ("whole_host", "0:1:0"),
    ):
        if (name, mutation) == ("whole_host", "swap_action"):
            continue  # it claims no order
        host_of = host_of_each(layout)
        for lanes, segments in ((1, 1), (2, 2)):
            worlds, survivors, _ = testing.mutate(
                "all_reduce", name, len(host_of), 25, mutation, lanes, segments, host_of=host_of
            )
            assert survivors == [], f"{name} on {layout}"
            made += worlds
    assert made > 50
