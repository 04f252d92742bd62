"""The promises of SECURITY.md: each row names tests that prove it, and these exist."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

import farandole as fd

ROOT = Path(__file__).parents[2]


def rows() -> list[list[str]]:
    lines = (ROOT / "SECURITY.md").read_text().splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return table[1:]


def test_every_row_names_tests_that_exist() -> None:
    sources = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "tests").rglob("*.cpp")]
    defined = set(
        re.findall(r"(?:^def |^TEST\()(\w+)", "\n".join(map(Path.read_text, sources)), re.MULTILINE)
    )
    assert len(rows()) >= 20
    for row in rows():
        assert len(row) == 3, row[0]
        for name in re.findall(r"`([^`]+)`", row[2]) or [""]:
            command = name.partition(" ")[0]
            known = name in defined or command == "make" or (name and (ROOT / name).is_file())
            assert known, f"{row[0]}: {name}"


def test_shared_memory_is_left_out_of_core_files() -> None:
    fd.init()
    try:
        maps = re.split(r"^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text(), flags=re.M)
        ours = [each for each in maps if "memfd:farandole" in each.partition("\n")[0]]
        assert ours
        for each in ours:
            (flags,) = re.findall(r"VmFlags: (.*)", each)
            assert "dd" in flags.split()
    finally:
        fd.shutdown()


def test_traces_are_for_their_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "trace"
    monkeypatch.setenv("FARANDOLE_TRACE", str(folder))
    umask = os.umask(0)
    try:
        fd.init()
        fd.shutdown()
    finally:
        os.umask(umask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = list(folder.iterdir())
    assert files
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
