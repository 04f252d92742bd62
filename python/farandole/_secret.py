"""The secret of a job over several hosts, by which its ranks know each other."""

from __future__ import annotations

import hmac
import os
import stat
from contextlib import suppress
from pathlib import Path

from farandole import _core
from farandole._core import AuthError

BYTES = 32


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


class Pair:
    """This rank's part in a secret that ranks make who were given none: rank 0 draws it, and hides
    it from all who hear what is said, with a key that it shares with each. So it protects from who
    has heard the meeting. Who can change what is said there can be any rank of it."""

    def __init__(self) -> None:
        show_libcrypto()
        self._own = _core.KeyPair()
        self.key = self._own.public_key().hex()

    def hidden(self, secret: bytes, key: str) -> str:
        """The secret for the rank that has said this key."""
        shared = self._own.shared_with(bytes.fromhex(key))
        pad = hmac.digest(shared, b"farandole hands out a secret", "sha256")
        return bytes(s ^ p for s, p in zip(secret, pad, strict=True)).hex()

    def shown(self, hidden: str, key: str) -> bytes:
        """The secret that the rank of this key has hidden for this one."""
        return bytes.fromhex(self.hidden(bytes.fromhex(hidden), key))


def show_libcrypto() -> None:
    """The core proves by the OpenSSL that this Python's hashlib has, if it has one."""
    with suppress(ImportError):
        import _hashlib

        _core.look_for_libcrypto_in(getattr(_hashlib, "__file__", ""))
