"""Ranks that torchrun starts on several hosts, and starts again when one of them is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("torch")

import namespaces

PROGRAM = Path(__file__).with_name("torchrun_rounds.py")
LIMIT = 180


def run(spaces: Sequence[str], restarts: int, *words: str) -> list[tuple[int, str]]:
    """A torchrun of one rank in each network namespace, to its end: their exit codes and output."""
    options = [
        "--nnodes=2", "--nproc-per-node=1", f"--max-restarts={restarts}", "--rdzv-backend=c10d",
        "--rdzv-endpoint=10.77.3.1:29400", "--rdzv-id=rounds",
    ]  # fmt: skip
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "FARANDOLE_START_TIMEOUT": "30",
        "FARANDOLE_INSECURE": "1",
    }
    found = []
    with ExitStack() as stack:
        nodes = []
        for number, space in enumerate(spaces):
            torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
            own = f"--local-addr=10.77.3.{number + 1}"
            here = [own, f"--rdzv-conf=is_host={int(number == 0)},join_timeout=60"]
            node = subprocess.Popen(
                ["ip", "netns", "exec", space, *torchrun, *here, str(PROGRAM), *words],
                env=environment, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            stack.callback(node.wait)
            stack.callback(node.kill)
            nodes.append(node)
        for node in nodes:
            said, _ = node.communicate(timeout=LIMIT)
            found.append((node.returncode, said))
    return found


@pytest.fixture
def hosts(spaces: list[str]) -> Iterator[list[str]]:
    """Namespaces whose own name leads to the loopback."""
    with namespaces.named(spaces, "127.0.1.1"):
        yield spaces


@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("kind", ["numpy", "hook", "DDP"])
def test_ranks_meet_again_after_each_of_two_deaths(
    hosts: list[str], tmp_path: Path, kind: str
) -> None:
    """On one host, then on the other: agents count restarts differently, and torchrun's store still
    has what ranks of former rounds wrote."""
    total = sum(rank + step for step in range(4) for rank in range(2))
    for code, said in run(hosts, 2, kind, str(tmp_path), "1", "0"):
        assert code == 0, said
        assert f"done {total}" in said.splitlines(), said
    assert len(list(tmp_path.glob("died-*"))) == 2
