"""Tuning tables: their validation, the choice of algorithm, its explanation, and the fit."""

from __future__ import annotations

import json
import random
import stat
from binascii import crc32
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import farandole as fd
from core_testing import testing
from farandole import _core, cli
from farandole._tune import fit, kept, table
from farandole._tune.fit import LINKS, MPI
from farandole.cli import _why
from farandole.cli.tune import _keep

tuning = _core.tuning
LIMITS = testing.limits()
LINES, ONE_SHOT = LIMITS["ll"], LIMITS["one_shot"]
NAMES = [name for name, _ in tuning.fields()]
COLLECTIVES = sorted({p["collective"] for p in _core.schedule.planners()})
ORDERS = {
    size: {(p["collective"], p["name"]): p["order"] for p in _core.schedule.planners(size, 1000)}
    for size in range(1, 10)
}


def drawn(seed: int) -> str:
    """A random table, which passes validation though no machine is like it."""
    draw = random.Random(seed)
    return tuning.text({name: 10 ** draw.uniform(-12, -2) for name in NAMES}, f"drawn {seed}")


# ---- the table ----


def test_a_table_reads_back_exactly() -> None:
    for seed in range(50):
        text = drawn(seed)
        assert tuning.text(tuning.numbers(text), f"drawn {seed}") == text
        assert tuning.origin(text) == f"drawn {seed}"
    assert tuning.numbers() == tuning.numbers(tuning.text(tuning.numbers(), "again"))


def test_the_fingerprint_is_of_the_numbers_alone() -> None:
    numbers = tuning.numbers()
    assert tuning.fingerprint(tuning.text(numbers, "here")) == tuning.fingerprint(
        tuning.text(numbers, "elsewhere")
    )
    # The numbers are equal, but unmeasured ones, the defaults, do not choose paths.
    assert tuning.fingerprint(tuning.text(numbers, "here")) != tuning.fingerprint()
    assert not tuning.is_measured()
    assert tuning.is_measured(tuning.text(numbers, "here"))
    prints = {tuning.fingerprint(drawn(seed)) for seed in range(50)}
    assert len(prints) == 50
    assert all(len(p) == 16 and int(p, 16) >= 0 for p in prints)
    for name in NAMES:
        changed = tuning.text({**numbers, name: numbers[name] * (1 + 1e-15)}, "defaults")
        assert tuning.fingerprint(changed) != tuning.fingerprint()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [0.0, -1e-6, 11.0, float("nan"), float("inf")])
def test_a_number_nobody_can_have_measured_is_refused_by_name(name: str, bad: float) -> None:
    with pytest.raises(fd.InvalidArgument, match=f"tuning table: {name} is"):
        tuning.text({**tuning.numbers(), name: bad}, "bad")


@pytest.mark.parametrize("origin", ["", "two\nlines", "x" * 161, "é"])
def test_an_origin_is_one_short_line(origin: str) -> None:
    with pytest.raises(fd.InvalidArgument, match="origin"):
        tuning.text(tuning.numbers(), origin)


def test_garbled_text_is_refused() -> None:
    good = drawn(1)
    assert tuning.numbers(good)
    lines = good.splitlines(keepends=True)
    bad = [good + "more=1\n", good[:-1], good.replace("=", ":"), "x" * 5000, "\n", good + good]
    bad += ["".join(lines[:i] + lines[i + 1 :]) for i in range(len(lines))]
    for i, name in enumerate(NAMES):
        for value in ("", "1e-6x", "nan", "-1", "0x1p-3"):
            bad.append("".join([*lines[:i], f"{name}={value}\n", *lines[i + 1 :]]))
    for text in bad:
        with pytest.raises(fd.InvalidArgument, match="tuning table: "):
            tuning.numbers(text)


# ---- the file ----


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of this host's table in this test. No file is there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FARANDOLE_TUNING", "auto")
    monkeypatch.setattr(kept, "usable_cores", lambda: 8)
    return Path(kept.path_here())


def measured(**changes: Any) -> kept.Kept:
    """The result of a possible measurement: the defaults with `changes`."""
    return kept.Kept(
        kind=kept.kind(),
        measured="2026-01-02 03:04 UTC",
        ranks=4,
        noise=changes.pop("noise", 0.05),
        tries=changes.pop("tries", 1),
        errors={"ll": 0.05},
        seconds={**tuning.numbers(), **changes},
    )


