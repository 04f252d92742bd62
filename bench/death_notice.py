"""From a rank's death to every survivor's error: python bench/death_notice.py

Each run starts a job afresh. Its last rank is killed inside an all-reduce that the others wait in
(it never submits it) or while all-reduces follow one another; the time runs from just before the
kill until the last survivor has its PeerLost.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from farandole._bench.statistics import median
from farandole._ranks import Call, call_on_ranks
from farandole.cli._terminal import print_table

_LIMIT = 60  # seconds for one run

_PROGRAM = """
import os, signal, time
import numpy as np
import farandole as fd
fd.init()
victim = fd.size() - 1
def say(what): os.write(1, b"%s %d\\n" % (what, time.monotonic_ns()))
def die():
    say(b"dies")
    os.kill(os.getpid(), signal.SIGKILL)
fd.barrier()
try:
    if how == "waiting" and fd.rank() == victim:
        time.sleep(0.3)  # the others wait by then
        die()
    for i in range(10**9):
        if i == 1000 and fd.rank() == victim:
            die()
        fd.all_reduce(np.ones(1000))
except fd.PeerLost as error:
    assert error.rank == victim, error
    say(b"knows")
"""


def once(ranks: int, how: str) -> float:
    """Seconds from the death to the last survivor's error."""
    printed = [bytearray() for _ in range(ranks)]
    call_on_ranks(
        ranks,
        Call.of(exec, _PROGRAM, {"how": how}),
        env={},
        timeout=_LIMIT,
        listen=lambda rank, _, data: printed[rank].extend(data),
    )
    lines = [line.split() for each in printed for line in each.splitlines()]
    said = {
        word: [int(line[1]) for line in lines if line[:1] == [word]] for word in (b"dies", b"knows")
    }
    if len(said[b"dies"]) != 1 or len(said[b"knows"]) != ranks - 1:
        raise SystemExit(f"a survivor did not hear of the death: {printed}")
    return (max(said[b"knows"]) - said[b"dies"][0]) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="of every row (20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error("--runs is at least 1")
    rows: list[dict[str, Any]] = []
    for ranks in (2, 3, 8):
        for how in ("waiting", "working"):
            times = sorted(once(ranks, how) for _ in range(arguments.runs))
            rows.append(
                {"ranks": ranks, "others": how, "median_s": median(times), "max_s": times[-1]}
            )
    print_table(
        f"a rank's death to the last survivor's error, {arguments.runs} runs",
        ["ranks", "the others were", "median ms", "max ms"],
        [
            [str(row["ranks"]), str(row["others"])]
            + [f"{float(row[name]) * 1e3:.1f}" for name in ("median_s", "max_s")]
            for row in rows
        ],
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
