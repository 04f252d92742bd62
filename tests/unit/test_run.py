"""farandole.run: a function on ranks from scripts and notebooks, its results and its failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import farandole as fd

LIMIT = 60


def place(base: int, *, more: int = 0) -> tuple[int, int]:
    return base + more + int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def total(x: float) -> float:
    import numpy as np

    fd.init()
    return float(fd.all_reduce(np.float64(x + fd.rank())))


class Odd(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def fail(rank: int, how: str) -> str:
    import numpy as np

    fd.init()
    if fd.rank() == rank:
        if how == "raise":
            raise Odd(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(1000)
        if how == "unpicklable":
            error = RuntimeError("holds a lock")
            error.lock = threading.Lock()  # type: ignore[attr-defined]
            raise error
    fd.all_reduce(np.zeros(1))
    return "fine"


def shout(text: str) -> None:
    print(text)
    print(text.upper(), end="", file=sys.stderr)


def lock() -> Any:
    return threading.Lock()


def variable(name: str) -> str | None:
    return os.environ.get(name)


def big(n: int) -> bytes:
    return bytes(n)


def test_results_come_by_rank() -> None:
    assert fd.run(place, (10,), {"more": 5}, np=3) == [(15, 3), (16, 3), (17, 3)]


def test_ranks_meet() -> None:
    assert fd.run(total, (1.0,), np=2) == [3.0, 3.0]


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_arguments_and_results_of_any_size(size: int) -> None:
    assert fd.run(len, (bytes(size),), np=1) == [size]
    assert fd.run(big, (size,), np=1) == [bytes(size)]


def test_the_first_exception_is_raised_here_and_names_its_rank() -> None:
    with pytest.raises(Odd) as caught:
        fd.run(fail, (1, "raise"), np=2)
    assert caught.value.number == 7
    assert isinstance(caught.value.__cause__, fd.RanksFailed)
    assert "rank 1 raised\nTraceback" in str(caught.value.__cause__)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["raised by rank 1 of farandole.run"]


def test_an_exception_that_cannot_be_pickled_is_told_as_text() -> None:
    with pytest.raises(fd.RanksFailed, match=r"rank 1 raised(.|\n)*RuntimeError: holds a lock"):
        fd.run(fail, (1, "unpicklable"), np=2)


def test_a_killed_rank_is_the_cause_and_not_what_the_others_saw() -> None:
    with pytest.raises(fd.RanksFailed, match=r"^rank 1 was killed by SIGKILL\n"):
        fd.run(fail, (1, "kill"), np=2)


def test_a_rank_that_takes_too_long_is_named() -> None:
    with pytest.raises(fd.RanksFailed, match="rank 0 did not end within 3 s"):
        fd.run(fail, (1, "hang"), np=2, timeout=3)


def test_a_rank_that_cannot_be_started_is_named_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from harness import descriptors  # here: ranks import this module by itself

    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    before = descriptors()
    with pytest.raises(fd.RanksFailed, match=r"^rank 0 could not be started: .*/python: No such"):
        fd.run(len, ("",), np=2)
    assert descriptors() <= before  # one of an earlier test may have been closed


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(fd.RanksFailed, match="rank 0 raised\nthe result cannot be pickled"):
        fd.run(lock, np=1)


def test_what_cannot_be_called_is_refused_before_any_rank_starts() -> None:
    with pytest.raises(ValueError, match="fn is an int, which cannot be called"):
        fd.run(3, np=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="np is 0"):
        fd.run(len, ("",), np=0)
    with pytest.raises(ValueError, match="np is True"):
        fd.run(len, ("",), np=True)
    with pytest.raises(ValueError, match="cannot be pickled"):
        fd.run(len, (threading.Lock(),))


@pytest.mark.parametrize("args", [3, "abc", None])
def test_arguments_that_are_no_tuple_are_refused(args: Any) -> None:
    with pytest.raises(ValueError, match=f"args is {args!r}; it is a tuple of fn's arguments"):
        fd.run(len, args)
    with pytest.raises(ValueError, match="kwargs is 3; it is a dict, by name"):
        fd.run(place, (1,), 3)  # type: ignore[arg-type]


def test_cloudpickle_is_advised_only_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cloudpickle")
    with pytest.raises(ValueError, match=r"cannot pickle '_thread.lock' object\)$"):
        fd.run(len, (threading.Lock(),))
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ValueError, match="; install cloudpickle, or move"):
        fd.run(len, (threading.Lock(),))


def test_output_is_shown_here_with_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    fd.run(shout, ("hello",), np=2)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[0] hello", "[1] hello"]
    assert sorted(err.splitlines()) == ["[0] HELLO", "[1] HELLO"]


def test_the_environment_is_passed_on() -> None:
    assert fd.run(variable, ("HVD_X",), np=1, env={"HVD_X": "y"}) == ["y"]


SCRIPT = """
import os
import farandole

def place(base):
    return base + int(os.environ["RANK"])

if __name__ == "__main__":
    print(farandole.run(place, (5,), np=2))
"""


@pytest.mark.parametrize("cloudpickle", [True, False])
def test_functions_of_a_script_run_with_and_without_cloudpickle(
    tmp_path: Path, cloudpickle: bool
) -> None:
    if cloudpickle:
        pytest.importorskip("cloudpickle")
    script = tmp_path / "script.py"
    blocked = "" if cloudpickle else "import sys; sys.modules['cloudpickle'] = None\n"
    script.write_text(blocked + SCRIPT)
    assert _output_of(str(script)) == "[5, 6]\n"


def test_lambdas_run_with_cloudpickle() -> None:
    pytest.importorskip("cloudpickle")
    y = 3
    assert fd.run(lambda x: x + y, (4,), np=1) == [7]


def test_a_typed_in_function_needs_cloudpickle_and_says_so() -> None:
    script = "import sys; sys.modules['cloudpickle'] = None\n" + SCRIPT
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert "typed in and stands in no file; install cloudpickle" in done.stderr


def _output_of(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nobody_is_left_when_the_caller_is_killed(tmp_path: Path) -> None:
    script = (
        "import farandole, os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_run\n"
        f"farandole.run(test_run.wait_in, ({str(tmp_path)!r},), np=2)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], start_new_session=True) as caller:
        try:
            deadline = time.monotonic() + LIMIT
            while len(found := list(tmp_path.glob("pid-*"))) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            caller.kill()
    pids = [int(path.name.removeprefix("pid-")) for path in found]
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"{pids} outlive their caller"
        time.sleep(0.01)


def wait_in(folder: str) -> None:
    Path(folder, f"pid-{os.getpid()}").touch()
    time.sleep(1000)
