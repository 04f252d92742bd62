"""From a rank's death to the next training step: python bench/recovery.py

A PyTorch model trains on 4 ranks, and saves its state after every step. Rank 1 is killed at step
20; the time runs from just before the kill until the last rank has completed a step after it.

    elastic         farandole run --min-np 2; the state is saved in memory. The 3 ranks that are
                    left go on, the fourth comes later
    elastic, 2 hosts  the same, of 2 pretended hosts
    started again   farandole run, again when it has failed; the state is saved in a file, on a
                    memory file system if there is one. All 4 ranks are started again

Runs take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from farandole._bench.statistics import median
from farandole.cli._terminal import print_table

_LIMIT = 120  # seconds for one run
_STEPS, _RANKS = 40, 4

_COMMON = """
import os, signal, sys, time, torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(16, 512)
def say(what): os.write(1, b"%s %d\\n" % (what, time.monotonic_ns()))
def die():
    say(b"dies")
    os.kill(os.getpid(), signal.SIGKILL)
"""

_PROGRAMS = {
    "elastic": _COMMON
    + """
import farandole.torch as hvd
hvd.init()
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)
@hvd.elastic.run
def train(state):
    first, again = True, state.step > 0
    while state.step < int(sys.argv[1]):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if state.step == 20 and not again and os.environ["FARANDOLE_WORKER"] == "1": die()
        optimizer.step()
        state.step += 1
        if first and again: say(b"on")
        first = False
        state.commit()
train(state)
""",
    "started again": _COMMON
    + """
import farandole.torch as hvd
hvd.init()
file, step = sys.argv[2], 0
again = os.path.exists(file)
if again:
    kept = torch.load(file)
    model.load_state_dict(kept["model"]); optimizer.load_state_dict(kept["optimizer"])
    step = kept["step"]
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
first = True
while step < int(sys.argv[1]):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    if step == 20 and not again and hvd.rank() == 1: die()
    optimizer.step()
    step += 1
    if first and again: say(b"on")
    first = False
    if hvd.rank() == 0:
        kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(kept, file + ".new")
        os.rename(file + ".new", file)
""",
}


def _command(peer: str, folder: str, program: Path) -> list[str]:
    run = [sys.executable, "-m", "farandole", "run", "-np", str(_RANKS), "--no-prefix", "--grace=0"]
    ranks = ["--", sys.executable, str(program), str(_STEPS), str(Path(folder) / "kept")]
    if peer == "started again":
        return ["sh", "-c", f"until {shlex.join([*run, *ranks])}; do :; done"]
    hosts = ["-H", "a:2,b:2", "--launcher=local"] if "hosts" in peer else []
    return [*run, "--min-np=2", *hosts, *ranks]


def once(peer: str) -> float:
    """Seconds from the death to the last rank's first step after it."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        program = Path(folder) / "program.py"
        program.write_text(_PROGRAMS[peer.partition(",")[0]])
        done = subprocess.run(
            _command(peer, folder, program),
            capture_output=True,
            text=True,
            timeout=_LIMIT,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    said = [line.split() for line in done.stdout.splitlines()]
    dies = [int(words[1]) for words in said if words[:1] == ["dies"]]
    on = [int(words[1]) for words in said if words[:1] == ["on"]]
    ranks = _RANKS if peer == "started again" else _RANKS - 1
    if done.returncode or len(dies) != 1 or len(on) < ranks:
        raise SystemExit(f"{peer} did not go on: {done.stdout}{done.stderr}")
    return (sorted(on)[ranks - 1] - dies[0]) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="of every row (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error("--runs is at least 1")
    times: dict[str, list[float]] = {
        "elastic": [],
        "elastic, 2 hosts": [],
        "started again": [],
    }
    for _ in range(arguments.runs):
        for peer, found in times.items():
            found.append(once(peer))
    print_table(
        f"a rank's death to the next step, {_RANKS} ranks, {arguments.runs} runs",
        ["how", "median s", "best s", "worst s"],
        [
            [peer, *(f"{value:.3f}" for value in (median(sorted(found)), min(found), max(found)))]
            for peer, found in times.items()
        ],
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(times, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
