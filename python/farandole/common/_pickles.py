"""Pickles that ranks send each other. A pickle is code, so none is read that no rank of this job
has made.

Bytes between hosts may be changed on their way. So a pickle travels behind a MAC of it and of what
it is for: HMAC-SHA256 (RFC 2104), by a key that follows from the job's secret and is another one in
each world. What it is for says also which one it is of many, so that no old one takes its place: by
its number, or by random numbers of all who read it. Without a secret (FARANDOLE_INSECURE=1) it
proves nothing.
"""

from __future__ import annotations

import hmac
import pickle
from typing import Any

from farandole import _world
from farandole._core import LinkError
from farandole._ranks import dumps

SEAL = 32  # bytes


def sealed(obj: Any, what: str) -> bytes:
    """The pickle of an object, by cloudpickle where that is installed.

    Args:
        what: the object is for, in the same words on all ranks, with its number if there are many.
    """
    return seal(dumps(obj), what)


def seal(pickled: bytes, what: str, fresh: bytes = b"") -> bytes:
    """The same of a pickle. ``fresh``: what makes this one differ from all before it."""
    return _mac(pickled, what, fresh) + pickled


def unsealed(data: bytes, what: str, fresh: bytes = b"") -> Any:
    """The object.

    Raises:
        LinkError: no rank of this job has made these bytes, or for something else.
    """
    mac, rest = data[:SEAL], data[SEAL:]
    if not hmac.compare_digest(mac, _mac(rest, what, fresh)):
        raise LinkError(
            f"{what}: rank {_world.rank()} has got {len(data)} bytes that no rank of this job has "
            "sent\n  advice: something between the hosts changes bytes; look for who may do so"
        )
    return pickle.loads(rest)


def _mac(data: bytes, what: str, fresh: bytes) -> bytes:
    world = f"farandole pickles of {_world.job()}"
    key = hmac.digest(_world.world().secret(), world.encode(), "sha256")
    said = b"".join(len(each).to_bytes(8, "little") + each for each in (what.encode(), fresh))
    return hmac.digest(key, said + data, "sha256")
