"""How verbs print with: `rich` where it is installed and a terminal shows it, else plain text."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from farandole._tables import plain_table


def wants_colour(fd: int) -> bool:
    """Whether escape sequences on this descriptor reach a terminal that shows them."""
    if os.environ.get("NO_COLOR"):
        return False
    return os.isatty(fd) and os.environ.get("TERM", "dumb") != "dumb"


def columns() -> int:
    """How wide the terminal is that stdout shows itself on; 0: there is none that knows escapes."""
    if not sys.stdout.isatty() or not wants_colour(sys.stdout.fileno()):
        return 0
    return os.get_terminal_size(sys.stdout.fileno()).columns or 80


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """One table on stdout; the last column takes the width that is left."""
    console = _console()
    if console is None:
        print(plain_table(title, columns, rows))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _console() -> Any:
    if not wants_colour(sys.stdout.fileno()):
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False)
