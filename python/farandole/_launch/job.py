"""What is asked of the launcher."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class LaunchError(Exception):
    """The job could not be started; the message is for the user."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Job(NamedTuple):  # a dataclass would import inspect: ranks start that much later
    """One command, started once per rank."""

    command: list[str]
    ranks: int
    prefix: bool = True
    colours: tuple[bool, bool] = (False, False)  # on stdout, on stderr
    output_dir: Path | None = None
    grace: float = 1.0
    patience: float = 5.0
