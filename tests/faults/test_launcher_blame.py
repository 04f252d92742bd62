"""`farandole run` names the rank that is the cause and returns its code, whoever ends first."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from farandole._launch.words import Blame, Word
from harness import launch

REPEAT = int(os.environ.get("LAUNCHES", "2"))  # 50 shows what happens seldom

# The culprit brings the job down. `late`: only when the processes of its peers, whose pids are in
# files, have ended.
PROGRAM = """
import atexit, os, resource, signal, sys, threading, time
from pathlib import Path
HERE, RANK, SIZE = Path(__file__).parent, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
how, culprit = sys.argv[1], int(sys.argv[2])

def is_over(file):
    if not file.exists(): return False
    return Path(f"/proc/{file.read_text()}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

def outlive_the_others():
    deadline = time.monotonic() + 20
    while not all(is_over(HERE / f"pid-{r}") for r in range(SIZE) if r != culprit):
        assert time.monotonic() < deadline
        time.sleep(0.005)

def lack_room():
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + (100 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))

def lack_descriptors():
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        while True: os.open("/dev/null", os.O_RDONLY)
    except OSError: pass

(HERE / f"new-{RANK}").write_text(str(os.getpid()))
os.rename(HERE / f"new-{RANK}", HERE / f"pid-{RANK}")
if RANK == culprit and how == "late":
    atexit.register(outlive_the_others)  # after farandole's, which is registered later
if RANK == culprit and how == "setting":
    os.environ["FARANDOLE_LEVEL"] = "fast"
import numpy as np
import farandole as fd
from farandole import _core, _world
fd.init()
group = fd.split(0) if how == "group" else None
guilty = fd.rank() == culprit
fd.all_reduce(np.ones(3), group=group)
if guilty:
    if how == "early": sys.exit(0)
    if how == "_exit 0": os._exit(0)
    if how == "stuck": time.sleep(1000)
    if how == "stopped": os.kill(os.getpid(), signal.SIGSTOP)
    if how == "exit": sys.exit(7)
    if how == "_exit": os._exit(7)
    if how == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if how == "room": lack_room()
    if how == "descriptors": lack_descriptors()
    if how == "in the midst": threading.Timer(0.2, os._exit, (0,)).start()
    if how in ("raise", "late", "group"): raise ValueError("bad sample 4711")
if how == "room":
    rows = 0 if guilty else 200 << 20
    large = (np.zeros(rows, np.uint8), None, (rows,))
    names = _core.names_of(_world.world())
    _core.wait_by_number(names.submit("all_gather", "large", [large]))
if how == "descriptors": fd.all_reduce(np.ones(3), group=fd.split(0))
if how == "count": fd.all_reduce(np.ones(4 if guilty else 3))
if how == "counts": fd.all_reduce(np.ones(3 + fd.rank()))
if how == "circle" and guilty: fd.recv(np.ones(3), source=(culprit + 1) % SIZE)
for _ in range(10**9):
    fd.all_reduce(np.ones(1_000_000 if how == "in the midst" else 3), group=group)
