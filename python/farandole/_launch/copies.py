"""Files that get what ranks write, byte for byte."""

from __future__ import annotations

import os

from farandole._launch.job import Copies, LaunchError

_Pair = tuple[int | None, int | None]  # a rank's, of its stdout and of its stderr


class Files:
    """The files that get copies of ranks' output. Those of a job's first ranks are opened at once:
    errors are reported before the ranks start."""

    def __init__(self, copies: Copies | None, ranks: int) -> None:
        self._copies = copies
        self._width = len(str(ranks - 1))
        self._open = {rank: self._pair(rank) for rank in range(ranks)}

    def of(self, rank: int) -> _Pair:
        """Raises LaunchError where they cannot be opened."""
        return self._open.pop(rank, None) or self._pair(rank)

    def _pair(self, rank: int) -> _Pair:
        copies = self._copies
        if copies is None:
            return None, None
        try:
            copies.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return _open(copies, 0, rank, self._width), _open(copies, 1, rank, self._width)
        except FileExistsError as error:
            raise LaunchError(f"{copies.option}: {error.filename} is there already") from error
        except OSError as error:
            raise LaunchError(f"{copies.option}: {error.filename}: {error.strerror}") from error


def _open(copies: Copies, which: int, rank: int, width: int) -> int:
    """Refuses to overwrite unless that was asked for: the last run's logs may be wanted."""
    path = copies.directory / copies.names[which].format(rank=rank, width=width)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if_there = os.O_TRUNC if copies.overwrite else os.O_EXCL
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | if_there, 0o600)
