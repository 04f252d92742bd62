"""Shows that each guard of the checks can fail: plants a fault and runs the guard's own command.

table.py has a row for each guard. All is done in a copy of the working tree, build/guards/tree. A
row holds if the command fails with the fault and prints the row's words. The rest of .ci/run shows
that the command passes without the fault.

    run.py                    all rows: make guards GUARDS=
    run.py NAME …             these
    run.py --draw [--seed S]  an eighth, by a seed that is printed: .ci/run
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import table

from copied_tree import ROOT, CopiedTree

TREE = CopiedTree(ROOT / "build" / "guards" / "tree")
LIMIT = 600  # seconds for one command


def borrow_libraries() -> None:
    """Links the compiled parts and kernels of the installed package into the copy's package."""
    script = "import farandole; print(farandole.__path__[0])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd="/"
    )
    installed = Path(done.stdout.strip())
    for library in [*installed.rglob("*.so"), *installed.rglob("*.fatbin")]:
        link = TREE.root / "python" / "farandole" / library.relative_to(installed)
        link.unlink(missing_ok=True)
        link.symlink_to(library)


def clear(guard: table.Guard) -> None:
    """The copy without what a row left: its fault, and whatever its command named planted."""
    for name in guard.fault:
        if not (ROOT / name).exists():
            (TREE.root / name).unlink(missing_ok=True)
    for left in list(TREE.root.rglob("planted*")):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink(missing_ok=True)
    TREE.restore()


def try_out(guard: table.Guard) -> str:
    """The fate of the fault: 'noticed', or the problem with the guard."""
    try:
        for name, change in guard.fault.items():
            path = TREE.root / name
            before = path.read_text() if path.exists() else ""
            try:
                after = change(before)
            except AssertionError as error:
                return f"the fault cannot be planted: {error}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(after)
        done = TREE.shell("bash", "-euo", "pipefail", "-c", guard.command, limit=LIMIT)
        if done.returncode == 0:
            return "NOT NOTICED"
        if not re.search(guard.says, done.stdout):
            print(done.stdout[-4000:])
            return f"fails without saying {guard.says!r}"
        return "noticed"
    finally:
        clear(guard)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plants faults for the checks to notice.")
    parser.add_argument("names", nargs="*", help="of rows; all without one")
    parser.add_argument("--draw", action="store_true", help="an eighth of those that are quick")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    rows = {row.name: row for row in table.GUARDS}
    if unknown := set(options.names) - set(rows):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(rows)}")
    chosen = [row for row in rows.values() if not options.names or row.name in options.names]
    if options.draw:
        chosen = [row for row in chosen if not row.slow]
        count = -(-len(chosen) // 8)
        print(f"{count} of {len(chosen)} quick guards, --seed {options.seed}")
        chosen = random.Random(options.seed).sample(chosen, count)
    TREE.restore()
    borrow_libraries()
    missed = []
    for guard in chosen:
        began = time.monotonic()
        fate = try_out(guard)
        print(f"{guard.name}: {fate} ({time.monotonic() - began:.0f} s)", flush=True)
        missed += [f"{guard.name} ({fate})"] if fate != "noticed" else []
    print(f"{len(chosen) - len(missed)} of {len(chosen)} guards noticed their fault")
    if missed:
        raise SystemExit(f"not caught: {', '.join(missed)}")


if __name__ == "__main__":
    main()
