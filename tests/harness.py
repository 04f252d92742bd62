"""Rank processes for tests: started in milliseconds, told what to run, asked how it ended.

A nursery is one process that has imported numpy and farandole, and perhaps a framework, and has
used none; ranks are forked from it, so a world of eight costs little. The nursery keeps dead ranks
as zombies until their world is closed: how a process ended can then be read by the others, as under
a launcher.

    with World(3) as world:
        outcomes = world.run(function, argument)     # function(argument) on every rank

Functions live in a test module and are sent by name. Inside one, `tell(text)` sends a word to the
test, which `hear`s it: ranks and tests synchronise by words, not by time.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import functools
import importlib
import itertools
import os
import pickle
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

HERE = Path(__file__).parent
_SHOW_STACKS = signal.SIGUSR1
LIMIT = 120.0  # seconds for one call on all ranks: a bound, never waited for when all is well
MOST_RANKS = 64  # that are forked at once
FIELDS = [
    "verdict", "evidence", "advice", "rank", "peer", "pid", "signal", "host", "operation", "tensor",
    "sequence", "lane", "step", "bytes_done", "bytes_total", "field", "values",
]  # fmt: skip


# ---- what a rank reports ----


@dataclass
class Outcome:
    """How one call ended on one rank."""

    value: Any = None
    error: str | None = None  # the exception's class name
    text: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    bases: tuple[str, ...] = ()
    trace: str = ""
    ended: float = 0.0  # time.monotonic(), which all processes of a machine share

    def __getattr__(self, name: str) -> Any:
        """The error's facts: outcome.rank, outcome.signal, ..."""
        if name.startswith("__") or name not in FIELDS:
            raise AttributeError(name)
        return self.fields.get(name)


class Ended(Exception):
    """A rank's process ended without reporting an outcome."""


def _facts(error: BaseException) -> dict[str, Any]:
    facts = {name: getattr(error, name) for name in FIELDS if hasattr(error, name)}
    return facts | ({"values": dict(facts["values"])} if "values" in facts else {})


def _outcome(call: Callable[[], Any]) -> Outcome:
    try:
        value = call()
        return Outcome(value=value, ended=time.monotonic())
    except BaseException as error:
        ended = time.monotonic()
        return Outcome(
            error=type(error).__name__,
            text=str(error),
            fields=_facts(error),
            bases=tuple(base.__name__ for base in type(error).__mro__),
            trace=traceback.format_exc(),
            ended=ended,
        )


# ---- inside a rank ----

_to_test: Connection | None = None


def is_rank() -> bool:
    return _to_test is not None


def tell(word: Any) -> None:
    """Inside a rank: sends a word to the test."""
    assert _to_test is not None
    _to_test.send(("word", word))


def listen() -> Any:
    """Inside a rank: waits for the next word that the test `say`s."""
    assert _to_test is not None
    kind, word = _to_test.recv()
    assert kind == "word"
    return word


def _call(folder: str, module: str, name: str, arguments: tuple[Any, ...]) -> Any:
    if folder not in sys.path:
        sys.path.append(folder)
    return getattr(importlib.import_module(module), name)(*arguments)


def _live(connection: Connection) -> None:
    """A rank's life: calls, one after the other, until the test closes the connection."""
    global _to_test
    _to_test = connection
    while True:
        try:
            kind, payload = connection.recv()
        except (EOFError, ConnectionError):
            return
        if kind == "leave":
            return
        outcome = _outcome(lambda p=payload: _call(*p))  # type: ignore[misc]
        with contextlib.suppress(BrokenPipeError):
            connection.send(("outcome", outcome))


def _be_born(connection_fd: int, output_fd: int, environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    keep = {0, 1, 2, connection_fd}
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
        if fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)
    # Line-buffered, so that a rank's last output is there even if it is killed.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.register(_SHOW_STACKS)
    faulthandler.enable()
    code = 0
    try:
        _live(Connection(connection_fd))
        if "farandole._world" in sys.modules:
            sys.modules["farandole._world"].shutdown()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    os._exit(code)  # skips the teardown of the interpreter: with a framework it takes seconds


# ---- the nursery ----


def _nursery(control: socket.socket, framework: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import numpy  # noqa: F401

    importlib.import_module(f"farandole.{framework or '_collectives'}")
    if framework == "keras":
        with contextlib.suppress(ImportError):  # as Keras' first fit does, on every backend
            import tensorflow  # noqa: F401
    threads = os.listdir("/proc/self/task")  # noqa: PTH208
    assert len(threads) == 1, "none but this one would be in a rank that is forked from here"
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 16, 2 * MOST_RANKS)
        if not message:
            return
        number, kind, payload = pickle.loads(message)
        if kind == "fork":
            pids = []
            for i, environment in enumerate(payload):
                pid = os.fork()
                if pid == 0:
                    _be_born(fds[2 * i], fds[2 * i + 1], environment)
                pids.append(pid)
            for fd in fds:
                os.close(fd)
            control.send(pickle.dumps((number, pids)))
        else:  # reap: they have been killed, so this does not wait
            control.send(pickle.dumps((number, [os.waitpid(pid, 0)[1] for pid in payload])))


