"""The guards of the checks, each with a fault that it must notice: see run.py.

A guard is a command of the Makefile, of .ci/run or of .pre-commit-config.yaml that is there to
fail, or a test of tests/test_layers.py. tests/unit/test_guards.py fails for one without a row. A
row takes its command's text from there, so a command that was weakened no longer notices.
"""
# ruff: noqa: E501 - a row reads better in one line

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
Change = Callable[[str], str]  # a file's text before and after; "" if there is no such file


@dataclass(frozen=True)
class Guard:
    name: str
    command: str  # run by bash in a copy of the tree
    fault: Mapping[str, Change]  # by the file's path
    says: str  # a regular expression for what the command prints then
    slow: bool = False  # minutes: left out where rows are drawn


def new(text: str) -> Change:
    return lambda _: text


def append(text: str) -> Change:
    return lambda old: old + text


def replace(old: str, by: str) -> Change:
    def change(text: str) -> str:
        assert old in text, f"{old!r} is not there any more"
        return text.replace(old, by, 1)

    return change


# ---- the text of commands ----

TAKEN: set[tuple[str, str]] = set()  # lines of the Makefile that rows have, by target


def recipe(target: str) -> list[str]:
    """The commands of a rule of the Makefile, without what runs before the tool's own name."""
    found = re.search(
        rf"^(?:[\w-]+ )*{target}(?: [\w-]+)*:.*\n((?:(?:\t|ifneq|endif).*\n)+)",
        (ROOT / "Makefile").read_text(),
        re.M,
    )
    assert found, target
    lines = [line.strip() for line in found[1].splitlines() if line.startswith("\t")]
    return [line for line in lines if not line.endswith("\\")]


def made(target: str, word: str, **variables: str) -> str:
    """The one line of a rule that has this word, as bash takes it, with these variables of make."""
    [line] = [line for line in recipe(target) if f" {word}" in f" {line.lstrip('@')} "]
    TAKEN.add((target, line))
    text = line.lstrip("@").replace("$(BIN)/", "")
    for name, value in variables.items():
        text = text.replace(f"$({name})", value)
    text = re.sub(r"\$\((?:or |filter-out [^,]*,)([^,)]*)[^)]*\)", r"\1", text)
    left = re.search(r"(?<!\$)\$\(\w+", text)
    assert not left, f"make {target}: {left and left[0]}) has no value in the row"
    return text.replace("$$", "$")


# ---- make lint, make tidy ----

BADLY_FORMATTED = "#pragma once\nint   planted( );\n"
TIDY = made("tidy", "cmake") + "; " + made("tidy", "clang-tidy", TIDY="csrc/base/reduce_op.cpp")
STUBTEST = made("lint", "mypy.stubtest", TREE=f"$PYTHONPATH:../../{sys.implementation.cache_tag}")

LINT = [
    Guard("ruff check", made("lint", "ruff check"), {"python/farandole/planted.py": new("import os\n")}, "F401"),
    Guard("ruff format", made("lint", "ruff format"), {"python/farandole/planted.py": new("x  = 1\n")}, "would be reformatted"),
    Guard(
        "clang-format", made("lint", "clang-format", CPP="csrc/base/planted.h"),
        {"csrc/base/planted.h": new(BADLY_FORMATTED)}, "code should be clang-formatted",
    ),
    Guard("codespell", made("lint", "codespell"), {"docs/planted.md": new("This is t" "eh fault.\n")}, "t" "eh ==> the"),
    Guard("mypy", made("lint", "mypy "), {"python/farandole/planted.py": new('x: int = "a"\n')}, "planted.*Incompatible types"),
    Guard("basedpyright", made("lint", "basedpyright"), {"tests/typed/planted.py": new('x: int = "a"\n')}, "planted.py.*error"),
    Guard(
        "completeness", made("lint", ".ci/completeness.py"),
        {"python/farandole/planted.py": new("\n".join(f"def f{i}(x): return x" for i in range(900)))},
        "below 95%",
    ),
    Guard(
        "stubtest", STUBTEST, {"python/farandole/_core/__init__.pyi": append("\ndef planted() -> None: ...\n")},
        "planted is not present at runtime",
    ),
    Guard("stubtest of what tests reach", STUBTEST, {"tests/_core_testing.pyi": append("\ndef planted() -> None: ...\n")}, "planted is not present at runtime"),
    Guard(
        "clang-tidy", TIDY,
        {"csrc/base/reduce_op.cpp": append("\nbool planted(unsigned x) { return sizeof(x) == 4 && sizeof(sizeof(x)) == 8; }\n")},
        "bugprone-sizeof-expression",
    ),
]  # fmt: skip

