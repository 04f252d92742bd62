"""Facts, one after the other: wrapped to a terminal's width, else a line each, for grep."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def lines_of(
    parts: Mapping[str, Mapping[str, str]], settings: Sequence[Mapping[str, Any]], width: int
) -> Iterator[str]:
    """`width`: of the terminal; 0: there is none."""
    if not width:
        for part, facts in parts.items():
            yield from (f"{part} {name}: {value}" for name, value in facts.items())
        for row in settings:
            kind = f"({row['type']}, default {row['default']})"
            yield f"{row['name']}: {row['value']} {kind}: {row['doc']}"
        return
    for part, facts in parts.items():
        yield part
        longest = max(map(len, facts), default=0)
        for name, value in facts.items():
            yield from _wrapped(f"  {name.ljust(longest)}  ", value, width)
        yield ""
    if settings:
        yield "settings (environment variables)"
    for row in settings:
        default = "" if row["value"] == row["default"] else f"  (default {row['default']})"
        yield from _wrapped(f"  {row['name']} = ", f"{row['value']}{default}", width)
        yield from _wrapped("      ", str(row["doc"]), width)


def _wrapped(begin: str, text: str, width: int) -> list[str]:
    """All lines begin where the text does, where there is room for that."""
    indent = " " * min(len(begin), width // 2)
    return textwrap.wrap(
        begin + text, width, subsequent_indent=indent, drop_whitespace=True,
        break_on_hyphens=False,
    )  # fmt: skip