def fill(path: Path, **changes: Any) -> None:
    kept.write(str(path), measured(**changes))


def test_a_file_is_found_again_and_is_private(cache: Path) -> None:
    assert table.find() == table.Table()
    assert table.for_world(2) == ""
    fill(cache, ll_start=2e-6)
    found = table.find()
    assert found.kept == measured(ll_start=2e-6)
    assert tuning.numbers(found.text) == {**tuning.numbers(), "ll_start": 2e-6}
    assert found.origin == "measured 2026-01-02 03:04 UTC with 4 ranks"
    assert (found.path, found.why_not) == (str(cache), "")
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o700
    fill(cache, ll_start=3e-6)  # replaces the old table
    assert tuning.numbers(table.for_world(2))["ll_start"] == 3e-6
    assert [p.name for p in cache.parent.iterdir()] == [cache.name]


def test_ranks_that_take_turns_make_their_usual_choices(cache: Path) -> None:
    fill(cache)
    assert table.find(8).text != ""
    assert table.find(9) == table.Table(why_not="9 ranks take turns on 8 cores")


def test_a_table_of_a_busy_host_is_not_used_unless_it_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cache, noise=0.3)
    assert table.find().text == ""
    assert table.find().why_not == f"{cache}: the host was busy (noise 30 %)"
    assert table.for_world(2) == ""  # and no warning: warnings are errors here
    monkeypatch.setenv("FARANDOLE_TUNING", str(cache))
    assert table.find().text != ""


def test_what_would_not_be_believed_is_not_written(cache: Path) -> None:
    with pytest.raises(cli.CommandError, match=r"nothing is written: .*ll_start"):
        _keep(str(cache), measured(ll_start=-1.0), force=True)
    assert not cache.exists()


def test_a_quieter_table_stays_and_a_noisier_one_goes(cache: Path) -> None:
    def after(noise: float, *, force: bool = False) -> tuple[float, int]:
        _keep(str(cache), measured(noise=noise), force=force)
        found = kept.read(str(cache))
        return found.noise, found.tries

    assert after(0.4) == (0.4, 1)
    assert after(0.1) == (0.1, 2)  # quieter
    assert after(0.3) == (0.1, 3)  # noisier: only the number of tries changes
    assert after(0.12) == (0.12, 4)  # as good, and newer
    assert after(0.3, force=True) == (0.3, 5)


def test_a_write_that_fails_leaves_the_old_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cache)
    before = cache.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        fill(cache, ll_start=1e-3)
    assert cache.read_bytes() == before
    assert [p.name for p in cache.parent.iterdir()] == [cache.name]


def sealed(text: str) -> bytes:
    """The text with a checksum that matches."""
    return text.encode() + b"check=%08x\n" % crc32(text.encode())


def edited(old: str, new: str) -> Callable[[str], bytes]:
    def edit(text: str) -> bytes:
        assert old in text
        return sealed(text.replace(old, new))

    return edit


GARBLED: list[tuple[str, Callable[[str], bytes]]] = [
    ("no farandole tuning table 1", lambda _: b"\xff\x00 not text"),
    ("no farandole tuning table 1", lambda _: b""),
    ("no farandole tuning table 1", lambda _: b" " * 70000),
    ("no farandole tuning table 1", edited("table 1", "table 2")),
    ("no farandole tuning table 1", lambda text: text.encode()),  # cut before its checksum
    ("damaged", lambda text: sealed(text)[:-3]),
    ("damaged", lambda text: sealed(text).replace(b"cores", b"cares")),
    ("damaged", lambda text: sealed(text) + b"more\n"),
    ("for farandole '0.0.1'", edited(f"farandole={fd._core.__version__}", "farandole=0.0.1")),
    ("for cores None", edited("kind.cores=", "kind.bores=")),
    ("missing", edited("seconds.ll_start=", "seconds.ll_start=x")),
    ("missing", edited("ranks=4", "ranks=four")),
    ("missing", edited("measured=", "measurement=")),
    ("missing", edited("noise=", "other.noise=")),
    ("ll_start is nan", edited("ll_start=5e-07", "ll_start=nan")),
    ("ll_start is 1000", edited("ll_start=5e-07", "ll_start=1000")),
    ("it has 19 numbers", edited("seconds.ll_start", "seconds.more=1\nseconds.ll_start")),
    ("no ll_start", edited("seconds.ll_start", "seconds.lines_begin")),
    ("origin", edited("03:04", "03:04\a")),
    ("origin", edited("03:04", "long " * 100)),
]


