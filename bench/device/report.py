"""The text that says what came of each part of `make device`."""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LEAST = 10  # seconds that a part has, or it is not begun


def _did_well(part: str) -> bool:
    is_command = any(line.startswith("$ ") for line in part.splitlines())
    return not is_command or part.rstrip().endswith("\nexit code 0")


def _ran(command: list[str], limit: float, settings: dict[str, str]) -> tuple[str, str]:
    """What it printed, and how it ended. One that takes too long ends with all that it has
    started."""
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True, env={**os.environ, **settings},
    )  # fmt: skip
    try:
        printed = started.communicate(timeout=limit)
        ended = f"exit code {started.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        printed = started.communicate()
        ended = f"not done after {limit:.0f} s"
    return "".join(printed), ended


class Report:
    """A text with a part for each title. What stands in the file already is kept, but for commands
    that did not do well: they are run again. Parts whose titles have one of the words `without` are
    left out; after `seconds` none is begun."""

    def __init__(self, path: Path, seconds: float, without: list[str]) -> None:
        self._path, self._failed, self._left = path, 0, 0
        self._end, self._without = time.monotonic() + seconds, without
        text = path.read_text() if path.exists() else ""
        parts = [part for part in re.split("(?m)^== ", text) if part.strip()]
        self._before = "".join(f"== {part}" for part in parts if _did_well(part))
        if self._before != text:
            path.write_text(self._before)

    def part(self, title: str, make: Callable[[], str]) -> None:
        if not self._has(title):
            self._add(title, make())

    def run(self, title: str, limit: float, arguments: list[str], **settings: str) -> None:
        """A command of farandole's, with what it printed."""
        shown = " ".join([f"{name}={value}" for name, value in settings.items()] + ["farandole"])
        self._command(title, limit, ["-m", "farandole", *arguments], [shown, *arguments], settings)

    def script(self, title: str, limit: float, name: str, arguments: list[str]) -> None:
        """A program beside this one."""
        command = [str(HERE / name), *arguments]
        self._command(title, limit, command, [sys.executable, *command], {})

    def _command(
        self,
        title: str,
        limit: float,
        arguments: list[str],
        shown: list[str],
        settings: dict[str, str],
    ) -> None:
        if self._has(title):
            return
        limit = min(limit, self._end - time.monotonic())
        if limit < LEAST:
            self._left += 1
            print(f"{title}: no time is left", flush=True)
            return
        printed, ended = _ran([sys.executable, *arguments], limit, settings)
        self._failed += ended != "exit code 0"
        text = f"$ {' '.join(shown).replace(sys.executable, 'python')}\n{printed.rstrip()}\n{ended}"
        self._add(title, text.replace(f"{ROOT}/", ""))

    def end(self) -> int:
        wrong, left = self._failed, self._left
        print(f"{self._path}: " + (f"{wrong} parts failed" if wrong else "all parts did well"))
        if left:
            print(f"{left} parts were not begun: start it again with the same file")
        return 1 if wrong or left else 0

    def _has(self, title: str) -> bool:
        """Or is not asked for."""
        if any(word in title for word in self._without):
            return True
        return f"\n== {title}, " in f"\n{self._before}"

    def _add(self, title: str, text: str) -> None:
        when = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        with self._path.open("a") as file:
            file.write(f"== {title}, {when}\n{text}\n\n")
        print(f"{title}: done", flush=True)
