"""The folds against numpy, and every instruction set against the baseline, bit for bit.

The reference knows nothing of the native code: halves are rounded in integers or by numpy, and the
canonical tree is folded one node at a time.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from core_testing import testing
from farandole import _core
from grid import combinations

ISAS = _core.instruction_sets()

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
HALVES = ["float16", "bfloat16"]
FLOATS = [*HALVES, "float32", "float64"]
AHEAD = ("operands", "ownership", "nothing")
DTYPES = [*FLOATS, *INTEGERS, "bool"]
OPS = ["sum", "mean", "min", "max", "product"]
PAIRS = [(dtype, op) for dtype in DTYPES for op in OPS if (dtype, op) != ("bool", "mean")]

# Array of bits, as they lie in memory.
Bits = np.ndarray[Any, np.dtype[Any]]

# mantissa bits, bits of the canonical NaN, of infinity, of the sign
FORMATS: dict[str, tuple[Any, int, int, int, int]] = {
    "float16": (np.uint16, 10, 0x7E00, 0x7C00, 0x8000),
    "bfloat16": (np.uint16, 7, 0x7FC0, 0x7F80, 0x8000),
    "float32": (np.uint32, 23, 0x7FC00000, 0x7F800000, 0x80000000),
    "float64": (np.uint64, 52, 0x7FF8 << 48, 0x7FF0 << 48, 1 << 63),
}
COUNTS = [0, 1, 2, 7, 8, *range(15, 66), 1000]


def seeded(*what: object) -> np.random.Generator:
    seed = zlib.crc32(repr(what).encode())
    print(f"seed {seed} from {what}")
    return np.random.default_rng(seed)


# The reference.


def bits_dtype(dtype: str) -> Any:
    if dtype in FORMATS:
        return FORMATS[dtype][0]
    return np.uint8 if dtype == "bool" else np.dtype(dtype).type


def widened(bits: Bits, dtype: str) -> Bits:
    """The numbers in the accumulate type."""
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype in FORMATS:
        return bits.view(dtype)
    return bits


def rounded(values: Bits, dtype: str) -> Bits:
    """The bits of numbers of the accumulate type; NaN is canonical."""
    if dtype not in FORMATS:
        return values
    kind, _, nan, _, _ = FORMATS[dtype]
    if dtype == "float16":
        bits = values.astype(np.float16).view(np.uint16)
    elif dtype == "bfloat16":
        wide = values.view(np.uint32).astype(np.uint64)
        bits = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    else:
        bits = values.view(kind)
    return np.where(np.isnan(values), kind(nan), bits)


def ordered(values: Bits) -> Bits:
    """Integers in the order of the numbers, negative zero below positive zero."""
    if values.dtype.kind != "f":
        return values
    signed = values.view(f"i{values.itemsize}")
    return np.where(signed < 0, signed ^ np.iinfo(signed.dtype).max, signed)


def reference_fold(lower: Bits, upper: Bits, dtype: str, op: str) -> Bits:
    if dtype == "bool":
        a, b = lower != 0, upper != 0
        return np.asarray(a | b if op in ("sum", "max") else a & b, np.uint8)
    a, b = widened(lower, dtype), widened(upper, dtype)
    with np.errstate(all="ignore"):
        if op in ("sum", "mean"):
            result = a + b
        elif op == "product":
            result = a * b
        else:
            first = ordered(a) < ordered(b) if op == "min" else ordered(a) > ordered(b)
            result = np.where(first, a, b)
            if dtype in FORMATS:
                result = np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), result)
        return rounded(result.astype(a.dtype), dtype)


def reference_scale(bits: Bits, dtype: str, factor: float, divide: int = 1) -> Bits:
    if factor == 1 and divide == 1:
        return bits
    if dtype in FORMATS:
        values = widened(bits, dtype)
        with np.errstate(all="ignore"):
            return rounded(values * values.dtype.type(factor), dtype)
    limits = np.iinfo(dtype)
    result = []
    for value in bits.tolist():
        if factor != 1:
            scaled = float(value) * factor
            value = int(min(max(scaled, limits.min), limits.max))
            value = min(value, limits.max)  # 2^64 - 1 is no double
        result.append(abs(value) // divide * (-1 if value < 0 else 1))
    return np.array(result, bits.dtype)


def reference_tree(leaves: list[Bits], dtype: str, op: str) -> Bits:
    """Split at the largest power of two below the number of leaves."""
    if len(leaves) == 1:
        return leaves[0]
    middle = 1
    while middle * 2 < len(leaves):
        middle *= 2
    lower, upper = leaves[:middle], leaves[middle:]
    return reference_fold(
        reference_tree(lower, dtype, op), reference_tree(upper, dtype, op), dtype, op
    )


def reference_all(leaves: list[Bits], dtype: str, op: str, pre: float, post: float) -> Bits:
    divide = 1
    if op == "mean" and dtype in FORMATS:
        post *= 1 / len(leaves)
    elif op == "mean":
        divide = len(leaves)
    total = reference_tree([reference_scale(leaf, dtype, pre) for leaf in leaves], dtype, op)
    return reference_scale(total, dtype, post, divide)


# Inputs.


def random_bits(rng: np.random.Generator, dtype: str, count: int) -> Bits:
    """Any bits at all: NaNs, infinities and subnormals come with floats of all sizes."""
    kind = np.dtype(bits_dtype(dtype))
    if dtype == "bool":
        return rng.integers(0, 3, count, dtype=np.uint8)
    return np.frombuffer(rng.bytes(count * kind.itemsize), kind)


def near_one(rng: np.random.Generator, dtype: str, count: int) -> Bits:
    """Numbers whose sums round: where a wrong order or a missing rounding shows."""
    if dtype not in FORMATS:
        return random_bits(rng, dtype, count)
    wide = np.float64 if dtype == "float64" else np.float32
    return rounded(rng.standard_normal(count).astype(wide), dtype)


def specials(dtype: str) -> Bits:
    kind, mantissa, nan, infinity, sign = FORMATS[dtype]
    one_unit = 1 << mantissa
    one = (infinity >> mantissa >> 1) << mantissa
    positive = [
        *(0, 1, 2, 3, one_unit - 1, one_unit, one_unit + 1),  # zero, subnormal, smallest normal
        *(one - one_unit, one - 1, one, one + 1, one + one_unit),
        *(infinity - one_unit, infinity - 1, infinity),
        *(infinity + 1, infinity + one_unit - 1, nan, nan + 5),  # signalling and quiet NaN
    ]
    return np.array([p | s for p in positive for s in (0, sign)], kind)


def every_half() -> Bits:
    return np.arange(1 << 16, dtype=np.uint16)


# Calls.


def fold(lower: Bits, upper: Bits, dtype: str, op: str, isa: str, **options: Any) -> Bits:
    result = testing.fold(dtype, op, lower, upper, isa, **options)
    return np.frombuffer(result, bits_dtype(dtype))


def fold_all(leaves: list[Bits], dtype: str, op: str, **options: Any) -> Bits:
    return np.frombuffer(testing.fold_canonical(dtype, op, leaves, **options), bits_dtype(dtype))


def assert_same_bits(got: Bits, expected: Bits, *operands: Bits) -> None:
    assert got.dtype == expected.dtype
    wrong = np.flatnonzero(got != expected)
    if wrong.size:
        first = wrong[0]
        shown = [f"{int(x[first]):#x}" for x in (*operands, expected, got)]
        pytest.fail(f"{wrong.size} of {got.size} differ; operands…, expected, got: {shown}")


@contextlib.contextmanager
def subnormals_flushed() -> Iterator[None]:
    if not testing.flush_to_zero(True):
        pytest.skip("this processor's flush-to-zero mode is unknown here")
    try:
        yield
    finally:
        testing.flush_to_zero(False)


# One fold.


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_a_fold_is_numpys_for_random_bits_and_every_count(dtype: str, op: str, isa: str) -> None:
    rng = seeded(dtype, op)
    for count in COUNTS:
        lower, upper = random_bits(rng, dtype, count), random_bits(rng, dtype, count)
        expected = reference_fold(lower, upper, dtype, op)
        assert_same_bits(fold(lower, upper, dtype, op, isa), expected, lower, upper)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_meets_every_special(dtype: str, op: str, isa: str) -> None:
    rng = seeded(dtype, op, "halves")
    every = every_half()
    for other in [*specials(dtype), *rng.integers(0, 1 << 16, 8)]:
        others = np.full_like(every, other)
        for lower, upper in ((every, others), (others, every)):
            expected = reference_fold(lower, upper, dtype, op)
            assert_same_bits(fold(lower, upper, dtype, op, isa), expected, lower, upper)
    for _ in range(4):
        lower, upper = every, rng.permutation(every)
        expected = reference_fold(lower, upper, dtype, op)
        assert_same_bits(fold(lower, upper, dtype, op, isa), expected, lower, upper)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_special_meets_every_special(dtype: str, op: str, isa: str) -> None:
    special = specials(dtype)
    lower, upper = np.repeat(special, special.size), np.tile(special, special.size)
    expected = reference_fold(lower, upper, dtype, op)
    assert_same_bits(fold(lower, upper, dtype, op, isa), expected, lower, upper)
    with subnormals_flushed():
        flushed = fold(lower, upper, dtype, op, isa)
    assert_same_bits(flushed, expected, lower, upper)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_subnormals_survive_a_caller_who_flushes_them(dtype: str, isa: str) -> None:
    kind, mantissa, _, _, sign = FORMATS[dtype]
    rng = seeded(dtype, "subnormal")
    lower = rng.integers(1, 1 << mantissa, 999).astype(kind)
    upper = rng.integers(1, 1 << mantissa, 999).astype(kind) | kind(sign)
    expected = reference_fold(lower, upper, dtype, "sum")
    assert np.count_nonzero(expected & kind(sign - 1)) > 900
    with subnormals_flushed():
        got = fold(lower, upper, dtype, "sum", isa)
    assert_same_bits(got, expected, lower, upper)


def test_the_callers_mode_is_restored() -> None:
    tiny = np.full(4, 2, np.uint32)
    with subnormals_flushed():
        fold(tiny, tiny, "float32", "sum", ISAS[-1])
        flushed = tiny.view(np.float32) * np.float32(1)
    assert not flushed.any()
    assert (tiny.view(np.float32) * np.float32(1)).all()


@pytest.mark.parametrize(
    ("isa", "dtype", "op"),
    combinations(ISAS, DTYPES, OPS, fits=lambda _, dtype, op: (dtype, op) in PAIRS),
)
def test_any_alignment_and_an_output_that_is_an_input(dtype: str, op: str, isa: str) -> None:
    rng = seeded(dtype, op, "alias")
    for count in (1, 17, 65, 1000, 9001):
        lower, upper = random_bits(rng, dtype, count), random_bits(rng, dtype, count)
        expected = reference_fold(lower, upper, dtype, op)
        for out in ("apart", "lower", "upper"):
            for misaligned in (0, 1, 3, 8):
                got = fold(lower, upper, dtype, op, isa, out=out, misaligned=misaligned)
                assert_same_bits(got, expected, lower, upper)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_the_last_fold_of_a_sum_is_a_fold_and_a_scale(dtype: str, isa: str) -> None:
    rng = seeded(dtype, "last fold")
    operands = []
    if dtype in FLOATS:
        special = specials(dtype)
        operands.append((np.repeat(special, special.size), np.tile(special, special.size)))
    for count in (*COUNTS, 9001):
        operands.append((random_bits(rng, dtype, count), random_bits(rng, dtype, count)))
        operands.append((near_one(rng, dtype, count), near_one(rng, dtype, count)))
    for lower, upper in operands:
        total = reference_fold(lower, upper, dtype, "sum")
        for factor in (None, 0.5, 1 / 3, -1e30) if dtype in FLOATS else (None,):
            expected = total if factor is None else reference_scale(total, dtype, factor)
            for outputs, ahead in ((1, "operands"), *((2, ahead) for ahead in AHEAD)):
                got = testing.sum(
                    dtype,
                    lower,
                    upper,
                    isa,
                    factor=factor,
                    outputs=outputs,
                    ahead=ahead,
                    misaligned=outputs,
                )
                assert_same_bits(np.frombuffer(got, bits_dtype(dtype)), expected, lower, upper)


def test_a_boolean_is_whatever_is_not_zero() -> None:
    lower, upper = np.array([0, 0, 2, 0x80], np.uint8), np.array([0, 4, 0, 1], np.uint8)
    for isa in ISAS:
        assert fold(lower, upper, "bool", "sum", isa).tolist() == [0, 1, 1, 1]
        assert fold(lower, upper, "bool", "max", isa).tolist() == [0, 1, 1, 1]
        assert fold(lower, upper, "bool", "product", isa).tolist() == [0, 0, 0, 1]
        assert fold(lower, upper, "bool", "min", isa).tolist() == [0, 0, 0, 1]
        with pytest.raises(_core.Error, match="no meaning"):
            fold(lower, upper, "bool", "mean", isa)


def test_there_is_a_baseline_and_an_unknown_instruction_set_is_refused() -> None:
    assert ISAS[0] == "baseline"
    with pytest.raises(_core.Error, match="no instruction set"):
        fold(np.zeros(1, np.uint32), np.zeros(1, np.uint32), "float32", "sum", "abacus")


# Scales and casts.


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_scale_is_one_multiplication_in_the_accumulate_type(dtype: str) -> None:
    rng = seeded(dtype, "scale")
    bits = np.concatenate([specials(dtype), random_bits(rng, dtype, 3001)])
    if dtype in HALVES:
        bits = every_half()
    for factor in (0.0, -0.0, 0.1, 1 / 3, -2.0, 1e-30, 1e300, 5e-324, float("inf"), float("nan")):
        expected = reference_scale(bits, dtype, factor)
        for isa in (None, *ISAS):
            with subnormals_flushed():
                got = testing.scale(dtype, bits, factor, 1, isa)
            assert_same_bits(np.frombuffer(got, bits.dtype), expected, bits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_of_one_copies(dtype: str) -> None:
    bits = random_bits(seeded(dtype, "identity"), dtype, 1001)
    assert testing.scale(dtype, bits, 1.0) == bits.tobytes()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_scaled_integers_truncate_toward_zero_and_saturate(dtype: str) -> None:
    limits = np.iinfo(dtype)
    edges = {limits.min, limits.min + 1, -7, -2, -1, 0, 1, 2, 3, 7, limits.max - 1, limits.max}
    bits = np.array([e for e in sorted(edges) if e >= limits.min], dtype)
    for factor, divide in ((0.5, 1), (-0.5, 1), (1.0, 2), (1.0, 1000), (2.5, 3), (1e30, 1)):
        got = np.frombuffer(testing.scale(dtype, bits, factor, divide), dtype)
        assert_same_bits(got, reference_scale(bits, dtype, factor, divide), bits)
    assert not np.frombuffer(testing.scale(dtype, bits, float("nan")), dtype).any()


def test_a_scaled_boolean_stays_true_unless_the_factor_is_zero() -> None:
    bits = np.array([0, 1, 7], np.uint8)
    assert list(testing.scale("bool", bits, 0.25)) == [0, 1, 1]
    assert list(testing.scale("bool", bits, 0.0)) == [0, 0, 0]


@pytest.mark.parametrize("half", HALVES)
def test_every_half_widens_exactly_and_comes_back(half: str) -> None:
    every = every_half()
    nan = np.isnan(widened(every, half))
    for wide in ("float32", "float64"):
        with np.errstate(all="ignore"):
            numbers = widened(every, half).astype(wide)
        expected = np.where(nan, np.dtype(wide).type(np.nan), numbers).tobytes()
        kinds = (None, *ISAS) if wide == "float32" else (None,)
        for isa in kinds:
            with subnormals_flushed():
                widened_bytes = testing.cast(wide, every, half, isa)
                back = testing.cast(half, np.frombuffer(widened_bytes, np.uint8), wide, isa)
            assert widened_bytes == expected
            canonical = np.where(nan, np.uint16(FORMATS[half][2]), every)
            assert_same_bits(np.frombuffer(back, np.uint16), canonical, every)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("isa", [None, *ISAS])
def test_float32_narrows_to_the_nearest_half_ties_to_even(half: str, isa: str | None) -> None:
    every = widened(every_half(), half).view(np.uint32)
    step = 1 << (FORMATS["float32"][1] - FORMATS[half][1] - 1)  # half a unit of normal halves
    bits = np.concatenate([every + np.uint32(d % (1 << 32)) for d in (-1, 0, 1)])
    bits = np.concatenate(
        [bits, bits + np.uint32(step), random_bits(seeded(half), "float32", 9999)]
    )
    below_normal = (np.arange(4096, dtype=np.uint32) << 13) + np.uint32(102 << 23)
    bits = np.concatenate([bits, below_normal])
    with np.errstate(all="ignore"):
        expected = rounded(bits.view(np.float32), half)
    with subnormals_flushed():
        got = testing.cast(half, bits, "float32", isa)
    assert_same_bits(np.frombuffer(got, np.uint16), expected, bits)


def test_float64_narrows_in_one_rounding() -> None:
    # Rounded to float32 first, the last bit would be lost, and the tie then go to even: down.
    above = 1 + 2.0**-11 + 2.0**-40
    above_ties = np.array([above, -above, 2.0**-25 + 2.0**-60])
    got = np.frombuffer(testing.cast("float16", above_ties, "float64"), np.float16)
    assert got.tolist() == [1 + 2.0**-10, -(1 + 2.0**-10), 2.0**-24]
    rng = seeded("float64")
    small = rng.standard_normal(9999)
    any_bits = random_bits(rng, "float64", 9999).view(np.float64)
    numbers = np.concatenate([any_bits, small, np.ldexp(small, -15), np.ldexp(small, -140)])
    for narrow in ("float16", "float32"):
        with np.errstate(all="ignore"):
            expected = numbers.astype(narrow).view(FORMATS[narrow][0])
        expected = np.where(np.isnan(numbers), FORMATS[narrow][0](FORMATS[narrow][2]), expected)
        cast = np.frombuffer(testing.cast(narrow, numbers, "float64"), FORMATS[narrow][0])
        assert_same_bits(cast, expected, numbers.view(np.uint64))


def test_between_halves_is_by_way_of_float32_which_holds_both() -> None:
    every = every_half()
    for one, other in (HALVES, HALVES[::-1]):
        with np.errstate(all="ignore"):
            expected = rounded(widened(every, one), other)
        assert_same_bits(np.frombuffer(testing.cast(other, every, one), np.uint16), expected, every)
    with pytest.raises(_core.Error, match="no cast from int32 to float16"):
        testing.cast("float16", np.zeros(2, np.int32), "int32")


# Many leaves.


@pytest.mark.parametrize(
    ("size", "dtype", "op"),
    combinations([*range(1, 10), 33], DTYPES, OPS, fits=lambda _, dtype, op: (dtype, op) in PAIRS),
)
def test_many_leaves_fold_in_canonical_order(dtype: str, op: str, size: int) -> None:
    rng = seeded(dtype, op, size)
    leaves = [near_one(rng, dtype, 777) for _ in range(size)]
    expected = reference_all(leaves, dtype, op, 1.0, 1.0)
    assert_same_bits(fold_all(leaves, dtype, op), expected)
    into = [size - 1, 0, size // 2]
    assert_same_bits(fold_all(leaves, dtype, op, into=into), expected)


@pytest.mark.parametrize(
    ("size", "op", "dtype"), combinations([1, 2, 3, 7, 8], OPS, [*FLOATS, *INTEGERS])
)
def test_leaves_and_result_are_scaled_and_rounded(dtype: str, op: str, size: int) -> None:
    rng = seeded(dtype, op, size, "scaled")
    leaves = [near_one(rng, dtype, 333) for _ in range(size)]
    for pre, post in ((0.3, 1.0), (1.0, 0.7), (0.3, -1.7)):
        expected = reference_all(leaves, dtype, op, pre, post)
        options = {"prescale": pre, "postscale": post}
        assert_same_bits(fold_all(leaves, dtype, op, **options), expected)
        assert_same_bits(fold_all(leaves, dtype, op, into=[size - 1], **options), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_tiles_meet_without_a_seam(dtype: str) -> None:
    rng = seeded(dtype, "tiles")
    for size in (1, 2, 3, 64, 70):
        leaves = [near_one(rng, dtype, 20011) for _ in range(size)]
        for pre, post in ((1.0, 1.0), (0.5, 1.5)):
            expected = reference_all(leaves, dtype, "mean", pre, post)
            got = fold_all(leaves, dtype, "mean", prescale=pre, postscale=post, into=[0])
            assert_same_bits(got, expected)


def test_order_shows_in_the_bits() -> None:
    # Left to right every one would be lost; the canonical tree adds them to each other first.
    leaves = [np.array([x], np.float32).view(np.uint32) for x in (2.0**24, 0.0, 1.0, 1.0)]
    assert fold_all(leaves, "float32", "sum").view(np.float32)[0] == 2.0**24 + 2


def test_halves_round_at_every_node() -> None:
    leaves = [np.array([x], np.float16).view(np.uint16) for x in (2048.0, 1.0, 1.0, 0.0)]
    # (2048 + 1) rounds to 2048, and 2048 + 1 again; a float32 sum would give 2050.
    assert fold_all(leaves, "float16", "sum").view(np.float16)[0] == 2048


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_mean_of_49_ones_is_one(dtype: str) -> None:
    ones = [np.ones(5, dtype)] * 49
    assert fold_all(ones, dtype, "mean").tolist() == [1] * 5


def test_negative_means_truncate_toward_zero() -> None:
    leaves = [np.array(x, np.int32) for x in ([-3, 3, -1], [-4, 4, 0])]
    assert fold_all(leaves, "int32", "mean").tolist() == [-3, 3, 0]


def test_int64_beyond_doubles_is_exact_unless_scaled() -> None:
    big = 2**53 + 1
    leaves = [np.array([big, -big], np.int64), np.array([0, 0], np.int64)]
    assert fold_all(leaves, "int64", "sum").tolist() == [big, -big]
    assert fold_all(leaves, "int64", "mean").tolist() == [big // 2, -(big // 2)]


# Steps of a schedule.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16"])
def test_steps_scale_the_operands_that_are_leaves_and_finish_when_asked(dtype: str) -> None:
    rng = seeded(dtype, "steps")
    options = {"prescale": 0.3, "postscale": 1.7, "size": 5}
    arrived, held = (near_one(rng, dtype, 9001) for _ in range(2))
    for arrived_is_leaf in (False, True):
        a = reference_scale(arrived, dtype, 0.3 if arrived_is_leaf else 1.0)
        for finish in (False, True):

            def finished(bits: Bits, op: str, finish: bool = finish) -> Bits:
                if not finish:
                    return bits
                if op != "mean":
                    return reference_scale(bits, dtype, 1.7)
                is_float = dtype in FORMATS
                return reference_scale(
                    bits, dtype, 1.7 * (1 / 5) if is_float else 1.7, 1 if is_float else 5
                )

            for op in OPS:
                got = testing.store_step(dtype, op, arrived, arrived_is_leaf, finish, **options)
                assert_same_bits(np.frombuffer(got, arrived.dtype), finished(a, op))
                for held_is_leaf in (False, True):
                    h = reference_scale(held, dtype, 0.3 if held_is_leaf else 1.0)
                    for side, (lower, upper) in (("lower", (a, h)), ("upper", (h, a))):
                        expected = finished(reference_fold(lower, upper, dtype, op), op)
                        leaf = (side, arrived_is_leaf, held, held_is_leaf, finish)
                        got = testing.fold_step(dtype, op, arrived, *leaf, **options)
                        assert_same_bits(np.frombuffer(got, arrived.dtype), expected)
