"""Numbers from samples. Everything here takes values and returns values."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import median as median
from typing import NamedTuple


class Summary(NamedTuple):
    """The least, the median and the 99th percentile of a sample of times."""

    least: float
    median: float
    p99: float


class Interval(NamedTuple):
    """A median and where it lies, with at least `confidence`."""

    median: float
    low: float
    high: float
    confidence: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that at least `percent` of the values do not exceed: always a measured one.

    With fewer than 100 values, p99 is the greatest.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"no {percent}th percentile of {len(values)} values")
    index = math.ceil(len(values) * percent / 100) - 1
    return sorted(values)[max(0, index)]


def summarize(values: Sequence[float]) -> Summary:
    return Summary(min(values), median(values), percentile(values, 99))


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The sample's median, and an interval that holds the true one with `confidence`.

    The interval lies between two of the values. Each value falls below the true median with
    probability one half, whatever the distribution, so how often the k-th smallest exceeds it
    follows from the binomial distribution alone. With too few values for `confidence` (five give
    0.94) it is the whole range, and `confidence` in the result tells what that is worth.
    """
    ordered = sorted(values)
    n = len(ordered)
    middle = median(ordered)
    cut, outside = 0, 2.0 * 0.5**n  # (P of all values below) + (P of all above)
    while cut + 1 < n // 2:
        further = outside + 2.0 * math.comb(n, cut + 1) * 0.5**n
        if further > 1 - confidence:
            break
        cut, outside = cut + 1, further
    return Interval(middle, ordered[cut], ordered[n - 1 - cut], max(0.0, 1 - outside))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Pairwise: block by block, so that what slows a whole block cancels."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def ratio_to_best(
    ours: Sequence[float],
    others: Sequence[Sequence[float]],
    confidence: float = 0.95,
    resamples: int = 1000,
) -> Interval:
    """Our median over the least of the others' medians, of values that belong together by index.

    The interval is the percentile bootstrap's: whole rounds are drawn again, ours and the others'
    of a round together, and in each drawing the best of the others is chosen anew. So it holds
    both the noise of a round and the doubt which of the others is the best. The drawings are the
    same in every call.
    """
    rounds = len(ours)
    if rounds == 0 or not others or any(len(other) != rounds for other in others):
        raise ValueError("a ratio needs rounds, and a value of everybody in each")

    def ratio(drawn: Sequence[int]) -> float:
        best = min(median([other[i] for i in drawn]) for other in others)
        return median([ours[i] for i in drawn]) / best

    draw = random.Random(rounds)
    ratios = sorted(ratio(draw.choices(range(rounds), k=rounds)) for _ in range(resamples))
    tail = (1 - confidence) / 2
    low, high = (percentile(ratios, 100 * part) for part in (tail, 1 - tail))
    return Interval(ratio(range(rounds)), low, high, confidence)


def format_ratio(ratio: float, low: float, high: float) -> str:
    """'0.41 (0.39 to 0.44)'; where noise covers the difference, that is said."""
    within = f"({low:.2f} to {high:.2f})"
    return f"no difference {within}" if low <= 1 <= high else f"{ratio:.2f} {within}"


def gigabytes_per_second(bytes_moved: float, nanoseconds: float) -> float:
    """10⁹ bytes, as nccl-tests and network vendors count; a byte a nanosecond."""
    return bytes_moved / nanoseconds if nanoseconds > 0 else 0.0


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """'4', '64K', '1MiB' in bytes; units are powers of 1024. ValueError says what is wrong."""
    digits = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = digits[-1:] if digits[-1:] in _UNITS else ""
    number = digits.removesuffix(unit)
    if not number.isdecimal():
        raise ValueError(f"'{text}' is not a size; sizes look like 4, 64K, 1M, 2G")
    return int(number) * _UNITS[unit]


def format_size(count: int) -> str:
    """The shortest exact one: 1048576 is '1 MiB', 1000 is '1000 B'."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count and count % scale == 0:
            return f"{count // scale} {unit}"
    return f"{count} B"


def format_microseconds(nanoseconds: float) -> str:
    """Three digits: '0.82', '14.5', '373'."""
    us = nanoseconds / 1000
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"
