"""The global batch: every rank takes its part of the batch that the program of one process has.

A batch of n samples is split into contiguous parts, `share(n, size, rank)`. A rank's mean gradient
weighs `Share.weight(size)`, so that the mean over ranks is the mean over the n samples, also where
n does not divide. farandole.keras.Model does all of this by itself; this is for loops of your own.
No framework is imported here before one of its objects comes.
"""

from __future__ import annotations

from farandole.data._leader import FromRank0
from farandole.data._order import DEFAULT_SEED
from farandole.data._parts import Arrays, Part, part_of
from farandole.data._same import ReadBatches
from farandole.data._share import Share, share
from farandole.data._tensorflow import split_dataset
from farandole.data._torch import split_loader

__all__ = [
    "DEFAULT_SEED",
    "Arrays",
    "FromRank0",
    "Part",
    "ReadBatches",
    "Share",
    "part_of",
    "share",
    "split_dataset",
    "split_loader",
]
