"""Refuses a commit's message of another form than CONTRIBUTING.md asks for: `subject.py FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

MOST = 72  # characters of a subject


def faults(message: str) -> list[str]:
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    found = []
    if not subject[:1].isupper():
        found.append("begins with no capital letter")
    if subject.endswith("."):
        found.append("ends with a full stop")
    if len(subject) > MOST:
        found.append(f"has {len(subject)} characters, {MOST} at most")
    if len(lines) > 1 and lines[1]:
        found.append("has no empty line below it")
    return [f"the subject {fault}: {subject!r}" for fault in found]


def main() -> None:
    if found := faults(Path(sys.argv[1]).read_text()):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