"""


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
        done = launch(ranks, [sys.executable, script, how, str(ranks - 1)], code=None)
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
    done = launch(3, [sys.executable, script, "late", "2"], f"--grace={grace}", code=None)
    assert done.returncode == 1
    assert re.fullmatch(
        r"farandole: rank 2 \(pid \d+\) exited with code 1: ValueError: bad sample 4711 "
        rf"\({re.escape(str(script))}, line \d+\)",
        done.stderr.splitlines()[-1],
    ), done.stderr


@pytest.mark.parametrize(
    ("blamed", "guilty", "quoted"),
    [
        ({0: 1, 1: None, 2: 1}, [1], 1),
        ({0: 1, 2: 0}, [1], 0),  # 1 has said nothing
        ({1: None, 0: None, 2: None}, [0, 1, 2], 1),
        ({0: 2, 1: 2, 2: 0}, [0, 2], 0),  # two hosts have lost sight of each other
    ],
)
def test_blame_goes_to_the_end_of_the_chain(
    blamed: dict[int, int | None], guilty: list[int], quoted: int
) -> None:
    """`blamed`: by rank, in the order of their words."""
    blame = Blame()
    for rank in range(3):
        blame.hear(Word(rank, 100 + rank, ["met"]))
    for rank, other in blamed.items():
        pid = "0" if other is None else str(100 + other)
        blame.hear(Word(rank, 100 + rank, ["end", "1", pid, "Error: the same", "file, line 1"]))
    assert blame.guilt(list(blamed)) == (guilty, quoted)


# By cause: the exit code of the job, and its last line. {c}: the culprit; {v}: any other rank.
WORLD, DURING = r"ranks 0, 1, 2 ended with farandole\.", r"during all_reduce #\d+ .*"
CAUSES = {
    "raise": (1, r"{c} exited with code 1: ValueError: bad sample 4711 \(.*"),
    "exit": (7, "{c} exited with code 7"),
    "_exit": (7, rf"{{c}} exited with code 7; {{v}}PeerLost: {{c}} exited with code 7 {DURING}"),
    "_exit 0": (1, rf"{{c}} exited with code 0; {{v}}PeerLost: {{c}} exited with code 0 {DURING}"),
    "early": (1, "{c} exited with code 0; {v}EarlyExit: {c} left before .*"),
    "killed": (137, "{c} was killed by SIGKILL"),
    "stuck": (1, "{c} did not go on; {v}Stalled: .* not submitted by rank {n} .*"),
    # Stalled: where nobody shares its host, who would see that it is stopped.
    "stopped": (1, "{c} did not go on; {v}(PeerHung|Stalled): .*rank {n} .*"),
    "room": (1, r"{c} exited with code 1: farandole\.ResourceError: rank {n} cannot allocate .*"),
    "count": (1, r"{c} exited with code 1: farandole\.Mismatch: .* 4 on rank {n} .*"),
    "counts": (1, rf"{WORLD}Mismatch: .* 3 on rank 0; 4 on rank 1; 5 on rank 2 .*"),
    "setting": (
        1,
        r"{c} exited with code 1: farandole\.RendezvousError: .* FARANDOLE_LEVEL: .* on rank {n}.*",
    ),
}
CAUSES["in the midst"] = CAUSES["_exit 0"]
CAUSES_ON_ONE_HOST = {"circle": (1, rf"{WORLD}Deadlock: ranks .* wait for each other for ever.*")}
CAUSES_OVER_HOSTS = {
    "descriptors": (
        1,
        r"{c} exited with code 1(; {v}|: farandole\.)(ResourceError|RemoteError): .*rank {n}: .*",
    )
}


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize(
    ("how", "hosts"),
    [(how, "") for how in CAUSES | CAUSES_ON_ONE_HOST]
    + [(how, "a:2,b:1") for how in CAUSES | CAUSES_OVER_HOSTS],
)
def test_the_last_line_names_no_victim(tmp_path: Path, how: str, hosts: str, culprit: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    options = [f"-H={hosts}", "--launcher=local"] if hosts else []
    done = launch(
        3, [sys.executable, script, how, str(culprit)], "--grace=20", *options, code=None,
        FARANDOLE_TIMEOUT="2" if how in ("stuck", "stopped") else "60", FARANDOLE_WARN_AFTER="0.5",
    )  # fmt: skip
    code, last = (CAUSES | CAUSES_ON_ONE_HOST | CAUSES_OVER_HOSTS)[how]
    c, v = rf"rank {culprit} \(pid \d+[^)]*\)", r"rank \d ended with farandole\."
    expected = last.replace("{c}", c).replace("{v}", v).replace("{n}", str(culprit))
    assert re.fullmatch(f"farandole: {expected}", done.stderr.splitlines()[-1]), done.stderr
    assert done.returncode == code
