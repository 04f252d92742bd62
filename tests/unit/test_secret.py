"""Whose file the job's secret may be in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farandole import AuthError, _secret


def test_a_secret_of_another_user_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    path.write_text("ab" * _secret.BYTES)
    path.chmod(0o600)
    monkeypatch.setenv("FARANDOLE_SECRET_FILE", str(path))
    assert _secret.find(may_be_made=False) == (b"\xab" * _secret.BYTES, False)
    owner = os.stat_result((0o100600, 1, 1, 1, os.geteuid() + 1, 0, 64, 0, 0, 0))
    monkeypatch.setattr(os, "fstat", lambda _: owner)
    with pytest.raises(AuthError, match=f"belongs to user {os.geteuid() + 1}"):
        _secret.find(may_be_made=False)
