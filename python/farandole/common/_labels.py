"""Names of Keras' variables that are the same on all ranks."""

from __future__ import annotations

import re


def without_numbers(path: str) -> str:
    """A path without the numbers that Keras gives to layers. They differ between ranks as soon as
    one of them has made another model before.

    Examples:
        >>> without_numbers("sequential_2/dense_11/kernel")
        'sequential/dense/kernel'

    An optimizer's variable bears in its last part the whole path of what it goes with.

        >>> without_numbers("adam/sequential_2_dense_11_kernel_momentum")
        'adam/sequential_dense_kernel_momentum'
        >>> without_numbers("block_2_norm/gamma")  # as its user calls it
        'block_2_norm/gamma'
    """
    return re.sub(r"_\d+(?=/|$|_[^/]*$)", "", path)
