"""`farandole run -H a:2,b:2`: agents on simulated hosts or in network namespaces."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from test_launcher import command_of, marked, running

from farandole._launch.agents.reach import AGENT
from harness import launch, process_state, wait_until

SSH = """#!/bin/sh
# As ssh and sshd: the last word is one line for a shell. Its own words are kept for the test.
[ -n "$WORDS" ] && printf '%s\\n' "$@" > "$WORDS"
while [ "$1" != -- ]; do shift; done
shift
[ "$1" = nowhere ] && { echo "ssh: Could not resolve hostname nowhere" >&2; exit 255; }
[ "$1" = "$SEEN" ] && export SSH_CONNECTION="198.51.100.1 40000 198.51.100.2 22"
shift
echo "Welcome, this shell prints"
exec sh -c "$*"
"""

# A rank that prints its place in a world that really meets.
WORLD = """
import numpy as np
import farandole as fd
fd.init()
total = fd.all_reduce(np.array([2.0 ** fd.rank()]))[0]
print(json.dumps([fd.local_rank(), fd.local_size(), fd.cross_rank(), fd.cross_size(), total]))
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


@pytest.fixture(autouse=True)
def leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No temporary file is left, such as a secret."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    yield
    wait_until(lambda: not list(temporary.iterdir()), "all files to be removed")


def by_prefix(output: str) -> dict[str, list[str]]:
    """The output of each rank: '0 a' for rank 0 on a."""
    found: dict[str, list[str]] = {}
    for line in output.splitlines():
        match = re.fullmatch(r"\[([^]]+)\] +(.*)", line)
        assert match, line
        found.setdefault(match[1], []).append(match[2])
    return found


# -- what ranks find ----------------------------------------------------------------------------


def test_ranks_are_numbered_by_host_and_find_their_places(reach: str) -> None:
    script = """
path = Path(os.environ["FARANDOLE_SECRET_FILE"])
modes = [p.stat().st_mode for p in (path, path.parent)]
say(json.dumps([dict(os.environ), modes, path.read_text()]))
"""
    options = ["-H", "a:2,me-b.example.com:2,c:2", reach, "-x", "WORD=it's $HOME"]
    result = launch(3, command_of(script), *options)
    lines = by_prefix(result.stdout)
    assert sorted(lines) == ["0 a", "1 a", "2 me-b"]
    seen = [json.loads(text) for _, (text,) in sorted(lines.items())]
    names = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "NODE_RANK"]
    places = [[int(environment[name]) for name in names] for environment, *_ in seen]
    assert places == [[0, 2, 0, 2, 0], [1, 2, 0, 1, 0], [0, 1, 1, 2, 1]]
    for name in ("MASTER_ADDR", "MASTER_PORT", "FARANDOLE_RUN_ID", "WORLD_SIZE"):
        assert len({environment[name] for environment, *_ in seen}) == 1
    assert {environment["WORD"] for environment, *_ in seen} == {"it's $HOME"}
    assert len({secret for *_, secret in seen}) == 1
    assert re.fullmatch("[0-9a-f]{64}", seen[0][2])
    for environment, modes, secret in seen:
        assert [stat.S_IMODE(mode) for mode in modes] == [0o600, 0o700]
        assert secret not in environment.values()


def test_ranks_of_pretended_hosts_meet_as_on_several() -> None:
    command = [sys.executable, "-c", "import json" + WORLD]
    result = launch(3, command, "-H", "a:2,b:2", "--launcher=local")
    assert {prefix: json.loads(text) for prefix, (text,) in by_prefix(result.stdout).items()} == {
        "0 a": [0, 2, 0, 2, 7.0], "1 a": [1, 2, 0, 2, 7.0], "2 b": [0, 1, 1, 2, 7.0]
    }  # fmt: skip


def test_ranks_meet_without_a_secret_where_the_launcher_is_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FARANDOLE_SECRET_FILE", "/not/there")  # of the launcher alone
    script = "import json, os\nprint(os.environ['FARANDOLE_SECRET_FILE'] or 'none')" + WORLD
    options = ["-H", "a:1,b:1", "--launcher=local", "--insecure"]
    result = launch(2, [sys.executable, "-c", script], *options)
    seen = by_prefix(result.stdout)
    assert {prefix: secret for prefix, (secret, _) in seen.items()} == {
        "0 a": "none",
        "1 b": "none",
    }
    assert [json.loads(place)[-1] for _, place in seen.values()] == [3.0, 3.0]
    options = ["-H", "localhost:2", "--insecure"]
    result = launch(2, [sys.executable, "-c", "pass"], *options)
    assert "--insecure not used: all ranks are on this host" in result.stderr


