"""Pickles of other ranks: one function reads them, and none that no rank has made."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import farandole as fd
from farandole.common import _objects, _pickles
from farandole.common._pickles import packed, seal, sealed, unsealed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python/farandole"


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    fd.init()
    yield
    fd.shutdown()


class Harm:
    done = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _does_harm, ()


def _does_harm() -> None:
    Harm.done = True


def test_what_was_sealed_is_read() -> None:
    value = {"a": [1, 2.5, None], "ü": b"\0"}
    assert unsealed(sealed(value, "x"), "x") == value


def test_nothing_else_is() -> None:
    """Not one bit may differ, nor what it is for, nor the key."""
    data = sealed(Harm(), "x")
    changed = [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(len(data))]
    for other in (*changed, data[:-1], data + b"\0", data[32:], b"", _pickles.dumps(Harm())):
        with pytest.raises(fd.LinkError, match="that no rank of this job has sent"):
            unsealed(other, "x")
    with pytest.raises(fd.LinkError, match="y: rank 0 has got"):
        unsealed(data, "y")
    fd.shutdown()
    fd.init()  # a world of its own, with another secret
    with pytest.raises(fd.LinkError):
        unsealed(data, "x")
    assert not Harm.done


def test_an_old_pickle_is_none_of_another_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks draw random numbers for each."""
    gathered, said = _objects.gathered, list[Any]()

    def what_was_said_first(array: Any, name: str | None, number: int) -> Any:
        rows = gathered(array, name, number)
        if name == "x.data":
            said.append(rows)
            return said[0]
        return rows

    monkeypatch.setattr(_objects, "gathered", what_was_said_first)
    assert _objects.allgather_object("old", "x") == ["old"]
    with pytest.raises(fd.LinkError, match="that no rank of this job has sent"):
        _objects.allgather_object("new", "x")


def test_no_pickle_is_made_where_plain_values_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pickles, "dumps", None)
    monkeypatch.setattr(_pickles, "pickle", None)
    assert unsealed(sealed([1, {"a": b"x"}], "x"), "x") == [1, {"a": b"x"}]


def test_pickles_that_are_refused_are_neither_made_nor_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = sealed(Harm(), "x")
    monkeypatch.setenv("FARANDOLE_PICKLE", "off")
    assert _objects.allgather_object((1, "a")) == [(1, "a")]
    with pytest.raises(fd.InvalidArgument, match="a Harm is sent as a pickle only"):
        _objects.broadcast_object({"a": [Harm()]})
    with pytest.raises(fd.LinkError, match="that no rank of this job has sent"):
        unsealed(data, "x")
    assert not Harm.done


def test_what_makes_a_pickle_fresh_is_apart_from_what_it_is_for() -> None:
    data = seal(packed(1), "ab", b"c")
    assert unsealed(data, "ab", b"c") == 1
    for what, fresh in (("ab", b""), ("ab", b"d"), ("a", b"bc"), ("abc", b"")):
        with pytest.raises(fd.LinkError):
            unsealed(data, what, fresh)


def test_security_md_names_all_who_unpickle() -> None:
    reads = re.compile(r"pickle\.(loads?|Unpickler)\(|allow_pickle=True")
    files = [file for file in PACKAGE.rglob("*.py") if reads.search(file.read_text())]
    found = {str(file.relative_to(PACKAGE)) for file in files}
    assert found == {"_ranks.py", "common/_pickles.py", "ray.py"}
    rows = (ROOT / "SECURITY.md").read_text().splitlines()
    row = next(row for row in rows if row.startswith("| pickle"))
    assert all(name in row for name in ("_ranks.py", "common/_pickles.py", "Ray"))
