"""The differential tester notices what it is for, and shrinks it to what matters."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "differential"))

import programs
from programs import Front, Program, Result

BEFORE = {"w": np.array([1.0, 100.0]), "small": np.array([1e-6])}
UPDATE = {"w": np.array([0.1, -0.2]), "small": np.array([1e-6])}
TABLE = {"model": ["mlp", "conv"], "touch": ["nothing", "data", "clip"], "loss": ["mean", "sum"]}


def trained(factor: float = 1.0, losses: tuple[float, ...] = (1.0, 0.5)) -> Result:
    after = {name: BEFORE[name] + factor * UPDATE[name] for name in BEFORE}
    return Result(BEFORE, after, list(losses))


def front(fits: programs.Fits = lambda _: True) -> Front:
    return Front("torch", TABLE, lambda: None, lambda *_: trained(), fits)


def test_rounding_is_no_difference() -> None:
    assert programs.difference(trained(), trained(1 + 1e-5), 1e-3) is None


@pytest.mark.parametrize("factor", [2.0, 3.0, 0.5, 1 / 3, 0.0, float("nan")])
def test_a_factor_of_the_ranks_is_a_difference(factor: float) -> None:
    assert "w is off by" in str(programs.difference(trained(), trained(factor), 1e-3))


def test_the_smallest_parameter_counts_as_much() -> None:
    wrong = trained()
    wrong.after["small"] = BEFORE["small"] + 2 * UPDATE["small"]
    assert "small is off by" in str(programs.difference(trained(), wrong, 1e-3))


def test_losses_and_dtypes_are_compared() -> None:
    assert "loss 1" in str(programs.difference(trained(), trained(losses=(1.0, 0.6)), 1e-3))
    assert "1 losses" in str(programs.difference(trained(), trained(losses=(1.0,)), 1e-3))
    wrong = trained()
    wrong.after["w"] = wrong.after["w"].astype(np.float32)
    assert "w is float32(2,), not float64(2,)" in str(programs.difference(trained(), wrong, 1e-3))


def test_ranks_have_the_same_bits() -> None:
    wrong = trained()
    wrong.after["w"] = np.nextafter(wrong.after["w"], 9)
    assert programs.same_bits([trained(), trained()]) is None
    assert programs.same_bits([trained(), wrong]) == "w differs between ranks 0 and 1"


def test_programs_are_printed_and_read() -> None:
    program = programs.draw("x", front(), random.Random(3), plain=0)
    assert programs.read(str(program), {"x": front()}) == program
    assert programs.read("front=x touch=data", {"x": front()})["loss"] == "mean"
    with pytest.raises(SystemExit, match="touch"):
        programs.read("front=x touch=nowhere", {"x": front()})


def test_draws_see_every_value_that_fits() -> None:
    dice = random.Random(1)
    fits = front(lambda program: (program["model"], program["loss"]) != ("conv", "sum"))
    drawn = [programs.draw("x", fits, dice) for _ in range(200)]
    assert {p["touch"] for p in drawn} == set(TABLE["touch"])
    assert all(fits.fits(p) for p in drawn)


def test_a_failure_is_shrunk_to_what_matters() -> None:
    start = Program("x", (("model", "conv"), ("touch", "data"), ("loss", "sum")))
    found = programs.shrunk(start, front(), lambda p: p["touch"] == "data" and p["loss"] == "sum")
    assert str(found) == "front=x model=mlp touch=data loss=sum"


def test_refusals_are_read_from_the_page() -> None:
    rows = programs.refusals("| a.b, c | touch=data loss=sum | why |\n| front | program | x |\n")
    [row] = rows
    program = Program("c", (("touch", "data"), ("loss", "sum"), ("model", "mlp")))
    assert row.allows(program)
    assert not row.allows(program.having("loss", "mean"))
    assert not row.allows(Program("d", program.values))
    assert programs.refusals(programs.REFUSALS.read_text())
