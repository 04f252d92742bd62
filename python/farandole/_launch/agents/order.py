"""The launcher's order to an agent: one JSON object, in the first frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from farandole._launch.agents.frames import message


class Order(NamedTuple):
    version: str  # of the launcher's farandole, which the agent's must equal
    package: str  # where that lies: PYTHONPATH may have folders in it
    marker: str  # with which the agent's stdout begins, behind what shells print
    launcher: str  # ssh, netns, local, or here: this one is on the launcher's own host
    host: str
    number: int  # of the host, from 0
    counts: list[int]  # of the ranks of all hosts
    command: list[str]
    directory: str
    environment: dict[str, str]
    secret: str  # empty: ranks shall meet without one
    patience: float
    binding: str  # one of BINDINGS

    @property
    def secret_name(self) -> str:
        """Name of the secret's directory: one for each host that a machine pretends to be."""
        return f"farandole-{self.marker}-{self.number}"

    def frame(self) -> bytes:
        return message("order", **self._asdict())

    @staticmethod
    def of(content: dict[str, Any]) -> Order:
        """Reads an order of this version. Others share only `marker` and `version` with it."""
        return Order(**{name: content[name] for name in Order._fields})


def version() -> str:
    """The version of this farandole. If it is installed, its core is not loaded for that."""
    from importlib import metadata

    try:
        return metadata.version("farandole")
    except metadata.PackageNotFoundError:
        from farandole import _core

        return _core.__version__


def package() -> str:
    """The directory of this farandole, for PYTHONPATH."""
    return str(Path(__file__).parents[2])