def test_the_launcher_seals_what_ranks_send_where_it_is_told_to() -> None:
    script = "import json, os\nprint(os.environ['FARANDOLE_WIRE'])" + WORLD
    result = launch(
        2, [sys.executable, "-c", script], "-H", "a:1,b:1", "--launcher=local", "--seal"
    )
    seen = by_prefix(result.stdout)
    assert {prefix: wire for prefix, (wire, _) in seen.items()} == {
        "0 a": "sealed",
        "1 b": "sealed",
    }
    assert [json.loads(place)[-1] for _, place in seen.values()] == [3.0, 3.0]
    result = launch(2, [sys.executable, "-c", "pass"], "-H", "localhost:2", "--seal")
    assert "--seal not used: all ranks are on this host" in result.stderr


def test_ranks_of_network_namespaces_meet(spaces: list[str]) -> None:
    a, b = spaces
    script = "import json, os\nprint(os.environ['MASTER_ADDR'])" + WORLD
    options = ["-H", f"{a}:2,{b}:2", "--launcher=netns"]
    result = launch(4, [sys.executable, "-c", script], *options)
    seen = by_prefix(result.stdout)
    assert {address for address, _ in seen.values()} == {"10.77.3.1"}
    assert {prefix: json.loads(place) for prefix, (_, place) in seen.items()} == {
        f"0 {a}": [0, 2, 0, 2, 15.0], f"1 {a}": [1, 2, 0, 2, 15.0],
        f"2 {b}": [0, 2, 1, 2, 15.0], f"3 {b}": [1, 2, 1, 2, 15.0],
    }  # fmt: skip


def test_a_namespace_without_an_address_is_refused(spaces: list[str]) -> None:
    a, b = spaces
    subprocess.run(["ip", "-n", b, "link", "set", b, "down"], check=True)
    result = launch(2, ["true"], "-H", f"{a}:1,{b}:1", "--launcher=netns", code=1)
    assert re.match(f"farandole run: host {b}: no interface of that namespace is up", result.stderr)
    options = ["-H", f"{a}:1", "--launcher=netns", "--iface", "nosuch0"]
    result = launch(1, ["true"], *options, code=1)
    assert f"host {a}: FARANDOLE_IFACE=nosuch0 is not up there" in result.stderr


@pytest.mark.parametrize("reach", ["ssh"], indirect=True)
@pytest.mark.parametrize(
    ("hosts", "seen", "address"),
    [
        ("a:1,b:1", "a", "198.51.100.2"),
        ("10.9.9.9:1,a:1", "a", "10.9.9.9"),
        ("10.9.9.9:1,a:1", "10.9.9.9", "198.51.100.2"),  # a router's, which that host does not have
        ("b:1,a:1", "a", "b"),
    ],
)
def test_ranks_meet_where_sshd_was_reached(reach: str, hosts: str, seen: str, address: str) -> None:
    """MASTER_ADDR is where sshd was reached, else the address in -H, else the name."""
    result = launch(2, command_of("say(os.environ['MASTER_ADDR'])"), "-H", hosts, reach, SEEN=seen)
    assert list(by_prefix(result.stdout).values()) == [[address], [address]]


@pytest.mark.parametrize("reach", ["ssh"], indirect=True)
def test_ssh_gets_words_and_no_secret(reach: str, tmp_path: Path) -> None:
    words = tmp_path / "words"
    launch(
        1, ["true"], "-H", "me@b:1", reach, "-p", "2222", "-i", "key", "-x", "PASSWORD=tell nobody",
        WORDS=str(words),
    )  # fmt: skip
    assert words.read_text().splitlines() == [
        "-o", "BatchMode=yes", "-T", "-o", "ConnectTimeout=10", "-p", "2222", "-i", "key",
        "--", "me@b", shlex.join([sys.executable, "-c", AGENT]),
    ]  # fmt: skip


