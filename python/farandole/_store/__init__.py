"""What ranks of several hosts tell each other first: everybody's words, for everybody.

Rank 0 listens at MASTER_ADDR and MASTER_PORT. Each other rank connects, both prove that they know
the job's secret, and then it hands in its words and gets those of all ranks. Under torchrun, which
holds that port, its own store carries the same words.

    meeting.py      which ranks, where, until when
    talk.py         words on a connection
    reception.py    rank 0's part
    guest.py        the others'
    line.py         what a rank says that cannot reach another one, once all have met here
    rounds.py       the words of all ranks in a store of torch.distributed's
    torch_store.py  the same as above in such a store
"""

from __future__ import annotations

import time

from farandole._core import AuthError, RendezvousError
from farandole._store.guest import Lost, be_guest, nobody_there
from farandole._store.line import Line, told
from farandole._store.meeting import (
    FAREWELL,
    GRACE,
    Check,
    Meeting,
    Met,
    Reminder,
    Words,
    name_of,
    refusal,
    refused,
)
from farandole._store.reception import Reception, listen, no_place
from farandole._store.rounds import KeyValueStore, meet_in
from farandole._store.torch_store import exchange_in, torchruns

__all__ = [
    "FAREWELL",
    "GRACE",
    "KeyValueStore",
    "Line",
    "Meeting",
    "Met",
    "exchange",
    "exchange_in",
    "meet_in",
    "name_of",
    "refusal",
    "refused",
    "told",
    "torchruns",
]

_RETRY = 0.05


def exchange(meeting: Meeting, mine: Words, check: Check) -> Met:
    """Every rank's words, by rank. Rank 0 refuses all of them for what ``check`` says.

    Raises:
        RendezvousError: ranks are missing at the deadline, or two are the same.
        Error: what ``check`` says.
        AuthError: the other end does not know the secret.
    """
    reminder = Reminder(meeting)
    while True:
        meeting.look()
        taken = None
        if meeting.rank == 0 or meeting.among:
            listeners, taken = listen(meeting)
            if listeners:
                return Reception(meeting, mine, check, listeners).receive_all()
        try:
            return be_guest(meeting, mine)
        except OSError as error:  # who receives may come later
            why = no_place(meeting, taken) if taken else nobody_there(meeting, error)
            if time.monotonic() >= meeting.until:
                raise why from error
            reminder.warn_in_time(str(why))
        except (Lost, AuthError) as error:
            if taken is not None:
                raise no_place(meeting, taken) from error
            if isinstance(error, AuthError):
                raise
            raise RendezvousError(str(error)) from error
        time.sleep(_RETRY)
