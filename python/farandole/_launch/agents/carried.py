"""Selects the variables of the launcher's environment that ranks on other hosts get.

Variables that a host sets for itself (HOME, USER, TMPDIR, XDG_…) stay its own. All others can be
named with -x.
"""

from __future__ import annotations

from collections.abc import Mapping

from farandole._launch.agents.secret import VARIABLE as SECRET_FILE
from farandole._launch.job import LaunchError
from farandole._launch.ranks import Rendezvous, rank_environment

NAMES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LANG", "TZ", "NO_COLOR")
PREFIXES = (
    "FARANDOLE_", "HOROVOD_", "PYTHON", "LC_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "NCCL_", "TF_",
    "XLA_", "JAX_", "KERAS_", "TORCH_", "PYTORCH_",
)  # fmt: skip

# Variables that the launcher or an agent sets for every rank.
_SET_HERE = {
    *rank_environment(0, [1]),
    *Rendezvous("", 0, "").environment(),
    "FARANDOLE_RESTART_COUNT",
    SECRET_FILE,
}


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are carried without being named."""
    return {
        name: value
        for name, value in environment.items()
        if name in NAMES or name.startswith(PREFIXES)
    }


def named(words: list[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that `-x NAME` and `-x NAME=VALUE` ask for."""
    found = {}
    for word in words:
        name, given, value = word.partition("=")
        if not name or "\0" in word:
            raise LaunchError(f"-x takes NAME or NAME=VALUE, not '{word}'")
        if name in _SET_HERE:
            raise LaunchError(f"-x {name}: the launcher itself sets it")
        if not given and name not in environment:
            raise LaunchError(f"-x {name}: it is not set here; set it, or write -x {name}=VALUE")
        found[name] = value if given else environment[name]
    return found