@pytest.mark.parametrize(("why", "garble"), GARBLED)
def test_a_garbled_file_is_one_warning_and_the_usual_choices(
    cache: Path, why: str, garble: Callable[[str], bytes]
) -> None:
    fill(cache)
    whole = cache.read_text()
    cache.write_bytes(garble(whole[: whole.index("check=")]))
    found = table.find()
    assert found.text == ""
    assert why in found.why_not
    assert str(cache) in found.why_not
    with pytest.warns(RuntimeWarning, match="farandole makes its usual choices") as seen:
        assert table.for_world(2) == ""
    assert len(seen) == 1


def test_no_changed_byte_goes_unseen(cache: Path) -> None:
    fill(cache)
    whole = cache.read_bytes()
    for at in range(len(whole)):
        cache.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(kept.NotBelieved):
            kept.read(str(cache))


def test_a_file_that_cannot_be_read_is_not_believed(cache: Path) -> None:
    cache.mkdir(parents=True)
    assert "directory" in table.find().why_not.lower()


def test_the_setting_names_a_file_or_none(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cache, ll_start=2e-6)
    other = tmp_path / "other.txt"
    elsewhere = measured(ll_start=4e-6)
    kept.write(str(other), elsewhere._replace(kind={**elsewhere.kind, "cores": "4096"}))
    by_setting = {"auto": 2e-6, "": 2e-6, "kept": 2e-6, str(other): 4e-6, "off": 5e-7}
    for setting, start in by_setting.items():
        monkeypatch.setenv("FARANDOLE_TUNING", setting)
        assert tuning.numbers(table.find().text)["ll_start"] == start
    monkeypatch.setenv("FARANDOLE_TUNING", str(tmp_path / "none.txt"))
    assert "none.txt: No such file" in table.find().why_not


@pytest.mark.usefixtures("cache")
def test_without_a_home_there_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert table.for_world(2) == ""
    assert table.find().why_not == "there is no home directory to keep it in"


# ---- the choice ----


