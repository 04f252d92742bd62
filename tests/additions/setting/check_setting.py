"""A new setting: shown, refused where it is wrong, and compared as ranks meet."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import farandole as fd
from farandole import _core, cli
from harness import World

NAME = "FARANDOLE_DUMMY"


def value() -> str:
    return next(str(row["value"]) for row in _core.settings() if row["name"] == NAME)


def join() -> None:
    fd.init()


def test_info_shows_it(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    assert value() == "7"
    monkeypatch.setenv(NAME, "8")
    assert value() == "8"
    assert _core.unread_variables() == []
    assert cli.main(["info"]) == 0
    assert NAME in capfd.readouterr().out


def test_what_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "soon")
    with pytest.raises(fd.InvalidArgument, match=f"^{NAME}=soon is not a number"):
        _core.settings()


def test_a_mistyped_name_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARANDOLE_DUMY", "8")
    assert _core.unread_variables() == [f"FARANDOLE_DUMY is not a setting; did you mean {NAME}?"]


def test_ranks_must_have_the_same(spawn: Callable[..., World]) -> None:
    world = spawn(2, each=[{NAME: "7"}, {NAME: "8"}])
    world.start(join)
    for outcome in world.outcomes():
        assert outcome.error == "RendezvousError"
        assert outcome.verdict == f"ranks disagree on {NAME}: 7 on rank 0; 8 on rank 1"
