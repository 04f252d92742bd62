"""The error classes: one per row of the table, each with every field, each on its docs page."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import farandole as fd
from farandole import _core
from harness import FIELDS

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
NAMES = list(_core.error_names)


@pytest.mark.parametrize("name", NAMES)
def test_every_class_is_public_and_documented(name: str) -> None:
    kind = getattr(fd, name)
    assert issubclass(kind, fd.Error)
    assert issubclass(kind, RuntimeError)
    assert kind.__module__ == "farandole"
    assert name in fd.__all__
    assert f"## {name}\n" in PAGE.read_text()


def test_the_page_has_no_other_class() -> None:
    headings = [line[3:] for line in PAGE.read_text().splitlines() if line.startswith("## ")]
    assert [h for h in headings if h[0].isupper() and " " not in h] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_error_made_from_a_text_has_every_field(name: str) -> None:
    error = getattr(fd, name)("it broke\n  evidence: none")
    assert error.verdict == "it broke"
    assert error.advice
    for field in FIELDS:
        assert hasattr(error, field)
    assert error.rank is None
    assert dict(error.values) == {}
    error.rank = 3
    assert error.rank == 3
    assert getattr(fd, name)("another").rank is None


def test_an_error_of_the_core_has_verdict_and_advice() -> None:
    with pytest.raises(fd.InvalidArgument) as caught:
        _core.Buffer(0, 1, "complex64")
    error = caught.value
    assert error.verdict == "dtype complex64 is not supported"
    assert str(error) == f"{error.verdict}\n  advice: {error.advice}"
    assert isinstance(error, ValueError)


def test_errors_can_be_pickled() -> None:
    """Across process borders: multiprocessing, schedulers."""
    error = fd.PeerLost("rank 2 died")
    error.rank = 2
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is fd.PeerLost
    assert copy.rank == 2
    assert copy.verdict == "rank 2 died"


def test_builtin_bases() -> None:
    assert issubclass(fd.InvalidArgument, ValueError)
    assert issubclass(fd.NotInitialized, ValueError)
    with pytest.raises(ValueError, match=r"call farandole\.init"):
        fd.all_reduce(np.ones(2))


def test_control_characters_of_reasons_and_names_are_escaped() -> None:
    script = (
        "import numpy as np, farandole as fd\n"
        "fd.init(rank=0, size=1)\n"
        "fd.world().abort('bad \\x1b[31m\\n\\x7f\\x9b news \\u00e9')\n"
        "try:\n    fd.all_reduce(np.ones(1), name='w\\x1b]0;x\\x07')\n"
        "except fd.Aborted as error:\n    print(str(error), error.verdict, sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    lines = done.stdout.splitlines()
    assert "aborted: bad \\x1b[31m\\x0a\\x7f\\x9b news \u00e9" in lines[0], done
    assert lines[-1] == lines[0]
    assert all(c.isprintable() for line in lines for c in line)