def questions(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    return {
        "collective": draw.choice(COLLECTIVES),
        "count": draw.choice([0, 1, 7, 509, 518, 519, 8192, 8193, 60001, 1 << 22]),
        "dtype": draw.choice(["float32", "float16", "uint8"]),
        "ranks": draw.randint(1, 9),
        "shared": draw.random() < 0.5,
        "foreign": draw.random() < 0.5,
        "level": draw.choice(["canonical", "fast"]),
    }


def usual_path(collective: str, bytes_in: int, ranks: int, *, shared: bool, foreign: bool) -> str:
    """The path that runs without a measured table: an independent statement of the rule."""
    if bytes_in <= LINES:
        return "ll"
    if shared and collective in ("all_reduce", "reduce"):
        return "mapped"
    if shared and collective == "gather" and bytes_in >= LIMITS["handed in"]:
        return "mapped"
    if bytes_in <= ONE_SHOT or ranks == 1:
        return "one_shot"
    if foreign:
        return "cma"
    return "cico"


def test_without_a_table_paths_are_the_usual_ones() -> None:
    for collective in sorted(set(COLLECTIVES) - {"barrier"}):
        blocks = collective in ("scatter", "all_to_all")  # of `count` for every rank
        for ranks in (1, 2, 3, 8, 33, 256):
            for count in (0, 1, LINES, LINES + 1, ONE_SHOT, ONE_SHOT + 1, LIMITS["handed in"]):
                for shared in (False, True):
                    for foreign in (False, True):
                        rows = tuning.explain(
                            collective, count, "uint8", ranks, shared=shared, foreign=foreign
                        )
                        longest = count * ranks if blocks else count
                        expected = usual_path(
                            collective, longest, ranks, shared=shared, foreign=foreign
                        )
                        assert [r["name"] for r in rows if r["chosen"]] == [expected], (
                            collective, ranks, count, shared, foreign,
                        )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_a_measured_choice_is_the_usual_one_or_much_less(seed: int) -> None:
    """No allowed algorithm has a predicted time below 90 % of the chosen one's."""
    for q in range(100):
        question, text = questions(1000 * seed + q), drawn(seed)
        rows = tuning.explain(**question, text=text)
        assert rows == tuning.explain(**question, text=text)
        chosen = [row for row in rows if row["chosen"]]
        assert len(chosen) == 1, question
        assert chosen[0]["refusal"] == ""
        if chosen[0]["name"] == "barrier":
            continue
        took = chosen[0]["seconds"]
        assert took is not None
        allowed = [row["seconds"] for row in rows if not row["refusal"]]
        assert took * 0.9 <= min(s for s in allowed if s is not None), question


def test_who_is_told_to_go_by_address_does_not_copy() -> None:
    slow = tuning.text({**tuning.numbers(), "cma_start": 1.0}, "by address is slow here")
    for demanded, expected in ((False, "cico"), (True, "cma")):
        rows = tuning.explain("all_reduce", 1 << 20, foreign=True, demanded=demanded, text=slow)
        assert [row["name"] for row in rows if row["chosen"]] == [expected]


@pytest.mark.parametrize("seed", range(20))
def test_no_table_leaves_the_level(seed: int) -> None:
    for size in range(1, 10):
        for collective in COLLECTIVES:
            for count in (0, 1, 1000, 1 << 20):
                rows = tuning.explain(collective, count, "float32", size, text=drawn(seed))
                for row in rows:
                    if row["backend"] == "schedule" and not row["refusal"]:
                        assert ORDERS[size][collective, row["name"]] == "canonical", row


def test_equal_numbers_give_equal_choices_whatever_their_origin() -> None:
    for seed in range(200):
        numbers, question = tuning.numbers(drawn(seed)), questions(seed)
        answers = [
            tuning.explain(**question, text=tuning.text(numbers, origin)) for origin in ("a", "b")
        ]
        assert answers[0] == answers[1]


def test_lines_hold_what_they_hold_whatever_is_measured() -> None:
    fast = {name: 1e-12 if name.startswith(("ll", "one_shot")) else 1.0 for name in NAMES}
    text = tuning.text(fast, "small paths alone")
    for count, name in ((266, "ll"), (267, "one_shot"), (8192, "one_shot"), (8193, "cico")):
        rows = tuning.explain("all_reduce", count, text=text)
        assert [row["name"] for row in rows if row["chosen"]] == [name]


@pytest.mark.parametrize("mistake", [{"ranks": 0}, {"collective": "dance"}, {"level": "exact"}])
def test_a_question_without_meaning_is_refused(mistake: dict[str, Any]) -> None:
    with pytest.raises(fd.InvalidArgument):
        tuning.explain(**{"collective": "all_reduce", "count": 1, **mistake})


def by_mpi(collective: str = "all_reduce", **question: Any) -> dict[str, Any] | None:
    rows = tuning.explain(collective, 1000, **question)
    return next((dict(row) for row in rows if row["backend"] == "mpi"), None)


@pytest.mark.parametrize(
    ("question", "refusal"),
    [
        ({"level": "fast"}, "data do not go over MPI"),
        ({"transport": "mpi"}, "level 'canonical' promises bits"),
        ({"transport": "mpi", "level": "fast"}, "chosen between hosts alone, or by name"),
        ({"transport": "mpi", "level": "fast", "dtype": "bfloat16"}, "MPI has no bfloat16"),
    ],
)
def test_mpis_own_way_says_why_it_is_not_taken(question: dict[str, Any], refusal: str) -> None:
    row = by_mpi(**question)
    assert row is not None
    assert refusal in row["refusal"]
    assert row["seconds"] is None, "nobody has measured it"
    assert by_mpi("broadcast", **question) is None


def test_mpis_own_way_takes_what_was_measured() -> None:
    text = tuning.text({**tuning.numbers(), "mpi_round": 1e-5, "mpi_byte": 1e-9}, "measured")
    row = by_mpi(ranks=4, text=text)
    assert row is not None
    assert row["seconds"] == pytest.approx(2 * 1e-5 + 1e-9 * 1.5 * 4000)


# ---- the output of info --why ----

WHY = f"""\
all_reduce of 4 MiB float32, 3 ranks on this host, memory caller, level canonical: cico

name              what     us         why
----------------  -------  ---------  ------------------------------------------------------------------------
ll                path           672  takes at most {LINES} bytes
one_shot          path           673  takes at most {ONE_SHOT} bytes
mapped            path           169  needs input and output in memory that all ranks map (farandole.allocate)
cma               path           339  reaches other ranks' memory, which is forbidden or found to be slower
cico              path           507  chosen: the only one allowed
"""  # noqa: E501


@pytest.fixture
def by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host on which ranks measure that copies by address are slow."""
    monkeypatch.setattr(_why, "_by_address", lambda *_: (False, "it is slow here"))


@pytest.mark.usefixtures("by_copies")
def test_why_is_a_table_and_its_origin(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FARANDOLE_TUNING", "off")
    assert cli.main(["info", "--why", "4M", "--ranks", "3"]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith(WHY)
    assert "only same_on_all_ranks, below level canonical" in shown
    assert shown.endswith(
        "not by address: it is slow here\n"
        f"table {tuning.fingerprint()}: defaults\nFARANDOLE_TUNING=off\n"
    )


@pytest.mark.usefixtures("by_copies")
def test_why_tells_the_file_and_what_is_forced(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["info", "--why", "1K"]) == 0
    assert capfd.readouterr().out.endswith("defaults\nmeasure this host: farandole tune\n")
    fill(cache, ll_start=1e-3)
    monkeypatch.setenv("FARANDOLE_ALGORITHM", "ring")
    assert cli.main(["info", "--why", "1K"]) == 0
    shown = capfd.readouterr().out
    assert "level canonical: one_shot\n" in shown
    assert f"measured 2026-01-02 03:04 UTC with 4 ranks, noise 5.0 %\nfile {cache}\n" in shown
    assert shown.endswith("but FARANDOLE_ALGORITHM=ring forces that one where it can run\n")
    cache.write_text("{}")
    assert cli.main(["info", "--why", "1K"]) == 0
    assert f"not used: {cache}: it is no farandole tuning table 1" in capfd.readouterr().out


def test_why_asks_two_ranks_about_addresses(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for setting, expected in (("0", (False, "FARANDOLE_CMA=0")), ("1", None)):
        monkeypatch.setenv("FARANDOLE_CMA", setting)
        assert cli.main(["info", "--json", "--why", "4M"]) == 0
        facts = json.loads(capfd.readouterr().out)
        answer = facts["by address"]
        if expected is not None:
            assert (answer["used"], answer["why not"]) == expected
        # With FARANDOLE_CMA=1 they copy by address if the kernel allows it.
        assert facts["choice"] == ("cma" if answer["used"] else "cico")
        assert answer["used"] or answer["why not"]


@pytest.mark.usefixtures("by_copies")
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_why_as_json_for_every_collective(
    collective: str, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["info", "--json", "--why", "64K", "--collective", collective, "--memory", "ours"]
    assert cli.main(arguments) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["choice"] in [c["name"] for c in facts["candidates"] if c["chosen"]]
    assert facts["question"]["bytes"] == 65536


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--why", "soon"], "--why: 'soon' is not a size"),
        (["--why", "3"], "3 bytes are not a number of float32 (4 bytes)"),
        (["--why", "4", "--ranks", "0"], "--ranks takes a number from 1 to 1024, not '0'"),
        (["--why", "4", "--dtype", "float7"], "--dtype float7 is unknown"),
        (["--why", "4", "--collective", "dance"], "there is no collective 'dance'"),
        (["--ranks", "2"], "--ranks belongs to --why SIZE"),
    ],
)
def test_mistakes_in_why_are_one_line(
    arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["info", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert words in err


# ---- the fit ----


def samples(text: str, noise: float = 0.0) -> list[fit.Sample]:
    """Times that would be measured on a host that matches the model."""
    draw = random.Random(3)
    found = []
    rows = [("all_reduce", path) for path in fit.PATHS]
    rows += [(c, p) for c, p in ORDERS[4] if c in ("all_reduce", "broadcast", "all_gather")]
    for collective, name in rows:
        for size in (8, 2048, 32768, 524288):
            explained = tuning.explain(
                collective, size, "uint8", 4, shared=True, foreign=True, level="fast", text=text
            )
            seconds = next(row["seconds"] for row in explained if row["name"] == name)
            assert seconds is not None
            found.append(
                fit.Sample(collective, name, size, 4, seconds * (1 + draw.uniform(-noise, noise)))
            )
    return found


def test_a_true_model_is_found_again() -> None:
    truth = {name: value * 3 for name, value in tuning.numbers().items()} | {"ll_byte": 4e-9}
    result = fit.fit(samples(tuning.text(truth, "true")))
    for name in set(NAMES) - {"channel_message", *LINKS, *MPI}:
        assert result.seconds[name] == pytest.approx(truth[name], rel=0.05), name
    assert max(result.medians().values()) < 0.01
    noisy = fit.fit(samples(tuning.text(truth, "true"), noise=0.2))
    assert 0.01 < max(noisy.medians().values()) < 0.25
    assert tuning.text(noisy.seconds, "noisy")


def test_what_the_times_do_not_tell_stays_as_it_was() -> None:
    assert fit.fit([]).seconds == tuning.numbers()
    few = fit.fit([fit.Sample("all_reduce", "ll", 8, 2, 1e-6)])
    changed = {n for n in NAMES if few.seconds[n] != tuning.numbers()[n]}
    assert changed <= {"ll_start", "ll_byte"}


def test_times_that_make_no_sense_give_a_table_that_is_believed() -> None:
    """More data take less time here. No number may become negative."""
    odd = [fit.Sample("all_reduce", p, b, 2, 1e-3 / (b + 1)) for p in fit.PATHS for b in (1, 2000)]
    assert tuning.text(fit.fit(odd).seconds, "odd")


def test_tune_takes_a_number_of_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    for wrong in ("1", "0", "-2", "many", "65"):
        assert cli.main(["tune", "-np", wrong]) == 2
        assert f"-np takes a number from 2 to 64, not '{wrong}'" in capfd.readouterr().err


# ---- links to other hosts ----


def test_links_stay_until_they_are_measured_again(cache: Path) -> None:
    def after(*, links: bool, noise: float, **seconds: float) -> tuple[str, float, float]:
        found = measured(noise=noise, **seconds)
        said = _keep(str(cache), found, force=False, measured_links=links)
        numbers = kept.read(str(cache)).seconds
        return said.partition(":")[0], numbers["network_round"], numbers["ll_start"]

    first = {"network_round": 5e-5, "ll_start": 1e-6}
    assert after(links=True, noise=0.1, **first) == ("written", 5e-5, 1e-6)
    assert after(links=False, noise=0.1, ll_start=2e-6) == ("written", 5e-5, 2e-6)
    # The host is noisier: numbers of the host itself are not replaced.
    assert after(links=True, noise=0.3, network_round=6e-5, ll_start=3e-6)[1:] == (6e-5, 2e-6)
    assert after(links=False, noise=0.3, network_round=7e-5)[1:] == (6e-5, 2e-6)


def test_what_mpi_takes_stays_whatever_else_is_measured(cache: Path) -> None:
    fill(cache, mpi_round=3e-5, mpi_byte=2e-9)
    for links in (False, True):
        _keep(str(cache), measured(network_round=links + 1e-5), force=True, measured_links=links)
        numbers = kept.read(str(cache)).seconds
        assert (numbers["mpi_round"], numbers["mpi_byte"]) == (3e-5, 2e-9)


def test_a_table_from_before_mpi_was_measured_is_believed(cache: Path) -> None:
    old = measured()
    kept.write(
        str(cache), old._replace(seconds={n: s for n, s in old.seconds.items() if n not in MPI})
    )
    assert tuning.numbers(table.find().text) == tuning.numbers()
    assert _keep(str(cache), measured(ll_start=2e-6), force=True).startswith("written")
    assert kept.read(str(cache)).seconds == tuning.numbers() | {"ll_start": 2e-6}


def test_ranks_of_mpiexec_are_not_counted_again(capfd: pytest.CaptureFixture[str]) -> None:
    for option in (["-np", "2"], ["-H", "a,b"]):
        assert cli.main(["tune", "--mpi", *option]) == 2
        assert f"{option[0]} does not go with --mpi" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-H", "localhost"], "a link has two ends"),
        (["-H", "no-such-host,localhost"], "the table is of this host; name it first"),
        (["-H", "a,b", "--launcher", "local"], "--output FILE, or --dry-run"),
        (["--launcher", "local"], "name them with -H"),
        (["-H", "a:0,b"], "at least 1 slot"),
    ],
)
def test_links_need_hosts_that_make_sense(
    arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", *arguments]) == 2
    assert said in capfd.readouterr().err
