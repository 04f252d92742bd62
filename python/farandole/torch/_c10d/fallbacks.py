"""Operations that gloo ran instead of the engine: counted, with one warning for each kind."""

from __future__ import annotations

import logging
from collections import Counter

_log = logging.getLogger("farandole")
_counts: Counter[str] = Counter()


def fallbacks() -> dict[str, int]:
    """How often gloo ran an operation of this process' farandole groups, by kind of operation.

    Empty where all of them were farandole's own; docs/torch-distributed.md lists what is not.

    Examples:
        >>> import farandole.torch.distributed
        >>> farandole.torch.distributed.fallbacks()
        {}
    """
    return dict(_counts)


def note_fallback(kind: str) -> None:
    if kind not in _counts:
        _log.warning("%s is not farandole's: gloo runs it (said once)", kind)
    _counts[kind] += 1
