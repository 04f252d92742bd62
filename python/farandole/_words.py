"""Names of things, errors, and texts of others, as users read them."""

from __future__ import annotations


class CommandError(Exception):
    """An error for the user of a command, in one line; becomes ``farandole …: line`` and an exit
    code."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def type_of(value: object) -> str:
    """'a list', 'an int'."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def printable(text: str) -> str:
    """The text, with characters escaped that must not reach a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
