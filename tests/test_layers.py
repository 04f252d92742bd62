"""Includes and imports stay within the layers that the tables here allow."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
TESTS = ROOT / "tests"
PACKAGE = ROOT / "python" / "farandole"

# Folders that each folder of csrc may include, besides itself and base.
POLLED = {"engine", "stream", "control", "transport", "schedule"}
CUDA = {"cuda", "cuda/driver", "cuda/exchange", "cuda/nccl"}
EDGE = POLLED | CUDA | {"jax", "named", "fusion", "devices", "backends", "group", "fold"}
ALLOWED = {
    "base": set(),
    "schedule": set(),
    "fold": set(),
    "transport": set(),
    "control": {"transport"},
    "stream": POLLED - {"engine"},
    "engine": POLLED,
    "backends": POLLED - {"control"} | {"fold"},
    "group": POLLED | {"fold"},
    "devices": POLLED | {"group", "named", "fusion", "fold"} | CUDA,
    "named": POLLED | {"group", "fold"},
    "fusion": POLLED | {"group", "fold"},
    "jax": POLLED | {"fusion", "group", "fold", "devices", "cuda/driver"},
    "cuda": {"cuda/kernels", "fold", "schedule"},
    "cuda/kernels": {"fold"},  # also compiled by nvcc, so only formulas
    "cuda/driver": set(),
    "cuda/nccl": {"cuda", "cuda/driver"},
    "cuda/exchange": {"cuda", "cuda/driver", "cuda/kernels", "cuda/nccl"},
    "tensorflow": set(),  # a plug-in: base/plugin.h is all it knows of the rest
    "bindings": EDGE,
    # Code for tests alone, below tests/.
    "core": EDGE,
    "core/bindings": EDGE | {"bindings", "core"},
}
FRAMEWORK_HEADERS = re.compile(
    r"torch|tensorflow|ATen|c10|jax|xla|mpi\.h|Python\.h|cuda|nccl", re.I
)
# Headers that only the bindings may include.
PYBIND = re.compile(r"pybind11/")

# Python's layers from the bottom: modules and packages, each of which may import those of layers
# before its own, also inside functions. A module belongs to the longest name that it begins with.
PYTHON_LAYERS = [
    "_core _json",
    "_datagrams _host_parts _interfaces _launchers _progress _tables _topology _words typing",
    "_live",
    "_listening _meeting _place _plan_size _secret",
    "_elastic _mpi _mpi_words",
    "_mpi_meeting",
    "_arguments _errors _limits _numerics _one_world _plan _watch",
    "_endings _hosts _trace cuda",
    "_draw _launch _tune _world_place",
    "_ranks _world",
    "_collectives _memory _metrics _run _timeline _unreduced testing",
    "farandole",  # the names that a program sees
    "_bench common horovod learning_rate parameter_server",
    "data ray",
    "pipeline",
    "_tune.first_use _tune.links _tune.ranks _tune.starting",  # these measure
    "_check _tune.__main__ _tune.over_mpi",
    "jax torch._devices torch._entries torch._finite torch.compression",
    "torch._tensors",
    "torch._c10d torch.adasum",
    "torch._operations",
    "torch._training",
    "torch.distributed torch.ops torch.optimizer torch.sync_batch_norm",
    "torch.functions torch.sparse",
    "torch._global torch._pipeline",
    "torch.global_batch torch.pipeline",
    "torch.elastic torch.metrics torch.mpi_ops",
    "torch",
    "tensorflow._graph tensorflow._verdicts tensorflow.compression",
    "tensorflow",
    "keras",
    "tensorflow.keras tensorflow.optimizer tensorflow.elastic",
    "tensorflow.__init__",
    "strategy",
    "_torch_backend cli",
    "__main__",
]
# Imports against the table, with the reason.
EXCEPTIONS = {
    ("_tune.kept", "farandole"): "the version alone, before anything else is loaded",
}
# Modules that import each other, with the reason.
KNOWN_CIRCLES = {
    frozenset({"cli", "cli._why", "cli.info"}): "`farandole --version` asks a verb",
}
# Root modules that name a framework, with the reason.
NAMES_A_FRAMEWORK = {
    "_torch_backend.py": "PyTorch finds the backend by it, and must not import farandole.torch",
}

# Imported only in the package of their name, or inside functions.
GUESTS = {"torch", "tensorflow", "keras", "jax", "mpi4py", "ray", "rich", "matplotlib", "sklearn"}


def sources() -> list[str]:
    """Source paths as includes spell them: below csrc or, for code of tests alone, below tests."""
    found = [(CSRC, p) for p in CSRC.rglob("*")]
    found += [(TESTS, p) for p in (TESTS / "core").rglob("*")]
    suffixes = (".h", ".cpp", ".cu", ".cuh")
    return sorted(str(p.relative_to(root)) for root, p in found if p.suffix in suffixes)


def located(name: str) -> Path:
    return (TESTS if name.startswith("core/") else CSRC) / name


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+["<]([^">]+)[">]', path.read_text(), re.MULTILINE)


def folder_of(name: str) -> str:
    """The folder in ALLOWED of a file, given as includes spell it."""
    parent = str(Path(name).parent)
    return parent if parent in ALLOWED else name.split("/")[0]


@pytest.mark.parametrize("source", sources())
def test_includes_go_downwards(source: str) -> None:
    folder = folder_of(source)
    assert folder in ALLOWED, f"{folder} is not in the table"
    for name in includes(located(source)):
        first = folder_of(name)
        if first in ALLOWED and "/" in name:
            assert first in ALLOWED[folder] | {folder, "base"}, f"{folder} includes {name}"
            assert located(name).exists(), f"{name} does not exist"
        elif folder.endswith("bindings"):
            assert not FRAMEWORK_HEADERS.search(name.removeprefix("pybind11/")), name
        else:
            assert not FRAMEWORK_HEADERS.search(name), name
            assert not PYBIND.search(name), f"{folder} includes {name}"


def test_the_table_has_no_circle() -> None:
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {f for f, below in ALLOWED.items() if f not in done and below - {f} <= done}
        assert ready, f"a circle among {set(ALLOWED) - done}"
        done |= ready


def statements(path: Path) -> list[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    """A file's imports. The first flag: it runs as soon as the file is imported. The second: it is
    for type checkers alone."""
    found: list[tuple[ast.Import | ast.ImportFrom, bool, bool]] = []

    def visit(node: ast.AST, at_once: bool, for_types: bool) -> None:
        for child in ast.iter_child_nodes(node):
            later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if isinstance(child, ast.Import | ast.ImportFrom):
                found.append((child, at_once and not for_types, for_types))
            visit(child, at_once and not later, for_types or types)

    visit(ast.parse(path.read_text()), True, False)
    return found


def imports(path: Path) -> list[tuple[str, bool]]:
    """Modules that a file imports, and whether as soon as the file is imported."""
    found: list[tuple[str, bool]] = []
    for node, at_once, _ in statements(path):
        if isinstance(node, ast.Import):
            found.extend((alias.name, at_once) for alias in node.names)
        else:
            assert node.level == 0, f"{path}: a relative import"
            found.append((node.module or "", at_once))
            found.extend((f"{node.module}.{a.name}", at_once) for a in node.names)
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
            # A framework in its own package, and libraries that draw in the command line's files.
            allowed = home in (top, "cli") or (top == "rich" and home == "_launch")
            allowed |= (home, top) == ("strategy", "tensorflow")  # in tf.distribute's words
            # Keras runs on one of several frameworks: only keras/_torch.py imports torch, etc.
            assert allowed or parts == ("keras", f"_{top}"), f"imports {name}"
        if home.startswith("_") and home not in ("__init__", "__main__") and at_once:
            below = name.removeprefix("farandole.").split(".")[0] if top == "farandole" else ""
            assert not below or below == "farandole" or below.startswith("_"), f"imports {name}"
    if home == "_launch":
        natives = [n for n, at_once in imports(path) if at_once and n.startswith("farandole._c")]
        assert not natives, "the launcher starts without the native core"


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__") or "farandole"


MODULES = {module_of(path): path for path in [*PACKAGE.rglob("*.pyi"), *python_files()]}
LAYER_OF = {name: i for i, names in enumerate(PYTHON_LAYERS) for name in names.split()}


def arrows(path: Path) -> set[str]:
    """Our modules that a file imports anywhere, but not for type checkers alone."""
    found = set()
    for node, _, for_types in statements(path):
        home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for name in [] if for_types else [home + alias.name for alias in node.names]:
            ours = name.removeprefix("farandole.")
            if ours == name and name.partition(".")[0] != "farandole":
                continue
            found.add(ours if ours in MODULES else ours.rpartition(".")[0] or "farandole")
    return found - {module_of(path)}


def unit_of(module: str) -> str:
    """The entry of PYTHON_LAYERS that covers the module."""
    name = module
    if f"{module}.__init__" in LAYER_OF:
        return f"{module}.__init__"
    while name not in LAYER_OF:
        assert "." in name, f"{module} is in no layer"
        name = name.rpartition(".")[0]
    return name


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_python_imports_lower_layers(path: Path) -> None:
    home = unit_of(module_of(path))
    for other in arrows(path):
        below = unit_of(other)
        known = (module_of(path), other) in EXCEPTIONS
        if below != home and not known:
            assert LAYER_OF[below] < LAYER_OF[home], f"{home} imports {other}, of {below}"


def test_the_table_of_python_is_of_today() -> None:
    assert {name.removesuffix(".__init__") for name in LAYER_OF} <= set(MODULES)
    assert all(other in arrows(MODULES[name]) for name, other in EXCEPTIONS)


def test_no_two_modules_import_each_other() -> None:
    edges = {name: arrows(path) for name, path in MODULES.items() if path.suffix == ".py"}
    for circle in circles(edges):
        assert circle in KNOWN_CIRCLES, sorted(circle)


def circles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """The strongly connected components with a cycle: modules that all reach each other."""
    reach = {name: set(others) for name, others in edges.items()}
    for middle in edges:
        for others in reach.values():
            if middle in others:
                others |= reach[middle]
    return {
        frozenset(b for b in reach if b in reach[a] and a in reach.get(b, ()))
        for a in reach
        if a in reach[a]
    }


def test_the_engine_knows_no_framework() -> None:
    names = {"torch", "tensorflow", "keras", "jax"}
    for path in sorted(PACKAGE.glob("_*.py")) + sorted((PACKAGE / "_collectives").glob("*.py")):
        tree = ast.parse(path.read_text())
        words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        words |= {name.split(".")[0] for name, _ in imports(path)}
        assert not words & names or path.name in NAMES_A_FRAMEWORK, path


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
    """The linker takes two types of one name in one library for the same, even if they differ."""
    where: dict[str, set[str]] = {}
    for source in (s for s in sources() if s.endswith(".h")):
        text = located(source).read_text()
        if not re.search(r"^namespace (farandole::|\{)", text, re.MULTILINE):  # else one of its own
            types = r"^(?:struct|class|union) (?:alignas\(\w+\) )?(\w+)[^;\n]*\{"
            for name in re.findall(types, text, re.MULTILINE):
                where.setdefault(name, set()).add(source)
    assert where
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


def test_ranks_are_started_by_one_function() -> None:
    starts = {
        str(path.relative_to(PACKAGE))
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Popen")
    }
    assert starts == {
        "_launch/ranks.py",
        "_launch/agents/connection.py",  # ssh, on the launcher's terminal
        "_launch/elastic/discovery.py",  # the user's script that lists hosts
    }
