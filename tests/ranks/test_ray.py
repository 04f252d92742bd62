"""farandole.ray: ranks that are actors, on a cluster of two nodes of this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import farandole as fd

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [
    pytest.mark.xdist_group("ray"),  # one cluster
    pytest.mark.filterwarnings("default"),  # Ray's own
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    from ray.cluster_utils import Cluster

    made = Cluster(True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        made.add_node(num_cpus=2)
        ray.init(address=made.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture(autouse=True)
def leaves_nothing(cluster: None) -> Iterator[None]:  # noqa: ARG001 - begun before it
    yield
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}


def run(*args: Any, **options: Any) -> Any:
    import farandole.ray

    return farandole.ray.run(*args, **options)


# Ray sends these functions by value: ranks need not find this module.


def _places(settings: list[str]) -> Any:
    import numpy
    import ray

    import farandole

    farandole.init()
    total = farandole.all_reduce(numpy.full(1001, farandole.rank() + 1.0))
    node = ray.get_runtime_context().get_node_id()
    place = (farandole.rank(), farandole.size(), farandole.local_rank(), farandole.cross_rank())
    return place, node, total.tolist(), [os.environ.get(name) for name in settings]


def test_actors_are_ranks_numbered_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARANDOLE_WARN_AFTER", "7")
    names = ["FARANDOLE_WARN_AFTER", "MORE"]
    answers = run(_places, (names,), num_workers=4, env={"MORE": "2"}, strategy="SPREAD")
    places, nodes, totals, settings = zip(*answers, strict=True)
    assert list(places) == [(r, 4, r, 0) for r in range(4)], "one machine, whatever the nodes"
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert all(total == [10.0] * 1001 for total in totals)
    assert list(settings) == [["7", "2"]] * 4


def test_nodes_may_be_hosts() -> None:
    answers = run(_places, ([],), num_workers=4, env={"FARANDOLE_SPLIT_HOSTS": "2,2"})
    places = [place for place, *_ in answers]
    assert places == [(0, 4, 0, 0), (1, 4, 1, 0), (2, 4, 0, 1), (3, 4, 1, 1)]
    assert all(total == [10.0] * 1001 for _, _, total, _ in answers)


def _fails(how: str) -> None:
    import farandole

    farandole.init()
    if farandole.rank() == 1:
        if how == "raises":
            raise KeyError("mine alone")
        if how == "leaves":
            return
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        farandole.all_reduce(np.ones(3))


def test_an_exception_is_the_one_of_the_rank_that_raised_it() -> None:
    with pytest.raises(KeyError, match="mine alone") as raised:
        run(_fails, ("raises",), num_workers=3)
    assert "rank 1 raised" in str(raised.value.__cause__)


def test_a_rank_that_died_is_named_with_what_the_others_say() -> None:
    import farandole.ray

    with pytest.raises(farandole.ray.RanksFailed, match=r"rank 1 \(pid \d+ on ") as raised:
        run(_fails, ("dies",), num_workers=2)
    assert "PeerLost" in str(raised.value)


def test_a_rank_that_returns_early_is_told_to_the_others() -> None:
    with pytest.raises(fd.EarlyExit, match="rank 1"):
        run(_fails, ("leaves",), num_workers=2)


def _waits() -> None:
    import time

    time.sleep(600)


def test_time_ends_ranks() -> None:
    import farandole.ray

    with pytest.raises(farandole.ray.RanksFailed, match=r"did not end within 0\.5 s"):
        run(_waits, num_workers=1, timeout=0.5)


def test_what_the_cluster_lacks_is_told() -> None:
    with pytest.raises(TimeoutError, match=r"5 ranks with CPU 1 each within 0.5 s; free .*CPU \d"):
        run(_waits, num_workers=5, start_timeout=0.5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_workers": 0}, "num_workers is 0"),
        ({"num_workers": 1, "cpus_per_worker": 0}, "Ray reserves none"),
        ({"num_workers": 1, "strategy": "FIFO"}, "strategy is 'FIFO'; there are PACK"),
    ],
)
def test_mistakes(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run(_waits, **options)
