"""Every fault of tests/mutations still fits the code: one that does not would show nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_every_fault_still_fits_the_code() -> None:
    patches = sorted((ROOT / "tests" / "mutations").glob("*.patch"))
    assert len(patches) >= 40
    stale = [
        patch.name
        for patch in patches
        if subprocess.run(["git", "apply", "-C1", "--check", patch], cwd=ROOT).returncode != 0
    ]
    assert not stale, f"these no longer apply: {', '.join(stale)}"
