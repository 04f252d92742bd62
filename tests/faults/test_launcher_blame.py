"""`farandole run` names the rank that is the cause and returns its code, whoever ends first."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from harness import launch

REPEAT = int(os.environ.get("LAUNCHES", "2"))  # 50 shows what happens seldom

# The last rank ends. `late`: only when its peers' processes have ended, for which theirs are told.
PROGRAM = """
import atexit, os, sys, time
from pathlib import Path
HERE, RANK, SIZE = Path(__file__).parent, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
how, culprit = sys.argv[1], SIZE - 1

def is_over(file):
    if not file.exists(): return False
    return Path(f"/proc/{file.read_text()}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

def outlive_the_others():
    deadline = time.monotonic() + 20
    while not all(is_over(HERE / f"pid-{r}") for r in range(culprit)):
        assert time.monotonic() < deadline
        time.sleep(0.005)

(HERE / f"new-{RANK}").write_text(str(os.getpid()))
os.rename(HERE / f"new-{RANK}", HERE / f"pid-{RANK}")
if RANK == culprit and how.startswith("late"):
    atexit.register(outlive_the_others)  # after farandole's, which is registered later
import numpy as np
import farandole as fd
fd.init()
group = fd.split(0) if how == "group" else None
fd.all_reduce(np.ones(3), group=group)
if RANK == culprit:
    if how == "early": sys.exit(0)
    if how == "_exit 0": os._exit(0)
    if how == "stuck": time.sleep(1000)
    if how == "exit": sys.exit(7)
    if how == "_exit": os._exit(7)
    raise ValueError("bad sample 4711")
for _ in range(10**9):
    fd.all_reduce(np.ones(3), group=group)
"""


@pytest.mark.drawn(2)
@pytest.mark.timeout(60 + 20 * REPEAT)
@pytest.mark.parametrize("ranks", [2, 3, 16])
@pytest.mark.parametrize("how", ["raise", "exit", "_exit", "group"])
def test_the_cause_is_named_whoever_ends_first(tmp_path: Path, how: str, ranks: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    code = 1 if how in ("raise", "group") else 7
    wrong = []
    launches = 1 if REPEAT == 2 and ranks == 16 else REPEAT
    for _ in range(launches):
        done = launch(ranks, [sys.executable, script, how], code=None)
        last = done.stderr.splitlines()[-1]
        named = re.match(rf"farandole: rank {ranks - 1} \(pid \d+\) exited with code {code}", last)
        if not named or done.returncode != code or (code == 1 and "bad sample 4711" not in last):
            wrong.append((done.returncode, done.stderr.splitlines()[-2:]))
    print(f"{how}, {ranks} ranks: {len(wrong)} wrong of {launches}")
    assert not wrong


@pytest.mark.parametrize("grace", ["30", "0"])
def test_a_rank_that_ends_late_is_the_cause_all_the_same(tmp_path: Path, grace: str) -> None:
    """Its peers are gone before; with no grace it is ended by us before it could."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    done = launch(3, [sys.executable, script, "late"], f"--grace={grace}", code=None)
    assert done.returncode == 1
    assert re.fullmatch(
        r"farandole: rank 2 \(pid \d+\) exited with code 1: ValueError: bad sample 4711 "
        rf"\({re.escape(str(script))}, line \d+\)",
        done.stderr.splitlines()[-1],
    ), done.stderr


@pytest.mark.parametrize(
    ("how", "became", "error"),
    [
        ("early", "exited with code 0", "EarlyExit"),
        ("_exit 0", "exited with code 0", "PeerLost"),
        ("stuck", "did not go on", "Stalled"),
    ],
)
def test_no_victim_is_named_where_the_cause_has_not_failed(
    tmp_path: Path, how: str, became: str, error: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    done = launch(3, [sys.executable, script, how], code=None, FARANDOLE_TIMEOUT="1")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    named = rf"farandole: rank 2 \(pid \d+\) {became}; rank [01] ended with farandole.{error}: "
    assert re.match(named + ".*rank 2", last), done.stderr