# ---- make test and what it builds; make mutants ----

PYTEST = made("test", "pytest", WORKERS="-q -x -p no:cacheprovider -p no:xdist", PYTEST="")
BUILD = (
    "cmake -S . -B build/checks -G Ninja -DFARANDOLE_MODULE=OFF -DFARANDOLE_TESTS=ON"
    " -DFARANDOLE_WERROR=ON -DCMAKE_BUILD_TYPE=Release >/dev/null;"
    " cmake --build build/checks --target farandole_tests"
)
FORGOTTEN = """why: nobody would meet it
caught by: tests/unit/test_grid.py
--- a/tests/grid.py
+++ b/tests/grid.py
@@ -1,1 +1,1 @@
-\"\"\"Tables of tests over dimensions that do not depend on each other.
+\"\"\"Tables of tests over dimensions that do not depend on each other:
"""

IN_GIT = "trap 'rm -rf .git' EXIT; git init -q; "  # whose files another copy has
PLANTED_TEST = "tests/unit/test_planted.py"
LEFT = "/dev/shm/farandole-planted"
BILL = """{"metadata": {"tools": {"components": [{"name": "GNU", "version": "12"}]}, "component": {"version": "1"}},
 "components": [{"name": "libc++", "licenses": [{"expression": "Apache-2.0 WITH LLVM-exception"}]},
                {"name": "planted", "licenses": [{"expression": "MIT"}]}]}
"""
UNTRUE_BILL = (
    "cd build; about=planted/farandole-1.dist-info; mkdir -p planted/farandole $about/sboms $about/licenses;"
    " cp bill.json $about/sboms/farandole.cdx.json; printf 'Name: planted\\nVersion: 1\\n' >$about/METADATA;"
    " echo '#include <iostream>' | c++ -shared -fPIC -x c++ - -o planted/farandole/planted.so;"
    " (cd planted; python -m zipfile -c ../planted.whl farandole farandole-1.dist-info); cd ..; "
)
ASAN = (
    "cmake --preset asan-module >/dev/null; cmake --build --preset asan-module;"
    " rm -rf build/asan-package; mkdir build/asan-package; cp -r python/farandole build/asan-package/;"
    " rm build/asan-package/farandole/_core*.so; cp build/asan-module/_core*.so build/asan-package/farandole/;"
    " PYTHONPATH=build/asan-package LD_PRELOAD=$(g++ -print-file-name=libasan.so)"
    " ASAN_OPTIONS=detect_leaks=0 python -m farandole bench all_reduce -np 2 --sizes 1K --iterations 1"
)

FUZZ = "; ".join(
    [
        made("fuzz", "-DCMAKE_CXX_COMPILER", CLANG="clang++-14"),
        made("fuzz", "--build"),
        made("fuzz", "tests/", FUZZ="--seconds 10 --targets fuzz_messages"),
    ]
)

