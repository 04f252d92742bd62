"""A rank that ``farandole tune`` started; rank 0 leaves what was measured in a file."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import farandole as fd
from farandole._tune.ranks import measure


def main(result: str) -> int:
    samples = measure()
    if fd.rank() == 0:
        Path(result).write_text(json.dumps([asdict(sample) for sample in samples]))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
