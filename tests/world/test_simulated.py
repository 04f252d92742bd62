"""Whole worlds in one thread: every rank's engine polled in an order drawn from a seed."""

from __future__ import annotations

from collections import Counter

import pytest

from core_testing import testing

SEEDS_PER_BATCH = 50


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6])
def test_simulated_worlds_keep_every_promise(ranks: int) -> None:
    for seed in range(ranks * 1000, ranks * 1000 + SEEDS_PER_BATCH):
        report = testing.simulate(seed=seed, steps=25, ranks=ranks)
        assert report.complaint == "", report
        shares = report.correct + report.refused + report.failed
        assert shares > 0, report


@pytest.mark.timeout(120)
def test_simulated_worlds_meet_every_fate() -> None:
    """The worlds above prove little unless all of this really happens in them."""
    reports = [testing.simulate(seed=seed, steps=25, ranks=4) for seed in range(60)]
    assert all(report.complaint == "" for report in reports)
    assert set(Counter(report.fate for report in reports)) == {
        "lives",
        "aborted",
        "cut",
        "bereaved",
    }
    assert sum(report.correct for report in reports) > 1000
    assert sum(report.refused for report in reports) > 50
    assert sum(report.failed for report in reports) > 50
    for fate, told in [("aborted", "had enough"), ("cut", "was cut"), ("bereaved", "died during")]:
        assert any(told in report.verdict for report in reports if report.fate == fate), fate


def test_simulated_worlds_repeat_from_their_seed() -> None:
    for seed in range(8):
        once, again = (testing.simulate(seed=seed, steps=20, ranks=3) for _ in range(2))
        if once.fate != "bereaved":  # there time passes before a death is believed
            assert repr(once) == repr(again)