TESTS = [
    Guard("warnings of the compiler", BUILD, {"csrc/base/reduce_op.cpp": append("\nstatic int planted() { return 1; }\n")}, "error: .*planted", slow=True),
    Guard(
        "ctest", BUILD + "; ctest --test-dir build/checks -R farandole_tests --output-on-failure",
        {"tests/cpp/test_clock_log.cpp": append("\nTEST(planted) { CHECK_EQUAL(1, 2); }\n")}, "FAILED: planted", slow=True,
    ),
    Guard("pytest", PYTEST + PLANTED_TEST, {PLANTED_TEST: new("def test_planted():\n    assert 1 == 2\n")}, "1 failed"),
    Guard(
        "pytest: warnings", PYTEST + PLANTED_TEST,
        {PLANTED_TEST: new("import warnings\n\n\ndef test_planted():\n    warnings.warn('planted')\n")}, "UserWarning: planted",
    ),
    Guard("pytest: no test", PYTEST + PLANTED_TEST, {PLANTED_TEST: new("")}, "no tests ran"),
    Guard(
        "pytest: memory that is left", f"trap 'rm -f {LEFT}' EXIT; {PYTEST}{PLANTED_TEST}",
        {PLANTED_TEST: new(f"def leaves():\n    open('{LEFT}', 'w').close()\n\n\ndef test_planted(spawn):\n    spawn(1).run(leaves)\n")},
        f"assert .*{LEFT}",
    ),
    Guard("pytest: unknown marks", PYTEST + PLANTED_TEST, {PLANTED_TEST: new("import pytest\n\n\n@pytest.mark.planted\ndef test_planted():\n    pass\n")}, "'planted' not found in `markers`"),
    Guard(
        "pytest: failures that are expected and do not come", PYTEST + PLANTED_TEST,
        {PLANTED_TEST: new("import pytest\n\n\n@pytest.mark.xfail\ndef test_planted():\n    pass\n")}, "XPASS\\(strict\\)",
    ),
    Guard("pytest: time", f"{PYTEST}-o timeout=1 {PLANTED_TEST}", {PLANTED_TEST: new("import time\n\n\ndef test_planted():\n    time.sleep(60)\n")}, "Timeout"),
    Guard(
        "pytest: descriptors that are left", PYTEST + PLANTED_TEST,
        {PLANTED_TEST: new("import os\n\n\ndef test_planted(spawn):\n    spawn(1)\n    os.dup(1)\n")}, "open_files",
    ),
    Guard(
        "make differential", made("differential", "tests/", DIFFERENTIAL='--ranks 2 --program "front=torch.hook"'),
        {"python/farandole/torch/optimizer.py": replace("op: int = Average", "op: int = Sum")}, "wrong: .*is off by",
    ),
    Guard(
        "make demo", made("demo", "examples/", OUT="build/planted"),
        {"python/farandole/torch/optimizer.py": replace("op: int = Average", "op: int = Sum")}, "NOT THE SAME",
    ),
    Guard(
        "make faults", made("faults", "tests/", FAULTS="--runs 1 --rows 1"),
        {"tests/faults/report_program.py": replace('f"@{word} ', 'f"{word} ')}, "no rank says that it was done",
    ),
    Guard("make guards", IN_GIT + made("guards", "tests/", GUARDS="planted"), {"tests/guards/table.py": append('\nGUARDS.append(Guard("planted", "true", {}, "words"))\n')}, "not caught: planted \\(NOT NOTICED\\)"),
    Guard(
        "make guards: a fault that no longer applies", IN_GIT + made("guards", "tests/", GUARDS="planted"),
        {"tests/guards/table.py": append('\nGUARDS.append(Guard("planted", "false", {"Makefile": replace("nowhere", "")}, "words"))\n')}, "'nowhere' is not there any more",
    ),
    Guard(
        "make sanitize-module", ASAN,
        {"csrc/bindings/module.cpp": replace("  bind_errors(module);", "  { volatile int* freed = new int(1); delete freed; *freed = 2; }\n  bind_errors(module);")},
        "heap-use-after-free", slow=True,
    ),
    Guard(
        "make additions", IN_GIT + made("additions", "tests/") + " error",
        {"tests/additions/error/check_error.py": append("\n\ndef test_planted() -> None:\n    assert 1 == 2\n")}, "test_planted", slow=True,
    ),
    Guard(
        "make fuzz", FUZZ,
        {"csrc/base/wire.h": replace("if (bytes > left_.size())", "if (bytes > left_.size() + 8)")},
        "AddressSanitizer", slow=True,
    ),
    Guard(
        "hardening of wheels",
        "mkdir -p build/planted/farandole; cc -shared -fPIC -fno-stack-protector -fcf-protection=none -Wl,-z,lazy -o build/planted/farandole/planted.so build/planted.c;"
        " (cd build/planted; python -m zipfile -c ../planted.whl farandole); python .ci/hardened.py build/planted.whl",
        {"build/planted.c": new("".join(f"int planted{i}(int x) {{ return x + {i}; }}\n" for i in range(40)))}, "planted.so: lacks BIND_NOW, stack protector, FORTIFY, CET",
    ),
    Guard(
        "wheels that say where they were built",
        'mkdir -p build/planted/farandole; echo "$PWD/csrc" >build/planted/farandole/planted.so;'
        " (cd build/planted; python -m zipfile -c ../planted.whl farandole); python .ci/repeatable.py build/planted.whl",
        {}, "planted.so has '/",
    ),
    Guard(
        "two builds that differ",
        "mkdir -p build/planted; cd build; for word in one two; do echo $word >planted/planted.so; python -m zipfile -c $word.whl planted; done;"
        " python ../.ci/repeatable.py one.whl two.whl",
        {}, "planted.so differs from byte 0",
    ),
    Guard("bills of materials", UNTRUE_BILL + "python .ci/sbom.py build/planted.whl", {"build/bill.json": new(BILL)}, "libc\\+\\+ is in the bill only"),
    Guard("bills without notices", UNTRUE_BILL + "python .ci/sbom.py build/planted.whl", {"build/bill.json": new(BILL)}, "there is no notice of planted"),
    Guard("make mutants", IN_GIT + made("mutants", "tests/", MUTANTS="planted"), {"tests/mutations/planted.patch": new(FORGOTTEN)}, "planted: NOT CAUGHT", slow=True),
    Guard(
        "faults that no longer apply", PYTEST + "tests/unit/test_mutations.py",
        {"tests/mutations/planted.patch": new(FORGOTTEN.replace("-\"\"\"Tables", "-\"\"\"Chairs"))}, "no longer apply: planted.patch",
    ),
]  # fmt: skip

