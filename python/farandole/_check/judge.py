"""Each thing that is out of line in a check, in one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median

from farandole._check.measure import Found, Host, Link

SLOWER = 0.6  # of the median of all: a link, or a host's memory
FARTHER = 3.0  # times the median latency
_NEAR = 100e-6  # seconds: below that, latencies say more of the moment than of the link
_RESENT = 0.001  # of TCP's segments
_CLOCK = 1.0  # seconds: logs and certificates of hosts that differ by more are hard to compare


def complaints(found: Found) -> Iterator[str]:
    names = [host.name for host in found.hosts]
    yield from _of_links(found.links, names)
    yield from _of_hosts(found.hosts)


def _of_links(links: list[Link], names: list[str]) -> Iterator[str]:
    ways = [(f"{names[a]} to {names[b]}", rate)
            for link in links
            for a, b, rate in ((link.first, link.second, link.there),
                               (link.second, link.first, link.back))]  # fmt: skip
    usual = median([rate for _, rate in ways]) if ways else 0.0
    for way, rate in ways:
        if rate < SLOWER * usual:
            yield f"{way}: {rate / 1e6:.0f} MB/s, where half of the links have {usual / 1e6:.0f}"
    usual = median([link.latency for link in links]) if links else 0.0
    for link in links:
        between = f"{names[link.first]} and {names[link.second]}"
        if link.latency > max(FARTHER * usual, _NEAR):
            yield (
                f"{between}: a latency of {link.latency * 1e6:.0f} us, where half of the links "
                f"have {usual * 1e6:.0f}"
            )
        if link.resent > _RESENT:
            yield f"{between}: {link.resent:.2%} of the segments were sent again, so some are lost"


def _of_hosts(hosts: list[Host]) -> Iterator[str]:
    usual = median(host.memory for host in hosts)
    for host in hosts:
        if host.wrong:
            yield (
                f"{host.name}: {host.wrong} elements of sums with another host are wrong by "
                "IEEE 754; do not use both before you know which one computes so"
            )
        if host.memory < SLOWER * usual:
            yield (
                f"{host.name}: its memory copies {host.memory / 1e9:.1f} GB/s, where half of the "
                f"hosts copy {usual / 1e9:.1f}"
            )
        if abs(host.clock) > _CLOCK + host.clock_error:
            yield f"{host.name}: its clock is {host.clock:+.1f} s from that of {hosts[0].name}"
    for what in ("cores", "instructions", "python", "numpy"):
        values = [str(getattr(host, what)) for host in hosts]
        (most, _), *others = Counter(values).most_common()
        if others:
            odd = [f"{h.name} has {v}" for h, v in zip(hosts, values, strict=True) if v != most]
            yield f"{_NAMES[what]} differ: {', '.join(odd)}; the others have {most}"


_NAMES = {
    "cores": "usable cores", "instructions": "instruction sets", "python": "versions of Python",
    "numpy": "versions of numpy",
}  # fmt: skip