class Nursery:
    """The process that ranks are forked from; one for each package and framework to be tested.

    `framework`: a package of farandole; for Keras with its backend, "keras on jax".
    """

    def __init__(
        self, python_path: Iterable[str | Path] = (), framework: str = "", **env: str
    ) -> None:
        framework, _, backend = framework.partition(" on ")
        self._numbers = itertools.count()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [str(p) for p in (*python_path, HERE, os.environ.get("PYTHONPATH", "")) if str(p)]
        environment = {k: v for k, v in os.environ.items() if not _is_ours(k)}
        environment |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **env}
        environment |= {"KERAS_BACKEND": backend} if backend else {}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "harness.py"), str(theirs.fileno()), framework],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def fork(self, fds: list[int], environments: list[dict[str, str | None]]) -> list[int]:
        return self._ask("fork", environments, fds)

    def reap(self, pids: list[int]) -> list[int]:
        return self._ask("reap", pids, [])

    def _ask(self, kind: str, payload: Any, fds: list[int]) -> list[int]:
        number = next(self._numbers)
        socket.send_fds(self._control, [pickle.dumps((number, kind, payload))], fds)
        while True:  # the answer to a question of a test that a time limit ended comes late
            answer = self._control.recv(1 << 16)
            assert answer, "the nursery ended"
            answered, numbers = pickle.loads(answer)
            if answered == number:
                return numbers  # type: ignore[no-any-return]

    def close(self) -> None:
        self._control.close()
        self._process.wait(LIMIT)


def jax_that_compiles_quickly(cache: str) -> dict[str, str]:
    """Environment of a nursery. Ranks share compiled code, which is slower, but compiles in a third
    of the time. XLA optimizes some of such a program's kernels alone, others of them with fused
    multiply-adds: where ranks' shapes differ, so would an update's bits. AVX has none of these."""
    return {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_cpu_max_isa=AVX {_old_emitters()}",
    }


def _old_emitters() -> str:
    """The flag for XLA's old emitters, which compile faster. XLA without them would abort on it."""
    try:
        jaxlib = Version(metadata.version("jaxlib"))
    except metadata.PackageNotFoundError:
        return ""
    return "--xla_cpu_use_fusion_emitters=false" if jaxlib < Version("0.11.1") else ""


def _is_ours(name: str) -> bool:
    return name.startswith(("FARANDOLE_", "HOROVOD_", "TORCHELASTIC_")) or name in {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    }  # fmt: skip


# ---- a world of ranks, as a test sees it ----


