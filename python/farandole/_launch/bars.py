"""Lines that are redrawn: progress bars.

A bar goes back to the beginning of its line (tqdm), or back letter by letter and then to the
beginning (Keras), and writes over itself. Here is what a terminal would show of such a line.
"""

from __future__ import annotations

import re

_ESCAPE = r"\x1b\[[0-9;?]*[A-Za-z]"
# A letter with the colours in front of it.
_CELL = re.compile(rf"(?:{_ESCAPE})*[^\x1b]|(?:{_ESCAPE})+|\x1b", re.DOTALL)
_CLEARED = re.compile(rb"\r +\r")
# The start of what Python writes after a bar that its program has not ended.
_BEHIND = re.compile(rb"Traceback \(most recent call|\w(?:Error|Warning)\b")


def is_drawing(part: bytes | bytearray) -> bool:
    """Whether a line that has not ended may be a bar."""
    return b"\r" in part or b"\b" in part


def is_redrawn(line: bytes | bytearray) -> bool:
    """Whether a line was drawn again before its end, which may be a return and a newline."""
    return b"\r" in line.rstrip(b"\r") or b"\b" in line


def is_bar(line: bytes) -> bool:
    """Whether a line is a bar and nothing else that somebody wants to read."""
    return is_redrawn(line) and _BEHIND.search(newest(line)) is None


def newest(line: bytes) -> bytes:
    """The line as a terminal shows it in the end."""
    text = last_state(line)
    return _written_over(text) if b"\b" in text else text


def last_state(line: bytes) -> bytes:
    """The text since the last return to the beginning of the line."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def since_cleared(line: bytes) -> bytes:
    """The text since the line was last overwritten with spaces. It is no part of the bar."""
    ends = [match.end() for match in _CLEARED.finditer(line)]
    return line[ends[-1] :] if ends else line


def fitted(line: bytes, width: int) -> bytes:
    """As much of the line as `width` columns hold: part of a wrapped line would stay behind."""
    cells = _CELL.findall(line.decode(errors="surrogateescape"))
    if len(cells) <= width:
        return line
    colours_end = "\x1b[0m" if b"\x1b" in line else ""
    return ("".join(cells[: max(0, width)]) + colours_end).encode(errors="surrogateescape")


def _written_over(text: bytes) -> bytes:
    shown: list[str] = []
    at = 0
    for cell in _CELL.findall(text.decode(errors="surrogateescape")):
        if cell.endswith("\b"):
            at = max(0, at - 1)
        else:
            shown[at : at + 1] = [cell]
            at += 1
    return "".join(shown).encode(errors="surrogateescape")
