"""Many cases in one set of ranks, forked from a process that has imported the framework.

A test module marks functions with ``@on_ranks(2, 3)`` and ends with ``test_on_ranks =
make_tests(__name__, "torch")``: every (function, number of ranks) is a test of its own. New ranks
begin as the framework's do (`begin_torch` and so on), or as `prepare` says. A rank on which a case
fails leaves, and the cases after it have new ranks.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

import farandole as fd

_F = TypeVar("_F", bound=Callable[[], None])
_registered: dict[str, list[tuple[Callable[[], None], tuple[int, ...]]]] = {}


def needs(*packages: str) -> None:
    """Skips the test module where one of them is not installed; imports none."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


def on_ranks(*sizes: int) -> Callable[[_F], _F]:
    def register(function: _F) -> _F:
        _registered.setdefault(function.__module__, []).append((function, sizes))
        return function

    return register


def make_tests(
    module: str,
    framework: str,
    *,
    prepare: Callable[[], None] | None = None,
    cases_of: Sequence[str] = (),
    without: Sequence[str] = (),
    only_sizes: Sequence[int] = (),
) -> Any:
    """`module`: which has the cases, unless others have them, `cases_of`. `framework`: as a nursery
    is told (harness.py). `without`: names of cases that do not work there. `only_sizes`: of
    worlds; default: all that cases ask for."""
    cases = [case for each in cases_of or [module] for case in _registered[each]]
    table = [(f, n) for f, sizes in cases for n in sizes if f.__name__ not in without]
    table = [(f, n) for f, n in table if not only_sizes or n in only_sizes]
    table.sort(key=lambda row: row[1])
    begin = prepare or _BEGIN[framework.partition(" ")[0]]

    rows = [pytest.param(f, n, id=f"{f.__name__}[{n}]") for f, n in table]

    @pytest.mark.timeout(250)  # more than the ranks have (conftest.py), who say more
    @pytest.mark.parametrize(("case", "ranks"), rows)
    def test_on_ranks(case: Callable[[], None], ranks: int, run_case: Callable[..., None]) -> None:
        run_case(ranks, framework, begin, case)

    return test_on_ranks


# ---- on new ranks ----


def begin_torch() -> None:
    import torch

    import farandole.torch as hvd

    hvd.init()
    torch.set_num_threads(1)


def begin_tensorflow(threads: int = 2) -> None:
    """`threads`: for operations that wait for each other."""
    import tensorflow as tf

    import farandole.tensorflow as hvd

    tf.config.threading.set_inter_op_parallelism_threads(threads)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()


def begin_jax() -> None:
    import farandole.jax as fdj

    fdj.init()


def begin_jax_wide() -> None:
    """With numbers of 64 bits."""
    import jax

    jax.config.update("jax_enable_x64", True)
    begin_jax()


def begin_keras() -> None:
    import keras

    import farandole.keras as hvd

    hvd.init()
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)


_BEGIN: dict[str, Callable[[], None]] = {
    "torch": begin_torch, "tensorflow": begin_tensorflow, "jax": begin_jax, "keras": begin_keras,
}  # fmt: skip


# ---- on any ranks ----


@contextmanager
def checking_weights(when: str) -> Iterator[None]:
    """On a rank: models made meanwhile are compared then (FARANDOLE_CHECK_WEIGHTS)."""
    os.environ["FARANDOLE_CHECK_WEIGHTS"] = when
    try:
        yield
    finally:
        del os.environ["FARANDOLE_CHECK_WEIGHTS"]


@contextmanager
def numerics(what: str) -> Iterator[None]:
    """On a rank: what optimizers made meanwhile do where a gradient is not finite."""
    os.environ["FARANDOLE_NUMERICS"] = what
    try:
        yield
    finally:
        del os.environ["FARANDOLE_NUMERICS"]


@contextmanager
def told(count: int, settle: Callable[[], object] = lambda: None) -> Iterator[list[str]]:
    """So many warnings of gradients that are not finite; their words. `settle`: ends what runs."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
        settle()
    texts += [str(w.message) for w in caught if "has a gradient that is" in str(w.message)]
    assert len(texts) == count, texts


@contextmanager
def raises(error: type[BaseException], *words: str) -> Iterator[Any]:
    with pytest.raises(error) as caught:
        yield caught
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"


def refused(call: Callable[[], Any], *words: str, kind: type[Exception] = ValueError) -> None:
    """By an error of ours, with these words, that is of the framework's `kind`, too."""
    with raises(fd.InvalidArgument, *words) as caught:
        call()
    assert isinstance(caught.value, kind)