def _ports() -> Iterator[int]:
    """Ports below 32768, where Linux's automatic ports begin, from a range per pytest worker. So no
    connection of another test takes a free port before rank 0 listens there."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 16_000 + worker % 16 * 1000
    for number in itertools.count(7 * os.getpid()):  # concurrent sessions begin at different ports
        yield first + number % 1000


_next_ports = _ports()


def _free_port() -> int:
    for port in _next_ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError  # there are always more


@functools.cache
def _secret_file() -> str:
    fd, name = tempfile.mkstemp(prefix="farandole-test-secret-")
    os.write(fd, secrets.token_hex(32).encode())
    os.close(fd)
    atexit.register(Path(name).unlink, missing_ok=True)
    return name


def split(parts: str) -> dict[str, str | None]:
    """Environment that makes ranks believe they are on several hosts: "1,3" or "0:1:0"."""
    return {"FARANDOLE_SPLIT_HOSTS": parts, "FARANDOLE_SECRET_FILE": _secret_file()}


class World:
    """Rank processes of one job, alive until closed."""

    def __init__(
        self,
        size: int,
        nursery: Nursery,
        env: dict[str, str | None] | None = None,
        each: list[dict[str, str | None]] | None = None,
    ) -> None:
        """`env` is set on all ranks; `each` has one entry per rank, which adds to it."""
        self.nursery = nursery
        self.run_id = uuid.uuid4().hex[:12]
        job = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "FARANDOLE_RUN_ID": self.run_id,
            "FARANDOLE_START_TIMEOUT": "20",
        }
        own = each if each is not None else [{}] * size
        environments: list[dict[str, str | None]] = [
            {**job, "RANK": str(r), "LOCAL_RANK": str(r), **(env or {}), **extra}
            for r, extra in enumerate(own)
        ]
        self.outputs = [tempfile.TemporaryFile() for _ in own]  # noqa: SIM115
        self.connections: list[Connection] = []
        fds = []
        theirs = []
        for output in self.outputs:
            mine, other = socket.socketpair()
            self.connections.append(Connection(mine.detach()))
            theirs.append(other)
            fds += [other.fileno(), output.fileno()]
        self.pids = nursery.fork(fds, environments)
        for other in theirs:
            other.close()
        self._words: list[list[Any]] = [[] for _ in own]
        self._outcomes: list[list[Outcome]] = [[] for _ in own]
        self._closed = False

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.pids)

    # -- telling ranks what to do

    def start(self, function: Callable[..., Any], *arguments: Any, ranks: Any = None) -> None:
        folder = str(Path(function.__code__.co_filename).parent)
        call = (folder, function.__module__, function.__name__, arguments)
        for r in range(len(self)) if ranks is None else ranks:
            self.connections[r].send(("call", call))

    def say(self, rank: int, word: Any) -> None:
        """Sends a word to the rank, whose `listen()` returns it."""
        self.connections[rank].send(("word", word))

    def signal(self, rank: int, number: int) -> float:
        """Sends a signal and returns the time at which it was sent. A stopped rank stands still."""
        when = time.monotonic()
        os.kill(self.pids[rank], number)
        if number == signal.SIGSTOP:
            wait_until(lambda: stands_still(self.pids[rank]), f"rank {rank} to stop")
        return when

    # -- hearing from them

    def _pump(self, rank: int, deadline: float) -> None:
        connection = self.connections[rank]
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"rank {rank} said nothing\n{self.stacks()}")
        try:
            kind, payload = connection.recv()
        except (EOFError, ConnectionError):
            how = self.how_ended(rank)
            raise Ended(f"rank {rank} (pid {self.pids[rank]}) {how}\n{self.report()}") from None
        (self._words if kind == "word" else self._outcomes)[rank].append(payload)

    def hear(self, rank: int, timeout: float = LIMIT) -> Any:
        """Waits for the next word that the rank `tell`s."""
        deadline = time.monotonic() + timeout
        while not self._words[rank]:
            self._pump(rank, deadline)
        return self._words[rank].pop(0)

    def hear_all(self, ranks: Iterable[int] | None = None) -> list[Any]:
        return [self.hear(r) for r in (range(len(self)) if ranks is None else ranks)]

    def outcome(self, rank: int, timeout: float = LIMIT) -> Outcome:
        """How the rank's next call ended; raises Ended if its process has ended."""
        deadline = time.monotonic() + timeout
        while not self._outcomes[rank]:
            self._pump(rank, deadline)
        return self._outcomes[rank].pop(0)

    def outcomes(self, ranks: Iterable[int] | None = None, timeout: float = LIMIT) -> list[Outcome]:
        return [self.outcome(r, timeout) for r in (range(len(self)) if ranks is None else ranks)]

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = LIMIT) -> Any:
        """Calls the function on all ranks and returns the values; fails if one raised. A rank that
        raised leaves, so that others do not wait for it."""
        self.start(function, *arguments)
        deadline = time.monotonic() + timeout
        waiting = dict(zip(self.connections, range(len(self)), strict=True))
        while waiting:
            connection = (wait(list(waiting), deadline - time.monotonic()) or list(waiting))[0]
            rank = waiting[connection]
            self._pump(rank, deadline)
            if self._outcomes[rank]:
                del waiting[connection]
                if self._outcomes[rank][0].error is not None:
                    with contextlib.suppress(OSError):
                        connection.send(("leave", None))
        failed = [r for r, (outcome, *_) in enumerate(self._outcomes) if outcome.error]
        assert not failed, f"ranks {failed}\n{self.report()}"
        return [o.value for o in self.outcomes()]

    def output(self, rank: int) -> str:
        """Everything the rank has written to stdout and stderr."""
        output = self.outputs[rank].fileno()  # shares its offset with the rank: pread() keeps it
        return os.pread(output, os.fstat(output).st_size, 0).decode(errors="replace")

    def report(self) -> str:
        """All ranks' output, and the exceptions that no test has collected yet."""
        return "\n".join(
            f"--- rank {r}\n{self.output(r)}{''.join(o.trace for o in outcomes)}"
            for r, outcomes in enumerate(self._outcomes)
        )

    def stacks(self) -> str:
        """The same as `report()`, with the stacks of all threads of the ranks."""
        for pid in self.pids:
            os.kill(pid, _SHOW_STACKS)
        self.died(0, 1.0)  # ranks write their stacks at once, but give no sign when they are done
        return self.report()

    def died(self, rank: int, timeout: float = LIMIT) -> bool:
        """Waits for the end of a rank's process, which stays a zombie; False if it lives on."""
        fd = os.pidfd_open(self.pids[rank])
        try:
            return bool(select.select([fd], [], [], timeout)[0])
        finally:
            os.close(fd)

    def how_ended(self, rank: int) -> str:
        """The end of a rank that closed its connection: "ended by SIGSEGV", "ended with code 1"."""
        if not self.died(rank, 5.0):
            return "closed its connection and lives on"
        # Field 52, exit_code, of proc_pid_stat(5) is a zombie's wait status.
        stat = Path(f"/proc/{self.pids[rank]}/stat").read_text()
        status = int(stat.rpartition(") ")[2].split()[49])
        if os.WIFSIGNALED(status):
            return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"ended with code {os.WEXITSTATUS(status)}"

    def close(self, grace: float = 5.0) -> list[int]:
        """Lets ranks leave, kills those that do not; returns their exit statuses."""
        if self._closed:
            return []
        self._closed = True
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send(("leave", None))
        for r in range(len(self)):
            if not self.died(r, grace):
                os.kill(self.pids[r], signal.SIGKILL)
        for connection in self.connections:
            connection.close()
        statuses = self.nursery.reap(self.pids)
        for output in self.outputs:
            output.close()
        return statuses


