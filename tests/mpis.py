"""MPIs for tests: a real mpiexec starts ranks, each a new interpreter that calls a function of a
test module and reports how that ended.

Each MPI has a folder of its own, with mpi4py beside it: the Makefile puts them into .venv/mpi.
TEST_MPI names another folder of such folders.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import harness

NAMES = ["openmpi", "mpich", "impi"]
# Open MPI, old and new, may run as root and with more ranks than cores. Other MPIs ignore these.
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}  # fmt: skip
# Options that keep mpiexec from killing the other ranks when one dies. MPICH has none: it kills
# them sooner or later, even with -disable-auto-cleanup.
TOLERANT = {"openmpi": ["--enable-recovery"]}
_TOKEN = "FARANDOLE_TEST_TOKEN"


@dataclass
class Ended:
    """How a job ended."""

    code: int
    text: str  # what it wrote
    outcomes: list[harness.Outcome | None] = field(default_factory=list)  # None: it reported none

    def of_others(self, rank: int, all_live: bool) -> list[harness.Outcome]:
        """Reports of all ranks but this one; fails if `all_live` and one has sent no report."""
        others = [o for r, o in enumerate(self.outcomes) if r != rank]
        assert not all_live or None not in others, self.text
        return [o for o in others if o is not None]


@dataclass(frozen=True)
class Mpi:
    """An MPI and the folder in which it is installed."""

    name: str
    home: Path

    @property
    def packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.home / "lib" / version / "site-packages"

    def environment(self) -> dict[str, str]:
        library = next(iter(sorted(self.home.glob("lib/libmpi.so.*"))))
        path = [str(self.packages), str(harness.HERE), os.environ.get("PYTHONPATH", "")]
        python_path = os.pathsep.join(filter(None, path))
        return {**ALLOWED, "MPI4PY_LIBMPI": str(library), "PYTHONPATH": python_path}

    def start(
        self, ranks: int, command: list[str], *options: str, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a Python program to its end, and checks that no process of it is left."""
        token = uuid.uuid4().hex
        mpiexec = str(self.home / "bin" / "mpiexec")
        done = subprocess.run(
            [mpiexec, *options, "-n", str(ranks), sys.executable, *command],
            env=os.environ | {"OMP_NUM_THREADS": "1", _TOKEN: token} | self.environment() | env,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=harness.LIMIT, check=False,
        )  # fmt: skip
        deadline = time.monotonic() + 10
        while left := processes_with(token):
            assert time.monotonic() < deadline, f"processes {left} are left: {done.stdout}"
            time.sleep(0.05)
        return done

    def call(
        self, ranks: int, function: Callable[..., Any], *arguments: Any,
        options: list[str] | None = None, env: dict[str, str] | None = None,
    ) -> Ended:  # fmt: skip
        """Calls the function on every rank, each in a new interpreter."""
        with TemporaryDirectory() as folder:
            code = function.__code__
            call = (str(Path(code.co_filename).parent), function.__module__, function.__name__)
            (Path(folder) / "call").write_bytes(pickle.dumps((*call, arguments)))
            done = self.start(ranks, [__file__, folder], *(options or []), **(env or {}))
            ended = Ended(done.returncode, done.stdout)
            for rank in range(ranks):
                report = Path(folder) / str(rank)
                ended.outcomes.append(
                    pickle.loads(report.read_bytes()) if report.exists() else None
                )
        return ended

    def run(
        self, ranks: int, function: Callable[..., Any], *arguments: Any,
        env: dict[str, str] | None = None,
    ) -> list[Any]:  # fmt: skip
        """The values that the function returns; fails if a rank failed."""
        ended = self.call(ranks, function, *arguments, env=env)
        wrong = [o.trace if o else "no report" for o in ended.outcomes if o is None or o.error]
        assert not wrong, "\n".join([*wrong, ended.text])
        assert ended.code == 0, ended.text
        return [o.value for o in ended.outcomes if o]


def find(name: str) -> Mpi:
    """The MPI of that name; skips the test if it is not installed."""
    root = os.environ.get("TEST_MPI") or Path(sys.prefix) / "mpi"
    mpi = Mpi(name, Path(root) / name)
    if not (mpi.home / "bin" / "mpiexec").exists() or not (mpi.packages / "mpi4py").exists():
        pytest.skip(f"{name} is not in {mpi.home}: `make .venv/stamps/mpi-{name}` puts it there")
    return mpi


def processes_with(token: str) -> list[int]:
    """Processes with the token in their environment, which their children inherit."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if f"{_TOKEN}={token}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:  # it is gone
                pass
    return found


def _be_rank(folder: Path) -> None:
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
    rank = next(os.environ[name] for name in names if name in os.environ)
    home, module, name, arguments = pickle.loads((folder / "call").read_bytes())
    sys.path.insert(0, home)
    function = getattr(importlib.import_module(module), name)
    raised: list[BaseException] = []

    def call() -> Any:
        try:
            return function(*arguments)
        except BaseException as error:
            raised.append(error)
            raise

    part = folder / f"{rank}.part"
    part.write_bytes(pickle.dumps(harness._outcome(call)))
    part.rename(folder / rank)
    if raised:
        raise raised[0]  # nobody catches it


if __name__ == "__main__":
    import mpis

    mpis._be_rank(Path(sys.argv[1]))
