"""``import horovod`` means farandole, for programs that were written for Horovod.

    farandole run --horovod -np 2 -- python train.py     nothing in train.py changes
    torchrun --nproc-per-node 2 -m farandole.horovod train.py    likewise, of any launcher
    farandole.horovod.install()                          from inside, before `import horovod`

One finder in front of ``sys.meta_path`` answers for ``horovod`` and everything below it, and for
nothing else. What `_MODULES` lists *is* our module; any other name is an ImportError that says what
to do instead.

Under ``farandole run --horovod`` nothing of ours runs when Python starts. `SEARCH_PATH` stands
first in PYTHONPATH, and holds one small package called horovod. Each importer (a script,
``-c``, ``-m``, a process that these start) installs the finder by it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

__all__ = ["SEARCH_PATH", "VERSION", "install"]

VERSION = "0.28.1"  # whose names and signatures these are
SEARCH_PATH = Path(__file__).resolve().parent / "path"
_PACKAGE = SEARCH_PATH / "horovod" / "__init__.py"

# Modules that both have, by package.
_SAME = {
    "common": "basics elastic exceptions process_sets util",
    "keras": "callbacks elastic",
    "tensorflow": "compression elastic functions keras mpi_ops sync_batch_norm util",
    "tensorflow.keras": "callbacks elastic",
    "torch": "compression elastic functions mpi_ops optimizer sync_batch_norm",
    "torch.elastic": "sampler state",
}
_MODULES = {"horovod.runner": "farandole.horovod.runner"}
for _package, _names in _SAME.items():
    for _name in (_package, *(f"{_package}.{each}" for each in _names.split())):
        _MODULES[f"horovod.{_name}"] = f"farandole.{_name}"

# Programs that import these may speak to Keras 3 as to Keras 2.
_WITH_KERAS = {"horovod.keras", "horovod.tensorflow", "horovod.tensorflow.keras"}

# Modules that only Horovod has, by the second part of the name, and what to use instead.
_ABSENT = {
    "data": "use torch.utils.data",
    "mxnet": "MXNet is retired; there is no farandole for it",
    "ray": "use farandole.ray.run(function, num_workers=4)",
    "spark": "start the ranks with `farandole run`, or with farandole.run(function) from Python",
}


def install() -> None:
    """Lets ``import horovod`` and ``import horovod.torch`` mean farandole in this process.

    Processes that it starts do not inherit that, unless they call it, too; ``farandole run
    --horovod`` reaches them all. A second call does nothing. An installed Horovod is not used, and
    rank 0 says so.

    Raises:
        ImportError: another horovod was imported before.

    Examples:
        >>> import farandole.horovod
        >>> farandole.horovod.install()
        >>> import horovod.common.util
        >>> horovod.common.util.mpi_built()
        False
    """
    present = sys.modules.get("horovod")
    if present is not None and not _is_ours(present.__file__):
        raise ImportError(
            f"horovod was imported from {present.__file__} before farandole.horovod.install(); "
            "call that first"
        )
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    _say_what_is_shadowed()


def as_environment() -> dict[str, str]:
    """The variables by which a Python that is started, and all that it starts, know horovod."""
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(SEARCH_PATH), *([inherited] if inherited else [])])}


class _Finder(importlib.abc.MetaPathFinder):
    """Answers for horovod and what is below it."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the protocol's
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        top, _, rest = fullname.partition(".")
        if top != "horovod":
            return None
        if not rest:
            return importlib.util.spec_from_file_location(fullname, _PACKAGE)
        if fullname in _MODULES:
            return ModuleSpec(fullname, _Alias(_MODULES[fullname]))
        advice = _ABSENT.get(rest.partition(".")[0], "see docs/from-horovod.md for what there is")
        raise ModuleNotFoundError(
            f"horovod is farandole here, which has no {fullname}: {advice}", name=fullname
        )


class _Alias(importlib.abc.Loader):
    """Puts a module of ours in the place of the one that is being imported."""

    def __init__(self, ours: str) -> None:
        self._ours = ours

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns what it finds in sys.modules after this.
        sys.modules[module.__name__] = importlib.import_module(self._ours)
        if module.__name__ in _WITH_KERAS:
            importlib.import_module("farandole.horovod._keras2").learn()


def _is_ours(file: str | None) -> bool:
    # True for any copy: the launcher's farandole may lie elsewhere than the rank's.
    return file is not None and Path(file).parts[-5:] == _PACKAGE.parts[-5:]


def _say_what_is_shadowed() -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    elsewhere = [entry for entry in sys.path if not _is_ours(f"{entry}/horovod/__init__.py")]
    other = PathFinder.find_spec("horovod", elsewhere)
    if other is not None and other.origin is not None:
        print(
            f"farandole: horovod means farandole here; {Path(other.origin).parent} is not used",
            file=sys.stderr,
        )
