"""`draw.py SEED HOW-MANY ITEM…` prints so many items, drawn by the seed; all with 'whole'."""

from __future__ import annotations

import random
import sys


def main() -> None:
    seed, count, *items = sys.argv[1:]
    if seed != "whole":
        # The items are part of the seed, so that two draws of one run do not go together.
        drawn = set(random.Random(f"{seed} {items}").sample(items, min(int(count), len(items))))
        items = [item for item in items if item in drawn]
    print("\n".join(items))


if __name__ == "__main__":
    main()
