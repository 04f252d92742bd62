"""Tuning among ranks: one table for all of them, and what runs is what is explained."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farandole as fd
from farandole import _core, _tuning
from harness import World

tuning = _core.tuning
DEFAULTS = tuning.numbers()
SLOW_LINES = {**DEFAULTS, "lines_start": 1e-3}
EAGER_STAGED = {**DEFAULTS, "staged_start": 1e-12, "staged_byte": 1e-14}
DEAR_BYTES = {**DEFAULTS, "channel_byte": 1e-3}
TABLES = [DEFAULTS, SLOW_LINES, EAGER_STAGED, DEAR_BYTES]


def file_of(tmp_path: Path, seconds: dict[str, float]) -> str:
    path = tmp_path / f"{tuning.fingerprint(tuning.text(seconds, 'x'))}.json"
    _tuning.write(path, seconds, measured="2026-01-02 03:04 UTC", ranks=2, fit={})
    return str(path)


def join() -> str:
    fd.init()
    return str(fd.world().tuning)


def path_of(count: int, shared: bool) -> tuple[str, bytes]:
    """What runs an all-reduce of that length, and its bits."""
    x = fd.allocate(count, np.float32) if shared else np.empty(count, np.float32)
    x[:] = np.random.default_rng(fd.rank()).standard_cauchy(count)
    out = fd.all_reduce(x, out=x)
    return str(fd.world().last_path), out.tobytes()


@pytest.mark.parametrize("size", [2, 3])
def test_rank_0s_table_holds_for_all_where_files_differ(
    spawn: Callable[..., World], tmp_path: Path, size: int
) -> None:
    files = [file_of(tmp_path, table) for table in TABLES]
    for first in range(len(TABLES)):
        each = [{"FARANDOLE_TUNING": files[(first + r) % len(files)]} for r in range(size)]
        world = spawn(size, each=each)
        texts = set(world.run(join))
        assert len(texts) == 1
        assert tuning.numbers(texts.pop()) == TABLES[first]


def test_other_ranks_need_no_file_and_read_none(
    spawn: Callable[..., World], tmp_path: Path
) -> None:
    garbled = tmp_path / "garbled.json"
    garbled.write_text("garbled")
    good = file_of(tmp_path, SLOW_LINES)
    world = spawn(2, each=[{"FARANDOLE_TUNING": good}, {"FARANDOLE_TUNING": str(garbled)}])
    assert {tuning.fingerprint(t) for t in world.run(join)} == {
        tuning.fingerprint(tuning.text(SLOW_LINES, "x"))
    }
    assert "tuning" not in world.output(1)


def test_a_garbled_file_on_rank_0_is_a_warning_and_the_job_runs(
    spawn: Callable[..., World], tmp_path: Path
) -> None:
    garbled = tmp_path / "garbled.json"
    garbled.write_text("garbled")
    world = spawn(2, env={"FARANDOLE_TUNING": str(garbled)})
    assert {tuning.origin(t) for t in world.run(join)} == {"defaults"}
    assert "garbled.json: it is no JSON" in world.output(0)
    assert "garbled.json" not in world.output(1)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_runs_is_what_is_explained_and_the_bits_never_change(
    spawn: Callable[..., World], tmp_path: Path, size: int
) -> None:
    bits: dict[tuple[int, bool], set[bytes]] = {}
    ran = set()
    for table in TABLES:
        world = spawn(size, env={"FARANDOLE_TUNING": file_of(tmp_path, table)})
        text = world.run(join)[0]
        for count in (1, 500, 600, 8192, 8193, 50000):
            for shared in (False, True):
                outcomes = world.run(path_of, count, shared)
                rows = tuning.explain("all_reduce", count, "float32", size, shared, text=text)
                expected = next(row["name"] for row in rows if row["chosen"])
                assert {path for path, _ in outcomes} == {expected}
                ran.add(expected)
                bits.setdefault((count, shared), set()).update(b for _, b in outcomes)
        world.close()
    assert all(len(seen) == 1 for seen in bits.values())
    assert {"lines", "one_shot", "window"} <= ran


def test_tune_measures_and_the_next_job_uses_it(tmp_path: Path) -> None:
    """The whole way: a short measurement of two ranks, its file, and `info --why` from it."""
    file = tmp_path / "cache" / "mine.json"

    def command(*arguments: str, **environment: str) -> str:
        import os

        done = subprocess.run(
            [sys.executable, "-m", "farandole", *arguments],
            capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    shown = command("tune", "-np", "2", "--output", str(file))
    assert f"written: {file}" in shown
    for name in DEFAULTS:
        assert name in shown
    content: dict[str, Any] = json.loads(file.read_text())
    assert content["ranks"] == 2
    assert set(content["fit"]) == {"lines", "one_shot", "window", "staged", "schedules"}
    why = command("info", "--json", "--why", "4M", FARANDOLE_TUNING=str(file))
    table = json.loads(why)["table"]
    assert table["from"].startswith("measured 20")
    assert table["median errors"] == content["fit"]
