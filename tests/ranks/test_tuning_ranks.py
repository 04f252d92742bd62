"""Tuning among ranks: one table for all of them, and what runs is what is explained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import farandole as fd
from farandole import _core
from farandole._tune import kept
from harness import World, split

tuning = _core.tuning
DEFAULTS = tuning.numbers()
SLOW_LINES = {**DEFAULTS, "ll_start": 1e-3}
EAGER_STAGED = {**DEFAULTS, "cico_start": 1e-12, "cico_byte": 1e-14}
DEAR_BYTES = {**DEFAULTS, "channel_byte": 1e-3}
TABLES = [DEFAULTS, SLOW_LINES, EAGER_STAGED, DEAR_BYTES]


def file_of(tmp_path: Path, seconds: dict[str, float]) -> str:
    path = tmp_path / f"{tuning.fingerprint(tuning.text(seconds, 'x'))}.txt"
    kept.write(str(path), kept.Kept(kept.kind(), "2026-01-02 03:04 UTC", 2, 0.05, 1, {}, seconds))
    return str(path)


def join() -> str:
    fd.init()
    return str(fd.world().tuning)


def path_of(count: int, shared: bool) -> tuple[str, bytes]:
    """The path of an all-reduce of that length, and the bits of its result."""
    x = fd.allocate(count, np.float32) if shared else np.empty(count, np.float32)
    x[:] = np.random.default_rng(fd.rank()).standard_cauchy(count)
    out = fd.all_reduce(x, out=x)
    return str(fd.world().last_path), out.tobytes()


def reaches_by_address() -> bool:
    return bool(fd.world().by_address[0])


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
    garbled = tmp_path / "garbled.txt"
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
    garbled = tmp_path / "garbled.txt"
    garbled.write_text("garbled")
    world = spawn(2, env={"FARANDOLE_TUNING": str(garbled)})
    assert {tuning.origin(t) for t in world.run(join)} == {"defaults"}
    assert "garbled.txt: it is no farandole tuning table 1" in world.output(0)
    assert "garbled.txt" not in world.output(1)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_runs_is_what_is_explained_and_the_bits_never_change(
    spawn: Callable[..., World], tmp_path: Path, size: int
) -> None:
    bits: dict[tuple[int, bool], set[bytes]] = {}
    ran = set()
    for table in TABLES:
        world = spawn(size, env={"FARANDOLE_TUNING": file_of(tmp_path, table)})
        text = world.run(join)[0]
        foreign = world.run(reaches_by_address)[0]
        for count in (1, 500, 600, 8192, 8193, 50000):
            for shared in (False, True):
                outcomes = world.run(path_of, count, shared)
                rows = tuning.explain(
                    "all_reduce", count, "float32", size, shared=shared, foreign=foreign, text=text
                )
                expected = next(row["name"] for row in rows if row["chosen"])
                assert {path for path, _ in outcomes} == {expected}
                ran.add(expected)
                bits.setdefault((count, shared), set()).update(b for _, b in outcomes)
        world.close()
    assert all(len(seen) == 1 for seen in bits.values())
    assert {"ll", "one_shot", "mapped"} <= ran


def path_between_hosts(counts: list[int]) -> list[str]:
    fd.init()
    paths = []
    for count in counts:
        assert (fd.all_reduce(np.ones(count, np.float32)) == fd.size()).all()
        paths.append(fd.world().last_path)
    return paths


def test_choices_between_hosts_follow_from_what_links_take(
    spawn: Callable[..., World], tmp_path: Path
) -> None:
    counts = [512, 2048, 8192]  # 2, 8 and 32 KiB of each rank
    links = {
        "usual": ({}, ["eager", "schedule", "schedule"]),
        "far": ({"network_round": 1e-3}, ["eager", "eager", "eager"]),
        "narrow": ({"network_byte": 1e-6}, ["schedule", "schedule", "schedule"]),
    }
    for link, (numbers, paths) in links.items():
        file = file_of(tmp_path, {**DEFAULTS, **numbers})
        world = spawn(4, env=split("2,2") | {"FARANDOLE_TUNING": file})
        assert world.run(path_between_hosts, counts) == [paths] * 4, link


# ---- commands ----


def command(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "farandole", *arguments],
        capture_output=True, text=True, timeout=120, check=False, cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CI": "", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def visited() -> tuple[int, list[tuple[str, float]], int]:
    """How many rows there are, what was told of visiting them in rounds, and how often the end."""
    from farandole._tune import ranks

    class Told:
        def __init__(self) -> None:
            self.rows: list[tuple[str, float]] = []
            self.ends = 0

        def now(self, what: str, done: float) -> None:
            self.rows.append((what, done))

        def clear(self) -> None:
            self.ends += 1

    fd.init()
    rows, told = list(ranks._rows(planners=False))[:3], Told()
    ranks._visit_all(rows, 0.001, told)  # type: ignore[arg-type]
    return len(rows), told.rows, told.ends


def test_each_row_is_told_of_before_it_is_visited(spawn: Callable[..., World]) -> None:
    (outcome,) = spawn(1).run(visited)
    rows, told, ends = outcome
    assert told[0][0] == "round 1, all_reduce by ll, 8 B"
    assert told[rows][0] == "round 2, all_reduce by ll, 8 B"
    assert len({what.partition(", ")[2] for what, _ in told}) == rows
    passed = [done for _, done in told]
    assert passed == sorted(passed)
    assert 0 <= passed[0] <= passed[-1] <= 0.001
    assert ends == 1


def test_tune_measures_and_the_next_job_uses_it(tmp_path: Path) -> None:
    """The whole way: a measurement of two ranks, its file, and `info --why` from it."""
    file = tmp_path / "cache" / "mine.txt"
    # Settings for other jobs in the environment must not affect the measurement.
    noise = {"FARANDOLE_CMA": "0", "FARANDOLE_ALGORITHM": "ring", "FARANDOLE_TUNING": "nowhere"}
    shown = command("tune", "-np", "2", "--output", str(file), **noise).stdout
    assert shown.startswith("measuring paths and planners with 2 ranks: ")
    assert f"written: {file}" in shown
    for name in DEFAULTS.keys() - {"mpi_round", "mpi_byte"}:  # those `tune --mpi` measures
        assert name in shown
    found = kept.read(str(file))
    assert (found.ranks, found.tries) == (2, 0)
    assert set(found.errors) >= {"ll", "one_shot", "mapped", "cico", "schedules"}
    why = command("info", "--json", "--why", "4M", FARANDOLE_TUNING=str(file)).stdout
    table = json.loads(why)["table"]
    assert table["from"].startswith("measured 20")
    assert table["median errors"] == found.errors


# Links alone are measured here, and not for long.
LINKS_ALONE = """
import sys
from farandole._tune import starting
from farandole._tune.fit import Sample
from farandole.cli import main, tune
starting.measure = lambda *_, **__: [Sample("all_reduce", "ll", 8, 2, 1e-6)]
tune._SECONDS = 0.2
sys.exit(main(["tune", *sys.argv[1:]]))
"""


def test_tune_measures_links(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    options = ["-H", "a,b", "--launcher=local", "--output", str(file)]
    done = subprocess.run(
        [sys.executable, "-c", LINKS_ALONE, *options],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CI": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "noise of links" in done.stdout
    assert f"written: {file}" in done.stdout
    seconds = kept.read(str(file)).seconds
    for number in ("network_round", "network_byte"):
        assert seconds[number] != DEFAULTS[number]
    assert 1e-7 < seconds["network_round"] < 1
    assert 1e-12 < seconds["network_byte"] < 1e-6


# `farandole run` looks at how busy the host is; here it sees what the test says. A test, which may
# find a busy one, does not give up early.
QUIET = """
import sys
from farandole._tune import first_use, kept
first_use._is_quiet = lambda: {quiet}
first_use._LIMIT_SECONDS = 60
kept.usable_cores = lambda: 2
from farandole.cli import main
sys.exit(main(["run", "-np", "2", "--", sys.executable, "-c", "print('ran')"]))
"""


def run_first(cache: Path, *, quiet: bool = True, **environment: str) -> str:
    """The stderr of `farandole run`; its ranks print to stdout."""
    done = subprocess.run(
        [sys.executable, "-c", QUIET.format(quiet=quiet)],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CI": "", "XDG_CACHE_HOME": str(cache),
             "FARANDOLE_TUNING": "auto", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ran") == 2
    return done.stderr


def test_the_first_run_measures_and_the_second_starts_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = Path(kept.path_here())
    said = run_first(tmp_path)
    assert said.count("\n") == 1, said
    assert said.startswith("farandole: this kind of host is new; measuring it once")
    found = kept.read(str(path))
    assert found.tries == 1
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    kept.write(str(path), found._replace(noise=0.01))
    before = path.read_bytes()
    assert run_first(tmp_path) == ""
    assert path.read_bytes() == before
    # Damaged: said, and measured anew.
    path.write_bytes(before.replace(b"cores", b"cares"))
    said = run_first(tmp_path)
    assert f"{path} is not used: it is damaged; measuring it once" in said
    assert kept.read(str(path)).tries == 1


def test_a_noisy_first_run_is_tried_again_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = Path(kept.path_here())
    noisy = kept.Kept(kept.kind(), "2026-01-02 03:04 UTC", 2, 0.9, 2, {}, DEFAULTS)
    kept.write(str(path), noisy)
    assert "this host was busy when it was measured; measuring it" in run_first(tmp_path)
    assert kept.read(str(path)).tries == 3
    kept.write(str(path), noisy._replace(tries=3))
    assert run_first(tmp_path) == ""


@pytest.mark.parametrize(
    "environment",
    [{"FARANDOLE_TUNING": "kept"}, {"FARANDOLE_TUNING": "off"}, {"CI": "true"},
     {"XDG_CACHE_HOME": "/dev/null"}],
    ids=str,
)  # fmt: skip
def test_who_is_told_not_to_or_has_no_place_for_it_does_not_measure(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    assert run_first(tmp_path, **environment) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_busy_host_is_not_measured(tmp_path: Path) -> None:
    assert run_first(tmp_path, quiet=False) == ""
    assert list(tmp_path.iterdir()) == []


def test_one_of_two_that_start_at_once_measures(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor() as pool:
        both = [f.result() for f in [pool.submit(run_first, tmp_path) for _ in range(2)]]
    assert sorted("measuring" in said for said in both) == [False, True], both
