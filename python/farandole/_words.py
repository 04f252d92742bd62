"""Names of things, for messages."""

from __future__ import annotations


def type_of(value: object) -> str:
    """'a list', 'an int'."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"
