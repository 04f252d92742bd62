"""Lists the blocks that stand twice in the sources: python tests/repeats.py

A repeat is a pair of places that share six or more lines. Lines are compared without indentation
and with single spaces. Blank lines, imports, namespaces, the licence and lines that only close
brackets do not count. Three copies of a block are three pairs.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("csrc", "python", "tests", "bench")
PYTHON, CPP = (".py", ".pyi"), (".h", ".cpp", ".cu", ".cuh")
LEAST = 6  # lines of a repeat

_CLOSING = re.compile(r"[)\]};,]* ?(# fmt: skip|// namespace.*)?")
_IMPORT = re.compile(r"# ?include\b|#pragma once|using [\w:]+;|namespace [\w: ]*\{")
_LICENCE = re.compile(r"(#|//) (Copyright|SPDX-|Licensed under)")


class Line(NamedTuple):
    number: int
    text: str


class Repeat(NamedTuple):
    """The first lines of both places, and how many lines they share."""

    one: tuple[str, int]
    other: tuple[str, int]
    lines: int


def lines_of(name: str, text: str) -> list[Line]:
    """The lines of a file that count."""
    imports = _python_imports(text) if name.endswith(PYTHON) else set()
    found = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = " ".join(raw.split())
        skipped = number in imports or _CLOSING.fullmatch(line) or _LICENCE.match(line)
        if not skipped and not (name.endswith(CPP) and _IMPORT.match(line)):
            found.append(Line(number, line))
    return found


def _python_imports(text: str) -> set[int]:
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
    return {number for n in nodes for number in range(n.lineno, (n.end_lineno or n.lineno) + 1)}


def repeats(texts: Mapping[str, str]) -> list[Repeat]:
    """All repeats among files, by name."""
    files = {name: lines_of(name, text) for name, text in sorted(texts.items())}
    words = {name: [line.text for line in lines] for name, lines in files.items()}
    places = defaultdict(list)  # of every run of LEAST lines
    for name, file in words.items():
        for i in range(len(file) - LEAST + 1):
            places[tuple(file[i : i + LEAST])].append((name, i))
    found = []
    for same in places.values():
        for one, other in _pairs(same):
            length = _length(words, one, other)
            if length >= LEAST:
                starts = [(name, files[name][i].number) for name, i in (one, other)]
                found.append(Repeat(*starts, length))
    return sorted(found)


def _pairs(places: Sequence[tuple[str, int]]) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    for i, one in enumerate(places):
        for other in places[i + 1 :]:
            yield one, other


def _length(
    words: Mapping[str, Sequence[str]], one: tuple[str, int], other: tuple[str, int]
) -> int:
    """How many lines two places share; 0 if the same begins earlier. Places do not overlap."""
    (a, i), (b, j) = one, other
    if i and j and words[a][i - 1] == words[b][j - 1]:
        return 0
    most = min(len(words[a]) - i, len(words[b]) - j, j - i if a == b else len(words[a]))
    return next((n for n in range(most) if words[a][i + n] != words[b][j + n]), most)


def sources() -> dict[str, str]:
    """The texts of all files that git knows or does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.splitlines() if name.endswith(PYTHON + CPP)]
    return {name: (ROOT / name).read_text() for name in names if (ROOT / name).exists()}


def main() -> None:
    found = repeats(sources())
    for (one, i), (other, j), lines in found:
        print(f"{lines:4}  {one}:{i}  {other}:{j}")
    print(f"{len(found)} repeats of {LEAST} lines or more, {sum(r.lines for r in found)} lines")


if __name__ == "__main__":
    main()
