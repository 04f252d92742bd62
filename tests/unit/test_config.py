"""The FARANDOLE_* variables: read once, refused with the variable's name."""

from __future__ import annotations

import pytest

from farandole import InvalidArgument, _core

SETTINGS = {row["name"]: row for row in _core.settings()}


def value(name: str) -> str:
    return str(next(row["value"] for row in _core.settings() if row["name"] == name))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_variable_is_explained(name: str) -> None:
    row = SETTINGS[name]
    assert name.startswith("FARANDOLE_")
    assert row["type"] in ("number", "bytes", "text")
    assert len(row["doc"]) > 10
    assert row["value"] == row["default"]


@pytest.mark.parametrize("name", [n for n, row in SETTINGS.items() if row["type"] == "number"])
@pytest.mark.parametrize("bad", ["soon", "", "-1", "nan", "1s", "1 2"])
def test_bad_numbers_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, bad: str
) -> None:
    monkeypatch.setenv(name, bad)
    with pytest.raises(InvalidArgument, match=f"^{name}={bad} is not a number of at least 0"):
        _core.settings()


@pytest.mark.parametrize("good", ["0", "2.5", "1e3"])
def test_numbers(monkeypatch: pytest.MonkeyPatch, good: str) -> None:
    monkeypatch.setenv("FARANDOLE_TIMEOUT", good)
    assert float(value("FARANDOLE_TIMEOUT")) == float(good)


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("1048576", 1 << 20), ("512K", 512 << 10), ("25M", 25 << 20), ("1.5GiB", 3 << 29)],
)
def test_sizes(monkeypatch: pytest.MonkeyPatch, text: str, count: int) -> None:
    monkeypatch.setenv("FARANDOLE_BUCKET_BYTES", text)
    assert value("FARANDOLE_BUCKET_BYTES") == str(count)


@pytest.mark.parametrize("bad", ["much", "", "-1", "5 M", "5T", "M", "nan", "inf", "1e30"])
def test_bad_sizes_are_refused(monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    monkeypatch.setenv("FARANDOLE_BUCKET_BYTES", bad)
    with pytest.raises(InvalidArgument, match=f"^FARANDOLE_BUCKET_BYTES={bad} is not a size"):
        _core.settings()


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("FARANDOLE_LEVEL", "canonical fast"),
        ("FARANDOLE_PROGRESS", "auto thread caller"),
        ("FARANDOLE_LOG", "error warning info debug"),
    ],
)
def test_choices(monkeypatch: pytest.MonkeyPatch, name: str, choices: str) -> None:
    for choice in choices.split():
        monkeypatch.setenv(name, choice)
        assert value(name) == choice
    monkeypatch.setenv(name, "other")
    with pytest.raises(InvalidArgument, match=f"{name}=other is not one of {choices}"):
        _core.settings()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FARANDOLE_TIMOUT", "FARANDOLE_TIMEOUT"),
        ("FARANDOLE_BUCKETBYTES", "FARANDOLE_BUCKET_BYTES"),
        ("FARANDOLE_BUCKET_BYTE", "FARANDOLE_BUCKET_BYTES"),
        ("FARANDOLE_LEVLE", "FARANDOLE_LEVEL"),
    ],
)
def test_a_mistyped_name_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str, meant: str) -> None:
    assert _core.unread_variables() == []
    monkeypatch.setenv(name, "1")
    assert _core.unread_variables() == [f"{name} is not a setting; did you mean {meant}?"]


@pytest.mark.parametrize("name", ["FARANDOLE_DEBUG", "FARANDOLE_SOMETHING_ELSE", "FARANDOLE_"])
def test_a_name_like_no_other_is_noticed_without_a_guess(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    assert _core.unread_variables() == [f"{name} is not a setting"]


@pytest.mark.parametrize(
    "name",
    [
        *SETTINGS,
        "FARANDOLE_RUN_ID",
        "FARANDOLE_RESTART_COUNT",
        "FARANDOLE_TEST_FOLDER",
        "MY_FARANDOLE_TIMOUT",
        "farandole_timout",
    ],
)
def test_what_somebody_reads_is_no_mistake(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert _core.unread_variables() == []
