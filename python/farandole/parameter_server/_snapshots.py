"""Files in which a server saves its variables, and from which it goes on after a restart."""

from __future__ import annotations

import json
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from farandole import _json
from farandole._arguments import shown
from farandole._core import InvalidArgument

_FORMAT = 1


class Snapshots:
    """Where servers write snapshots, and how often.

    Each server writes a file of its own, ``server-0-of-2.version-500.npz``, under another name
    first: a file under its own name is whole. The newest ones are kept. When servers start and find
    files, they go on from the newest.

    Args:
        folder: on a file system that servers find again after a restart; made if it is missing.
        every: the number of updates between two of them, at least 1.
        keep: how many files of a server are kept, at least 1.

    Raises:
        InvalidArgument: a number that is too small.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int = 1000, keep: int = 2) -> None:
        for name, value in [("every", every), ("keep", keep)]:
            if not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"Snapshots: {name} is {shown(value)}; it is at least 1")
        self.folder = Path(folder)
        self.every = every
        self.keep = keep

    def path(self, server: int, servers: int, version: int) -> Path:
        """The file of one server's snapshot after so many updates."""
        return self.folder / f"server-{server}-of-{servers}.version-{version}.npz"

    def found(self, server: int, servers: int) -> list[int]:
        """The versions of a server's files, the newest first."""
        pattern = rf"server-{server}-of-{servers}\.version-(\d+)\.npz"
        return sorted((int(match[1]) for match in self._matches(pattern)), reverse=True)

    def check_servers(self, servers: int) -> None:
        """Raises InvalidArgument where all files are of another number of servers."""
        counts = {int(match[1]) for match in self._matches(r"server-\d+-of-(\d+)\..*\.npz")}
        if counts and servers not in counts:
            raise InvalidArgument(
                f"the snapshots in {self.folder} are of {min(counts)} servers, and there are "
                f"{servers} now\n  advice: as many servers as before, or another folder"
            )

    def _matches(self, pattern: str) -> list[re.Match[str]]:
        names = os.listdir(self.folder) if self.folder.is_dir() else []  # noqa: PTH208
        return [match for name in names if (match := re.fullmatch(pattern, name))]


# Errors of numpy and zipfile for files that are no snapshots; a part of a kind that they do not
# know is a RuntimeError.
_DAMAGED = (
    OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RuntimeError, MemoryError,
    zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip


class Content(NamedTuple):
    """The content of one snapshot."""

    version: int
    variables: Mapping[str, np.ndarray]
    rule: Mapping[str, np.ndarray]
    told: dict[str, Any]  # JSON: what else there is


def write(snapshots: Snapshots, server: int, servers: int, content: Content) -> Path:
    """Writes a snapshot. If it raises OSError, the files from before stay."""
    path = snapshots.path(server, servers, content.version)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {
        "format": _FORMAT,
        "version": content.version,
        "variables": list(content.variables),
        "rule": list(content.rule),
        "told": content.told,
    }
    arrays = {f"v{i}": value for i, value in enumerate(content.variables.values())}
    arrays |= {f"r{i}": np.asarray(value) for i, value in enumerate(content.rule.values())}
    unfinished = path.with_suffix(".unfinished")
    try:
        with unfinished.open("wb") as file:
            np.savez(file, head=np.array(json.dumps(head)), **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    for old in snapshots.found(server, servers)[snapshots.keep :]:
        snapshots.path(server, servers, old).unlink(missing_ok=True)
    return path


def read(path: Path) -> Content:
    """Raises InvalidArgument for a file that is no snapshot, or is damaged."""
    try:
        with path.open("rb") as stored, np.load(stored, allow_pickle=False) as file:
            head = _json.read(str(file["head"]))
            if head["format"] != _FORMAT:
                raise InvalidArgument(
                    f"snapshot {path} is of format {head['format']}; this version reads {_FORMAT}"
                )
            return Content(
                head["version"],
                {name: file[f"v{i}"] for i, name in enumerate(head["variables"])},
                {name: file[f"r{i}"] for i, name in enumerate(head["rule"])},
                head["told"],
            )
    except _DAMAGED as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(
            f"snapshot {path} cannot be read: {error}\n  advice: remove it, and the servers go on "
            "from the one before"
        ) from error


def check_fits(path: Path, content: Content, variables: Mapping[str, np.ndarray]) -> None:
    """Raises InvalidArgument where a snapshot is of other variables."""

    def said(of: Mapping[str, np.ndarray], name: str) -> str:
        return f"{of[name].dtype} of shape {of[name].shape}" if name in of else "not there"

    for name in {**variables, **content.variables}:
        theirs, ours = said(content.variables, name), said(variables, name)
        if theirs != ours:
            raise InvalidArgument(
                f"snapshot {path} does not fit: variable '{name}' is {theirs} in it, and {ours} "
                "here\n  advice: another folder for another model"
            )
