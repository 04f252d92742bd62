"""The others go to rank 0."""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import struct
import time
from contextlib import ExitStack

from farandole._core import AuthError, RendezvousError
from farandole._store.line import Guest
from farandole._store.meeting import GRACE, Meeting, Met, Words, name_of, refused, said_among
from farandole._store.talk import MAGIC, NONCE, POLITE, PROOF, hear, proof, send, take


class Closed(OSError):
    """Whoever received there has met its own world, and receives no more; or receives nobody."""


class Lost(Exception):
    """Who received stopped in the middle of it, or is none of ours."""


def be_guest(meeting: Meeting, mine: Words) -> Met:
    """Raises OSError where nobody receives."""
    with ExitStack() as stack:
        connection = stack.enter_context(_connect(meeting))
        try:
            _prove(meeting, connection)
            connection.settimeout(max(POLITE, meeting.until - time.monotonic() + GRACE))
            send(connection, mine | {"among": meeting.among})
            answer = hear(connection)
        except ConnectionResetError as error:
            raise Closed(error.errno, str(error)) from error
        except Closed:
            raise
        except (OSError, ValueError) as error:
            whom = "the others" if meeting.among else "rank 0"
            raise Lost(
                f"rank {meeting.rank}{said_among(meeting)} lost {whom} at {meeting.place}: "
                f"{error}; look at their logs"
            ) from error
        if "closed" in answer:
            raise Closed(errno.ECONNREFUSED, f"there was {answer['closed']}")
        if "refused" in answer:
            raise refused(answer)
        stack.pop_all()  # the connection stays
    table: list[Words] = answer["ranks"]
    keeper = next((words for words in table if words["rank"] == answer["by"]), None)
    if keeper is None:
        connection.close()
        return Met(table, Guest(None, "", 0))
    return Met(table, Guest(connection, name_of(keeper), meeting.until + 2 * GRACE))


def _connect(meeting: Meeting) -> socket.socket:
    """Raises OSError where nobody listens.

    Then the kernel may give that very port to whoever connects, who so connects to himself; and
    nobody else can listen there meanwhile.
    """
    connection = socket.create_connection((meeting.address, meeting.port), timeout=POLITE)
    if connection.getsockname() != connection.getpeername():
        return connection
    at_once = struct.pack("ii", 1, 0)  # the port is free again
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    connection.close()
    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _prove(meeting: Meeting, connection: socket.socket) -> None:
    mine = secrets.token_bytes(NONCE)
    connection.sendall(MAGIC + mine)
    try:
        theirs = take(connection, NONCE + PROOF)
    except TimeoutError as error:
        raise Closed(errno.ETIMEDOUT, "who listens there says nothing") from error
    nonces = mine + theirs[:NONCE]
    if not hmac.compare_digest(theirs[NONCE:], proof(meeting.secret, b"server", nonces)):
        raise AuthError(
            f"who listens at {meeting.address}:{meeting.port} does not know the secret of rank "
            f"{meeting.rank}'s job; give every rank the same FARANDOLE_SECRET_FILE, and every job "
            "a port of its own"
        )
    connection.sendall(proof(meeting.secret, b"client", nonces))


def nobody_there(meeting: Meeting, error: OSError) -> RendezvousError:
    who = f"rank {meeting.rank}{said_among(meeting)}"
    why = error.strerror or error
    if meeting.among:
        return RendezvousError(
            f"{who} found none of the others at {meeting.place}: {why}; start one of these ranks "
            "on the host of MASTER_ADDR, or start them by torchrun"
        )
    whom = "rank 0" if meeting.rank else "the others"
    return RendezvousError(
        f"{who} does not reach {whom} at {meeting.place}: {why}; check MASTER_ADDR and "
        "MASTER_PORT, and look at rank 0's log"
    )
