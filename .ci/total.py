"""`total.py REPORT` prints the totals of pytest's report; fails if it has a failure or no test."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as xml
from pathlib import Path


def main() -> None:
    report = Path(sys.argv[1])
    if not report.exists():
        print("pytest left no report")
        sys.exit(1)
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in xml.parse(report).iter("testsuite"):
        for name in total:
            total[name] += int(suite.get(name, 0))
    bad = total["failures"] + total["errors"]
    passed = total["tests"] - bad - total["skipped"]
    print(f"{passed} passed, {bad} failed, {total['skipped']} skipped")
    sys.exit(bad > 0 or passed == 0)


if __name__ == "__main__":
    main()
