"""Runs the fuzzers of the engine's decoders (build/fuzz, by clang's libFuzzer), two at a time.

Each begins with its corpus, which keeps every input that once crashed it, and then has an equal
share of the time. A crash prints the stack and the file that repeats it.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/fuzz"
CORPUS = Path(__file__).parent / "corpus"
TARGETS = sorted(file.stem for file in Path(__file__).parent.glob("fuzz_*.cpp"))
AT_ONCE = 2
MOST_KEPT = 24  # inputs of a corpus that grows
SANITIZERS = {"ASAN_OPTIONS": "allocator_may_return_null=0:quarantine_size_mb=16"}


def fuzz(target: str, seconds: int, seed: int, found: Path) -> tuple[int, str]:
    """libFuzzer's exit code and words."""
    found.mkdir(parents=True)
    command = [
        str(BUILD / target),
        *(f"-max_total_time={seconds}", f"-seed={seed}", "-print_final_stats=1", "-timeout=20"),
        *("-rss_limit_mb=2048", "-malloc_limit_mb=512", "-max_len=4096", "-verbosity=0"),
        f"-artifact_prefix={BUILD}/crash-{target}-",
        str(found),
        str(CORPUS / target),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=SANITIZERS, check=False)
    return done.returncode, done.stderr


def grow(target: str, found: Path) -> None:
    """Keeps the fewest inputs, old and new, that reach all that both reach."""
    merged = found.with_name(target + "-merged")
    merged.mkdir()
    command = [str(BUILD / target), "-merge=1", str(merged), str(CORPUS / target), str(found)]
    subprocess.run(command, capture_output=True, check=True)
    kept = sorted(merged.iterdir(), key=lambda file: file.stat().st_size)[:MOST_KEPT]
    for file in (CORPUS / target).glob("[0-9a-f]*"):  # those with other names are kept for ever
        file.unlink()
    for file in kept:
        shutil.copy(file, CORPUS / target / file.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=3600, help="for all of them together")
    parser.add_argument("--seed", type=int, default=random.randrange(1, 2**31))
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=TARGETS)
    parser.add_argument("--grow", action="store_true", help="put what was found into the corpus")
    options = parser.parse_args()
    each = max(1, options.seconds * AT_ONCE // len(options.targets))
    print(f"seed {options.seed}, {each} s for each of {', '.join(options.targets)}", flush=True)
    failed = False
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:

        def run(target: str) -> tuple[str, int, str]:
            return target, *fuzz(target, each, options.seed, Path(folder) / target)

        for target, code, said in pool.map(run, options.targets):
            numbers = dict(re.findall(r"stat::(\w+):\s+(\d+)", said))
            print(
                f"{target}: {numbers.get('number_of_executed_units', '?')} inputs, "
                f"{numbers.get('new_units_added', '?')} new, "
                f"{numbers.get('peak_rss_mb', '?')} MiB, exit code {code}",
                flush=True,
            )
            if code != 0:
                failed = True
                print(said[-6000:])
            elif options.grow:
                grow(target, Path(folder) / target)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
