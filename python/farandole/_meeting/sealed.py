"""Words with a seal, for carriers that ask nobody who they are: a store of torch.distributed's, a
communicator of mpi4py's.

The seal is HMAC-SHA256, by the job's secret, of the words and of what they are for. That names who
says them and a number that was drawn for this meeting, so words of another rank, of another place
or of the past do not fit. Without a secret a seal proves nothing: then anybody can make one.
"""

from __future__ import annotations

import hmac
import json
from typing import Any

from farandole import _json
from farandole._meeting.errors import error_in

_ADVICE = (
    "give all ranks one FARANDOLE_SECRET_FILE, or none; where they have it, somebody has changed "
    "these words, or repeats old ones"
)
_DIGITS = 64


def sealed(secret: bytes, purpose: str, words: Any) -> str:
    text = json.dumps(words)
    return _seal(secret, purpose, text.encode()).decode() + text


def opened(secret: bytes, purpose: str, data: bytes, rank: int | None) -> Any:
    """The words of that rank, or of any.

    Raises:
        AuthError: they are not as it has said them, for this purpose.
        ValueError: they are no words.
    """
    seal, text = data[:_DIGITS], data[_DIGITS:]
    if not hmac.compare_digest(seal, _seal(secret, purpose, text)):
        who = "a rank" if rank is None else f"rank {rank}"
        verdict = f"words of {who} have no seal of this job's secret"
        raise error_in({"kind": "AuthError", "verdict": verdict, "advice": _ADVICE, "rank": rank})
    return _json.read(text)


def _seal(secret: bytes, purpose: str, text: bytes) -> bytes:
    said = b"farandole says " + purpose.encode() + b"\0" + text
    return hmac.digest(secret, said, "sha256").hex().encode()
