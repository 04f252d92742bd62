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
    try:
        if (why := _make(names)) is not None:
            leave = pytest.fail if os.environ.get("TEST_NAMESPACES") else pytest.skip
            leave(f"network namespaces cannot be made here: {why}")
        yield names
    finally:
        for name in names:
            if shutil.which("ip") is not None:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


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


def _make(names: list[str]) -> str | None:
    """Why not, if so."""
    if shutil.which("ip") is None:
        return "there is no 'ip'"
    script = ["sh", "-c", _CABLE.format(*names)]
    made = subprocess.run(script, capture_output=True, text=True, check=False)
    return made.stderr.strip() if made.returncode else None
