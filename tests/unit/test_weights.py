"""Checksums of parameters, and what is said of ranks whose parameters differ."""

from __future__ import annotations

import math

import numpy as np
import pytest

import farandole as fd
from farandole import InvalidArgument, Mismatch, _core
from farandole.common._weights import compares, period

LENGTHS = [0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 1000, 4099]


def noise(length: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(length).integers(0, 256, length, np.uint8)


def checksum(array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    return _core.checksums([array])[0]


@pytest.mark.parametrize("length", LENGTHS)
def test_every_bit_counts(length: int) -> None:
    data = noise(length)
    whole = checksum(data)
    for byte in {*range(min(length, 130)), *range(max(length - 70, 0), length)}:
        for bit in (0, 3, 7):
            other = data.copy()
            other[byte] ^= 1 << bit
            assert checksum(other) != whole, (byte, bit)


@pytest.mark.parametrize("length", LENGTHS)
def test_it_is_of_the_bits_wherever_they_lie(length: int) -> None:
    data = noise(length)
    for offset in (1, 3, 8):
        moved = np.zeros(length + offset, np.uint8)[offset:]
        moved[:] = data
        assert checksum(moved) == checksum(data)


def test_zeros_of_different_lengths_are_told_apart() -> None:
    assert len(set(_core.checksums([np.zeros(n, np.uint8) for n in LENGTHS]))) == len(LENGTHS)


def test_elements_that_change_places_are_noticed() -> None:
    data = np.arange(200, dtype=np.uint64)
    for distance in (1, 8, 64):
        moved = data.copy()
        moved[[5, 5 + distance]] = moved[[5 + distance, 5]]
        assert _core.checksums([moved]) != _core.checksums([data])


def test_values_count_by_their_bits() -> None:
    """Two zeros are not the same, and a value that is no number is the same as itself."""
    zero, minus, nan = (np.full(3, x, np.float32) for x in (0.0, -0.0, np.nan))
    assert _core.checksums([zero]) != _core.checksums([minus])
    assert _core.checksums([nan]) == _core.checksums([nan.copy()])


def difference(*rows: list[int], step: int = 1, equal_before: int = 0) -> Mismatch | None:
    names = ["first", "second", "third"]
    return _core.weights_error(names, list(enumerate(rows)), step, equal_before, "line()")


def test_equal_ones_are_no_error() -> None:
    assert difference([1, 2, 3], [1, 2, 3]) is None


def test_the_first_that_differs_is_named_with_who_has_what() -> None:
    error = difference([1, 2, 3], [1, 5, 3], [1, 2, 4])
    assert isinstance(error, Mismatch)
    assert (error.tensor, error.field, error.rank) == ("second", "weights", 1)
    assert dict(error.values) == {f"{2:016x}": [0, 2], f"{5:016x}": [1]}
    assert str(error).startswith(
        f"ranks start from different weights: 'second' has checksum {2:016x} on ranks 0, 2; "
        f"{5:016x} on rank 1; 2 of 3 weights differ"
    )
    assert error.advice.startswith("add line() before the first step")


def test_of_two_ranks_nobody_is_to_blame() -> None:
    error = difference([1, 2, 3], [1, 2, 4])
    assert error is not None
    assert error.rank is None
    assert "1 of 3 weights differs" in str(error)


def test_what_comes_apart_later_is_said_with_its_steps() -> None:
    error = difference([1, 2, 3], [1, 2, 4], step=21, equal_before=11)
    assert error is not None
    assert "the same before step 11, and differ before step 21: 'third'" in str(error)
    assert "line()" in error.advice


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert period() == 2000
    for text, steps in [("first", float("inf")), ("off", None), ("1", 1), ("250", 250)]:
        monkeypatch.setenv("FARANDOLE_CHECK_WEIGHTS", text)
        assert period() == steps
    for wrong in ["", "0", "-1", "1.5", "on", "05", "1e3", "99999999999"]:
        monkeypatch.setenv("FARANDOLE_CHECK_WEIGHTS", wrong)
        with pytest.raises(InvalidArgument, match="one of first off, or a number of at least 1"):
            _core.settings()


@pytest.mark.parametrize("every", [1, 2, 3, 7, 49, 50, 2000, math.inf])
def test_reducers_compare_in_the_steps_that_the_python_rule_names(every: float) -> None:
    fd.init()
    gradient = np.ones(1, np.float32)
    rows = [("p", 1, "float32")]
    reducer = _core.Reducer(fd.world(), rows, bucket_bytes=4, first_bucket_bytes=4)
    reducer.watch_weights(["p"], every, "line()")
    last = 50 if math.isinf(every) else max(50, int(every) + 2)
    due = []
    for step in range(1, last + 1):
        if reducer.weights_due:
            due.append(step)
            reducer.show_weights([1])
        reducer.mark_ready(0, gradient.ctypes.data)
        reducer.wait()
    fd.shutdown()
    assert due == [step for step in range(1, last + 1) if compares(step - 1, every)]
    assert due[:2] == ([1] if math.isinf(every) else [1, 2])
