"""Proves the table "To add | Write | Then these follow without edits" of CONTRIBUTING.md.

Every folder beside this file stands for a row. It has new files, by their path in the tree, and
what else the row says is written, rows.patch, which names the row. All of it goes into a copy of
the working tree, build/additions/tree, which is compiled once; check_*.py of the folder then shows
that the rest follows.

    run.py            all of them: make additions
    run.py NAME …     all are added, these are checked
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from copied_tree import ROOT, CopiedTree

HERE = Path(__file__).parent
TREE = CopiedTree(ROOT / "build" / "additions" / "tree")
LIMIT = 600  # seconds for the checks of one row


class Addition:
    """One row, done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def patch(self) -> Path:
        return self.folder / "rows.patch"

    @property
    def row(self) -> str:
        """The first column of the row."""
        return self.patch.read_text().partition("\n")[0].removeprefix("row: ")

    @property
    def new_files(self) -> list[str]:
        """By their path in the tree."""
        files = [p for p in self.folder.rglob("*/**/*") if p.suffix in (".cpp", ".h", ".py")]
        return sorted(str(p.relative_to(self.folder)) for p in files)

    @property
    def edited_files(self) -> list[str]:
        return re.findall(r"^\+\+\+ b/(\S+)", self.patch.read_text(), re.MULTILINE)


def additions() -> list[Addition]:
    return [Addition(patch.parent) for patch in sorted(HERE.glob("*/rows.patch"))]


def add(addition: Addition) -> None:
    for name in addition.new_files:
        target = TREE.root / name
        if target.exists():
            raise SystemExit(f"{addition.folder.name}: {name} is there already")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(addition.folder / name, target)
    done = TREE.shell("git", "apply", "-C1", addition.patch)
    if done.returncode != 0:
        raise SystemExit(f"{addition.folder.name}: rows.patch does not apply\n{done.stdout}")


def holds(addition: Addition) -> bool:
    """Whether all that the row says follows; else what did not is printed."""
    checks = sorted((TREE.root / "tests" / "additions" / addition.folder.name).glob("check_*.py"))
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    done = TREE.shell(sys.executable, *pytest, *checks, limit=LIMIT)
    if done.returncode != 0:
        print(done.stdout[-6000:], flush=True)
    return done.returncode == 0


def main() -> None:
    known = {a.folder.name: a for a in additions()}
    parser = argparse.ArgumentParser(description="Adds a dummy for every row, and looks.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(known)}; all without one")
    names = parser.parse_args().names or list(known)
    if unknown := set(names) - set(known):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    began = time.monotonic()
    TREE.restore()
    for addition in known.values():
        add(addition)
    TREE.prepare("_core", "_tf", "core_testing", "farandole_tests")
    print(f"{len(known)} dummies added and compiled ({time.monotonic() - began:.0f} s)", flush=True)
    broken = []
    for name in names:
        began = time.monotonic()
        fate = "follows" if holds(known[name]) else "DOES NOT FOLLOW"
        print(f"{known[name].row}: the rest {fate} ({time.monotonic() - began:.0f} s)", flush=True)
        broken += [name] if fate != "follows" else []
    if broken:
        raise SystemExit(f"CONTRIBUTING.md promises more than there is: {', '.join(broken)}")


if __name__ == "__main__":
    main()
