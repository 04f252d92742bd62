"""The secret of a job over several hosts: 32 random bytes, as 64 hexadecimal digits.

The launcher makes it and sends it to the agents with the order, over the stdin of ssh. Each agent
writes it to a file of mode 600 in a new directory of mode 700, names the file to its ranks in
FARANDOLE_SECRET_FILE, and removes both at its end. It is in no argument and in no variable. A job
of one host has none: its ranks know each other by the kernel's word.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

VARIABLE = "FARANDOLE_SECRET_FILE"


def new_secret() -> str:
    return os.urandom(32).hex()


class SecretFile:
    """The file on one host. `name`: of its directory, which nobody can guess."""

    def __init__(self, name: str, secret: str) -> None:
        """Raises OSError, also if somebody has the directory."""
        self._directory = Path(tempfile.gettempdir(), name)
        self._directory.mkdir(mode=0o700)
        self.path = self._directory / "secret"
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secret)
        except OSError:
            self.remove()
            raise

    def remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def remove_all(marker: str) -> None:
    """Removes the secrets of all agents of a job: the launcher may outlive one beside it."""
    for directory in Path(tempfile.gettempdir()).glob(f"farandole-{marker}-*"):
        shutil.rmtree(directory, ignore_errors=True)
