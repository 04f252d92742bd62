"""The text that says what came of each part of `make device`."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from mps import LOGS, PIPES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LEAST = 10  # seconds that a part has, or it is not begun
DYING = 5  # seconds that a process may take to end when it is killed


def _did_well(part: str) -> bool:
    is_command = any(line.startswith("$ ") for line in part.splitlines())
    return not is_command or part.rstrip().endswith("\nexit code 0")


def _run(
    command: list[str], limit: float, settings: dict[str, str], tell: Callable[[str, str], None]
) -> None:
    """Tells what it printed, and how it ended, also where this program is interrupted. One that
    takes too long ends with all that it has started; nobody waits for what does not end then."""
    ended = "interrupted"
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said:
        started = subprocess.Popen(
            command, stdout=printed, stderr=said,
            start_new_session=True, env={**os.environ, **settings},
        )  # fmt: skip
        try:
            ended = f"exit code {started.wait(limit)}"
        except subprocess.TimeoutExpired:
            ended = f"not done after {limit:.0f} s"
        finally:
            if started.returncode is None:
                os.killpg(started.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    started.wait(DYING)
            tell(_text(printed) + _text(said), ended)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


class Report:
    """A text with a part for each title. What stands in the file already is kept, but for commands
    that did not do well: they are run again. Parts whose titles have one of the words `without`, or
    none of `only`, are left out; after `seconds` none is begun."""

    def __init__(self, path: Path, seconds: float, only: list[str], without: list[str]) -> None:
        self._path, self._failed, self._left = path, 0, 0
        self._end, self._only, self._without = time.monotonic() + seconds, only, without
        text = path.read_text() if path.exists() else ""
        parts = [part for part in re.split("(?m)^== ", text) if part.strip()]
        self._before = "".join(f"== {part}" for part in parts if _did_well(part))
        if self._before != text:
            path.write_text(self._before)

    def part(self, title: str, make: Callable[[], str]) -> None:
        if self.lacks(title):
            self._add(title, make())

    def run(self, title: str, limit: float, arguments: list[str], **settings: str) -> None:
        """A command of farandole's, with what it printed."""
        shown = ["farandole", *arguments]
        self._command(title, limit, ["-m", "farandole", *arguments], shown, settings)

    def script(
        self, title: str, limit: float, name: str, arguments: list[str], **settings: str
    ) -> None:
        """A program beside this one."""
        command = [str(HERE / name), *arguments]
        self._command(title, limit, command, [sys.executable, *command], settings)

    def _command(
        self,
        title: str,
        limit: float,
        arguments: list[str],
        shown: list[str],
        settings: dict[str, str],
    ) -> None:
        if not self.lacks(title):
            return
        told = {name: value for name, value in settings.items() if name not in (PIPES, LOGS)}
        shown = [*(f"{name}={value}" for name, value in told.items()), *shown]
        limit = min(limit, self._end - time.monotonic())
        if limit < LEAST:
            self._left += 1
            print(f"{title}: no time is left", flush=True)
            return

        def tell(printed: str, ended: str) -> None:
            self._failed += ended != "exit code 0"
            name = " ".join(shown).replace(sys.executable, "python")
            self._add(title, f"$ {name}\n{printed.rstrip()}\n{ended}".replace(f"{ROOT}/", ""))

        _run([sys.executable, *arguments], limit, settings, tell)

    def end(self) -> int:
        wrong, left = self._failed, self._left
        print(f"{self._path}: " + (f"{wrong} parts failed" if wrong else "all parts did well"))
        if left:
            print(f"{left} parts were not begun: start it again with the same file")
        return 1 if wrong or left else 0

    def lacks(self, title: str) -> bool:
        """It is asked for, and does not stand in the file."""
        if any(word in title for word in self._without):
            return False
        if self._only and not any(word in title for word in self._only):
            return False
        return not re.search(rf"(?m)^== {re.escape(title)}, \d{{4}}-", self._before)

    def _add(self, title: str, text: str) -> None:
        when = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        with self._path.open("a") as file:
            file.write(f"== {title}, {when}\n{text}\n\n")
        print(f"{title}: done", flush=True)
