"""The dummies of tests/additions still fit the code and the table of CONTRIBUTING.md."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from copied_tree import ROOT, CopiedTree

FLAGS = ("-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-I.", "-Icsrc", "-Itests")


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("additions", ROOT / "tests/additions/run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()
ADDITIONS = SCRIPT.additions()
of_each = pytest.mark.parametrize("addition", ADDITIONS, ids=lambda a: a.folder.name)


def promises() -> dict[str, str]:
    """The table of CONTRIBUTING.md: from the kind of addition to the code that it needs."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| To add | Write |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines()[2:]]
    return {what: write for what, write, _ in rows}


def test_every_row_has_its_dummy() -> None:
    assert sorted(addition.row for addition in ADDITIONS) == sorted(promises())


@of_each
def test_its_row_is_applied(addition: Any) -> None:
    done = subprocess.run(["git", "apply", "-C1", "--check", addition.patch], cwd=ROOT)
    assert done.returncode == 0, "rows.patch no longer applies"
    there = [name for name in addition.new_files if (ROOT / name).exists()]
    assert there == []


@of_each
def test_it_writes_what_its_row_names(addition: Any) -> None:
    named = re.findall(r"`([^`]+)`", promises()[addition.row])
    for name in addition.edited_files:
        assert any(f"/{name}".endswith(f"/{place}") for place in named), f"{name} is edited, too"
    for name in addition.new_files:
        folders = [str(Path(place).parent if "farandole/" in place else place) for place in named]
        assert any(name.startswith(folder.rstrip("/") + "/") for folder in folders), name


@of_each
def test_it_is_small(addition: Any) -> None:
    rows = addition.patch.read_text().splitlines()
    added = [row for row in rows if row.startswith("+") and not row.startswith("+++")]
    assert 0 < len(added) <= 10
    assert sorted(addition.folder.glob("check_*.py"))


def test_they_compile_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    tree = CopiedTree(tmp_path / "tree")
    monkeypatch.setattr(SCRIPT, "TREE", tree)
    tree.restore()
    for addition in ADDITIONS:
        SCRIPT.add(addition)
    sources = [name for each in ADDITIONS for name in each.new_files if name.endswith(".cpp")]
    assert len(sources) >= 3
    done = tree.shell("c++", *FLAGS, *sources)
    assert done.returncode == 0, done.stdout