# ---- what is compiled for tests alone ----


TREE = HERE.parent / "build" / sys.implementation.cache_tag  # as of the wheel (pyproject.toml)


def build(target: str) -> None:
    """Builds a target in the build folder of the installed core, for the same Python."""
    if shutil.which("cmake") is None:
        pytest.skip(f"{target} has to be built, by cmake", allow_module_level=True)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = [
        "cmake", "-S", str(HERE.parent), "-B", str(TREE), *generator, "-DFARANDOLE_TESTS=ON",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]  # fmt: skip
    TREE.mkdir(parents=True, exist_ok=True)
    with (TREE / "tests.lock").open("w") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        for command in (configure, ["cmake", "--build", str(TREE), "--target", target]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


# ---- programs of their own ----


def launcher(ranks: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "farandole", "run", "-np", str(ranks), *options, "--"]


def launch(
    ranks: int, command: Sequence[str | Path], *options: str, code: int | None = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program under `farandole run` to its end. `code`: the expected exit code; None: any.
    `env`: set for the launcher and all ranks."""
    done = subprocess.run(
        [*launcher(ranks, *options), *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
        check=False,
    )
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


def two_torchruns(
    ranks: int, command: Sequence[str], parts: str, rendezvous: Sequence[str]
) -> list[tuple[str, str]]:
    """Runs a program to its end under two torchruns, as on two hosts, with `ranks` each. Returns
    stdout and stderr of both."""
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
             f"--nproc-per-node={ranks}", *rendezvous, *command],
            env=os.environ | split(parts) | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        said = []
        for node in nodes:
            said.append(node.communicate(timeout=150))
            assert node.returncode == 0, said[-1][1]
        return said
    finally:
        for node in nodes:
            node.kill()
            node.wait()


def start_program(script: Path, ranks: int) -> list[subprocess.Popen[str]]:
    """Starts a job without a launcher: each rank is an interpreter that runs the script."""
    job = {"WORLD_SIZE": str(ranks), "MASTER_PORT": "1", "FARANDOLE_RUN_ID": uuid.uuid4().hex}
    return [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **job, "RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(ranks)
    ]


# ---- nothing is left behind ----


def traces_of(run_id: str) -> list[str]:
    """Names of sockets and shared memory that a job has left on this machine."""
    left = [
        line.split()[-1]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if run_id in line
    ]
    return left + [str(p) for p in Path("/dev/shm").iterdir() if "farandole" in p.name]


def wait_until(condition: Callable[[], object], what: str = "it") -> None:
    deadline = time.monotonic() + 2 * LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)


def process_state(pid: int) -> str:
    """The kernel's letter for the state: "T" stopped, "Z" dead, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stands_still(pid: int) -> bool:
    """Whether each thread is stopped: the others run on until the one that got the signal runs."""
    tasks = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    try:
        return all(process_state(task) == "T" for task in tasks)
    except (FileNotFoundError, ProcessLookupError):  # a thread has ended meanwhile
        return False


def descriptors(process: int | str = "self") -> set[str]:
    """The descriptors of a process and what each one leads to."""
    found = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as the listing's own is
            found.add(f"{link.name} {link.readlink()}")
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("\n")


if __name__ == "__main__":
    # Ranks import this module by name, as their test modules do.
    import harness

    with socket.socket(fileno=int(sys.argv[1])) as nursery_control:
        harness._nursery(nursery_control, sys.argv[2])
    os._exit(0)
