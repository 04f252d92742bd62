"""`farandole run -H a:2,b:2`: agents, on pretended hosts that are all this machine."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from pathlib import Path

import pytest

from harness import launch

SSH = """#!/bin/sh
# As ssh and sshd: options and host are dropped, the rest is one line for a shell.
while [ "$1" != -- ]; do shift; done
shift
[ "$1" = nowhere ] && { echo "ssh: Could not resolve hostname nowhere" >&2; exit 255; }
shift
echo "Welcome, this shell prints"
exec sh -c "$*"
"""


@pytest.fixture(params=["local", "ssh"])
def reach(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "ssh":
        (tmp_path / "bin").mkdir()
        ssh = tmp_path / "bin" / "ssh"
        ssh.write_text(SSH)
        ssh.chmod(0o700)
        monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    return f"--launcher={request.param}"


def command(script: str) -> list[str]:
    return [sys.executable, "-S", "-c", "import json, os, signal, sys, time\n" + script]


def test_ranks_are_numbered_by_host_and_find_their_places(reach: str) -> None:
    script = """
path = os.environ["FARANDOLE_SECRET_FILE"]
modes = [os.stat(p).st_mode for p in (path, os.path.dirname(path))]
print(json.dumps([dict(os.environ), modes, open(path).read()]))
"""
    result = launch(3, command(script), "-H", "a:2,b:2,c:2", reach, "-x", "WORD=it's $HOME")
    seen = {}
    for line in result.stdout.splitlines():
        prefix, _, text = line.partition(" ")
        seen[prefix] = json.loads(text)
    names = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "NODE_RANK"]
    places = {
        rank: [int(environment[n]) for n in names] for rank, (environment, *_) in seen.items()
    }
    assert places == {"[0]": [0, 2, 0, 2, 0], "[1]": [1, 2, 0, 1, 0], "[2]": [0, 1, 1, 2, 1]}
    for name in ("MASTER_ADDR", "MASTER_PORT", "FARANDOLE_RUN_ID", "WORLD_SIZE"):
        assert len({environment[name] for environment, *_ in seen.values()}) == 1
    assert {environment["WORD"] for environment, *_ in seen.values()} == {"it's $HOME"}
    assert {secret for *_, secret in seen.values()} == {seen["[0]"][2]}
    assert re.fullmatch("[0-9a-f]{64}", seen["[0]"][2])
    for environment, modes, secret in seen.values():
        assert [stat.S_IMODE(mode) for mode in modes] == [0o600, 0o700]
        assert secret not in environment.values()
        assert not Path(environment["FARANDOLE_SECRET_FILE"]).parent.exists()


def test_a_killed_rank_is_named_with_its_host(reach: str) -> None:
    script = """
if os.environ["RANK"] == "3": os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    result = launch(4, command(script), "-H", "a:2,b:2", reach, "--grace=0", code=137)
    last = result.stderr.splitlines()[-1]
    assert re.match(r"farandole: rank 3 \(pid \d+ on b\) was killed by SIGKILL", last)


def test_much_output_arrives_whole(reach: str) -> None:
    script = (
        "text = (('x' * 99 + '\\n') * 20_000).encode()\nwhile text: text = text[os.write(1, text):]"
    )
    result = launch(2, command(script), "-H", "a:1,b:1", reach)
    lines = result.stdout.splitlines()
    assert len(lines) == 40_000
    assert set(lines) == {f"[{rank}] {'x' * 99}" for rank in range(2)}


@pytest.mark.parametrize("reach", ["ssh"], indirect=True)
def test_a_host_that_cannot_be_reached_is_named_with_what_ssh_said(reach: str) -> None:
    result = launch(2, ["true"], "-H", "a:1,nowhere:1", reach, code=1)
    assert len(result.stderr.splitlines()) == 1
    for part in ("host nowhere", "255", "Could not resolve hostname", "ssh -o BatchMode=yes"):
        assert part in result.stderr


def test_a_command_that_is_not_there_is_told_of_the_host(reach: str) -> None:
    result = launch(2, ["no-such-command"], "-H", "a:1,b:1", reach, code=127)
    assert re.fullmatch(
        r"farandole run: host [ab]: no-such-command: command not found\n", result.stderr
    )
