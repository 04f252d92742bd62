"""The update kernels: numpy's bits, and the same bits from every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from core_testing import testing
from farandole import InvalidArgument, _core
from farandole._core import HyperParameters

Array = np.ndarray[Any, Any]
SETS = _core.instruction_sets()
DTYPES = ["float32", "float64"]
COUNTS = [0, 1, 3, 7, 16, 17, 1000, 4099]


def data(dtype: str, count: int) -> tuple[Array, Array, Array, Array]:
    random = np.random.default_rng(count)
    value, gradient, first, second = (
        (random.standard_normal(count) * 10.0 ** random.integers(-6, 6, count)).astype(dtype)
        for _ in range(4)
    )
    return value, gradient, first, np.abs(second)


def sgd(h: dict[str, Any], value: Array, g: Array, first: Array, step: int) -> list[Array]:
    """In numpy, in the arrays' dtype: every operation rounds once."""
    t = value.dtype.type
    if h["weight_decay"]:
        g = g + value * t(h["weight_decay"])
    if h["momentum"]:
        first = g if step == 1 else first * t(h["momentum"]) + g * t(1 - h["dampening"])
        g = g + first * t(h["momentum"]) if h["nesterov"] else first
    return [value + g * t(-h["rate"]), first]


def adam(
    h: dict[str, Any], value: Array, g: Array, first: Array, second: Array, step: int
) -> list[Array]:
    t = value.dtype.type
    if h["decoupled"]:
        value = value * t(1 - h["rate"] * h["weight_decay"])
    elif h["weight_decay"]:
        g = g + value * t(h["weight_decay"])
    weight = t(1 - h["beta1"])
    first = first + (g - first) * weight if weight < 0.5 else g - (g - first) * (t(1) - weight)
    second = second * t(h["beta2"]) + g * t(1 - h["beta2"]) * g
    rate = -(h["rate"] / (1 - h["beta1"] ** step))
    root = np.sqrt(1 - h["beta2"] ** step)
    return [value + first * t(rate) / (np.sqrt(second) / t(root) + t(h["epsilon"])), first, second]


FIELDS = {
    "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "beta1": 0.0, "beta2": 0.0,
    "epsilon": 0.0, "nesterov": False, "decoupled": False, "maximize": False,
}  # fmt: skip
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"rate": 0.1}),
    ("sgd", {"rate": 0.1, "weight_decay": 0.01}),
    ("sgd", {"rate": 0.1, "momentum": 0.9}),
    ("sgd", {"rate": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    ("sgd", {"rate": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("adam", {"rate": 0.1, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}),
    ("adam", {"rate": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "weight_decay": 0.1}),
    ("adam", {"rate": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "weight_decay": 0.1,
              "decoupled": True, "maximize": True}),
    ("adam", {"rate": 0.1, "beta1": 0.2, "beta2": 0.9, "epsilon": 1e-6}),
    ("adam", {"rate": 0.1, "beta1": 0.0, "beta2": 0.9, "epsilon": 1e-6}),
]  # fmt: skip


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", range(len(SETTINGS)))
def test_updates_have_the_bits_of_numpy(row: int, dtype: str, isa: str) -> None:
    optimizer, given = SETTINGS[row]
    h = FIELDS | given
    for count in COUNTS:
        for step, factor in ((1, 1.0), (7, 0.3)):
            value, gradient, first, second = data(dtype, count)
            g = gradient * value.dtype.type(-factor if h["maximize"] else factor)
            if optimizer == "sgd":
                expected, state = sgd(h, value, g, first, step), [first]
            else:
                expected, state = adam(h, value, g, first, second, step), [first, second]
            got = testing.update(
                optimizer, dtype, value, gradient, state, HyperParameters(**given), step, factor,
                isa=isa,
            )  # fmt: skip
            assert [part.tobytes() for part in expected] == list(got), (count, step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", range(len(SETTINGS)))
def test_instruction_sets_agree_on_every_kind_of_number(row: int, dtype: str) -> None:
    optimizer, given = SETTINGS[row]
    specials = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-310, 3e38, 1.0], dtype)
    arrays = [a.ravel().copy() for a in np.meshgrid(*[specials] * 4)]
    results = {
        testing.update(
            optimizer, dtype, arrays[0], arrays[1], arrays[2:], HyperParameters(**given), 3, isa=isa
        )
        for isa in SETS
    }
    assert len(results) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
def test_norms(dtype: str, count: int) -> None:
    x = data(dtype, count)[0]
    wide = x.astype(np.float64)
    assert np.isclose(testing.norm("2", dtype, x), (wide**2).sum(), rtol=1e-14)
    assert testing.norm("inf", dtype, x) == (np.abs(wide).max() if count else 0)


@pytest.mark.parametrize("at", [0, 5, 20, 40])
def test_norms_keep_nan(at: int) -> None:
    x = np.ones(41, np.float32)
    x[at] = np.nan
    assert np.isnan(testing.norm("2", "float32", x))
    assert np.isnan(testing.norm("inf", "float32", x))


def test_what_cannot_be_updated_is_refused() -> None:
    x = np.ones(3, np.float16)
    with pytest.raises(InvalidArgument):
        testing.update("sgd", "float16", x, x, [], HyperParameters(rate=1.0), 1, isa=SETS[0])