# ---- make site ----

SITE = made("site", "mkdocs")

PAGES = [
    Guard("site: links", SITE, {"docs/start.md": append("\n[planted](nowhere.md)\n")}, "nowhere.md"),
    Guard("site: anchors", SITE, {"docs/start.md": append("\n[planted](errors.md#nowhere)\n")}, "nowhere"),
    Guard("site: links to files", SITE, {"docs/start.md": append("\n[planted](../nowhere.py)\n")}, "nowhere.py, which is not there"),
    Guard("site: pages that no list has", SITE, {"docs/planted.md": new("# Planted\n")}, "planted.md"),
    Guard("site: names", SITE, {"docs/reference/ray.md": replace("`RanksFailed`", "It")}, "RanksFailed is on no page"),
    Guard(
        "site: docstrings", SITE,
        {"python/farandole/parameter_server/_snapshots.py": replace('        """The file of one', '        _ = """The file of one')},
        "Snapshots.path has no docstring",
    ),
]  # fmt: skip

# ---- tests/test_layers.py ----


def layers(test: str) -> str:
    return f"{PYTEST} tests/test_layers.py -k {test}"


PLANTED = "python/farandole/common/planted"
STRUCT = "#pragma once\n\nnamespace farandole {\n\nstruct Planted {\n  int x;\n};\n\n}  // namespace farandole\n"
DOWNWARDS = layers("test_includes_go_downwards")
IMPORTS = layers("test_imports_go_downwards")

