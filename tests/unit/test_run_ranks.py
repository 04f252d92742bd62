"""run_ranks: results by rank, failures with everybody's output, nobody left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from farandole.testing import RanksFailed, run_ranks


def place(base: int) -> tuple[int, int, int]:
    return base + int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.getpid()


def add_up(folder: str) -> float:
    import numpy as np

    import farandole as fd

    fd.init()
    Path(folder, f"pid-{fd.rank()}").write_text(str(os.getpid()))
    return float(fd.all_reduce(np.float64(fd.rank() + 1)))


def fail_on(rank: int, how: str) -> str:
    print(f"rank {os.environ['RANK']} was here", flush=True)
    if int(os.environ["RANK"]) != rank:
        return "fine"
    if how == "raise":
        raise KeyError("of rank 1")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(1000)
    return how


def unpicklable() -> Any:
    return lambda: None


def variable(name: str) -> str | None:
    return os.environ.get(name)


def test_results_come_in_rank_order() -> None:
    got = run_ranks(3, place, 10)
    assert [(r, n) for r, n, _ in got] == [(10, 3), (11, 3), (12, 3)]
    assert len({pid for _, _, pid in got}) == 3


def test_ranks_meet(tmp_path: Path) -> None:
    assert run_ranks(2, add_up, str(tmp_path)) == [3.0, 3.0]


def test_the_environment_is_passed_on() -> None:
    assert run_ranks(1, variable, "FARANDOLE_LOG", env={"FARANDOLE_LOG": "error"}) == ["error"]


def test_an_exception_is_shown_with_the_output_of_all_ranks() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, fail_on, 1, "raise")
    text = str(caught.value)
    assert "rank 1 exited with code 1\nTraceback" in text
    assert "KeyError: 'of rank 1'" in text
    assert "rank 0 was here" in text
    assert "rank 1 was here" in text
    assert caught.value.errors[0] is None
    assert isinstance(caught.value.errors[1], KeyError)


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RanksFailed, match="rank 1 was killed by SIGKILL"):
        run_ranks(2, fail_on, 1, "kill")


def test_a_rank_that_hangs_is_killed_and_its_stack_shown() -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 did not end within 3 s(.|\n)*in fail_on"):
        run_ranks(2, fail_on, 1, "hang", timeout=3)


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(RanksFailed, match="cannot be pickled"):
        run_ranks(1, unpicklable)


def test_functions_inside_functions_are_refused() -> None:
    with pytest.raises(ValueError, match="not at the top"):
        run_ranks(1, lambda: None)