# -- output -------------------------------------------------------------------------------------


def test_much_output_arrives_whole(reach: str) -> None:
    script = (
        "text = (('x' * 99 + '\\n') * 20_000).encode()\nwhile text: text = text[os.write(1, text):]"
    )
    result = launch(2, command_of(script), "-H", "a:1,b:1", reach)
    for prefix, lines in by_prefix(result.stdout).items():
        assert (len(lines), set(lines)) == (20_000, {"x" * 99}), prefix


def test_stderr_stays_apart_and_a_last_line_is_whole() -> None:
    script = "os.write(2, b'to stderr'); os.write(1, b'to stdout')"
    result = launch(2, command_of(script), "-H", "a:1,b:1", "--launcher=local")
    for output, text in [(result.stdout, "to stdout"), (result.stderr, "to stderr")]:
        assert by_prefix(output) == {"0 a": [text], "1 b": [text]}


def test_ranks_elsewhere_learn_that_nobody_reads_any_more(reach: str) -> None:
    script = "while True: say('line')"
    with running(2, script, "-H", "a:1,b:1", reach, "--grace=0") as job:
        assert job.process.stdout is not None
        job.process.stdout.readline()
        job.process.stdout.close()
        assert job.process.wait(120) == 1  # BrokenPipeError


# -- ends ---------------------------------------------------------------------------------------


def test_a_rank_that_fails_on_the_second_host_gives_the_code(reach: str) -> None:
    script = """
if rank == 3: sys.exit(5)
forever()
"""
    result = launch(4, command_of(script), "-H", "a:2,b:2", reach, "--grace=0", code=5)
    *_, before, last = result.stderr.splitlines()
    assert re.fullmatch(r"farandole: rank 3 \(pid \d+ on b\) exited with code 5", last)
    assert before == "farandole: ranks 0, 1, 2 ended with SIGTERM; but first:"


def test_a_killed_rank_is_named_with_its_host() -> None:
    script = """
if rank == 3: os.kill(os.getpid(), signal.SIGKILL)
forever()
"""
    options = ["-H", "a:2,b:2", "--launcher=local", "--grace=0"]
    result = launch(4, command_of(script), *options, code=137)
    last = result.stderr.splitlines()[-1]
    assert re.match(r"farandole: rank 3 \(pid \d+ on b\) was killed by SIGKILL", last)


# The error of the others, by how the only rank of a host ends. There, only its agent sees the end.
ENDS_ALONE = {
    "os.kill(os.getpid(), signal.SIGKILL)": "PeerLost: rank 0 .* was killed by SIGKILL during",
    "os._exit(5)": "PeerLost: rank 0 .* exited with code 5 during",
    "sys.exit(9)": "RemoteError: rank 0 ended with exit code 9",
    "sys.exit()": r"EarlyExit: rank 0 \(pid \d+ on .* left before all_reduce",
}


@pytest.mark.parametrize("end", ENDS_ALONE)
def test_how_the_last_rank_of_a_host_ends_is_told(end: str) -> None:
    script = f"""
import os, signal, sys
import numpy as np
import farandole as fd
fd.init()
fd.all_reduce(np.ones(3))
if fd.rank() == 0: {end}
fd.all_reduce(np.ones(3), name="weights")
"""
    options = ["-H", "a:1,b:2", "--launcher=local", "--grace=5"]
    result = launch(3, [sys.executable, "-c", script], *options, code=None)
    for prefix in ("[1 b]", "[2 b]"):
        said = [line for line in result.stderr.splitlines() if line.startswith(prefix)]
        assert any(re.search(ENDS_ALONE[end], line) for line in said), result.stderr


def test_how_a_rank_ends_is_told_where_it_has_another_number() -> None:
    """In a second world of the same processes, numbered anew, while the first is still held."""
    script = """
import os, signal
import numpy as np
import farandole as fd
fd.init()
before = fd.world()
fd.shutdown()
fd.init(ranks=[2, 0, 1])
fd.all_reduce(np.ones(3))
if fd.rank() == 0: os.kill(os.getpid(), signal.SIGKILL)
fd.all_reduce(np.ones(3), name="weights")
"""
    options = ["-H", "a:2,b:1", "--launcher=local", "--grace=5"]
    result = launch(3, [sys.executable, "-c", script], *options, code=137)
    for prefix in ("[0 a]", "[1 a]"):
        said = [line for line in result.stderr.splitlines() if line.startswith(prefix)]
        assert any("was killed by SIGKILL during" in line for line in said), result.stderr


