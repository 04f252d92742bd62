"""The negotiator in random worlds: messages in any interleaving, one order on every rank."""

from __future__ import annotations

import pytest

from core_testing import testing


@pytest.mark.parametrize("ids", [1, 2, 5, 16384])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_every_rank_is_told_the_same_order_and_each_operation_once(ranks: int, ids: int) -> None:
    refused = stood_in = forgotten = stale = 0
    for seed in range(60):
        report = testing.simulate_negotiation(seed, ranks, names=7, times=6, ids=ids)
        assert report.complaint == "", f"seed {seed}: {report.complaint}"
        refused += report.refused
        stood_in += report.stood_in
        forgotten += report.forgotten
        stale += report.stale
    # The worlds were as varied as they should be.
    assert (refused > 0) == (ranks > 1)
    assert (stood_in > 0) == (ranks > 1)
    assert (forgotten > 0) == (ids < 7)
    assert (stale > 0) == (ids < 7)
