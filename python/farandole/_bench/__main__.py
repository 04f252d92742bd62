"""A rank that ``farandole bench -np`` started: place of the result and request are arguments.

Rank 0 shows rows on its stdout, which the launcher passes on, and leaves all of them in the result.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import farandole as fd
from farandole._bench.ranks import Request, measure


def main(result: str, request: str) -> int:
    try:
        found = measure(Request(**json.loads(request)))
    except fd.InvalidArgument as error:  # every rank meets it; one says so
        if fd.is_initialized() and fd.rank() != 0:
            return 2
        Path(result).write_text(json.dumps({"mistake": str(error).splitlines()[0]}))
        return 2
    if fd.rank() == 0:
        Path(result).write_text(json.dumps({"rows": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
