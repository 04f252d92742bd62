"""The secret of a job over several hosts, by which its ranks know each other."""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from farandole import _core
from farandole._core import AuthError

BYTES = 32


def shown(secret: bytes) -> str:
    """By which ranks see that they have the same one, and nobody what it is."""
    return f"of digest {hashlib.sha256(b'farandole shows ' + secret).hexdigest()[:8]}"


def find(*, may_be_made: bool) -> tuple[bytes, bool]:
    """The job's, and whether rank 0 makes one since there is none."""
    name = os.environ.get("FARANDOLE_SECRET_FILE")
    if not name:
        if may_be_made or os.environ.get("FARANDOLE_INSECURE") == "1":
            return b"", True
        raise AuthError(
            "the ranks are on several hosts and this one knows no secret of their job; set "
            "FARANDOLE_SECRET_FILE to a file of mode 600 with 64 hexadecimal digits, the same on "
            "every rank (`farandole run` makes one), or FARANDOLE_INSECURE=1 in a network that you "
            "trust"
        )
    try:
        with Path(name).open("rb") as file:  # once: what is looked at is what is read
            found = os.fstat(file.fileno())
            text = file.read(4 * BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise AuthError(f"FARANDOLE_SECRET_FILE={name}: {error.strerror}") from error
    mode = found.st_mode
    if found.st_uid not in (0, os.geteuid()):
        raise AuthError(
            f"FARANDOLE_SECRET_FILE={name} belongs to user {found.st_uid}, who may know or change "
            f"it; it must belong to user {os.geteuid()}, whose job this is, or to root"
        )
    if stat.S_IMODE(mode) & 0o077:
        raise AuthError(
            f"FARANDOLE_SECRET_FILE={name} may be read by others (mode {stat.S_IMODE(mode):o}); "
            "chmod 600 it"
        )
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != BYTES:
        raise AuthError(f"FARANDOLE_SECRET_FILE={name} does not hold 64 hexadecimal digits")
    return secret, False


def show_libcrypto() -> None:
    """The core proves by the OpenSSL that this Python's hashlib has, if it has one."""
    with suppress(ImportError):
        import _hashlib

        _core.look_for_libcrypto_in(getattr(_hashlib, "__file__", ""))
