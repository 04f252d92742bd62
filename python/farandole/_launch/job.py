"""What is asked of the launcher."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple


class LaunchError(Exception):
    """The job could not be started; the message is for the user."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Copies(NamedTuple):
    """Files that get what ranks write, byte for byte."""

    option: str  # that asked for them, for messages
    directory: Path
    names: tuple[str, str]  # of stdout's and stderr's, with {rank}, and {width} of the highest
    overwrite: bool  # else a file that is there already is an error


class Job(NamedTuple):  # a dataclass would import inspect: ranks start that much later
    """One command, started once per rank."""

    command: list[str]
    ranks: int
    prefix: bool = True
    all_output: bool = False  # the progress bars of all ranks, not of rank 0 alone
    colours: tuple[bool, bool] = (False, False)  # on stdout, on stderr
    copies: Copies | None = None
    environment: Mapping[str, str] = MappingProxyType({})  # besides what is inherited
    grace: float = 1.0
    patience: float = 5.0
