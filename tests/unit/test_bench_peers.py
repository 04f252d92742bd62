"""Comparing, without other libraries: ratios, layouts, finding peers, rows of fakes, pictures."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farandole import cli
from farandole._bench import statistics as st
from farandole._bench.comparing import OURS, Question, Variant, compare
from farandole._bench.layouts import COLLECTIVES, COMMON, ROOT, Buffers
from farandole._bench.peers.finding import Found, find, how_to_get, parse_pythons
from farandole._bench.peers.hosts import Hosts, command_over
from farandole._bench.peers.table import PEERS, Peer, PeerError
from farandole._bench.peers.workers import started

REPORT = Path(__file__).parents[2] / "bench" / "report"

# -- ratios -------------------------------------------------------------------------------------


def test_a_ratio_is_over_the_best_of_the_others() -> None:
    found = st.ratio_to_best([2.0] * 7, [[8.0] * 7, [4.0] * 7])
    assert found == (0.5, 0.5, 0.5, 0.95)


def test_a_ratio_pairs_rounds() -> None:
    slow = [1.0, 10.0, 100.0, 1000.0, 10000.0]  # the machine's mood, common to all
    found = st.ratio_to_best([2 * t for t in slow], [slow])
    assert (found.median, found.low, found.high) == (2, 2, 2)


def test_the_same_rounds_give_the_same_interval() -> None:
    rng = random.Random(1)
    ours, other = ([rng.random() + 1 for _ in range(11)] for _ in range(2))
    assert st.ratio_to_best(ours, [other]) == st.ratio_to_best(ours, [other])


def test_intervals_hold_the_ratio_about_as_often_as_they_say() -> None:
    rng = random.Random(20240301)
    trials, inside = 150, 0
    for _ in range(trials):
        ours = [0.8 * rng.lognormvariate(0, 0.3) for _ in range(15)]
        other = [rng.lognormvariate(0, 0.3) for _ in range(15)]
        found = st.ratio_to_best(ours, [other], resamples=200)
        inside += found.low <= 0.8 <= found.high
    assert inside / trials >= 0.88  # 0.95, less its own error and the bootstrap's


@pytest.mark.parametrize(("ours", "others"), [([], []), ([1.0], []), ([1.0], [[1.0, 2.0]])])
def test_a_ratio_needs_values_of_everybody(ours: list[float], others: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="a ratio needs rounds"):
        st.ratio_to_best(ours, others)


def test_noise_that_covers_a_difference_is_said() -> None:
    assert st.format_ratio(0.9, 0.8, 1.01) == "no difference (0.80 to 1.01)"
    assert st.format_ratio(0.9, 0.8, 0.99) == "0.90 (0.80 to 0.99)"


# -- layouts ------------------------------------------------------------------------------------


def _perform(name: str, ranks: list[Buffers]) -> None:
    """The collective, by numpy, on the buffers of all ranks."""
    inputs = [None if b.input is None else b.input.copy() for b in ranks]
    n = ranks[0].part
    total = sum(i for i in inputs if i is not None)
    for r, b in enumerate(ranks):
        if b.output is None:
            continue
        mine = slice(r * n, (r + 1) * n)
        b.output[:] = {
            "all_reduce": lambda: total,
            "reduce": lambda: total,
            "reduce_scatter": lambda mine=mine: total[mine],
            "broadcast": lambda: inputs[ROOT],
            "all_gather": lambda: np.concatenate(inputs),
            "gather": lambda: np.concatenate(inputs),
            "scatter": lambda mine=mine: inputs[ROOT][mine],
            "all_to_all": lambda mine=mine: np.concatenate([i[mine] for i in inputs]),
        }[name]()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", COMMON)
def test_a_layout_expects_what_the_collective_leaves(name: str, ranks: int) -> None:
    row = COLLECTIVES[name]
    everyone = [Buffers(row, 9000, "float32", rank, ranks) for rank in range(ranks)]
    for turn in range(-2, 5):
        for buffers in everyone:
            buffers.prepare(turn)
        _perform(name, everyone)
        assert [buffers.count_wrong(turn) for buffers in everyone] == [0] * ranks
    for buffers in everyone:
        if buffers.output is not None:
            buffers.output[-1] += 1
            assert buffers.count_wrong(turn) > 0
        buffers.clear()
        assert buffers.input is None or not buffers.input.any()


def test_what_is_shared_out_is_a_multiple_of_the_ranks() -> None:
    assert COLLECTIVES["all_gather"].count(10, "bfloat16", 4) == 8
    assert COLLECTIVES["all_reduce"].count(10, "bfloat16", 4) == 5


# -- finding peers ------------------------------------------------------------------------------


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment in which a distribution 'fakempi' installed a launcher and a library."""
    site = tmp_path / "lib" / "python3" / "site-packages"
    about = site / "fakempi-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "mpi4py").mkdir()
    (site / "mpi4py" / "__init__.py").touch()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fakempi\nVersion: 1.0\n")
    lines = []
    for name in ("bin/mpiexec", "lib/libmpi.so.12"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
        digest = base64.urlsafe_b64encode(hashlib.sha256(name.encode()).digest()).rstrip(b"=")
        lines.append(f"../../../{name},sha256={digest.decode()},{len(name)}\n")
    (about / "RECORD").write_text("".join(lines))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


FAKE = Peer("fake", "Fake MPI", "mpi", distribution="fakempi", requirements=("fakempi==1.0",))


def test_a_peer_is_found_with_its_own_launcher_and_library(wheel: Path) -> None:
    found = find(FAKE)
    assert Path(found.launcher[0]).resolve() == wheel / "bin" / "mpiexec"
    assert Path(found.environment["MPI4PY_LIBMPI"]).resolve() == wheel / "lib" / "libmpi.so.12"
    assert found.command(3)[1:] == ["-n", "3"]


def test_every_launcher_reaches_the_hosts(tmp_path: Path) -> None:
    hosts = Hosts("netns", [("a", 2), ("b", 1)])
    ours = Found(PEERS[OURS], "python", ("farandole", "run", "-np"))
    assert command_over(ours, hosts, tmp_path) == [
        *("farandole", "run", "-H", "a:2,b:1", "--launcher", "netns", "-np", "3", "--"),
    ]  # fmt: skip
    enter = ["ip", "netns", "exec", "a", "unshare", "--uts", "sh", "-c"]
    for name, option in (("mpi", "--host"), ("mpich", "-machinefile")):
        words = command_over(Found(PEERS[name], "python", ("mpiexec", "-n")), hosts, tmp_path)
        assert words[: len(enter)] == enter
        assert words[len(enter) + 1 : len(enter) + 5] == ["a", "mpiexec", "-n", "3"]
        assert option in words
        assert words[-1] == str(tmp_path / "instead-of-ssh")
    assert (tmp_path / "hosts").read_text() == "a:2\nb:1\n"
    pretended = Hosts("local", hosts.ranks)
    found = Found(PEERS["mpich"], "python", ("mpiexec", "-n"))
    assert command_over(found, pretended, tmp_path) == found.command(3)


def test_what_stands_in_the_place_of_ssh_reads_words_as_sshd_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, skipped in (("ip", 3), ("unshare", 1), ("hostname", 1)):
        fake = tmp_path / name
        fake.write_text(f'#!/bin/sh\necho {name} "$1 $2 $3"\nshift {skipped}\nexec "$@"\n')
        fake.chmod(0o700)
    (tmp_path / "hostname").write_text('#!/bin/sh\necho hostname "$1"\n')
    command_over(Found(PEERS["mpi"], "", ("", "")), Hosts("netns", [("a", 1)]), tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    said = subprocess.run(
        [tmp_path / "instead-of-ssh", "-x", "b", "'echo'", "$((1 + 1));", "echo", "'two  words'"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert said.splitlines() == [
        "ip netns exec b", "unshare --uts sh -c", "hostname b", "2", "two  words"
    ]  # fmt: skip


def test_files_that_another_mpi_overwrote_are_seen(wheel: Path) -> None:
    (wheel / "bin" / "mpiexec").write_text("another's")
    with pytest.raises(PeerError, match=r"mpiexec was overwritten by another package"):
        find(FAKE)


def test_a_peer_whose_launcher_cannot_be_started_is_named() -> None:
    found = Found(PEERS["gloo"], sys.executable, ("/nowhere/mpiexec",))
    with pytest.raises(PeerError, match="gloo could not be started: /nowhere/mpiexec: No such"):
        started(found, 2).__enter__()


def test_a_peer_that_is_missing_tells_how_to_get_it() -> None:
    lacking = Peer("none", "No MPI", "mpi", distribution="no-such", requirements=("no-such==1",))
    with pytest.raises(PeerError, match=r"No MPI is not here: .*pip install numpy no-such==1"):
        find(lacking)
    with pytest.raises(PeerError, match=r"/no/python is not a Python that runs"):
        find(FAKE, "/no/python")


def test_mpis_other_than_the_first_get_environments_of_their_own() -> None:
    assert how_to_get(PEERS["mpi"]).startswith("pip install ")
    for name in ("mpich", "mpich-mpir", "impi"):
        home = PEERS[name].home
        assert f"--peer-python {home}=peers/{home}/bin/python" in how_to_get(PEERS[name])


def test_pythons_are_read(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    assert parse_pythons(f"mpich={python},impi={python}") == {
        "mpich": str(python), "impi": str(python),
    }  # fmt: skip
    for bad, words in (("mpich", "is not NAME=PYTHON"), ("impi=/no/python", "there is no /no/")):
        with pytest.raises(ValueError, match=words):
            parse_pythons(bad)


# -- rows, with ranks that are not there --------------------------------------------------------


class FakeWorkers:
    """Answers as ranks would, each call in as many nanoseconds as told."""

    version = "1"

    def __init__(self, name: str, nanoseconds: int, **faults: Any) -> None:
        self.peer = PEERS[name]
        self.asked: list[dict[str, Any]] = []
        self._nanoseconds, self._faults = nanoseconds, faults

    def ask(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        self.asked.append(question)
        if question["bytes"] >= self._faults.get("dies_at", 1 << 60):
            raise PeerError(f"{self.peer.label}: a rank ended")
        if "unable" in self._faults:
            return [{"unable": self._faults["unable"]}] * 2
        calls = question["iterations"]
        wall = (calls + question["warm"]) * self._nanoseconds
        common = {"wrong": 0, "wall": wall, "bytes": question["bytes"], "path": "p"}
        return [
            {**common, "times": [self._nanoseconds - 1] * calls},
            {**common, "times": [self._nanoseconds] * calls},  # the slowest rank counts
        ]


def _compared(
    *workers: Any, sizes: tuple[int, ...] = (4,)
) -> tuple[list[dict[str, Any]], list[str]]:
    told: list[str] = []
    question = Question("all_reduce", sizes, rounds=6)
    variants = [Variant(w, memory) for w in workers for memory in w.peer.memory]
    return [row for rows in compare(question, variants, told.append) for row in rows], told


def test_rows_compare_ours_with_each_and_with_the_best() -> None:
    rows, told = _compared(
        FakeWorkers(OURS, 1000), FakeWorkers("mpi", 4000), FakeWorkers("gloo", 2000)
    )
    assert told == []
    assert [(row["peer"], row["memory"]) for row in rows] == [
        (OURS, "ours"), (OURS, "caller"), ("mpi", "caller"), ("gloo", "caller"),
    ]  # fmt: skip
    ours = rows[0]
    assert ours["p50_us"] == 1.0
    assert ours["rounds_us"] == [1.0] * 6
    assert {name: r["ratio"] for name, r in ours["ratios"].items()} == {
        "mpi": 0.25, "gloo": 0.5, "best": 0.5, "best_mpi": 0.25,
    }  # fmt: skip
    assert (ours["ratios"]["best"]["peer"], ours["ratios"]["best_mpi"]["peer"]) == ("gloo", "mpi")
    assert rows[2]["ratios"] == {}
    json.dumps(rows)


def test_every_round_asks_everybody_once_in_changing_order() -> None:
    log: list[str] = []
    first, second = FakeWorkers("mpi", 10), FakeWorkers("gloo", 10)
    for workers in (first, second):
        ask = workers.ask
        workers.ask = lambda q, ask=ask, name=workers.peer.name: log.append(name) or ask(q)  # type: ignore[method-assign]
    _compared(first, second)
    rounds = [tuple(log[i : i + 2]) for i in range(4, len(log), 2)]  # two of each to begin
    assert len(rounds) == 6
    assert set(rounds) == {("mpi", "gloo"), ("gloo", "mpi")}


def test_who_watches_is_told_of_a_round_before_it_begins() -> None:
    log: list[Any] = []
    workers = FakeWorkers("mpi", 10)
    ask = workers.ask
    workers.ask = lambda q: log.append("block") or ask(q)  # type: ignore[method-assign]
    question = Question("all_reduce", (8, 4), rounds=2)
    variants = [Variant(workers, "caller")]
    for rows in compare(question, variants, log.append, lambda *at: log.append(at)):
        log.append(rows[0]["bytes"])
    begins = ["block"] * 2  # to find how many calls a block has
    assert log == [
        (4, 0), *begins, (4, 0), "block", (4, 1), "block", 4,
        (8, 2), *begins, (8, 2), "block", (8, 3), "block", 8,
    ]  # fmt: skip


def test_who_cannot_who_is_too_slow_and_who_dies_is_left_out_and_told_of() -> None:
    rows, told = _compared(
        FakeWorkers(OURS, 1000),
        FakeWorkers("mpi", 1000, unable="MPI has no bfloat16"),
        FakeWorkers("mpich", 10**9),
        FakeWorkers("impi", 1000, dies_at=1024),
        sizes=(1024, 4),
    )
    assert [(r["bytes"], r["peer"]) for r in rows] == [
        (4, OURS), (4, OURS), (4, "impi"), (1024, OURS), (1024, OURS),
    ]  # fmt: skip
    assert len(told) == 3
    for words in ("MPI has no bfloat16", "a call takes 1.00 s", "Intel MPI: a rank ended"):
        assert any(words in line for line in told)


# -- pictures, the report, the command line -----------------------------------------------------


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_all_peers_are_drawn(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    from farandole._bench.plotting import draw

    workers = [FakeWorkers(name, 1000 * (i + 1)) for i, name in enumerate(PEERS)]
    rows, _ = _compared(*workers, sizes=(4, 1024, 1 << 20))
    path = tmp_path / f"bench.{kind}"
    draw(rows, path)
    assert path.stat().st_size > 10_000
    if kind == "svg":
        text = path.read_text()
        for peer in PEERS.values():
            assert peer.label in text


def test_spreads_reach_from_the_least_to_the_99th_percentile() -> None:
    from farandole._bench.plotting import bandwidth_of, time_of

    row = {"min_us": 2.0, "p50_us": 4.0, "p99_us": 8.0, "busbw_gbs": 10.0}
    assert time_of(row) == (2, 4, 8)
    assert bandwidth_of(row) == (5, 10, 20)  # the slowest calls have the least
    assert bandwidth_of({**row, "min_us": 0.0}) == (5, 10, 10)


def test_bars_of_several_series_stand_side_by_side() -> None:
    from farandole._bench.plotting import places_aside

    sizes, factors = [0, 4, 16, 1024], places_aside([0, 4, 16, 1024], 7)
    assert factors[3] == 1
    assert factors == sorted(set(factors))
    assert sizes[1] * factors[-1] < sizes[2] * factors[0]  # no bar nearer to another size
    assert places_aside([4], 1) == [1]


def test_every_series_has_its_median_and_its_bars_and_axes_have_units() -> None:
    pytest.importorskip("matplotlib")
    from farandole._bench.plotting import figure_of

    workers = [FakeWorkers(name, 1000 * (i + 1)) for i, name in enumerate((OURS, "mpi", "gloo"))]
    rows, _ = _compared(*workers, sizes=(4, 1024))
    for row in rows:
        row.update(min_us=row["p50_us"] / 2, p99_us=row["p50_us"] * 4)
    left, right = figure_of(rows).axes
    assert (left.get_ylabel(), right.get_ylabel()) == ("time of a call, µs", "bus bandwidth, GB/s")
    assert left.get_xlabel() == "size of one rank's data"
    for axes, below, above in ((left, 1 / 2, 4), (right, 1 / 4, 2)):
        assert len(axes.containers) == 4  # farandole has two kinds of memory
        for line, bars in zip(axes.lines[::3], axes.containers, strict=True):
            ends = [segment[:, 1] for segment in bars[2][0].get_segments()]
            for middle, (low, high) in zip(line.get_ydata(), ends, strict=True):
                assert (low, high) == pytest.approx((middle * below, middle * above))


def test_the_report_writes_tables_and_their_bars_between_markers(tmp_path: Path) -> None:
    rows, _ = _compared(FakeWorkers(OURS, 1000), FakeWorkers("mpi", 1100), sizes=(4, 1 << 20))
    (tmp_path / "all_reduce.json").write_text(json.dumps(rows))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- report: all_reduce -->\nold\n<!-- end: all_reduce -->\nafter\n")
    words = ["--render", "--only", "all_reduce", "--out", str(tmp_path), "--page", str(page)]
    done = subprocess.run(
        [sys.executable, str(REPORT), *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.startswith("before\n<!-- report: all_reduce -->")
    assert text.endswith("<!-- end: all_reduce -->\nafter\n")
    assert "old" not in text
    assert "≤ 1.00: yes" in text  # 0.91 of 4 B
    assert done.stderr.count("bar not met") == 2  # of 1 MiB: 0.4, 0.9


def test_the_page_has_a_place_for_every_part() -> None:
    page = (REPORT.parents[1] / "docs" / "benchmarks.md").read_text()
    for name in re.findall(r'^    "(\w+)": Part\(', (REPORT / "__main__.py").read_text(), re.M):
        assert page.count(f"<!-- report: {name} -->") == 1
        assert page.count(f"<!-- end: {name} -->") == 1


MISTAKES = [
    (["--compare", "lam"], "--compare: there is no lam; there are mpi, mpich"),
    (["--compare", "gloo", "--iterations", "3"], "--compare takes --seconds and --rounds"),
    (["--compare", "gloo", "--op", "max"], "--compare knows sums"),
    (["--compare", "gloo", "--rounds", "0"], "--rounds takes a number from 1 on"),
    (["--compare", "mpi", "--peer-python", "impi"], "--peer-python: 'impi' is not NAME=PYTHON"),
    (["--compare", "mpi", "--peer-python", f"impi={sys.executable}"], "impi is not among"),
    (["--rounds", "3"], "--rounds needs --compare"),
    (["--hot"], "--hot needs --compare"),
    (["--peer-python", "mpi=/bin/sh"], "--peer-python needs --compare"),
    (["--plot", "picture.txt"], "--plot: picture.txt does not end in"),
    (["-H", "a:1"], "-np is 2, but the hosts have 1 slot"),
    (["-H", "a:x"], "-H: 'a:x' is not 'name:slots'"),
    (["-H", "a:1,b:1"], "rank 0, which has the rows, would be on host a: name this host first"),
    (["--launcher", "local"], "--launcher says how hosts are reached: name them with -H"),
    (["-H", "a:1,b:1", "--compare", "copy"], "--compare needs hosts on this machine"),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES)
def test_a_mistake_is_one_clear_line(
    words: list[str], said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(["bench", "all_reduce", "-np", "2", *words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err


def test_a_barrier_is_neither_drawn_nor_compared(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(["bench", "barrier", "-np", "2", "--plot", "b.png"]) == 2
    assert cli.main(["bench", "barrier", "-np", "2", "--compare", "gloo"]) == 2
    assert cli.main(["bench", "all_reduce", "--compare", "gloo"]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 3


def test_numbers_of_the_table_are_what_pyproject_pins() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for peer in PEERS.values():
        for requirement in peer.requirements:
            assert "==" not in requirement or f'"{requirement}"' in text, requirement
