"""The page for newcomers names files and functions that exist, and stays short."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = (".py", ".pyi", ".h", ".cpp", ".cu", ".cuh")

STEP = re.compile(r"^(\d+)\. `([^`]+)` `([^`]+)`: \S", re.MULTILINE)
ROW = re.compile(r"^\| `((?:csrc|python)[^`]*)` \| .+ \| (.+) \|$", re.MULTILINE)
LONGEST_LINE = 100  # of a drawing


def page() -> str:
    return (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    found = re.search(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page(), re.DOTALL | re.MULTILINE
    )
    assert found is not None, title
    return found[1]


def walks() -> list[str]:
    return [section("The way of one gradient"), section("From init() to the first byte")]


def drawings() -> list[str]:
    return re.findall(r"^```text\n(.*?)^```", page(), re.DOTALL | re.MULTILINE)


def test_the_page_is_short() -> None:
    assert len(page().split()) <= 2500


def test_each_step_of_a_walk_names_a_function_that_exists() -> None:
    for walk, least in zip(walks(), (15, 10), strict=True):
        steps = STEP.findall(walk)
        assert [int(number) for number, _, _ in steps] == list(range(1, len(steps) + 1))
        assert len(steps) == len(re.findall(r"^\d+\. ", walk, re.MULTILINE)) >= least
        for number, file, name in steps:
            assert (ROOT / file).is_file(), f"step {number}: {file}"
            last = re.split(r"::|\.", name)[-1]
            text = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"\b{re.escape(last)}\b", text), f"step {number}: no {name} in {file}"


def test_a_drawing_has_every_step_of_its_walk() -> None:
    for walk in walks():
        drawn = re.search(r"```text\n(.*?)```", walk, re.DOTALL)
        assert drawn is not None
        numbers = {int(number) for number in re.findall(r"\b\d+\b", drawn[1])}
        assert numbers == {int(number) for number, _, _ in STEP.findall(walk)}


def test_drawings_fit_a_page() -> None:
    assert len(drawings()) == 3
    lines = [line for drawing in drawings() for line in drawing.splitlines()]
    assert [line for line in lines if len(line) > LONGEST_LINE] == []


def test_the_table_has_every_folder_and_names_files_of_it() -> None:
    rows = dict(ROW.findall(section("Layers")))
    folders = {f"csrc/{path.name}" for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    package = ROOT / "python" / "farandole"
    folders |= {f"python/farandole/{i.parent.name}" for i in package.glob("*/__init__.py*")}
    assert set(rows) == folders | {"python/farandole"}
    for folder, files in rows.items():
        names = re.findall(r"`([^`]+)`", files)
        assert names, folder
        for name in names:
            assert (ROOT / folder / name).is_file(), f"{folder}/{name}"


def test_every_other_file_that_it_names_exists() -> None:
    text = re.sub(r"^\| `(?:csrc|python).*\n", "", page(), flags=re.MULTILINE)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    homes = (ROOT, ROOT / "csrc", ROOT / "python" / "farandole")
    for name in re.findall(r"`([\w./]+)`", text):
        if name.endswith(SUFFIXES) or name.startswith("tests/"):
            assert any((home / name).exists() for home in homes), name
