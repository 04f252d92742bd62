"""Two network namespaces with a cable between them, for the time of a measurement."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from farandole._bench.peers.table import PeerError

_FILES = Path("/etc/netns")


@contextmanager
def cable(rate: str = "") -> Iterator[tuple[str, str]]:
    """The names of both ends. PeerError where the kernel refuses.

    Args:
        rate: what both ends may send, such as ``1gbit``, as the token bucket filter counts it:
            payload, TCP, IP and Ethernet headers. Its burst is 20 KB. Empty: no limit.
    """
    if shutil.which("ip") is None:
        raise PeerError("there is no 'ip' to make network namespaces with")
    ends = f"fd{os.getpid()}a", f"fd{os.getpid()}b"
    try:
        for words in _commands(ends, rate):
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise PeerError(f"{' '.join(words)}: {done.stderr.strip()}")
        for end in ends:  # `ip netns exec` lays it over /etc/hosts
            (_FILES / end).mkdir(parents=True)
            (_FILES / end / "hosts").write_text(
                "127.0.0.1 localhost\n"
                + "".join(f"{_address(i)} {name}\n" for i, name in enumerate(ends, 1))
            )
        yield ends
    finally:
        for name in ends:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(_FILES / name, ignore_errors=True)


def _address(number: int) -> str:
    return f"10.77.4.{number}"


def _commands(ends: tuple[str, str], rate: str) -> Iterator[list[str]]:
    a, b = ends
    yield from (["ip", "netns", "add", end] for end in ends)
    yield f"ip link add {a} netns {a} type veth peer name {b} netns {b}".split()
    for number, end in enumerate(ends, 1):
        yield f"ip -n {end} address add {_address(number)}/24 dev {end}".split()
        yield f"ip -n {end} link set {end} up".split()
        yield f"ip -n {end} link set lo up".split()
        if rate:
            shape = f"root tbf rate {rate} burst 160kbit latency 400ms"
            yield f"ip netns exec {end} tc qdisc add dev {end} {shape}".split()