LAYERS = [
    Guard("layers: includes", DOWNWARDS, {"csrc/base/planted.h": new('#include "engine/engine.h"\n')}, "base includes engine/engine.h"),
    Guard("layers: includes of what is not there", DOWNWARDS, {"csrc/engine/planted.h": new('#include "base/nowhere.h"\n')}, "does not exist"),
    Guard("layers: headers of frameworks", DOWNWARDS, {"csrc/base/planted.h": new("#include <torch/torch.h>\n")}, "torch/torch.h"),
    Guard("layers: pybind11", DOWNWARDS, {"csrc/base/planted.h": new("#include <pybind11/pybind11.h>\n")}, "base includes pybind11"),
    Guard("layers: folders", DOWNWARDS, {"csrc/planted/planted.h": new("#pragma once\n")}, "planted is not in the table"),
    Guard(
        "layers: circles of folders", layers("test_the_table_has_no_circle"),
        {"tests/test_layers.py": replace('"transport": set(),', '"transport": {"control"},')}, "a circle among",
    ),
    Guard("layers: modules in no layer", layers("test_python_imports_lower_layers"), {"python/farandole/planted.py": new("")}, "planted"),
    Guard("layers: guests", IMPORTS, {PLANTED + ".py": new("import torch\n")}, "imports torch"),
    Guard("layers: private modules", IMPORTS, {"python/farandole/_planted.py": new("from farandole import data\n")}, "imports farandole"),
    Guard("layers: relative imports", IMPORTS, {PLANTED + ".py": new("from . import exceptions\n")}, "a relative import"),
    Guard("layers: the launcher", IMPORTS, {"python/farandole/_launch/planted.py": new("from farandole import _core\n")}, "starts without the native core"),
    Guard(
        "layers: imports", layers("test_python_imports_lower_layers"),
        {"python/farandole/_words.py": append("\nfrom farandole import _world  # noqa\n")}, "_words imports _world",
    ),
    Guard(
        "layers: the table of Python", layers("test_the_table_of_python_is_of_today"),
        {"tests/test_layers.py": replace('"_core _json', '"_core _nowhere _json')}, "_nowhere",
    ),
    Guard(
        "layers: circles of modules", layers("test_no_two_modules_import_each_other"),
        {PLANTED + "_a.py": new("from farandole.common import planted_b\n"), PLANTED + "_b.py": new("from farandole.common import planted_a\n")},
        "planted_a",
    ),
    Guard("layers: names of frameworks", layers("test_the_engine_knows_no_framework"), {"python/farandole/_planted.py": new('X = "torch"\n')}, "_planted.py"),
    Guard(
        "layers: numpy alone", layers("test_importing_the_package_needs_numpy_alone"),
        {"python/farandole/__init__.py": append("\nimport matplotlib  # noqa\n")}, "matplotlib",
    ),
    Guard(
        "layers: starters of ranks", layers("test_ranks_are_started_by_one_function"),
        {"python/farandole/_planted.py": new("import subprocess\n\nsubprocess.Popen([])\n")}, "_planted.py",
    ),
    Guard(
        "layers: names of types", layers("test_a_type_has_its_name_for_itself"),
        {"csrc/base/planted.h": new(STRUCT), "csrc/engine/planted.h": new(STRUCT)}, "Planted",
    ),
]  # fmt: skip

# ---- .pre-commit-config.yaml: a hook fails if its command does, or if it changes a file ----


def hook(name: str, file: str) -> str:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    found = re.search(rf"- id: {name}\n(?:        .*\n)*?        entry: (.*)", text)
    assert found, name
    entry = f"RUFF_NO_CACHE=true {found[1]}"
    return f"before=$(sha1sum {file}); {entry} {file}; [[ $before == $(sha1sum {file}) ]] || {{ echo changed; exit 1; }}"


