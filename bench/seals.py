"""The cost of the seals of control messages between hosts: python bench/seals.py

Every message between hosts that is no tensor is sealed (csrc/base/seal.h). How much processor time
does that take, at each end? In a checkout whose tests are built (`make test-cpp`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from farandole._bench.statistics import format_size, median
from farandole.cli._terminal import print_table

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from core_testing import testing

_GOAL = 0.5e-6  # seconds, of a message of up to 256 bytes
_SIZES = 16, 64, 256, 4096, 65536


def measured(size: int, blocks: int) -> tuple[float, float]:
    """Seconds to seal a message and to open it: medians of blocks that take alike long."""
    messages = max(100, 20_000_000 // (size + 2000))
    seconds = [testing.seconds_to_seal(size, messages) for _ in range(blocks)]
    return median([s for s, _ in seconds]), median([o for _, o in seconds])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    options = parser.parse_args()
    rows, numbers = [], {}
    for size in _SIZES:
        seal, open_ = measured(size, options.blocks)
        bar = "-" if size > 256 else "yes" if max(seal, open_) <= _GOAL else "**NO**"
        rows.append([format_size(size), f"{1e6 * seal:.2f}", f"{1e6 * open_:.2f}", bar])
        numbers[size] = {"seal": seal, "open": open_}
    columns = ["message", "seal, µs", "open, µs", f"≤ {1e6 * _GOAL:.1f} µs each"]
    print_table("processor time of a seal", columns, rows)
    if options.json:
        options.json.write_text(json.dumps(numbers))


if __name__ == "__main__":
    main()
