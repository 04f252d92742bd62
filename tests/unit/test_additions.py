"""The dummies of `make additions` still fit; it shows that the rest follows, and takes minutes."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from copied_tree import ROOT, CopiedTree

FLAGS = ("-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-I.", "-Icsrc", "-Itests")


@pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None, reason="no checkout of git"
)
def test_the_dummies_of_all_rows_fit_together(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("additions", ROOT / "tests/additions/run.py")
    assert spec is not None
    assert spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    run.TREE = CopiedTree(tmp_path / "tree")
    run.TREE.restore()
    for addition in run.additions():
        run.add(addition)  # raises where a patch does not apply
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    sources = [name for each in run.additions() for name in each.new_files if ".cpp" in name]
    assert len(sources) >= 3
    done = run.TREE.shell("c++", *FLAGS, *sources)
    assert done.returncode == 0, done.stdout
