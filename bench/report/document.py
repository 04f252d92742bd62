"""Tables in Markdown, and their places between two markers of a page. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replace(page: str, name: str, text: str) -> str:
    """The page with `text` between its markers of `name`; ValueError where it has none."""
    begin, end = f"<!-- report: {name} -->", f"<!-- end: {name} -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page has no '{begin}' … '{end}'")
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"
