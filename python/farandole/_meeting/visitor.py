"""A client that has connected and has not said yet which rank it is."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Generator
from typing import NamedTuple

from farandole._meeting.connection import HEAD, MAGIC, NONCE, POLITE, PROOF, Connection, proof
from farandole._meeting.errors import Words
from farandole._meeting.members import checked


class _Wanted(NamedTuple):
    bytes: int
    lacks: str  # what a stranger comes without, who does not say them


class Visitor:
    """Takes what has come, and waits for no more: silent clients hold nobody up."""

    def __init__(self, connection: Connection, address: str, secret: bytes) -> None:
        self.connection = connection
        self.address = address  # as this host sees it; empty for a process of this host
        self.whence = f"at {address}" if address else f"(process {connection.process()})"
        self.until = time.monotonic() + POLITE  # then it will not prove it any more
        self.is_greeted = False
        self.has_proved = False
        self._said = b""
        self._steps = _greeting(connection, secret)
        self._wanted = next(self._steps)

    @property
    def lacks(self) -> str:
        return self._wanted.lacks

    def hear(self) -> Words | None:
        """Its words, once they have come.

        Raises:
            OSError: it has gone.
            ValueError: it is no rank of this job.
        """
        while (data := self.connection.receive(self._wanted.bytes - len(self._said))) is not None:
            self._said += data
            if len(self._said) < self._wanted.bytes:
                continue
            said, self._said = self._said, b""
            try:
                self._wanted = self._steps.send(said)
            except StopIteration as end:
                words: Words = end.value
                return words
            self.is_greeted, was_greeted = True, self.is_greeted
            if was_greeted and not self.has_proved:
                self.has_proved, self.until = True, time.monotonic() + POLITE
        return None


def _greeting(connection: Connection, secret: bytes) -> Generator[_Wanted, bytes, Words]:
    """Yields what it wants next, is sent those bytes, and returns the words in the end."""
    theirs = yield _Wanted(len(MAGIC) + NONCE, "without farandole's first words")
    if not theirs.startswith(MAGIC):
        raise ValueError("it does not know how ranks meet")
    mine = secrets.token_bytes(NONCE)
    nonces = theirs[len(MAGIC) :] + mine
    # So little goes into the buffer of a new connection at once.
    connection.send_bytes(MAGIC + mine + proof(secret, b"server", nonces), time.monotonic())
    connection.seal(secret, b"server", b"client", nonces)
    proved = yield _Wanted(PROOF, "without the job's secret" if secret else "without a proof")
    if not hmac.compare_digest(proved, proof(secret, b"client", nonces)):
        raise ValueError("it does not know the secret")
    lacks = "without a rank's words"
    head = yield _Wanted(HEAD.size, lacks)
    return checked(connection.words(head, (yield _Wanted(sum(connection.sizes(head)), lacks))))
