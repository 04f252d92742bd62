"""The FARANDOLE_* variables: read once, refused with the variable's name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farandole import InvalidArgument, _core

SETTINGS = {row["name"]: row for row in _core.settings()}


def value(name: str) -> str:
    return str(next(row["value"] for row in _core.settings() if row["name"] == name))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_variable_is_explained(name: str) -> None:
    row = SETTINGS[name]
    assert name.startswith("FARANDOLE_")
    assert row["type"] in ("number", "whole number", "bytes", "text")
    assert len(row["doc"]) > 10
    assert row["value"] == row["default"]


@pytest.mark.parametrize("name", [n for n, row in SETTINGS.items() if row["type"] == "number"])
@pytest.mark.parametrize("bad", ["soon", "", "-1", "nan", "1s", "1 2"])
def test_bad_numbers_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, bad: str
) -> None:
    monkeypatch.setenv(name, bad)
    with pytest.raises(InvalidArgument, match=f"^{name}={bad} is not .*a number of at least 0"):
        _core.settings()


def test_a_host_may_be_silent_for_half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARANDOLE_LINK_TIMEOUT", "0.4")
    with pytest.raises(InvalidArgument, match=r"=0\.4 is not 0 or a number"):
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


def test_a_locale_of_the_program_changes_no_number(tmp_path: Path) -> None:
    try:
        made = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")]
        subprocess.run(made, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no locale that writes 1,5")
    script = (
        "import locale; locale.setlocale(locale.LC_ALL, 'de_DE.UTF-8'); import test_config as t; "
        "print(t.value('FARANDOLE_TIMEOUT'), t.value('FARANDOLE_BUCKET_BYTES'))"
    )
    numbers = {"FARANDOLE_TIMEOUT": "2.5", "FARANDOLE_BUCKET_BYTES": "1.5K"}
    environment = os.environ | {"LOCPATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | numbers, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.stdout == "2.5 1536\n", ran.stderr


@pytest.mark.parametrize("bad", ["much", "", "-1", "5 M", "5T", "M", "nan", "inf", "1e30"])
def test_bad_sizes_are_refused(monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    monkeypatch.setenv("FARANDOLE_BUCKET_BYTES", bad)
    with pytest.raises(InvalidArgument, match=f"^FARANDOLE_BUCKET_BYTES={bad} is not a size"):
        _core.settings()


def test_a_number_of_names_is_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARANDOLE_NAME_CACHE", "2048")
    assert value("FARANDOLE_NAME_CACHE") == "2048"
    for bad in ("", "-1", "2K", "1.5", "many", "99999999999999999999"):
        monkeypatch.setenv("FARANDOLE_NAME_CACHE", bad)
        with pytest.raises(InvalidArgument, match=f"NAME_CACHE={bad} is not a whole number") as got:
            _core.settings()
        assert got.value.advice == "correct the variable, or unset it"


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("FARANDOLE_LEVEL", "canonical fast"),
        ("FARANDOLE_PROGRESS", "auto thread caller"),
        ("FARANDOLE_LOG", "error warning info debug"),
        ("FARANDOLE_DEVICE_PATH", "auto staged step spin lanes nccl"),
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


# -- Horovod's names ----------------------------------------------------------------------------

ALIASES = [
    ("HOROVOD_FUSION_THRESHOLD", "1048576", "FARANDOLE_BUCKET_BYTES", "1048576"),
    ("HOROVOD_FUSION_THRESHOLD", "0", "FARANDOLE_BUCKET_BYTES", "0"),
    ("HOROVOD_FUSION_THRESHOLD", "1048576", "FARANDOLE_FUSION_BYTES", "1048576"),
    ("HOROVOD_CACHE_CAPACITY", "2048", "FARANDOLE_NAME_CACHE", "2048"),
    ("HOROVOD_TIMELINE", "/tmp/t.json", "FARANDOLE_TIMELINE", "/tmp/t.json"),
    ("HOROVOD_STALL_CHECK_DISABLE", "1", "FARANDOLE_WARN_AFTER", "1e+09"),
    ("HOROVOD_STALL_CHECK_DISABLE", "0", "FARANDOLE_WARN_AFTER", "10"),
    ("HOROVOD_STALL_CHECK_TIME_SECONDS", "30", "FARANDOLE_WARN_AFTER", "30"),
    ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "90", "FARANDOLE_TIMEOUT", "90"),
    ("HOROVOD_START_TIMEOUT", "12", "FARANDOLE_START_TIMEOUT", "12"),
    ("HOROVOD_LOG_LEVEL", "TRACE", "FARANDOLE_LOG", "debug"),
    ("HOROVOD_LOG_LEVEL", "warning", "FARANDOLE_LOG", "warning"),
    ("HOROVOD_LOG_LEVEL", "Fatal", "FARANDOLE_LOG", "error"),
]


@pytest.mark.parametrize(("theirs", "text", "ours", "expected"), ALIASES)
def test_horovods_variable_is_read_where_ours_is_not_set(
    monkeypatch: pytest.MonkeyPatch, theirs: str, text: str, ours: str, expected: str
) -> None:
    monkeypatch.setenv(theirs, text)
    assert value(ours) == expected
    assert theirs in SETTINGS[ours]["horovod"].split()
    mine = "error" if ours == "FARANDOLE_LOG" else "77"
    monkeypatch.setenv(ours, mine)
    assert value(ours) == mine


def test_a_disabled_stall_check_wins_over_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "30")
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    assert value("FARANDOLE_WARN_AFTER") == "1e+09"
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "0")
    assert value("FARANDOLE_WARN_AFTER") == "30"


def test_a_bad_value_of_horovods_variable_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "soon")
    with pytest.raises(InvalidArgument, match="it comes from HOROVOD_START_TIMEOUT=soon"):
        _core.settings()


def test_other_variables_of_horovod_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "nonsense")
    monkeypatch.setenv("HOROVOD_SOMETHING", "else")
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "")
    assert all(row["value"] == row["default"] for row in _core.settings())
    assert _core.unread_variables() == []
