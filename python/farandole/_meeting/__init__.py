"""How ranks find each other: everybody's words, for everybody; on one host also descriptors.

The first rank listens where all look for it, by the job's name on its host or at MASTER_PORT
between hosts. Each other rank connects, both prove that they know the job's secret, and it hands
in its words. The receiving rank refuses all, with the reason, or gives all the table of words. A
line stays until all have what they need. Under torchrun, which holds MASTER_PORT, its own store
carries the same words; so does a communicator of mpi4py's (_mpi_meeting.py).

    meeting.py      which ranks, until when
    members.py      what a rank says of itself, and what all must have alike
    places.py       where ranks look for the one that receives
    connection.py   words and descriptors on a connection
    reception.py    the first rank's part; visitor.py: a client that is not known yet
    guest.py        the others'
    line.py         how a rank reports that it cannot reach another one, once all have met here
    errors.py       how they tell each other what is wrong
    here.py         the ranks of a host, and what they get
    sealed.py       words with a seal, where their carrier asks nobody who they are
    rounds.py       the words of all ranks in a store of torch.distributed's
    torch_store.py  the same as above in such a store
"""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from functools import partial

from farandole._core import AuthError, RendezvousError
from farandole._meeting.errors import Words, could_not_meet, error_in, name_of, told_of
from farandole._meeting.guest import Lost, be_guest, nobody_there
from farandole._meeting.line import Line, told
from farandole._meeting.meeting import FAREWELL, GRACE, Check, Meeting, Met, Reminder
from farandole._meeting.members import alike, objection, who
from farandole._meeting.places import JobsName, MasterPort, Place
from farandole._meeting.reception import Reception, Share
from farandole._meeting.rounds import KeyValueStore, meet_in
from farandole._meeting.torch_store import exchange_in, torchruns

__all__ = [
    "FAREWELL",
    "GRACE",
    "JobsName",
    "KeyValueStore",
    "Line",
    "MasterPort",
    "Meeting",
    "Met",
    "alike",
    "could_not_meet",
    "error_in",
    "exchange",
    "exchange_in",
    "meet_in",
    "name_of",
    "objection",
    "told",
    "told_of",
    "torchruns",
    "who",
]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.05  # seconds between two looks whether somebody receives


def _nothing(_: list[list[int]]) -> list[int]:
    return []


def exchange(
    meeting: Meeting, place: Place, mine: Words, check: Check,
    descriptors: Sequence[int] = (), share: Share = _nothing,
) -> Met:  # fmt: skip
    """Every rank's words, by rank. The receiving rank refuses all if ``check`` finds an error.

    Args:
        descriptors: this rank's, for the receiving rank.
        share: makes the descriptors that all ranks get from those of each.

    Raises:
        RendezvousError: ranks are missing at the deadline, or two are the same.
        Error: what ``check`` says, or what a rank lacks.
        AuthError: the other end does not know the secret.
    """
    mine = mine | {"among": meeting.among}
    reminder = Reminder(meeting)
    pause = _FIRST_PAUSE
    while True:
        meeting.look()
        taken: OSError | None = None
        if meeting.receives():
            try:
                listeners = place.listen()
            except OSError as error:
                taken = _why_taken(meeting, place, error)
            else:
                reception = Reception(meeting, place, mine, check, listeners)
                return reception.receive_all(descriptors, share)
        try:
            return be_guest(meeting, place, mine, descriptors)
        except OSError as error:  # who receives may come later
            why = _no_place(meeting, place, taken) if taken else nobody_there(meeting, place, error)
            if time.monotonic() >= meeting.until:
                raise why from error
            reminder.warn_in_time(partial(str, why))
        except (Lost, AuthError) as error:
            if isinstance(error, Lost) and meeting.among and time.monotonic() < meeting.until:
                continue  # who received was of another world, and has left the place
            if taken is not None:
                raise _no_place(meeting, place, taken) from error
            if isinstance(error, AuthError):
                raise
            raise RendezvousError(str(error)) from error
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _why_taken(meeting: Meeting, place: Place, error: OSError) -> OSError | None:
    """An error to raise later, as the owner may leave; None if the place may be on another host.

    Raises:
        RendezvousError: this rank cannot have it at all.
    """
    if meeting.among:
        return None
    if error.errno != errno.EADDRINUSE or not place.others_may_come:
        raise _no_place(meeting, place, error) from error
    return error


def _no_place(meeting: Meeting, place: Place, error: OSError) -> RendezvousError:
    return RendezvousError(
        f"rank {meeting.rank} cannot listen {place}: {error.strerror}; {place.advice_to_first}"
    )
