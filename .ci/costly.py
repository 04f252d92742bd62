"""`costly.py REPORT…` brings tests/costly.txt up to date: which tests take a second or more a row.

A test that no report has keeps its line. A test that is gone loses it. One that has become quicker
keeps it, too, as a report has only some of its rows.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

LIST = Path("tests/costly.txt")
# These read the sources, so each run has them.
ALWAYS = ("tests/test_layers.py", "tests/unit/test_english.py", "tests/unit/test_repeats.py")


def is_there(name: str) -> bool:
    path, _, function = name.partition("::")
    file = Path(path)
    return file.exists() and re.search(rf"\b{function}\b", file.read_text()) is not None


def main() -> None:
    seconds = {name: float(taken) for taken, name in map(str.split, LIST.read_text().splitlines())}
    for report in sys.argv[1:]:
        for case in xml.parse(report).iter("testcase"):
            file = re.sub(r"\.(Test\w+)$", "", case.get("classname", "")).replace(".", "/") + ".py"
            name = f"{file}::{case.get('name', '').partition('[')[0]}"
            taken = float(case.get("time", 0))
            if taken >= max(1.0, seconds.get(name, 0)) and file not in ALWAYS:
                seconds[name] = taken
    rows = sorted((name, taken) for name, taken in seconds.items() if is_there(name))
    LIST.write_text("".join(f"{taken:.1f} {name}\n" for name, taken in rows))


if __name__ == "__main__":
    main()
