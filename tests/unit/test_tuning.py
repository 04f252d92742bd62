"""Tuning tables: what is believed, what is chosen, what is told about it, what is fitted."""

from __future__ import annotations

import json
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farandole as fd
from farandole import _core, _tuning, cli
from farandole._tune import fit

tuning = _core.tuning
NAMES = [name for name, _ in tuning.fields()]
COLLECTIVES = sorted({p["collective"] for p in _core.schedule.planners()})
ORDERS = {
    size: {(p["collective"], p["name"]): p["order"] for p in _core.schedule.planners(size, 1000)}
    for size in range(1, 10)
}


def drawn(seed: int) -> str:
    """A table that no machine has, but that is believed."""
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
    assert tuning.fingerprint(tuning.text(numbers, "elsewhere")) == tuning.fingerprint()
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
    """Where the table of this host lies in this test; nothing is there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return _tuning.cache_path()


def fill(path: Path, **changes: float) -> None:
    numbers = {**tuning.numbers(), **changes}
    _tuning.write(path, numbers, measured="2026-01-02 03:04 UTC", ranks=4, fit={"lines": 0.05})


def test_a_file_is_found_again_and_is_private(cache: Path) -> None:
    assert _tuning.find() == _tuning.Table()
    assert _tuning.for_world() == ""
    fill(cache, lines_start=2e-6)
    table = _tuning.find()
    assert tuning.numbers(table.text) == {**tuning.numbers(), "lines_start": 2e-6}
    assert table.origin == "measured 2026-01-02 03:04 UTC with 4 ranks"
    assert (table.path, table.fit, table.why_not) == (cache, {"lines": 0.05}, "")
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o700
    fill(cache, lines_start=3e-6)  # over the old one
    assert tuning.numbers(_tuning.for_world())["lines_start"] == 3e-6
    assert [p.name for p in cache.parent.iterdir()] == [cache.name]


def test_what_would_not_be_believed_is_not_written(cache: Path) -> None:
    with pytest.raises(_tuning.NotBelieved, match="lines_start"):
        fill(cache, lines_start=-1.0)
    assert not cache.exists()


def test_a_write_that_fails_leaves_the_old_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cache)
    before = cache.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match="No space"):
        fill(cache, lines_start=1e-3)
    assert cache.read_bytes() == before
    assert [p.name for p in cache.parent.iterdir()] == [cache.name]


GARBLED: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("no JSON", lambda _: b"\xff\x00 not json"),
    ("no JSON", lambda _: b""),
    ("no JSON", lambda c: json.dumps(c)[:-9].encode()),
    ("no JSON", lambda _: b"[" * 60000),
    ("too long", lambda _: b" " * 70000),
    ("format", lambda _: []),
    ("format", lambda c: {**c, "format": 2}),
    ("which kind of host", lambda c: {**c, "kind": None}),
    ("for farandole '0.0.1'", lambda c: {**c, "kind": {**c["kind"], "farandole": "0.0.1"}}),
    ("for cores 4096", lambda c: {**c, "kind": {**c["kind"], "cores": 4096}}),
    ("missing", lambda c: {k: v for k, v in c.items() if k != "seconds"}),
    ("missing", lambda c: {**c, "seconds": {**c["seconds"], "lines_start": "1e-6"}}),
    ("missing", lambda c: {**c, "seconds": {**c["seconds"], "lines_start": True}}),
    ("missing", lambda c: {**c, "ranks": "two"}),
    ("missing", lambda c: {**c, "measured": 7}),
    ("lines_start is nan", lambda c: {**c, "seconds": {**c["seconds"], "lines_start": np.nan}}),
    ("lines_start is 1000", lambda c: {**c, "seconds": {**c["seconds"], "lines_start": 1000}}),
    ("numbers", lambda c: {**c, "seconds": {**c["seconds"], "more": 1e-6}}),
    ("no channel_round", lambda c: {**c, "seconds": {}}),
    ("origin", lambda c: {**c, "measured": "a\nb"}),
    ("origin", lambda c: {**c, "measured": "long " * 100}),
]


@pytest.mark.parametrize(("why", "garble"), GARBLED)
def test_a_garbled_file_is_one_warning_and_the_defaults(
    cache: Path, why: str, garble: Callable[[dict[str, Any]], Any]
) -> None:
    fill(cache)
    content = garble(json.loads(cache.read_text()))
    cache.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    table = _tuning.find()
    assert table.text == ""
    assert why in table.why_not
    assert str(cache) in table.why_not
    with pytest.warns(RuntimeWarning, match="farandole uses its default tuning table") as seen:
        assert _tuning.for_world() == ""
    assert len(seen) == 1


def test_a_file_that_cannot_be_read_is_not_believed(cache: Path) -> None:
    cache.mkdir(parents=True)
    assert "directory" in _tuning.find().why_not.lower()


def test_the_setting_names_a_file_or_none(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cache, lines_start=2e-6)
    other = tmp_path / "other.json"
    fill(other, lines_start=4e-6)
    content = json.loads(other.read_text())
    other.write_text(json.dumps({**content, "kind": {**content["kind"], "cores": 4096}}))
    for setting, start in (("auto", 2e-6), ("", 2e-6), (str(other), 4e-6), ("off", 5e-7)):
        monkeypatch.setenv("FARANDOLE_TUNING", setting)
        assert tuning.numbers(_tuning.find().text)["lines_start"] == start
    monkeypatch.setenv("FARANDOLE_TUNING", str(tmp_path / "none.json"))
    assert "none.json does not exist" in _tuning.find().why_not


def test_without_a_home_there_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setattr(Path, "home", homeless)
    assert _tuning.find() == _tuning.Table()


# ---- the choice ----


def questions(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    return {
        "collective": draw.choice(COLLECTIVES),
        "count": draw.choice([0, 1, 7, 509, 518, 519, 8192, 8193, 60001, 1 << 22]),
        "dtype": draw.choice(["float32", "float16", "uint8"]),
        "ranks": draw.randint(1, 9),
        "shared": draw.random() < 0.5,
        "level": draw.choice(["canonical", "fast"]),
    }


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_least_predicted_of_those_allowed(seed: int) -> None:
    for q in range(100):
        question, text = questions(1000 * seed + q), drawn(seed)
        rows = tuning.explain(**question, text=text)
        assert rows == tuning.explain(**question, text=text)
        chosen = [row for row in rows if row["chosen"]]
        assert len(chosen) == 1, question
        assert chosen[0]["refusal"] == ""
        if chosen[0]["name"] == "barrier":
            continue
        allowed = [row["seconds"] for row in rows if not row["refusal"]]
        assert chosen[0]["seconds"] == min(s for s in allowed if s is not None), question


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
    fast = {name: 1e-12 if name.startswith(("lines", "one_shot")) else 1.0 for name in NAMES}
    text = tuning.text(fast, "small paths alone")
    for count, name in ((518, "lines"), (519, "one_shot"), (8192, "one_shot"), (8193, "staged")):
        rows = tuning.explain("all_reduce", count, text=text)
        assert [row["name"] for row in rows if row["chosen"]] == [name]


@pytest.mark.parametrize("mistake", [{"ranks": 0}, {"collective": "dance"}, {"level": "exact"}])
def test_a_question_without_meaning_is_refused(mistake: dict[str, Any]) -> None:
    with pytest.raises(fd.InvalidArgument):
        tuning.explain(**{"collective": "all_reduce", "count": 1, **mistake})


# ---- what info --why tells ----

WHY = """\
all_reduce of 4 MiB float32, 3 ranks on this host, memory caller, level canonical: staged