def test_files_of_the_job_do_not_stand_in_for_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "re.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    command = Path(sys.executable).with_name("farandole")
    options = ["run", "-np", "1", "-H", "a:1", "--launcher=local", "--", "true"]
    done = subprocess.run([command, *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_cause_is_known_across_hosts(spaces: list[str]) -> None:
    """All ranks fail. The launcher names the rank that raised, whichever ends first."""
    a, b = spaces
    script = """
import numpy as np
import farandole as fd
fd.init()
fd.barrier()
if fd.rank() == 2: raise ValueError("bad sample 4711")
fd.all_reduce(np.ones(3))
"""
    options = ["-H", f"{a}:2,{b}:2", "--launcher=netns", "--grace=20"]
    result = launch(4, [sys.executable, "-c", script], *options, code=1)
    last = result.stderr.splitlines()[-1]
    assert re.match(
        rf"farandole: rank 2 \(pid \d+ on {b}\) exited with code 1: ValueError: bad", last
    )
    assert result.stderr.count("RemoteError: ") >= 3  # the others say it, too


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_the_ranks_of_all_hosts(reach: str, name: str, code: int) -> None:
    script = "signal.signal(signal.SIGINT, signal.SIG_DFL); say(f'up {rank}'); forever()"
    with running(4, script, "-H", "a:2,b:2", reach, "--no-prefix") as job:
        job.read_until(*[f"up {rank}" for rank in range(4)])
        job.process.send_signal(signal.Signals[name])
        found, _, err = job.end()
        assert found == code, err
        assert err.splitlines()[-1] == f"farandole: the job was ended by {name}"
        wait_until(lambda: not job.living(), "all processes of the job to end")


def test_a_second_sigint_kills_on_all_hosts() -> None:
    script = """
signal.signal(signal.SIGINT, lambda *_: say(f'got it {rank}'))
say(f'up {rank}')
forever()
"""
    options = ["-H", "a:1,b:1", "--launcher=local", "--no-prefix", "--patience=600"]
    with running(2, script, *options) as job:
        job.read_until("up 0", "up 1")
        job.process.send_signal(signal.SIGINT)
        job.read_until("got it 0", "got it 1")
        job.process.send_signal(signal.SIGINT)
        code, _, err = job.end()
        assert code == 130, err


def test_ranks_of_all_hosts_stop_and_continue() -> None:
    options = ["-H", "a:1,b:1", "--launcher=local", "--no-prefix"]
    with running(2, "say(f'up {os.getpid()}'); forever()", *options) as job:
        assert job.process.stdout is not None
        pids = [int(job.process.stdout.readline().split()[1]) for _ in range(2)]
        for number, states in [(signal.SIGTSTP, "T"), (signal.SIGCONT, "SR")]:
            job.process.send_signal(number)
            wait_until(
                lambda s=states: all(process_state(pid) in s for pid in pids), "ranks to follow"
            )


def test_what_a_rank_leaves_behind_on_another_host_is_ended_and_told() -> None:
    script = """
if rank == 1 and os.fork() == 0:
    os.setsid()
    os.close(1); os.close(2)
    forever()
"""
    result = launch(2, command_of(script), "-H", "a:1,b:1", "--launcher=local")
    assert re.search(r"farandole: ended what ranks left running on b: pid \d+", result.stderr)


# -- agents that vanish -------------------------------------------------------------------------

WITH_AGENT = "say(f'{rank} {os.getppid()}'); forever()"


def agent_of(job_output: list[str], rank: int) -> int:
    return next(int(line.split()[1]) for line in job_output if line.startswith(f"{rank} "))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_vanished_agent_ends_the_job(reach: str, number: signal.Signals) -> None:
    with running(2, WITH_AGENT, "-H", "a:1,b:1", reach, "--no-prefix", "--grace=0") as job:
        assert job.process.stdout is not None
        lines = [job.process.stdout.readline() for _ in range(2)]
        os.kill(agent_of(lines, 1), number)
        code, _, err = job.end()
        assert code == 1, err
        last = err.splitlines()[-1]
        how = "is gone" if number == signal.SIGKILL else "has not answered for 5 s"
        assert last.startswith(f"farandole: host b: its agent {how}"), err
        assert last.endswith("what became of its ranks (1) is not known"), err
        assert "rank 0 ended with SIGTERM; but first:" in err
        wait_until(lambda: not job.living(), "all processes of the job to end")


@pytest.mark.parametrize("victim", ["watchdog", "launcher"])
def test_nobody_survives_a_kill_of_the_launcher(reach: str, victim: str) -> None:
    with running(2, WITH_AGENT, "-H", "a:1,b:1", reach, "--no-prefix") as job:
        assert job.process.stdout is not None
        for _ in range(2):
            job.process.stdout.readline()
        os.kill(job.process.pid if victim == "watchdog" else job.launcher(), signal.SIGKILL)
        wait_until(lambda: not marked(job.mark), "all processes of the job to end")


@pytest.mark.parametrize("victim", ["watchdog", "launcher"])
def test_nobody_survives_a_kill_at_any_moment(victim: str) -> None:
    """Also while agents start. No secret is left either."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    delays = random.Random(seed)
    for _ in range(4):
        with running(2, "forever()", "-H", "a:1,b:1", "--launcher=local") as job:
            time.sleep(delays.random())
            pid = job.process.pid
            with suppress(ValueError):  # no launcher yet: the watchdog is killed instead
                pid = job.launcher() if victim == "launcher" else pid
            os.kill(pid, signal.SIGKILL)
            job.process.wait(120)
            wait_until(lambda j=job: not marked(j.mark), "all processes of the job to end")


# -- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reach", ["ssh"], indirect=True)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["-H", "a:1,nowhere:1"],
            r"host nowhere: no agent started there \(ssh exited with code 255\): ssh: Could not "
            r"resolve hostname nowhere; try: ssh -o BatchMode=yes -- nowhere true",
        ),
        (
            ["-H", "a:1,b:1", "--remote-python=/no/such/python"],
            r"host [ab]: no agent started there \(ssh exited with code 127\): .*not found; is "
            r"/no/such/python the Python there\? --remote-python names another",
        ),
    ],
)
def test_a_host_that_cannot_be_used_is_named(reach: str, options: list[str], says: str) -> None:
    result = launch(2, ["true"], reach, *options, code=1)
    assert re.fullmatch(f"farandole run: {says}\n", result.stderr), result.stderr


def test_a_command_that_is_not_there_is_told_of_the_host() -> None:
    options = ["-H", "a:1,b:1,c:1,d:1", "--launcher=local"]  # several agents may report it at once
    result = launch(4, ["no-such-command"], *options, code=127)
    says = r"farandole run: host [abcd]: no-such-command: command not found\n"
    assert re.fullmatch(says, result.stderr), result.stderr


def test_a_host_that_never_answers_is_given_up(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o700)
    options = ["-H", "a:1", "--launcher=local", f"--remote-python={python}", "--start-timeout=1"]
    began = time.monotonic()
    result = launch(1, ["true"], *options, code=1)
    assert "host a: its agent was not ready within 1 s" in result.stderr
    assert time.monotonic() - began < 100


def test_this_machine_may_pretend_to_be_several() -> None:
    """With --launcher=local. Otherwise all its names are one host."""
    hosts = ["-H", "localhost:1,127.0.0.1:1"]
    script = "say(os.environ['NODE_RANK'])"
    apart = launch(2, command_of(script), *hosts, "--launcher=local")
    assert by_prefix(apart.stdout) == {"0 localhost": ["0"], "1 127.0.0.1": ["1"]}
    assert by_prefix(launch(2, command_of(script), *hosts).stdout) == {"0": ["0"], "1": ["0"]}


def test_more_ranks_than_slots_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=2\nb slots=1\n")
    for options in (["-H", "a:2,b:1"], ["--hostfile", str(file)]):
        result = launch(4, ["true"], *options, code=2)
        assert result.stderr == "farandole run: -np is 4, but the hosts have 3 slots\n"
