"""Horovod's questions about the build, with true answers, and its small helpers.

farandole opens what it needs at run time and is built against no framework and no MPI.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import pairwise
from typing import Any

from farandole._arguments import explained
from farandole.common._reduction import choose_op

__all__ = [
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]

AverageFun = Callable[[int | None, bool | None], int]

# Horovod's word for an extension, and the module of ours that it means.
_EXTENSIONS = {"tensorflow": "farandole.tensorflow", "torch": "farandole.torch"}


def mpi_built(verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's signature
    """Whether MPI can carry operations: not yet."""
    return False


def gloo_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """Whether Gloo carries operations: farandole has transports of its own."""
    return False


def nccl_built(verbose: bool = False) -> int:  # noqa: ARG001
    """NCCL's version code where it can be used, 0 where not: not yet."""
    return 0


def ddl_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """Whether IBM's DDL can carry operations: no."""
    return False


def ccl_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """Whether Intel's oneCCL can carry operations: no."""
    return False


def cuda_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """Whether tensors on a GPU can be sent: not yet."""
    return False


def rocm_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """Whether ROCm can carry operations: no."""
    return False


@explained
def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001
    """Whether ``torch`` (or another framework) can send from a GPU: not yet."""
    return False


@explained
def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether farandole has a side for this framework, and the framework is installed."""
    word = ext_base_name.rpartition(".")[2]
    available = word in _EXTENSIONS and importlib.util.find_spec(word) is not None
    if verbose:
        print(f"extension {word} is {'' if available else 'not '}available")
    return available


@explained
def check_extension(
    ext_name: str,
    ext_env_var: str = "",  # noqa: ARG001 - Horovod's signature
    pkg_path: str = "",  # noqa: ARG001
    *args: Any,  # noqa: ARG001
) -> None:
    """Raises ImportError unless the extension (``horovod.torch``) is there."""
    if not extension_available(ext_name):
        raise ImportError(f"{ext_name} is not available: farandole or the framework lacks it")


def get_ext_suffix() -> str:
    """The suffix of native modules' file names."""
    return EXTENSION_SUFFIXES[0]


def get_average_backwards_compatibility_fun(
    reduce_ops: Any,  # noqa: ARG001 - Horovod's signature
) -> AverageFun:
    """The function of ``op`` and ``average`` (deprecated) that says which op is meant."""
    return lambda op, average: choose_op(average, op)


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Does nothing: no version of a framework is built in, so none can differ."""


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Sets environment variables (None: unsets) within a ``with``."""
    before = {name: os.environ.get(name) for name in kwargs}
    _set_environment(kwargs)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def is_iterable(x: Any) -> bool:
    try:
        iter(x)
    except TypeError:
        return False
    return True


@explained
def split_list(items: Sequence[Any], n: int) -> list[list[Any]]:
    """n parts in order, the first of which are longer by one where it does not divide."""
    short, longer = divmod(len(items), n)
    begins = [part * short + min(part, longer) for part in range(n + 1)]
    return [list(items[a:b]) for a, b in pairwise(begins)]


@explained
def num_rank_is_power_2(num_rank: int) -> bool:
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


@explained
def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Compares versions such as "1.10.2" by their numbers; a suffix ("+cpu", "rc1") does not count.

    Raises:
        ValueError: not three numbers with dots.
    """
    return _numbers(ver) >= _numbers(target)


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"{version!r} is not a version of three numbers, as 1.10.2")
    return tuple(int(number) for number in found.groups())
