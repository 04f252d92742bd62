"""What the launcher asks of an agent: one JSON object, the first frame that it is sent."""

from __future__ import annotations

from typing import Any, NamedTuple

from farandole._launch.frames import message


class Order(NamedTuple):
    version: str  # of the launcher's farandole, which the agent's must equal
    package: str  # where that lies, for PYTHONPATH
    marker: str  # with which the agent's stdout begins, behind what shells print
    host: str
    index: int  # of the host
    counts: list[int]  # of the ranks of all hosts
    command: list[str]
    directory: str
    environment: dict[str, str]
    secret: str
    patience: float

    def frame(self) -> bytes:
        return message("order", **self._asdict())

    @staticmethod
    def of(content: dict[str, Any]) -> Order:
        """Of a launcher of this version; of others, `marker` and `version` alone are sure."""
        return Order(**{name: content[name] for name in Order._fields})


def version() -> str:
    """Of this farandole, without loading its core where it is installed."""
    from importlib import metadata

    try:
        return metadata.version("farandole")
    except metadata.PackageNotFoundError:
        import farandole

        return farandole.__version__
