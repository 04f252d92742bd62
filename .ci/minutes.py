"""Where the checks' minutes go, as tables in Markdown.

`minutes.py parts.tsv` prints the parts of .ci/run (one line each: seconds, tab, command), and
`minutes.py report.xml` what pytest's files took, the longest first.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as xml
from collections import defaultdict
from pathlib import Path

LONGEST = 15  # files in the table; the rest is one row


def table(title: str, rows: list[tuple[str, float]]) -> None:
    print(f"| {title} | seconds |\n|---|---:|")
    for name, seconds in rows:
        print(f"| {name} | {seconds:.0f} |")
    print(f"| in all | {sum(seconds for _, seconds in rows):.0f} |\n")


def parts(path: Path) -> list[tuple[str, float]]:
    lines = [line.split("\t", 1) for line in path.read_text().splitlines()]
    return [(f"`{name}`", float(seconds)) for seconds, name in lines]


def test_files(path: Path) -> list[tuple[str, float]]:
    spent: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for case in xml.parse(path).iter("testcase"):
        file = re.sub(r"\.(Test\w+)$", "", case.get("classname", "")).replace(".", "/") + ".py"
        spent[file] += float(case.get("time", 0))
        count[file] += 1
    rows = sorted(spent.items(), key=lambda row: -row[1])
    shown = [(f"{file} ({count[file]})", seconds) for file, seconds in rows[:LONGEST]]
    rest = rows[LONGEST:]
    several = f"{len(rest)} other files ({sum(count[file] for file, _ in rest)})"
    return [*shown, (several, sum(seconds for _, seconds in rest))]


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        if not path.exists():
            print(f"{path} is not there: nothing to count\n")
        elif path.suffix == ".xml":
            table("tests (how many), on all workers", test_files(path))
        else:
            table("part", parts(path))


if __name__ == "__main__":
    main()
