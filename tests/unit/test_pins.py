"""Packages that make wheels are pinned, with hashes: .ci/pins agrees with pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

packaging = pytest.importorskip("packaging", reason="versions are compared with packaging")
from packaging.requirements import Requirement  # noqa: E402

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PINS = {path.stem: path.read_text() for path in (ROOT / ".ci" / "pins").glob("*.txt")}
ENTRY = re.compile(
    r"^(\S+==\S+)(?: ; [^\\\n]+)? \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.M
)


def versions(group: str) -> dict[str, str]:
    return dict(entry[0].split("==") for entry in ENTRY.findall(PINS[group]))


def listed(name: str) -> list[Requirement]:
    found = re.search(rf"^{name} = \[(.+)\]$", PYPROJECT, re.M)
    assert found, name
    return [Requirement(text) for text in re.findall(r'"([^"]+)"', found[1])]


@pytest.mark.parametrize(
    ("wanted", "group"), [("requires", "build"), *((group, group) for group in sorted(PINS))]
)
def test_pins_are_what_pyproject_asks_for(wanted: str, group: str) -> None:
    pinned = versions(group)
    for asked in listed(wanted):
        assert asked.name in pinned, f"{asked.name} is not pinned: run .ci/pin"
        assert asked.specifier.contains(pinned[asked.name]), f"{asked}: run .ci/pin"


@pytest.mark.parametrize("group", sorted(PINS))
def test_each_pin_has_a_hash_and_none_an_index(group: str) -> None:
    lines = [line for line in PINS[group].splitlines() if re.match(r"[^\s#]", line)]
    assert len(lines) == len(ENTRY.findall(PINS[group])) > 0
    assert "://" not in PINS[group]


def test_all_that_makes_wheels_is_pinned() -> None:
    makers = [(ROOT / name).read_text() for name in ("Makefile", ".ci/wheel", "pyproject.toml")]
    text = "\n".join(makers).replace("\\\n", "")
    for group in PINS:
        assert re.search(rf"/{group}\.txt|\(PINNED\){group}\.txt|pinned .*\b{group}\b", text), group
    builds = re.findall(r".*-m pip\b.* wheel .*", text)
    assert len(builds) == 2  # the Makefile's and .ci/wheel's
    assert all("--no-build-isolation" in build for build in builds)
    assert '"--no-isolation"' in makers[2]  # cibuildwheel's
    assert not re.search(rf"--group ({'|'.join(PINS)})\b", text)
