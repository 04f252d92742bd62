"""`farandole run` with small scripts as ranks: output, exit codes, signals, and cleanup."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from harness import launch, launcher, process_state, wait_until

LIMIT = 60  # seconds; an upper bound for anything here, never waited for when all is well
MARK = "FARANDOLE_TEST_MARK"

PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
rank = int(os.environ.get("RANK", -1))  # none yet in an elastic job
here = Path(os.environ.get("HERE", "."))
def say(text): os.write(1, (text + "\\n").encode())
def state(pid): return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
def wait_for(condition):
    while not condition(): time.sleep(0.005)
def forever():  # no pause(): a signal that comes just before it would run its handler after it
    while True: time.sleep(0.01)
"""


def command_of(script: str) -> list[str]:
    return [sys.executable, "-S", "-c", PRELUDE + script]


def run(
    ranks: int, script: str, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return launch(ranks, command_of(script), *options, code=None, **environment)


class Running:
    """A job under way."""

    def __init__(self, process: subprocess.Popen[str], mark: str) -> None:
        self.process = process
        self.mark = mark

    def read_until(self, *wanted: str) -> list[str]:
        """Reads stdout until each of `wanted` was a line of it."""
        assert self.process.stdout is not None
        missing, lines = set(wanted), []
        while missing:
            line = self.process.stdout.readline()
            assert line, f"ended without {missing}; got {lines}"
            lines.append(line.rstrip("\n"))
            missing.discard(lines[-1])
        return lines

    def launcher(self) -> int:
        """The watchdog's only child."""
        (child,) = (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        )
        return int(child)

    def end(self) -> tuple[int, str, str]:
        """Waits for the end: exit code, stdout and stderr that were not read yet."""
        out, err = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, out, err

    def living(self) -> list[int]:
        return marked(self.mark)


def marked(mark: str) -> list[int]:
    """All processes with the mark in their environment, whatever their parent."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with suppress(OSError):
                if wanted in (directory / "environ").read_bytes().split(b"\0"):
                    found.append(int(directory.name))
    return found


@contextmanager
def running(
    ranks: int, script: str | list[str], *options: str, **popen: object
) -> Iterator[Running]:
    """`script`: text of one, or a whole command."""
    mark = uuid.uuid4().hex
    extra = popen.pop("env", {})
    assert isinstance(extra, dict)
    command = command_of(script) if isinstance(script, str) else script
    arguments = [*launcher(ranks, *options), *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1", MARK: mark} | extra
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(arguments, env=environment, text=True, **(pipes | popen)) as process:
        try:
            yield Running(process, mark)
        finally:
            process.kill()
            try:
                wait_until(lambda: not marked(mark), "all processes of the job to end")
            finally:
                for pid in marked(mark):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


# -- what ranks find ----------------------------------------------------------------------------


def test_a_failed_job_is_run_again_as_often_as_asked(tmp_path: Path) -> None:
    script = """
again = os.environ["FARANDOLE_RESTART_COUNT"]
say(f"try {again}")
sys.exit(0 if again == os.environ["GOOD"] else 3)
"""
    options = ["--restarts", "2", "--output-dir", str(tmp_path / "out")]
    good = run(2, script, *options, GOOD="1", FARANDOLE_RESTART_COUNT="7")
    assert (good.returncode, good.stdout.split("\n").count("[1] try 1")) == (0, 1)
    assert "the job ended with exit code 3; restart 1 of 2" in good.stderr
    assert (tmp_path / "out/rank-0.out").read_text() == "try 0\n"
    assert (tmp_path / "out/restart-1/rank-0.out").read_text() == "try 1\n"
    bad = run(1, script, "--restarts", "2", GOOD="9")
    assert (bad.returncode, bad.stdout.count("try")) == (3, 3)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are bound to")
def test_ranks_are_bound_to_cores_of_their_own() -> None:
    script = "say(json.dumps(sorted(os.sched_getaffinity(0))))"
    done = run(2, script, "--bind", "core")
    assert done.returncode == 0, done.stderr
    first, second = (set(json.loads(line[4:])) for line in sorted(done.stdout.splitlines()))
    assert first
    assert second
    assert not first & second
    assert first | second == os.sched_getaffinity(0)


@pytest.mark.parametrize("where", [[], ["-H", "a:1,b:1", "--launcher=local"], ["--min-np=1"]])
def test_a_job_ends_when_its_time_is_over(where: list[str]) -> None:
    """Ranks may save their work: their exit codes are not the job's. Nothing is run again."""
    script = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); say('ready'); forever()"
    again = [] if "--min-np=1" in where else ["--restarts", "2"]
    done = run(2, script, "--timeout", "1.5", *again, *where)
    assert done.returncode == 124, done.stderr
    assert done.stdout.count("ready") <= 2
    assert "SIGTERM passed on to the ranks" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last == "farandole: the job was ended, as the time of --timeout is over"
    assert run(1, "sys.exit(3)", "--timeout", "60").returncode == 3


