"""The part of all other ranks: they connect to the one that receives."""

from __future__ import annotations

import errno
import hmac
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress

from farandole._core import Error, RendezvousError
from farandole._meeting.connection import (
    LOOK,
    MAGIC,
    NONCE,
    POLITE,
    PROOF,
    Connection,
    lacks_descriptors,
    proof,
    wait_for,
)
from farandole._meeting.errors import Words, error_in
from farandole._meeting.line import OnConnections
from farandole._meeting.meeting import GRACE, Meeting, Met
from farandole._meeting.members import checked
from farandole._meeting.places import Place
from farandole._meeting.translated import seen_at


class Closed(OSError):
    """The rank there has met its own world and receives no more; or nobody receives there."""


class Lost(Exception):
    """The receiving rank stopped halfway, or is none of this job's."""


def be_guest(meeting: Meeting, place: Place, mine: Words, descriptors: Sequence[int]) -> Met:
    """Meets the others at the receiving rank. Raises OSError where nobody receives."""
    connection = place.dial()
    try:
        there = connection.address()
        _prove(meeting, place, connection)
        with suppress(ConnectionError):  # there may be an answer
            connection.send(mine, descriptors)
        answer = _answer(meeting, place, connection, mine)
        if "closed" in answer:
            raise Closed(errno.ECONNREFUSED, f"there was {answer['closed']}")
        if "refused" in answer:
            raise error_in(answer["refused"])
    except BaseException:
        connection.close()
        raise
    table: list[Words] = answer["ranks"]
    given = connection.take_descriptors()
    keeper = next((words for words in table if words["rank"] == answer["by"]), None)
    if keeper is None:
        connection.close()
        return Met(table, OnConnections(mine, {}, [], 0))
    same_host = [words.get("identity") == keeper.get("identity") for words in table]
    table = [seen_at(w, there) if same else w for w, same in zip(table, same_host, strict=True)]
    keepers = {answer["by"]: connection}
    return Met(table, OnConnections(mine, keepers, [keeper], meeting.until + 2 * GRACE), given)


def _prove(meeting: Meeting, place: Place, connection: Connection) -> None:
    """Both ends prove that they know the job's secret."""
    until = time.monotonic() + POLITE
    mine = secrets.token_bytes(NONCE)
    who = f"rank {meeting.rank}"
    try:
        connection.send_bytes(MAGIC + mine, until)
        _wait_for_greeting(meeting, place, connection)
        heard = b""
        while (missing := len(MAGIC) + NONCE + PROOF - len(heard)) > 0:
            heard += connection.take_some(missing, until + POLITE)
            if not heard.startswith(MAGIC[: len(heard)]):
                raise place.stranger(who, connection, "does not say farandole's first words")
        theirs, proved = heard[len(MAGIC) : -PROOF], heard[-PROOF:]
        nonces = mine + theirs
        if not hmac.compare_digest(proved, proof(meeting.secret, b"server", nonces)):
            raise place.stranger(who, connection, "does not prove that it is")
        connection.send_bytes(proof(meeting.secret, b"client", nonces), until)
        connection.seal(meeting.secret, b"client", b"server", nonces)
    except OSError as error:
        if isinstance(error, Closed | Error):
            raise
        raise Closed(error.errno or errno.ECONNRESET, error.strerror or str(error)) from error


def _wait_for_greeting(meeting: Meeting, place: Place, connection: Connection) -> None:
    until = time.monotonic() + POLITE
    while not connection.has_come(LOOK):
        meeting.look()
        if time.monotonic() >= until and not place.is_patient(connection):
            if place.others_may_come:
                raise Closed(errno.ETIMEDOUT, "who listens there says nothing")
            raise place.stranger(f"rank {meeting.rank}", connection, "says nothing")
        if time.monotonic() >= meeting.until:
            raise Closed(errno.ETIMEDOUT, "who listens there stands still")


def _answer(meeting: Meeting, place: Place, connection: Connection, mine: Words) -> Words:
    """The receiving rank's answer. Raises Lost where none comes."""
    try:
        wait_for(connection, meeting.until + GRACE, meeting.look)
        answer = connection.hear(time.monotonic() + POLITE)
        if not isinstance(answer, dict) or not {"closed", "refused", "by"} & answer.keys():
            raise ValueError("it gave no answer")
        answer["ranks"] = [checked(words) for words in answer.get("ranks", [])]
        if "by" in answer and not answer["ranks"]:
            raise ValueError("it handed out no ranks")
    except (OSError, ValueError, TypeError) as error:
        if lacks_descriptors(error):
            raise OnConnections(mine, {0: connection}, [], 0).fail(error) from error
        raise Lost(
            f"rank {meeting.rank}{meeting.said_among()} lost {meeting.others()} {place}: {error}; "
            "look at their logs"
        ) from error
    return answer


def nobody_there(meeting: Meeting, place: Place, error: OSError) -> RendezvousError:
    who = f"rank {meeting.rank}{meeting.said_among()}"
    why = error.strerror or error
    if meeting.among:
        return RendezvousError(
            f"{who} found none of the others {place}: {why}; start one of these ranks "
            "on the host of MASTER_ADDR, or start them by torchrun"
        )
    return RendezvousError(
        f"{who} does not reach {meeting.others()} {place}: {why}; {place.advice}"
    )
