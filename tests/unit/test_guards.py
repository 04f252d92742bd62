"""Every guard of the checks has a row in tests/guards/table.py: a fault that it must notice."""
# ruff: noqa: E501 - a row reads better in one line

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "guards"))
sys.path.insert(0, str(ROOT / ".ci"))

import reason  # noqa: E402
import table  # noqa: E402

from copied_tree import CopiedTree  # noqa: E402

COMMANDS = "\n".join(guard.command for guard in table.GUARDS)
# Commands of the Makefile that fail by a fault of their own: what a sanitizer must notice is
# planted by ctest (tests/cpp/planted.h), and a test that fails there is a test like any other.
ELSEWHERE = (
    "cmake",
    "ctest",
    "$(PYTHON)",
    "@$(PYTHON)",
    "rm",
    "cp",
    "@cmake",
    "@$(MAKE)",
    "for",
    "$(BIN)/python -m pip",
)


@pytest.mark.parametrize("guard", table.GUARDS, ids=lambda guard: guard.name)
def test_a_fault_can_be_planted(guard: table.Guard) -> None:
    for name, change in guard.fault.items():
        path = ROOT / name
        before = path.read_text() if path.exists() else ""
        assert not path.exists() or change(before) != before


# Of the Makefile's targets those that check nothing; and `make device` and its dry run, whose
# verdicts tests/cuda/test_device_report.py tests.
NO_CHECKS = {
    "bench",
    "clean",
    "device",
    "device-dry",
    "device-wheels",
    "docs",
    "format",
    "help",
    "sanitize",
    "size",
    "test-all",
}
PHONY = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.M)
TARGETS = set(PHONY[1].split()) - NO_CHECKS if PHONY else set[str]()


# Their tools are those of `make test`, in another environment or under a sanitizer.
WITH_OTHER_PYTHONS = {"sanitize-module", "test-jax", "test-tf216"}


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_commands_of_the_makefile_have_rows(target: str) -> None:
    """Rows that have the commands' own text: what it forgives would be seen there."""
    lines = [line for line in table.recipe(target) if not line.startswith(ELSEWHERE)]
    missing = [line for line in lines if (target, line) not in table.TAKEN]
    if target in WITH_OTHER_PYTHONS:
        missing = [
            tool
            for line in lines
            for tool in re.findall(r"\S+\.py\b|-m [\w.]+", line)[:1]
            if tool not in COMMANDS
        ]
    assert not missing, f"no fault shows that these fail: {missing}"


def test_checks_of_wheels_have_rows() -> None:
    checks = re.search(r"for check in ([^;]+);", (ROOT / ".ci" / "wheel").read_text())
    assert checks
    assert not [name for name in checks[1].split() if f".ci/{name}.py" not in COMMANDS]


def test_hooks_have_rows() -> None:
    hooks = re.findall(r"^\s+- id: (\S+)", (ROOT / ".pre-commit-config.yaml").read_text(), re.M)
    names = {guard.name for guard in table.GUARDS}
    assert {f"hook: {hook}" for hook in hooks} <= names


def test_scripts_of_the_checks_have_rows() -> None:
    """But those that print, build or draw, and have tests of their own."""
    besides = {"costly.py", "draw.py", "minutes.py", "parts.sh", "pin", "pins", "reason.py"}
    besides |= {"total.py", "wheel"}
    names = {path.name for path in (ROOT / ".ci").iterdir()} - besides - {"__pycache__"}
    assert not [name for name in names if f".ci/{name}" not in COMMANDS]


def test_layers_have_rows() -> None:
    tree = ast.parse((ROOT / "tests" / "test_layers.py").read_text())
    tests = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert not [name for name in tests if name.startswith("test_") and name not in COMMANDS]


def test_a_row_leaves_nothing_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows run in any order, and one plants a file where another has planted a folder."""
    spec = importlib.util.spec_from_file_location(
        "guards_run", ROOT / "tests" / "guards" / "run.py"
    )
    assert spec
    assert spec.loader
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    tree = CopiedTree(tmp_path)
    monkeypatch.setattr(tree, "restore", lambda: None)
    monkeypatch.setattr(run, "TREE", tree)
    folder = table.Guard(
        "folder", "mkdir -p build/planted/x; false", {"planted/id": table.new("")}, ""
    )
    file = table.Guard("file", "echo >build/planted; false", {"planted": table.new("")}, "")
    assert [run.try_out(row) for row in (folder, file, folder)] == ["noticed"] * 3


def test_names_of_rows_differ() -> None:
    names = [guard.name for guard in table.GUARDS]
    assert len(names) == len(set(names))


# ---- the line that .ci/run ends with for a part that failed ----


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            "E   assert 1 == 2\nFAILED tests/unit/test_x.py::test_y[3] - assert 1 == 2\n= 1 failed =\nmake: *** [Makefile:60: test] Error 1\n",
            "tests/unit/test_x.py::test_y[3] - assert 1 == 2",
        ),
        ("    a.cpp:7: got 1, not 2\n  FAILED: ring_is_empty\n3 passed, 1 failed\n", "ring_is_empty - a.cpp:7: got 1, not 2"),
        ("x.cpp:3:5: error: unused 'y'\nninja: build stopped\n", "x.cpp:3:5: error: unused 'y'"),
        ("==1==ERROR: AddressSanitizer: heap-use-after-free on 0x1\n#0 f\n", "AddressSanitizer: heap-use-after-free on 0x1"),
        ("WARNING -  a link leads to x, which is not there\nAborted with 1 warnings\n", "WARNING -  a link leads to x, which is not there"),
        ("python/a.py:3: error: Incompatible types\nFound 1 error\n", "python/a.py:3: error: Incompatible types"),
        ("1 of 2 faults were caught\nnot caught: mean_is_a_sum\n", "not caught: mean_is_a_sum"),
        ("\x1b[31mNo space left\x1b[0m\nmake[1]: *** [x] Error 1\n", "No space left"),
        ("", "it printed nothing"),
    ],
)  # fmt: skip
def test_a_failed_part_is_told_in_one_line(log: str, line: str) -> None:
    assert reason.reason(log) == line


def test_draws_repeat_by_their_seed_and_see_everything() -> None:
    def draw(seed: str) -> list[str]:
        command = [sys.executable, str(ROOT / ".ci" / "draw.py"), seed, "1", "a", "b", "c"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    assert draw("whole") == ["a", "b", "c"]
    assert draw("7") == draw("7")
    assert {item for seed in range(24) for item in draw(str(seed))} == {"a", "b", "c"}