HOOKS = [
    Guard("hook: ruff-check", hook("ruff-check", "python/planted.py"), {"python/planted.py": new("import os\n")}, "changed"),
    Guard("hook: ruff-format", hook("ruff-format", "python/planted.py"), {"python/planted.py": new("x  = 1\n")}, "changed"),
    Guard("hook: clang-format", hook("clang-format", "csrc/base/planted.h"), {"csrc/base/planted.h": new(BADLY_FORMATTED)}, "changed"),
    Guard("hook: codespell", hook("codespell", "docs/planted.md"), {"docs/planted.md": new("This is t" "eh fault.\n")}, "t" "eh ==> the"),
    Guard("hook: commit-subject", hook("commit-subject", "build/message"), {"build/message": new("planted.\n")}, "ends with a full stop"),
]  # fmt: skip

# ---- .ci/run and .ci/wheel ----

RUN = "set +e; mkdir -p build/ci; . .ci/parts.sh; "
REPORT = '<testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="0"/></testsuites>'

# Where the environment of the tests is no bare one, the fault is there without a file.
SMOKE = "PYTHONPATH=.ci:python python .ci/smoke.py "

CI = [
    Guard("a part that fails", RUN + "part bash planted.sh; summary build/report.xml", {"planted.sh": new("exit 3\n"), "build/report.xml": new(REPORT.format(2, 0))}, "FAILED: bash planted.sh"),
    Guard("a report with failures", RUN + "summary build/report.xml", {"build/report.xml": new(REPORT.format(2, 1))}, "1 passed, 1 failed"),
    Guard("a report without tests", RUN + "summary build/report.xml", {"build/report.xml": new(REPORT.format(0, 0))}, "0 passed, 0 failed"),
    Guard("no report", RUN + "summary build/report.xml", {}, "pytest left no report"),
    Guard(
        "an old Python", "PYTHON='bash ./planted' make --no-print-directory .venv/stamps/venv",
        {"planted": new('#!/bin/sh\nexec python3 -c "import sys; sys.version_info = (3, 9); exec(\'\'\'$2\'\'\')"\n')},
        "Python 3.10 or later is needed",
    ),
    Guard(
        "a Python without headers", "PYTHON='bash ./planted' make --no-print-directory .venv/stamps/venv",
        {"planted": new('#!/bin/sh\nexec python3 -c "import sysconfig; sysconfig.get_path = lambda _: \'/nowhere\'; exec(\'\'\'$2\'\'\')"\n')},
        "Python.h is missing",
    ),
    Guard(
        "tools that are missing, without root", "chmod +x planted/id; PATH=$PWD/planted:$PATH PYTHON=nowhere bash .ci/run",
        {"planted/id": new("#!/bin/sh\necho 1000\n")}, "not root; install these first: python3",
    ),
    Guard("wheels for any Linux", "mkdir -p build; echo >build/planted; (cd build; python -m zipfile -c farandole-1-manylinux_2_28_x86_64.whl planted); python .ci/portable build build/farandole-1-manylinux_2_28_x86_64.whl", {}, "has no library"),
    Guard("a second build without a first", "bash .ci/reproducible python3", {}, "no wheel yet"),
    Guard("smoke: kernels", SMOKE + "--no-kernels", {}, "kernels for devices are there: True"),
    Guard("smoke: other packages", SMOKE, {}, "more than numpy is installed"),
    Guard(
        "a package with another hash", "bash .ci/pinned build/planted python3 pip",
        {".ci/pins/pip.txt": lambda text: re.sub("sha256:.{8}", "sha256:01234567", text)}, "DO NOT MATCH THE HASHES",
    ),
    Guard("size of a wheel", "bash .ci/size 1000 build/farandole-1.whl", {"build/farandole-1.whl": new("x" * 1001)}, "1001 bytes of at most 1000"),
]  # fmt: skip

GUARDS: list[Guard] = [*LINT, *TESTS, *PAGES, *LAYERS, *HOOKS, *CI]
