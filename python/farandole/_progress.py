"""Work that takes long shows itself: its rows as soon as they are known and, on a terminal and with
`rich`, below them a line that tells what is done now, how much is done and how long the rest takes.

The line is drawn only when there is something to tell, and by no thread: who measures is not
disturbed while a clock runs.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

_ERASE = "\r\x1b[K"  # the line the cursor is in
_PACE = 0.1  # seconds: nobody reads faster

Render = Callable[[str, float], str]  # of what is done now and how much is


class Progress:
    """Shows on stdout.

    Args:
        total: how much there is to do: things where it is whole, else seconds or any other measure.
        columns: of the terminal that shows it; 0: it is none, and rows are all there is.
    """

    def __init__(self, total: float, columns: int = 0) -> None:
        self._render = _renderer(total, columns) if columns else None
        self._drawn = False
        self._when = 0.0

    def now(self, what: str, done: float) -> None:
        """Shows what is being done, and how much is done already."""
        if self._render is not None and time.monotonic() - self._when >= _PACE:
            self._write(self._cleared() + self._render(what, done))
            self._drawn = True
            self._when = time.monotonic()

    def show(self, lines: str) -> None:
        """Lines that stay, in place of the one that tells what is done now."""
        self._write(self._cleared() + lines + "\n")
        self._when = 0.0

    def clear(self) -> None:
        """Takes that line away: at the end, or before anything else is printed."""
        if self._drawn:
            self._write(self._cleared())
            self._when = 0.0

    def _cleared(self) -> str:
        drawn, self._drawn = self._drawn, False
        return _ERASE if drawn else ""

    def _write(self, text: str) -> None:
        print(text, end="", flush=True)


def _renderer(total: float, columns: int) -> Render | None:
    """None without `rich`."""
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    whole = isinstance(total, int)
    bar = progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=20),
        progress.MofNCompleteColumn() if whole else progress.TaskProgressColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("left"),
        auto_refresh=False,
    )
    task = bar.add_task("", total=total)

    def render(what: str, done: float) -> str:
        bar.update(task, description=what, completed=done)
        out: Any = io.StringIO()
        # One column less: behind the last one some terminals begin a new line.
        console = Console(file=out, force_terminal=True, width=columns - 1, legacy_windows=False)
        console.print(bar.get_renderable(), end="", no_wrap=True, crop=True)
        return str(out.getvalue()).partition("\n")[0].rstrip()

    return render
