"""`farandole check`: which pairs are measured together, and what is out of line."""

from __future__ import annotations

from typing import Any

import pytest

from farandole._check.judge import complaints
from farandole._check.measure import Found, Host, Link, rounds


@pytest.mark.parametrize("hosts", [2, 3, 4, 7, 16])
def test_every_pair_is_measured_once_and_no_host_twice_at_a_time(hosts: int) -> None:
    found = list(rounds(hosts))
    pairs = [pair for one in found for pair in one]
    assert sorted(pairs) == [(a, b) for a in range(hosts) for b in range(a + 1, hosts)]
    for one in found:
        assert len({host for pair in one for host in pair}) == 2 * len(one)
    # Sums are looked at in the first two rounds.
    assert {host for one in found[:2] for pair in one for host in pair} == set(range(hosts))


def host(name: str, **fields: Any) -> Host:
    usual: dict[str, Any] = {
        "cores": 8, "instructions": "avx2", "python": "3.11.7", "numpy": "2.4.6", "memory": 1e10,
        "clock": 0.0, "clock_error": 0.001, "wrong": 0,
    }  # fmt: skip
    return Host(name, **usual | fields)


def link(first: int, second: int, **fields: float) -> Link:
    usual = {"latency": 30e-6, "there": 1e9, "back": 1e9, "resent": 0.0}
    return Link(first, second, **usual | fields)


def found(*hosts: Host, **odd: float) -> Found:
    """Three hosts; the link between the last two is `odd`."""
    named = dict(zip("abc", map(host, "abc"), strict=True)) | {each.name: each for each in hosts}
    return Found(list(named.values()), [link(0, 1), link(0, 2), link(1, 2, **odd)])


def test_equal_hosts_and_links_are_in_line() -> None:
    assert list(complaints(found())) == []
    assert list(complaints(found(there=0.7e9, latency=90e-6))) == []


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (found(there=2e8), "b to c: 200 MB/s, where half of the links have 1000"),
        (found(back=2e8), "c to b: 200 MB/s, where half of the links have 1000"),
        (found(latency=2e-3),
         "b and c: a latency of 2000 us, where half of the links have 30"),
        (found(resent=0.02), "b and c: 2.00% of the segments were sent again, so some are lost"),
        (found(host("b", wrong=3)),
         "b: 3 elements of sums with another host are wrong by IEEE 754; do not use both before "
         "you know which one computes so"),
        (found(host("b", memory=2e9)),
         "b: its memory copies 2.0 GB/s, where half of the hosts copy 10.0"),
        (found(host("c", clock=-5.0)), "c: its clock is -5.0 s from that of a"),
        (found(host("c", cores=2)), "usable cores differ: c has 2; the others have 8"),
        (found(host("a", numpy="1.26")),
         "versions of numpy differ: a has 1.26; the others have 2.4.6"),
    ],
)  # fmt: skip
def test_what_is_out_of_line_is_named(seen: Found, said: str) -> None:
    assert list(complaints(seen)) == [said]
