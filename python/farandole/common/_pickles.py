"""Objects that ranks send each other, as bytes. A pickle is code, so none is made where plain
values do (_typed.py), and none is read that no rank of this job has made.

Bytes between hosts may be changed on their way. So an object travels behind a MAC of it and of what
it is for: HMAC-SHA256 (RFC 2104), by a key that follows from the job's secret and is another one in
each world. What it is for says also which one it is of many, so that no old one takes its place: by
its number, or by random numbers of all who read it. Without a secret (FARANDOLE_INSECURE=1) it
proves nothing; FARANDOLE_PICKLE=off then still keeps ranks from running what others have made up.
"""

from __future__ import annotations

import hmac
import pickle
from typing import Any

from farandole import _world
from farandole._core import InvalidArgument, LinkError
from farandole._limits import setting
from farandole._ranks import dumps
from farandole.common import _typed

SEAL = 32  # bytes
_TYPED, _PICKLE = b"T", b"P"


def packed(obj: Any) -> bytes:
    """The object as bytes: typed, or else its pickle, by cloudpickle where that is installed.

    Raises:
        InvalidArgument: it needs a pickle, and FARANDOLE_PICKLE=off.
        Exception: it cannot be pickled.
    """
    try:
        return _typed.written(obj, _TYPED)
    except _typed.Untyped as reason:
        if _refuses_pickles():
            raise InvalidArgument(
                f"{reason} is sent as a pickle only, and FARANDOLE_PICKLE=off allows none\n"
                "  advice: send numbers, text, bytes, arrays of numpy and dense tensors of "
                "the host without a gradient, in lists, tuples and dicts"
            ) from None
    return _PICKLE + dumps(obj)


def sealed(obj: Any, what: str) -> bytes:
    """The same with its MAC.

    Args:
        what: the object is for, in the same words on all ranks, with its number if there are many.
    """
    return seal(packed(obj), what)


def seal(data: bytes, what: str, fresh: bytes = b"") -> bytes:
    """The same of a packed object. ``fresh``: what makes this one differ from all before it."""
    return _mac(data, what, fresh) + data


def unsealed(data: bytes, what: str, fresh: bytes = b"") -> Any:
    """The object.

    Raises:
        LinkError: no rank of this job has made these bytes, or for something else; or they cannot
            be read.
    """
    whole = memoryview(data)
    mac, rest = whole[:SEAL], whole[SEAL:]
    is_ours = hmac.compare_digest(mac, _mac(rest, what, fresh))
    kind, content = bytes(rest[:1]), rest[1:]
    if is_ours and kind == _TYPED:
        try:
            return _typed.read(content)
        except ValueError as error:
            raise LinkError(
                f"{what}: rank {_world.rank()} cannot read the {len(data)} bytes that it has got: "
                f"{error}"
            ) from None
    if not is_ours or kind != _PICKLE or _refuses_pickles():
        raise LinkError(
            f"{what}: rank {_world.rank()} has got {len(data)} bytes that no rank of this job has "
            "sent\n  advice: something between the hosts changes bytes; look for who may do so"
        )
    return pickle.loads(content)


def _refuses_pickles() -> bool:
    return setting("FARANDOLE_PICKLE") == "off"


def _mac(data: bytes | memoryview, what: str, fresh: bytes) -> bytes:
    world = f"farandole pickles of {_world.job()}"
    key = hmac.digest(_world.world().secret(), world.encode(), "sha256")
    said = b"".join(len(each).to_bytes(8, "little") + each for each in (what.encode(), fresh))
    found = hmac.new(key, said, "sha256")
    found.update(data)
    return found.digest()
