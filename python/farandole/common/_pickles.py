"""Pickles that ranks send each other. A pickle is code, so none is read that no rank of this job
has made.

Bytes between hosts may be changed on their way. So a pickle travels behind a MAC of it and of what
it is for: HMAC-SHA256 (RFC 2104), by a key that follows from the job's secret. Without a secret
(FARANDOLE_INSECURE=1) it proves nothing.
"""

from __future__ import annotations

import hmac
import pickle
from typing import Any

from farandole import _world
from farandole._core import LinkError
from farandole._ranks import dumps

_MAC = 32  # bytes


def sealed(obj: Any, what: str) -> bytes:
    """The pickle of an object, by cloudpickle where that is installed.

    Args:
        what: the object is for, in the same words on all ranks.
    """
    data = dumps(obj)
    return _mac(data, what) + data


def unsealed(data: bytes, what: str) -> Any:
    """The object.

    Raises:
        LinkError: no rank of this job has made these bytes, or for something else.
    """
    mac, rest = data[:_MAC], data[_MAC:]
    if not hmac.compare_digest(mac, _mac(rest, what)):
        raise LinkError(
            f"{what}: rank {_world.rank()} has got {len(data)} bytes that no rank of this job has "
            "sent\n  advice: something between the hosts changes bytes; look for who may do so"
        )
    return pickle.loads(rest)


def _mac(data: bytes, what: str) -> bytes:
    key = hmac.digest(_world.world().secret(), b"farandole pickles", "sha256")
    return hmac.digest(key, len(what).to_bytes(4, "little") + what.encode() + data, "sha256")
