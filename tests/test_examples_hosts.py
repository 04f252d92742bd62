"""An example on several hosts, whoever starts it and whatever its data go over: the curve of its
loss is that of one host, bit for bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import harness
import mpis
import namespaces
from harness import launch

DIGITS = str(Path(__file__).resolve().parents[1] / "examples" / "digits.py")
PARTS = "2,2"


def words(found: Path) -> list[str]:
    return [DIGITS, "--epochs", "1", "--json", str(found)]


def by_mpiexec(name: str) -> Callable[[Path], None]:
    """MPI carries what goes between the hosts."""

    def start(found: Path) -> None:
        env = {"FARANDOLE_SPLIT_HOSTS": PARTS, "FARANDOLE_TRANSPORT": "mpi"}
        done = mpis.find(name).start(4, words(found), **env)
        assert done.returncode == 0, done.stdout

    return start


def over_namespaces(found: Path) -> None:
    with namespaces.two() as (a, b):
        options = ["-H", f"{a}:2,{b}:2", "--launcher=netns"]
        launch(4, [sys.executable, *words(found)], *options)


def by_two_torchruns(found: Path) -> None:
    options = ["--master-addr=127.0.0.1", f"--master-port={harness._free_port()}"]
    harness.two_torchruns(2, words(found), PARTS, options)


WAYS: dict[str, Callable[[Path], None]] = {
    **{f"mpiexec of {name}": by_mpiexec(name) for name in mpis.NAMES},
    "two namespaces": over_namespaces,
    "two torchruns": by_two_torchruns,
}


@pytest.mark.parametrize("way", WAYS)
def test_digits_learn_as_on_one_host(way: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    launch(4, [sys.executable, *words(here)])
    WAYS[way](there)
    curves: list[Any] = [json.loads(file.read_text())["losses"] for file in (here, there)]
    assert curves[0]
    assert curves[1] == curves[0], "the same bits"
