"""Jobs of farandole's own whose first rank leaves a result."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from farandole._launch.job import Job, LaunchError
from farandole._launch.launcher import launch


def result_of(
    module: str, words: Sequence[str], job: Callable[[list[str]], Job]
) -> tuple[int, Any]:
    """Runs a module with the name of a file and these words; returns its exit code, and what the
    file then has: None where that is nothing, and not 0. `job`: makes a job of a command, with the
    first rank on this host.

    Raises:
        LaunchError: the ranks could not be started, or ended well without a result.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # or the launcher explains its own choice
    with tempfile.TemporaryDirectory(prefix=f"{module}-") as directory:
        file = Path(directory, "result.json")
        code = launch(job([sys.executable, "-m", module, str(file), *words]))
        if file.exists():
            return code, json.loads(file.read_text())
    if code == 0:
        raise LaunchError("the ranks ended without a result", 1)
    return code, None