name              what     us         why
----------------  -------  ---------  ------------------------------------------------------------------------
lines             path          1678  takes at most 2072 bytes
one_shot          path          1679  takes at most 32768 bytes
window            path           421  needs input and output in memory that all ranks map (farandole.allocate)
staged            path          1288  chosen: the only one allowed
"""  # noqa: E501


def test_why_is_a_table_and_its_origin(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FARANDOLE_TUNING", "off")
    assert cli.main(["info", "--why", "4M", "--ranks", "3"]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith(WHY)
    assert "only same_on_all_ranks, below level canonical" in shown
    assert shown.endswith(f"table {tuning.fingerprint()}: defaults\nFARANDOLE_TUNING=off\n")


def test_why_tells_the_file_and_what_is_forced(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["info", "--why", "1K"]) == 0
    assert capfd.readouterr().out.endswith("defaults\nmeasure this host: farandole tune\n")
    fill(cache, lines_start=1e-3)
    monkeypatch.setenv("FARANDOLE_ALGORITHM", "ring")
    assert cli.main(["info", "--why", "1K"]) == 0
    shown = capfd.readouterr().out
    assert "level canonical: one_shot\n" in shown
    assert f"measured 2026-01-02 03:04 UTC with 4 ranks\nfile {cache}\n" in shown
    assert shown.endswith("but FARANDOLE_ALGORITHM=ring forces that one where it can run\n")
    cache.write_text("{}")
    assert cli.main(["info", "--why", "1K"]) == 0
    assert f"not used: {cache}: it is no tuning table of format 1" in capfd.readouterr().out


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
    """What a host would show of which the model is true."""
    draw = random.Random(3)
    found = []
    rows = [("all_reduce", path) for path in fit.PATHS]
    rows += [(c, p) for c, p in ORDERS[4] if c in ("all_reduce", "broadcast", "all_gather")]
    for collective, name in rows:
        for size in (8, 2048, 32768, 524288):
            explained = tuning.explain(collective, size, "uint8", 4, True, "fast", text)
            seconds = next(row["seconds"] for row in explained if row["name"] == name)
            assert seconds is not None
            found.append(
                fit.Sample(collective, name, size, 4, seconds * (1 + draw.uniform(-noise, noise)))
            )
    return found


def test_a_true_model_is_found_again() -> None:
    truth = {name: value * 3 for name, value in tuning.numbers().items()} | {"lines_byte": 4e-9}
    result = fit.fit(samples(tuning.text(truth, "true")))
    for name in set(NAMES) - {"channel_message"}:
        assert result.seconds[name] == pytest.approx(truth[name], rel=0.05), name
    assert max(result.medians().values()) < 0.01
    noisy = fit.fit(samples(tuning.text(truth, "true"), noise=0.2))
    assert 0.01 < max(noisy.medians().values()) < 0.25
    assert tuning.text(noisy.seconds, "noisy")


def test_what_the_times_do_not_tell_stays_as_it_was() -> None:
    assert fit.fit([]).seconds == tuning.numbers()
    few = fit.fit([fit.Sample("all_reduce", "lines", 8, 2, 1e-6)])
    changed = {n for n in NAMES if few.seconds[n] != tuning.numbers()[n]}
    assert changed <= {"lines_start", "lines_byte"}


def test_times_that_make_no_sense_give_a_table_that_is_believed() -> None:
    """Longer data, shorter time: no number becomes negative."""
    odd = [fit.Sample("all_reduce", p, b, 2, 1e-3 / (b + 1)) for p in fit.PATHS for b in (1, 2000)]
    assert tuning.text(fit.fit(odd).seconds, "odd")


def test_tune_takes_a_number_of_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    for wrong in ("1", "0", "-2", "many", "65"):
        assert cli.main(["tune", "-np", wrong]) == 2
        assert f"-np takes a number from 2 to 64, not '{wrong}'" in capfd.readouterr().err
