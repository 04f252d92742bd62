"""How much of what programs see of farandole has a known type; fails below LEAST."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

LEAST = 0.95

here = str(Path(__file__).parent.parent / "python")  # whatever is installed
done = subprocess.run(
    ["basedpyright", "--verifytypes", "farandole", "--ignoreexternal", "--outputjson"],
    env=os.environ | {"PYTHONPATH": here}, capture_output=True, text=True, check=False,
)  # fmt: skip
if not done.stdout.startswith("{"):
    sys.exit(done.stderr or done.stdout)
report = json.loads(done.stdout)["typeCompleteness"]
score, symbols = report["completenessScore"], report["symbols"]
print(f"types: {score:.1%} of {sum(s['isExported'] for s in symbols)} names")
if score < LEAST:
    lacking = [s["name"] for s in symbols if s["isExported"] and not s["isTypeKnown"]]
    sys.exit("\n".join([f"below {LEAST:.0%}; unknown:", *lacking]))
