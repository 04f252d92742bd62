"""`reason.py LOG` prints in one line why a part of .ci/run failed: the test and its reason."""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST = 300  # characters of a line

# What tools print of a failure, the most telling first. Each has one group.
PATTERNS = [
    r"^(?:FAILED|ERROR) (tests/\S+.*)",  # pytest's summary
    r"^wrong: (.+)",  # tests/differential
    r"(not caught: .+)",  # tests/mutations, tests/guards
    r"((?:Address|Thread|Leak|UndefinedBehavior)Sanitizer: .+)",
    r"(\S+: runtime error: .+)",  # UBSan
    r"^\s*FAILED: ([a-z]\w+)$",  # tests/cpp
    r"^(\S+:\d+(?::\d+)?:? (?:fatal )?error: .+)",  # compilers, mypy
    r"^(\s*/\S+:\d+:\d+ - error: .+)",  # basedpyright
    r"^(WARNING -\s+.+)",  # mkdocs
    r"^(E\s{2,}.+)",  # pytest without a summary
    r"^((?:\w+\.)*\w*(?:Error|Exception): .+)",  # a traceback's end
]


def reason(log: str) -> str:
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in log.splitlines()]
    # make's own last words say less than the line before them.
    lines = [line for line in lines if line and not re.match(r"g?make(\[\d+\])?: ", line)]
    for pattern in PATTERNS:
        for at, line in enumerate(lines):
            if not (found := re.search(pattern, line)):
                continue
            said = found[1]
            if "FAILED: " in line and at > 0:  # a check of tests/cpp prints its place before
                said += f" - {lines[at - 1].strip()}"
            return said[:LONGEST]
    return lines[-1][:LONGEST] if lines else "it printed nothing"


if __name__ == "__main__":
    print(reason(Path(sys.argv[1]).read_text(errors="replace")))
