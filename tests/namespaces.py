"""Two network namespaces with a cable between them: hosts of a test, with no other network."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_CABLE = """set -e
ip netns add {0}
ip netns add {1}
ip link add {0} netns {0} type veth peer name {1} netns {1}
ip -n {0} address add 10.77.3.1/24 dev {0}
ip -n {1} address add 10.77.3.2/24 dev {1}
ip -n {0} link set {0} up
ip -n {1} link set {1} up
ip -n {0} link set lo up
ip -n {1} link set lo up
"""


@contextmanager
def two() -> Iterator[list[str]]:
    """Their names. Skips the test where they cannot be made; where TEST_NAMESPACES is set, they
    must be."""
    names = [f"fda{os.getpid()}", f"fdb{os.getpid()}"]
    with _made(names, _CABLE):
        yield names


@contextmanager
def _made(names: list[str], script: str) -> Iterator[None]:
    try:
        if (why := _make(names, script)) is not None:
            leave = pytest.fail if os.environ.get("TEST_NAMESPACES") else pytest.skip
            leave(f"network namespaces cannot be made here: {why}")
        yield
    finally:
        for name in names:
            if shutil.which("ip") is not None:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


# Both hosts reach the other one by an address that the router between them translates.
_TRANSLATED = """set -e
ip netns add {0}
ip netns add {1}
ip netns add {2}
ip link add near netns {0} type veth peer name to{0} netns {2}
ip link add near netns {1} type veth peer name to{1} netns {2}
ip -n {0} address add 10.77.4.2/24 dev near
ip -n {1} address add 10.77.5.2/24 dev near
ip -n {2} address add 10.77.4.9/24 dev to{0}
ip -n {2} address add 10.77.5.9/24 dev to{1}
for each in {0} {1}; do ip -n $each link set near up; ip -n $each link set lo up; done
for each in {0} {1}; do ip -n {2} link set to$each up; done
ip netns exec {2} sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'
ip netns exec {2} nft '
add table ip nat
add chain ip nat before {{ type nat hook prerouting priority -100; }}
add rule ip nat before ip daddr 10.77.4.9 dnat to 10.77.5.2
add rule ip nat before ip daddr 10.77.5.9 dnat to 10.77.4.2
add chain ip nat after {{ type nat hook postrouting priority 100; }}
add rule ip nat after ip saddr 10.77.4.2 snat to 10.77.5.9
add rule ip nat after ip saddr 10.77.5.2 snat to 10.77.4.9'
"""


@contextmanager
def translated() -> Iterator[list[tuple[str, str]]]:
    """Two hosts that no route connects: the name of each, and the address by which it reaches the
    first one. Skips the test as two() does, and where there is no nft."""
    if shutil.which("nft") is None:
        pytest.skip("there is no 'nft'")
    a, b, router = (f"fd{which}{os.getpid()}" for which in "cdr")
    with _made([a, b, router], _TRANSLATED):
        yield [(a, "10.77.4.2"), (b, "10.77.5.9")]


@contextmanager
def named(names: list[str], address: str) -> Iterator[None]:
    """Programs that start there find this host's name at an address of the loopback's, as Debian
    sets it: 127.0.1.1."""
    folders = [Path("/etc/netns", name) for name in names]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", f"{address} {socket.gethostname()}"]
            (folder / "hosts").write_text("\n".join([*lines, ""]))
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _make(names: list[str], script: str) -> str | None:
    """Why not, if so."""
    if shutil.which("ip") is None:
        return "there is no 'ip'"
    made = subprocess.run(
        ["sh", "-c", script.format(*names)], capture_output=True, text=True, check=False
    )
    return made.stderr.strip() if made.returncode else None
