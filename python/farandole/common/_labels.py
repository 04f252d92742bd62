"""What variables of Keras are called where all ranks must call them the same."""

from __future__ import annotations

import re


def without_numbers(path: str) -> str:
    """Without those that Keras gives to layers, which differ between ranks as soon as one of them
    has made another model before.

    Example:
        >>> without_numbers("sequential_2/dense_11/kernel")
        'sequential/dense/kernel'
    """
    return re.sub(r"_\d+(?=/|$)", "", path)
