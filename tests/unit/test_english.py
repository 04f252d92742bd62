"""Comments begin with a subject, and sentences of the pages are short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("csrc", "python", "tests", "bench", "examples")
SOURCES = (".py", ".pyi", ".h", ".cpp", ".cu", ".cuh")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md")

COMMENT = re.compile(r"\s*(//+|#|/\*)")
WITHOUT_A_SUBJECT = re.compile(
    r'(^\s*|.*\S  )(///?<?|#|r?""") ?(What|Of|Who|Whoever|Whom|Which)\b'  # or at a line's end
)
LONG = 30  # words of a sentence


def comments_without_a_subject() -> Iterator[str]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in SOURCES:
                continue
            before = ""
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if WITHOUT_A_SUBJECT.match(line) and not goes_on(before, line):
                    yield f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
                before = line


def goes_on(before: str, line: str) -> bool:
    """Whether a comment's line is the rest of a sentence."""
    both = COMMENT.match(before) and COMMENT.match(line)
    return bool(both) and not before.rstrip().endswith((".", ":", "-", "/", "#"))


def sentences(page: str) -> Iterator[str]:
    """Without code and addresses; each cell of a table is one at least."""
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "x", re.sub(r"\]\([^)]*\)", "]", text))
    for line in text.splitlines():
        for cell in line.strip("|").split("|") if line.startswith("|") else [line]:
            if not cell.startswith("#"):
                yield from re.split(r"(?<=[.!?:])\s+(?=[A-Z*\[x])", cell.strip("*- "))


def test_comments_begin_with_a_subject() -> None:
    found = list(comments_without_a_subject())
    assert len(found) <= 50, "\n".join(found)


def test_few_sentences_of_the_pages_are_long() -> None:
    pages = [path.read_text() for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    lengths = [len(sentence.split()) for page in pages for sentence in sentences(page)]
    lengths = [length for length in lengths if length > 2]
    assert len(lengths) > 5000
    assert sum(length > LONG for length in lengths) <= 0.03 * len(lengths)


def test_what_counts() -> None:
    assert WITHOUT_A_SUBJECT.match("  // What ranks have sent")
    assert WITHOUT_A_SUBJECT.match('    """Of a rank."""')
    assert WITHOUT_A_SUBJECT.match("int a;  // of nobody") is None
    assert WITHOUT_A_SUBJECT.match("int a;  // Of nobody")
    assert goes_on("// The lines of", "// What follows")
    assert not goes_on("// A sentence.", "// What follows")
    assert list(sentences("| One. Two `a. B` | three |")) == ["One.", "Two x", "three"]
