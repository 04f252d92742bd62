"""Who may include and import whom: the code's edges against one table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python" / "farandole"

# What each folder of csrc may include, besides itself and base.
ALLOWED = {
    "base": set(),
    "schedule": set(),
    "fold": set(),
    "transport": set(),
    "control": {"transport"},
    "engine": {"control", "transport", "schedule", "fold"},
    "backends": {"engine", "transport", "schedule", "fold"},
    "group": {"engine", "control", "transport", "schedule", "fold"},
    "named": {"group", "engine", "control", "transport", "schedule", "fold"},
    "fusion": {"group", "engine", "control", "transport", "schedule", "fold"},
    "jax": {"named", "fusion", "group", "engine", "control", "transport", "schedule", "fold"},
    "testing": {
        "named", "backends", "group", "engine", "control", "transport", "schedule", "fold",
    },
    "tensorflow": set(),  # a plug-in: base/plugin.h is all it knows of the rest
    "bindings": {
        "jax", "named", "fusion", "backends", "group", "engine", "control", "transport", "schedule",
        "fold",
    },
    # The module that no wheel has.
    "bindings/testing": {
        "bindings", "named", "fusion", "backends", "group", "engine", "control", "transport",
        "schedule", "fold", "testing",
    },
}  # fmt: skip
FRAMEWORK_HEADERS = re.compile(
    r"torch|tensorflow|ATen|c10|jax|xla|mpi\.h|Python\.h|cuda|nccl", re.I
)
# Of the standard library's and pybind11's headers, only bindings may include the latter.
PYBIND = re.compile(r"pybind11/")

# Imported only in the package of their name, or inside functions.
GUESTS = {"torch", "tensorflow", "keras", "jax", "mpi4py", "rich", "matplotlib", "sklearn"}


def sources() -> list[Path]:
    return sorted(p for p in CSRC.rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh"))


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+["<]([^">]+)[">]', path.read_text(), re.MULTILINE)


def folder_of(name: str) -> str:
    """The table's, of a file below csrc."""
    parent = str(Path(name).parent)
    return parent if parent in ALLOWED else name.split("/")[0]


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(CSRC)))
def test_includes_go_downwards(path: Path) -> None:
    folder = folder_of(str(path.relative_to(CSRC)))
    assert folder in ALLOWED, f"{folder} is not in the table"
    for name in includes(path):
        first = folder_of(name)
        if first in ALLOWED and "/" in name:
            assert first in ALLOWED[folder] | {folder, "base"}, f"{folder} includes {name}"
            assert (CSRC / name).exists(), f"{name} does not exist"
        elif folder.startswith("bindings"):
            assert not FRAMEWORK_HEADERS.search(name.removeprefix("pybind11/")), name
        else:
            assert not FRAMEWORK_HEADERS.search(name), name
            assert not PYBIND.search(name), f"{folder} includes {name}"


def test_the_table_has_no_circle() -> None:
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {f for f, below in ALLOWED.items() if f not in done and below <= done}
        assert ready, f"a circle among {set(ALLOWED) - done}"
        done |= ready


def imports(path: Path) -> list[tuple[str, bool]]:
    """Modules that a file imports, and whether at once, when it is itself imported."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, at_once: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if isinstance(child, ast.Import):
                found.extend((alias.name, at_once) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: a relative import"
                found.append((child.module or "", at_once))
                found.extend((f"{child.module}.{a.name}", at_once) for a in child.names)
            visit(child, at_once and not inside and not for_types)

    visit(ast.parse(path.read_text()), True)
    return found


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_downwards(path: Path) -> None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    home = parts[0]
    for name, at_once in imports(path):
        top = name.split(".")[0]
        if top in GUESTS and at_once:
            # A framework in its own package; what only draws, in the command line's files.
            allowed = home in (top, "cli") or (top == "rich" and home == "_launch")
            # Keras runs on one of several frameworks: a file of that name has what it forces.
            assert allowed or parts == ("keras", f"_{top}"), f"imports {name}"
        if home.startswith("_") and home not in ("__init__", "__main__") and at_once:
            below = name.removeprefix("farandole.").split(".")[0] if top == "farandole" else ""
            assert not below or below == "farandole" or below.startswith("_"), f"imports {name}"
    if home == "_launch":
        natives = [n for n, at_once in imports(path) if at_once and n.startswith("farandole._c")]
        assert not natives, "the launcher starts without the native core"


def test_importing_the_package_needs_numpy_alone() -> None:
    import subprocess
    import sys

    script = (
        "import sys, farandole; farandole.all_reduce;"
        f"print(sorted(set({sorted(GUESTS)!r}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_type_has_its_name_for_itself() -> None:
    """Two types of one name in one library are one to the linker, whatever is in them."""
    where: dict[str, set[str]] = {}
    for path in CSRC.rglob("*.h"):
        text = path.read_text()
        if not re.search(r"^namespace (farandole::|\{)", text, re.MULTILINE):  # else one of its own
            types = r"^(?:struct|class|union) (?:alignas\(\w+\) )?(\w+)[^;\n]*\{"
            for name in re.findall(types, text, re.MULTILINE):
                where.setdefault(name, set()).add(str(path.relative_to(CSRC)))
    assert where
    assert {name: files for name, files in where.items() if len(files) > 1} == {}
