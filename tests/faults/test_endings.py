"""How a rank's program ends is what the others are told: an exception, an exit code, or neither."""

from __future__ import annotations

from pathlib import Path

import pytest

import harness

# Rank 1 ends; the others wait for it in the world (0) and in a group of their own (2).
PROGRAM = """
import os, sys, threading, time
from pathlib import Path
import numpy as np
import farandole as fd
HERE = Path(__file__).parent

def wait_for(name):
    deadline = time.monotonic() + 30
    while not (HERE / name).exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)

def end():
{end}

fd.init()
pair = fd.split(0 if fd.rank() else 1)
fd.barrier()
if fd.rank() != 1:
    (HERE / f"ready-{{fd.rank()}}").touch()
if fd.rank() == 1:
    wait_for("ready-0")  # has made its group
    wait_for("ready-2")
    end()
else:
    try:
        fd.all_reduce(np.ones(3), group=pair if fd.rank() == 2 else None, name="waits")
    except fd.Error as error:
        assert error.pid > 0
        print(type(error).__name__, error.rank, error.verdict, "|", error.evidence)
    (HERE / f"heard-{{fd.rank()}}").touch()
"""
RAISES = 'raise ValueError("bad sample 4711\\nand more")'
ENDS = {
    "an exception": RAISES,
    "an exception without text": "raise KeyError",
    "an exception in farandole": "fd.all_reduce('text')",
    "an exception within a hook of its own": f"sys.excepthook = lambda *_: None\n{RAISES}",
    # The interpreter waits for the thread, and the thread for the others.
    "an exception beside a thread": "threading.Thread(target=lambda: (wait_for('heard-0'), "
    f"wait_for('heard-2'))).start()\n{RAISES}",
    "shutdown in finally": f"try:\n    {RAISES}\nfinally:\n    fd.shutdown()",
    "exit in finally": "try:\n    sys.exit(7)\nfinally:\n    fd.shutdown()",
    "sys.exit": "sys.exit(7)",
    "SystemExit": "raise SystemExit(7)",
    "sys.exit with text": "sys.exit('that was it')",
    "caught": f"try:\n    {RAISES}\nexcept ValueError:\n    pass",
    "caught around shutdown": f"try:\n    {RAISES}\nexcept ValueError:\n    pass\nfd.shutdown()",
    "sys.exit(0)": "sys.exit()",
}
EXPECTED = {
    "an exception without text": (1, "RemoteError 1 rank 1 ended with KeyError | {line}"),
    "an exception in farandole": (
        1,
        "RemoteError 1 rank 1 ended with farandole.InvalidArgument: input is a str, which has "
        "neither the buffer protocol nor __dlpack__ | {line}",
    ),
    "exit in finally": (7, "RemoteError 1 rank 1 ended with exit code 7 | {line}; it called "),
    "sys.exit": (7, "RemoteError 1 rank 1 ended with exit code 7 | its program called exit()"),
    "SystemExit": (7, "RemoteError 1 rank 1 ended with exit code 7 | its program called exit()"),
    "sys.exit with text": (1, "RemoteError 1 rank 1 ended with exit code 1 | its program called"),
    "caught": (0, "EarlyExit 1 rank 1 (pid {pid}) left before all_reduce"),
    "caught around shutdown": (0, "EarlyExit 1 rank 1 (pid {pid}) left before all_reduce"),
    "sys.exit(0)": (0, "EarlyExit 1 rank 1 (pid {pid}) left before all_reduce"),
}
EXCEPTION = (1, "RemoteError 1 rank 1 ended with ValueError: bad sample 4711 | {line}")


@pytest.mark.parametrize("name", ENDS)
def test_the_others_are_told_how_a_rank_ended(tmp_path: Path, name: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(end="\n".join(f"    {s}" for s in ENDS[name].split("\n"))))
    ranks = harness.start_program(script, 3)
    outputs = [rank.communicate(timeout=harness.LIMIT) for rank in ranks]
    code, told = EXPECTED.get(name, EXCEPTION)
    assert [rank.returncode for rank in ranks] == [0, code, 0], outputs
    causes = ("raise KeyError", "raise ValueError", "sys.exit(", "fd.all_reduce('text')")
    cause = next((text for text in causes if text in ENDS[name]), "")
    lines = script.read_text().splitlines()
    line = next((i for i, text in enumerate(lines, 1) if cause and cause in text), 0)
    told = told.format(line=f"{script}, line {line}", pid=ranks[1].pid)
    for r in (0, 2):
        assert outputs[r][0].startswith(told), outputs