def test_a_job_that_a_signal_stops_is_not_run_again() -> None:
    script = "say('ready'); forever()"
    with running(1, script, "--restarts", "2") as job:
        job.read_until("[0] ready")
        job.process.send_signal(signal.SIGTERM)
        code, out, _ = job.end()
    assert code == 143
    assert "ready" not in out


def test_ranks_find_their_place_in_the_environment() -> None:
    result = run(3, "say(json.dumps(dict(os.environ)))", OMPI_COMM_WORLD_RANK="7")
    assert result.returncode == 0, result.stderr
    seen = {}
    for line in result.stdout.splitlines():
        prefix, _, text = line.partition(" ")
        seen[prefix] = json.loads(text)
    assert sorted(seen) == ["[0]", "[1]", "[2]"]
    shared = ("MASTER_PORT", "FARANDOLE_RUN_ID")
    for name in shared:
        assert len({environment[name] for environment in seen.values()}) == 1
    assert re.fullmatch("[0-9a-f]{32}", seen["[0]"]["FARANDOLE_RUN_ID"])
    assert 0 < int(seen["[0]"]["MASTER_PORT"]) < 65536
    for rank in range(3):
        environment = seen[f"[{rank}]"]
        for name in ("RANK", "LOCAL_RANK", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK"):
            assert environment[name] == str(rank), name
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"):
            assert environment[name] == "3", name
        for name in ("NODE_RANK", "GROUP_RANK", "CROSS_RANK", "HOROVOD_CROSS_RANK"):
            assert environment[name] == "0", name
        for name in ("CROSS_SIZE", "HOROVOD_CROSS_SIZE", "PYTHONUNBUFFERED"):
            assert environment[name] == "1", name
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["FARANDOLE_RESTART_COUNT"] == "0"
        assert not [name for name in environment if name.startswith("OMPI_")]


def test_threads_are_shared_out_unless_the_user_did() -> None:
    cores = len(os.sched_getaffinity(0))
    script = "say(os.environ['OMP_NUM_THREADS'])"
    shared_out = run(2, script, OMP_NUM_THREADS="")
    each = max(1, cores // 2)
    assert shared_out.stdout.split() == ["[0]", str(each), "[1]", str(each)] or (
        shared_out.stdout.split() == ["[1]", str(each), "[0]", str(each)]
    )
    assert shared_out.stderr.count("OMP_NUM_THREADS") == 1
    chosen = run(2, script, OMP_NUM_THREADS="17")
    assert chosen.stdout.split().count("17") == 2
    assert chosen.stderr == ""


def test_stdin_is_empty() -> None:
    with running(1, "say(repr(sys.stdin.read()))", stdin=subprocess.PIPE) as job:
        code, out, _ = job.end()
    assert (code, out) == (0, "[0] ''\n")


# -- exit codes ---------------------------------------------------------------------------------


def test_the_first_failure_gives_the_code_and_the_last_line() -> None:
    script = """
if rank == 2: sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
forever()
"""
    # A rank that got SIGTERM before its handler stood is killed by it; both are later failures.
    result = run(4, script, "--grace", "0.5")
    assert result.returncode == 3
    last = result.stderr.splitlines()[-1]
    assert re.fullmatch(r"farandole: rank 2 \(pid \d+\) exited with code 3", last)
    assert "but first:" in result.stderr.splitlines()[-2]


def test_a_killed_rank_gives_128_and_the_signal() -> None:
    result = run(2, "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else forever()", "--grace=0")
    assert result.returncode == 137
    last = result.stderr.splitlines()[-1]
    assert re.match(r"farandole: rank 1 \(pid \d+\) was killed by SIGKILL", last)


def test_the_others_have_time_to_say_what_they_saw(tmp_path: Path) -> None:
    script = """
if rank == 1:
    (here / "new").write_text(str(os.getpid()))
    os.rename(here / "new", here / "pid")
    sys.exit(4)
wait_for((here / "pid").exists)
pid = int((here / "pid").read_text())
wait_for(lambda: state(pid) == "Z")
say("I saw it")
sys.exit(9)
"""
    result = run(2, script, f"--grace={LIMIT}", HERE=str(tmp_path))
    assert result.stdout == "[0] I saw it\n"
    assert result.returncode == 4
    assert "rank 0 exited with code 9; but first:" in result.stderr


def test_ranks_that_ignore_sigterm_are_killed(tmp_path: Path) -> None:
    script = """
if rank == 0:
    wait_for(lambda: (here / "ready").exists())
    sys.exit(6)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(here / "ready").touch()
forever()
"""
    result = run(2, script, "--grace=0", "--patience=0.2", HERE=str(tmp_path))
    assert result.returncode == 6
    assert "rank 1 did not end on SIGTERM: SIGKILL" in result.stderr
    assert "rank 1 ended with SIGKILL; but first:" in result.stderr


def test_a_rank_that_succeeds_early_leaves_the_others_alone(tmp_path: Path) -> None:
    script = """
if rank == 0:
    (here / "new").write_text(str(os.getpid()))
    os.rename(here / "new", here / "pid")
    sys.exit(0)
wait_for((here / "pid").exists)
wait_for(lambda: state(int((here / "pid").read_text())) == "Z")
say("still here")
"""
    result = run(2, script, "--grace=0", HERE=str(tmp_path))
    assert (result.returncode, result.stdout, result.stderr) == (0, "[1] still here\n", "")


# -- output -------------------------------------------------------------------------------------


def test_lines_of_many_ranks_are_never_torn() -> None:
    ranks, lines = 4, 25_000
    script = f"""
text = "".join(f"{{rank}} {{i}} " + "x" * (i % 251) + "|\\n" for i in range({lines})).encode()
size = (4099, 65521, 997, 20011)[rank]
for at in range(0, len(text), size):
    chunk = text[at : at + size]
    while chunk: chunk = chunk[os.write(1, chunk):]
"""
    result = run(ranks, script)
    assert result.returncode == 0, result.stderr
    following = [0] * ranks
    for line in result.stdout.splitlines():
        prefix, rank, index, rest = line.split(" ")
        assert prefix == f"[{rank}]"
        assert int(index) == following[int(rank)]
        assert rest == "x" * (int(index) % 251) + "|"
        following[int(rank)] += 1
    assert following == [lines] * ranks


def test_stdout_and_stderr_stay_apart() -> None:
    result = run(2, "say('good'); os.write(2, b'bad\\n')")
    assert sorted(result.stdout.splitlines()) == ["[0] good", "[1] good"]
    assert sorted(result.stderr.splitlines()) == ["[0] bad", "[1] bad"]


def test_without_prefix_lines_are_as_they_are() -> None:
    result = run(2, "say(f'line of {rank}')", "--no-prefix")
    assert sorted(result.stdout.splitlines()) == ["line of 0", "line of 1"]
    assert run(1, "os.write(1, b'a\\rb')", "--no-prefix").stdout == "a\nb"  # text mode: \r is \n


def test_last_lines_without_newline_are_shown_whole() -> None:
    result = run(3, "os.write(1, f'end of {rank}'.encode())")
    assert sorted(result.stdout.splitlines()) == ["[0] end of 0", "[1] end of 1", "[2] end of 2"]


def test_an_unfinished_line_is_shown_after_a_silence(tmp_path: Path) -> None:
    script = """
os.write(1, b"loading ...")
wait_for((here / "seen").exists)
say(" done")
"""
    with running(1, script, env={"HERE": str(tmp_path)}) as job:
        assert job.process.stdout is not None
        first = os.read(job.process.stdout.fileno(), 100)
        assert first == b"[0] loading ..."
        (tmp_path / "seen").touch()
        code, out, _ = job.end()
    assert (code, out) == (0, " done\n")


def test_megabytes_without_newline_do_not_fill_the_memory() -> None:
    script = """
piece = b"y" * 65536
for _ in range(1024): os.write(1, piece)
status = Path(f"/proc/{os.getppid()}/status").read_text()
os.write(2, status.partition("VmHWM:")[2].split()[0].encode())
"""
    result = run(1, script)
    assert result.stdout.count("y") == 64 * 2**20
    peak = int(result.stderr.split()[1])  # KiB
    assert peak < 48 * 1024


def test_progress_bars_are_redrawn_in_place_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    script = """
os.write(1, b"\\r 10%")
wait_for((here / "seen").exists)
os.write(1, b"\\r 20%")
os.write(1, b"\\r 30%\\n")
"""
    environment = {"HERE": str(tmp_path), "TERM": "xterm", "NO_COLOR": ""}
    with running(1, script, stdout=theirs, stderr=theirs, env=environment) as job:
        os.close(theirs)
        shown = b""
        while b" 10%" not in shown:
            shown += os.read(ours, 100)
        assert shown == b"\x1b[36m[0]\x1b[0m  10%"
        (tmp_path / "seen").touch()
        with suppress(OSError):  # EIO: the other side is closed
            while more := os.read(ours, 100):
                shown += more
        assert job.process.wait(LIMIT) == 0
    os.close(ours)
    assert shown.endswith(b"\r\x1b[K\x1b[36m[0]\x1b[0m  30%\r\n")


BARS = """
for state in (b"\\r 10%", b"\\r 20%", b"\\n", b"a line\\n", b"\\r 30%"): os.write(1, state)
"""


def test_the_bars_of_rank_0_alone_are_shown_and_copies_have_all(tmp_path: Path) -> None:
    result = run(2, BARS, f"--output-dir={tmp_path / 'logs'}")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        "[0]  20%",
        "[0]  30%",
        "[0] a line",
        "[1] a line",
    ]
    for rank in range(2):
        copy = (tmp_path / f"logs/rank-{rank}.out").read_bytes()
        assert copy == b"\r 10%\r 20%\na line\n\r 30%"
    result = run(2, BARS, "--all-output")
    assert result.stdout.splitlines().count("[1]  30%") == 1
    assert result.stdout.splitlines().count("[1]  20%") == 1


def test_a_rank_that_fails_tells_how_far_its_bar_came(tmp_path: Path) -> None:
    end = """
if rank == 2:
    (here / "said").touch()
    forever()
wait_for((here / "said").exists)
sys.exit(3 * rank)
"""
    result = run(3, BARS + end, "--grace=0", HERE=str(tmp_path))
    assert result.returncode == 3
    shown = [line for line in result.stdout.splitlines() if not line.startswith("[0]")]
    assert sorted(shown) == ["[1]  30%", "[1] a line", "[2] a line"]


def test_output_files_hold_every_byte(tmp_path: Path) -> None:
    directory = tmp_path / "logs"
    result = run(2, "os.write(1, b'a\\rb'); os.write(2, b'c')", f"--output-dir={directory}")
    assert result.returncode == 0, result.stderr
    assert directory.stat().st_mode & 0o777 == 0o700
    for rank in range(2):
        for name, content in ((f"rank-{rank}.out", b"a\rb"), (f"rank-{rank}.err", b"c")):
            assert (directory / name).read_bytes() == content
            assert (directory / name).stat().st_mode & 0o777 == 0o600
    again = run(1, "", f"--output-dir={directory}")
    assert again.returncode == 2
    assert "rank-0.out is there already" in again.stderr
    assert len(again.stderr.splitlines()) == 1


def test_ranks_learn_that_nobody_reads_any_more() -> None:
    script = """
try:
    while True: say("tick")
except BrokenPipeError:
    sys.exit(11)
"""
    with running(1, script) as job:
        job.read_until("[0] tick")
        assert job.process.stdout is not None
        job.process.stdout.close()
        assert job.process.wait(LIMIT) == 11


def test_a_file_that_takes_nothing_more_is_told() -> None:
    with Path("/dev/full").open("w") as full, running(1, 'say("lost")', stdout=full) as job:
        code, _, err = job.end()
    assert code == 0
    assert err == "farandole: stdout: No space left on device; nothing more is shown\n"


def test_a_reader_that_stalls_delays_no_signal() -> None:
    script = """
say("ready")
while True: os.write(1, b"z" * 1000 + b"\\n")
"""
    with running(2, script, "--patience=0.5") as job:
        job.read_until("[0] ready", "[1] ready")
        job.process.terminate()
        assert job.process.wait(LIMIT) == 143  # without reading on


# -- signals ------------------------------------------------------------------------------------

ANSWER = """
def answer(number, _):
    say(f"rank {rank} got {signal.Signals(number).name}")
    os._exit(0)
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), answer)
say("ready")
forever()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_signals_reach_every_rank(name: str) -> None:
    with running(2, ANSWER) as job:
        job.read_until("[0] ready", "[1] ready")
        job.process.send_signal(getattr(signal, name))
        code, out, _ = job.end()
    assert sorted(out.splitlines()) == [f"[{r}] rank {r} got {name}" for r in range(2)]
    assert code == 0  # the ranks' own


@pytest.mark.parametrize(("name", "expected"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_ranks_without_handler_end_by_the_signal(name: str, expected: int) -> None:
    script = "signal.signal(signal.SIGINT, signal.SIG_DFL); say('ready'); forever()"
    with running(2, script) as job:
        job.read_until("[0] ready", "[1] ready")
        job.process.send_signal(getattr(signal, name))
        code, _, err = job.end()
    assert code == expected
    assert err.splitlines()[-1] == f"farandole: the job was ended by {name}"


SAVES = """
worker = os.fork()
if worker == 0:  # as of a DataLoader: it has no handler
    forever()
def save(number, _):
    time.sleep(0.2)  # a signal that the worker got has ended it
    if state(worker) in "ZX": os._exit(3)
    os.kill(worker, signal.SIGKILL)
    os._exit(0)
signal.signal(getattr(signal, os.environ["SIGNAL"]), save)
say("ready")
forever()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_rank_that_handles_a_signal_keeps_its_workers(name: str) -> None:
    with running(2, SAVES, env={"SIGNAL": name}) as job:
        job.read_until("[0] ready", "[1] ready")
        job.process.send_signal(getattr(signal, name))
        code, _, _ = job.end()
    assert code == 0


@pytest.mark.parametrize("trap", ["", "trap 'true' TERM; "])
def test_a_signal_reaches_a_program_below_a_shell(trap: str, tmp_path: Path) -> None:
    """The shell waits for the program, also before it runs a trap of its own."""
    script = tmp_path / "rank.py"
    script.write_text(PRELUDE + ANSWER)
    with running(2, ["bash", "-c", f"{trap}{sys.executable} -S {script}; exit $?"]) as job:
        job.read_until("[0] ready", "[1] ready")
        job.process.terminate()
        _, out, _ = job.end()
    assert sorted(out.splitlines()) == [f"[{r}] rank {r} got SIGTERM" for r in range(2)]


STUBBORN = """
for name in ("SIGINT", "SIGTERM"): signal.signal(getattr(signal, name), signal.SIG_IGN)
say("ready")
forever()
"""


def test_a_second_sigint_kills_at_once() -> None:
    with running(2, STUBBORN, f"--patience={10 * LIMIT}") as job:
        job.read_until("[0] ready", "[1] ready")
        job.process.send_signal(signal.SIGINT)
        assert job.process.stderr is not None
        assert "again to kill them" in job.process.stderr.readline()
        job.process.send_signal(signal.SIGINT)
        code, _, _ = job.end()
    assert code == 130


def test_sigint_is_followed_by_sigterm_and_sigkill() -> None:
    with running(2, STUBBORN, "--patience=0.2") as job:
        job.read_until("[0] ready", "[1] ready")
        job.process.send_signal(signal.SIGINT)
        code, _, err = job.end()
    assert code == 130
    assert "ranks 0, 1 did not end on SIGTERM: SIGKILL" in err


def test_ranks_stop_and_continue_with_the_launcher() -> None:
    with running(2, "say(str(os.getpid())); say('ready'); forever()") as job:
        lines = job.read_until("[0] ready", "[1] ready")
        pids = [int(line.split()[1]) for line in lines if "ready" not in line]
        job.process.send_signal(signal.SIGTSTP)
        for pid in (*pids, job.process.pid):
            wait_until(lambda pid=pid: process_state(pid) == "T", f"{pid} to stop")
        job.process.send_signal(signal.SIGCONT)
        for pid in (*pids, job.process.pid):
            wait_until(lambda pid=pid: process_state(pid) != "T", f"{pid} to go on")
        job.process.terminate()
        assert job.end()[0] == 143


@pytest.mark.parametrize("whom", ["watchdog", "all"])
def test_a_launcher_that_stood_still_goes_on(whom: str) -> None:
    """All processes stop, as by `scontrol suspend`, or the watchdog alone does."""
    with running(1, "say(str(os.getpid())); say('ready'); forever()") as job:
        rank = int(job.read_until("[0] ready")[0].split()[1])
        pids = [job.process.pid, *([job.launcher(), rank] if whom == "all" else [])]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(1.0)  # longer than the watchdog waits for anything
        assert process_state(rank) != "T"
        job.process.terminate()
        assert job.end()[0] == 143


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(tmp_path: Path) -> None:
    script = "say('ready'); wait_for((here / 'go').exists); say('done')"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with running(1, script, env={"HERE": str(tmp_path)}) as job:
            job.read_until("[0] ready")
            job.process.send_signal(signal.SIGHUP)
            (tmp_path / "go").touch()
            code, out, err = job.end()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (code, out, err) == (0, "[0] done\n", "")


# -- nobody survives ----------------------------------------------------------------------------

# Each rank has a child, a child that ignores all it can, and a daemon: a double fork in a session
# of its own, whose parent is gone.
FAMILY = """
def live(word):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    say(word)
    forever()
if os.fork() == 0: live("child")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: live("daemon")
    os._exit(0)
os.wait()
say("ready")
"""
EVERYBODY = [f"[{rank}] {word}" for rank in range(2) for word in ("child", "daemon", "ready")]


@pytest.mark.parametrize("victim", ["watchdog", "launcher"])
def test_nobody_survives_a_kill_of_the(victim: str) -> None:
    with running(2, FAMILY + "forever()") as job:
        job.read_until(*EVERYBODY)
        assert len(job.living()) == 2 + 2 * 3
        os.kill(job.process.pid if victim == "watchdog" else job.launcher(), signal.SIGKILL)
        code, _, err = job.end()
        wait_until(lambda: not job.living(), "the family to end")
    if victim == "launcher":
        assert code == 137
        assert "the launcher was killed by SIGKILL; all ranks were ended" in err


def test_nobody_survives_a_kill_at_any_moment() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    for _ in range(8):
        with running(3, FAMILY + "forever()") as job:
            time.sleep(generator.uniform(0.0, 0.25))  # any moment, also before the first fork
            job.process.kill()
            job.process.wait(LIMIT)
            wait_until(lambda job=job: not job.living(), "the family to end")


def test_what_a_failed_rank_leaves_behind_is_ended() -> None:
    with running(2, FAMILY + "sys.exit(8) if rank == 0 else forever()", "--grace=0") as job:
        code, _, err = job.end()
        assert code == 8
        assert not job.living()
    assert err.splitlines()[-1].startswith("farandole: rank 0 ")


def test_a_daemon_of_a_rank_that_succeeded_is_ended_and_told() -> None:
    script = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: forever()
    os._exit(0)
os.wait()
"""
    with running(1, script) as job:
        code, _, err = job.end()
        assert not job.living()
    assert code == 0
    assert re.search(r"ended what ranks left running: pid \d+ \(", err)


def test_children_of_the_shell_that_became_the_launcher_are_left_alone() -> None:
    command = 'sleep 1000 & echo $!; exec "$@"'
    arguments = [*launcher(1), *command_of("say('ready'); forever()")]
    with subprocess.Popen(
        ["bash", "-c", command, "bash", *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        stranger = int(process.stdout.readline())
        try:
            assert process.stdout.readline() == "[0] ready\n"
            process.terminate()
            assert process.wait(LIMIT) == 143
            assert process_state(stranger) == "S"
        finally:
            os.kill(stranger, signal.SIGKILL)


THREADED = """
import sys, threading, time
from farandole._launch import watchdog
from farandole.cli import main

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
watch = watchdog._watch_over

def late(*what):
    time.sleep(0.5)  # the launcher has ended, and the thread has its SIGCHLD
    return watch(*what)

watchdog._watch_over = late
sys.exit(main(["run", "-np", "1", "--", "true"]))
"""


def test_a_program_with_threads_may_call_the_launcher() -> None:
    command = [sys.executable, "-c", THREADED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
