"""Shows that the tests notice: puts small faults into the code, one at a time, and runs a test.

Every patch beside this file is a fault. Before its diff stand two lines:

    why: what a user would meet
    caught by: tests/ranks/test_async.py::test_x

or `cpp NAME`, a test of tests/cpp; `cuda NAME`, of tests/cuda; `cuda tsan NAME`, the same under
ThreadSanitizer. The test named there belongs to `make test` or `make sanitize`; it must pass
without the patch and fail with it. All is done in a copy of the working tree, build/mutants/tree:
compiled once, then file by file. Of `--jobs` each has a copy of its own.

    run.py                    all of them: make mutants
    run.py NAME …             these
    run.py --draw 4 [--seed S]  some, by a seed that is printed: .ci/run
    run.py --jobs 2 [NAME …]  two at a time
    run.py --table [NAME …]   what happened goes into the table of README.md
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from copied_tree import ROOT, CopiedTree

HERE = Path(__file__).parent
TREES = ROOT / "build" / "mutants"
TREE = CopiedTree(TREES / "tree")
MODULES = ("_core", "_tf", "core_testing")
# Programs of C++ tests, by the first words of what catches a fault, in the build folder.
PROGRAMS = {
    "cpp": "farandole_tests",
    "cuda": "farandole_cuda_tests",
    "cuda tsan": "tsan/farandole_cuda_tests",
}
LIMIT = 240  # seconds for one run of a test; a fault that makes it hang is caught, too


@dataclass
class Mutant:
    name: str
    why: str
    test: str
    patch: Path

    @property
    def files(self) -> list[str]:
        return re.findall(r"^\+\+\+ b/(\S+)", self.patch.read_text(), re.MULTILINE)

    @property
    def program(self) -> str | None:
        return program_of(self.test)

    @property
    def is_compiled(self) -> bool:
        return any(file.endswith((".cpp", ".h", ".cuh")) for file in self.files)


def program_of(test: str) -> str | None:
    """The key of PROGRAMS for this test; None for a test of pytest."""
    kinds = [kind for kind in PROGRAMS if test.startswith(kind + " ")]
    return max(kinds, key=len) if kinds else None


def read(patch: Path) -> Mutant:
    head = dict(re.findall(r"^(why|caught by): (.+)$", patch.read_text(), re.MULTILINE))
    return Mutant(patch.stem, head["why"], head["caught by"], patch)


# ---- one fault ----


def fails(test: str) -> bool | None:
    """Whether the test fails; None if it did not run at all."""
    try:
        if kind := program_of(test):
            name = test.removeprefix(kind + " ")
            done = TREE.shell(TREE.build_folder / PROGRAMS[kind], name, limit=LIMIT / 4)
            return None if "\n0 passed, 0 failed" in done.stdout else done.returncode != 0
        pytest = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--timeout={LIMIT / 2}")
        done = TREE.shell(sys.executable, *pytest, *test.split(), limit=LIMIT)
    except subprocess.TimeoutExpired:
        return True
    return {0: False, 1: True}.get(done.returncode)


def build(kind: str | None) -> None:
    """The programs that a test of this kind needs."""
    if kind == "cuda tsan":
        TREE.build("farandole_cuda_tests", folder="tsan")
    elif kind:
        TREE.build(PROGRAMS[kind])
    else:
        TREE.build(*MODULES)


def try_out(mutant: Mutant) -> str:
    """The fate of the fault: "caught", or the problem with the fault or its test."""
    done = TREE.shell("git", "apply", "-C1", mutant.patch)
    if done.returncode != 0:
        return "does not apply"
    try:
        if mutant.is_compiled:
            build(mutant.program)
        return {True: "caught", False: "NOT CAUGHT", None: "no such test"}[fails(mutant.test)]
    except SystemExit:
        return "does not compile"
    finally:
        TREE.restore()


def run(mutants: list[Mutant]) -> list[tuple[Mutant, str, float]]:
    kinds = {m.program for m in mutants}
    TREE.restore()
    # A fault that the compiler sees needs no test: warnings are errors.
    programs = [PROGRAMS[kind] for kind in kinds - {None, "cuda tsan"}]
    TREE.prepare(*programs, *(MODULES if None in kinds else ()))
    if "cuda tsan" in kinds:
        TREE.configure("tsan", "-DFARANDOLE_MODULE=OFF", "-DCMAKE_BUILD_TYPE=Debug",
                       "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g", "-DFARANDOLE_SANITIZE=thread",
                       "-DCMAKE_CXX_FLAGS=-Wno-error=tsan -Wno-tsan")  # fmt: skip
        build("cuda tsan")
    passes = {test: fails(test) is False for test in sorted({m.test for m in mutants})}
    rows = []
    for mutant in mutants:
        began = time.monotonic()
        fate = try_out(mutant) if passes[mutant.test] else "its test fails without it"
        rows.append((mutant, fate, time.monotonic() - began))
        print(f"{mutant.name}: {fate} ({rows[-1][2]:.0f} s), by {mutant.test}", flush=True)
    return rows


def run_in_jobs(names: list[str], jobs: int) -> list[str]:
    """The jobs with a fault that was not caught. A test that fails beside others is a bug, too."""
    command = [sys.executable, __file__]
    started = {
        f"tree-{job}": subprocess.Popen([*command, *names[job::jobs], "--tree", f"tree-{job}"])
        for job in range(min(jobs, len(names)))
    }
    return [tree for tree, job in started.items() if job.wait() != 0]


def write_table(rows: list[tuple[Mutant, str, float]], existing: set[str]) -> None:
    """Writes the table. Faults that were not run keep their rows as long as their patch exists."""
    page = HERE / "README.md"
    text, _, table = (page.read_text() if page.exists() else "").partition("| fault |")
    lines = {row.split("|")[1].strip(): row for row in table.splitlines()[2:]}
    lines |= {m.name: f"| {m.name} | {m.why} | {fate} | `{m.test}` |" for m, fate, _ in rows}
    kept = [lines[name] for name in sorted(lines) if name in existing]
    page.write_text(text + "\n".join(["| fault | a user would meet | fate | test |",
                                      "|---|---|---|---|", *kept, ""]))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Puts faults into the code and runs their tests.")
    parser.add_argument("names", nargs="*", help="of patches; all without one")
    parser.add_argument("--draw", type=int, help="so many of them")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    parser.add_argument("--tree", default="tree", help="the copy's name")
    parser.add_argument("--table", action="store_true", help="write what happened to README.md")
    options = parser.parse_args()
    if options.jobs > 1 and options.table:
        parser.error("--table is written by one job")
    TREE.root = TREES / options.tree
    mutants = [read(patch) for patch in sorted(HERE.glob("*.patch"))]
    existing = {m.name for m in mutants}
    if options.names:
        unknown = set(options.names) - existing
        if unknown:
            parser.error(f"there is no {', '.join(sorted(unknown))}")
        mutants = [m for m in mutants if m.name in options.names]
    if options.draw:
        print(f"{options.draw} of {len(mutants)} faults, --seed {options.seed}")
        mutants = random.Random(options.seed).sample(mutants, min(options.draw, len(mutants)))
    if options.jobs > 1:
        missed = run_in_jobs([m.name for m in mutants], options.jobs)
        raise SystemExit(f"not all were caught: {', '.join(missed)}" if missed else None)
    rows = run(mutants)
    if options.table:
        write_table(rows, existing)
    missed = [m.name for m, fate, _ in rows if fate != "caught"]
    print(f"{len(rows) - len(missed)} of {len(rows)} faults were caught")
    if missed:
        raise SystemExit(f"not caught: {', '.join(missed)}")


if __name__ == "__main__":
    main()
