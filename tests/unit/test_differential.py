"""The differential tester notices what it is for, and shrinks it to what matters."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import cast

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "differential"))

import programs
import search
from fronts import FRONTS
from programs import Front, Program, Result

BEFORE = {"w": np.array([1.0, 100.0]), "small": np.array([1e-6])}
UPDATE = {"w": np.array([0.1, -0.2]), "small": np.array([1e-6])}
TABLE = {"model": ["mlp", "conv"], "touch": ["nothing", "data", "clip"], "loss": ["mean", "sum"]}


def trained(factor: float = 1.0, losses: tuple[float, ...] = (1.0, 0.5)) -> Result:
    after = {name: BEFORE[name] + factor * UPDATE[name] for name in BEFORE}
    return Result(BEFORE, after, list(losses))


def front(*left_out: str) -> Front:
    return Front("torch", TABLE, lambda: None, lambda *_: trained(), {"a reason": left_out})


def test_rounding_is_no_difference() -> None:
    assert programs.difference(trained(), trained(1 + 1e-5), 1e-3) is None


@pytest.mark.parametrize("factor", [2.0, 3.0, 0.5, 1 / 3, 0.0, float("nan")])
def test_a_factor_of_the_ranks_is_a_difference(factor: float) -> None:
    assert "w is off by" in str(programs.difference(trained(), trained(factor), 1e-3))


def test_the_smallest_parameter_counts_as_much() -> None:
    wrong = trained()
    wrong.after["small"] = BEFORE["small"] + 2 * UPDATE["small"]
    assert "small is off by" in str(programs.difference(trained(), wrong, 1e-3))


def test_the_smallest_parameter_exceeds_the_tolerance_a_hundredfold() -> None:
    wrong = trained()
    wrong.after["small"] = BEFORE["small"] + UPDATE["small"] / 2
    assert "small is off by" in str(programs.difference(trained(), wrong, 100 * 1e-3))
    assert programs.difference(trained(), wrong, 0.6) is None


def test_the_last_bit_of_a_weight_is_no_difference() -> None:
    still = {"w": np.array([1.0], np.float32)}
    other = {"w": np.nextafter(still["w"], np.float32(2))}
    right, got = (Result(still, after, []) for after in (still, other))
    assert programs.difference(right, got, 1e-3) is None


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
    fits = front("model=conv loss=sum")
    drawn = [programs.draw("x", fits, dice) for _ in range(200)]
    assert {p["touch"] for p in drawn} == set(TABLE["touch"])
    assert all(fits.fits(p) for p in drawn)


def test_a_failure_is_shrunk_to_what_matters() -> None:
    start = Program("x", (("model", "conv"), ("touch", "data"), ("loss", "sum")))
    found = programs.shrunk(start, front(), lambda p: p["touch"] == "data" and p["loss"] == "sum")
    assert str(found) == "front=x model=mlp touch=data loss=sum"


def test_refusals_are_read_from_the_page() -> None:
    text = "| a.b, c | touch=data,clip loss!=mean | why |\n| front | program | x |\n"
    [row] = programs.refusals(text)
    program = Program("c", (("touch", "data"), ("loss", "sum"), ("model", "mlp")))
    assert row.allows(program)
    assert row.allows(program.having("touch", "clip"))
    assert not row.allows(program.having("loss", "mean"))
    assert not row.allows(program.having("touch", "nothing"))
    assert not row.allows(Program("d", program.values))


def test_a_program_that_may_be_refused_is_drawn_seldom() -> None:
    rows = programs.refusals("| x | touch=data | why |\n")
    dice = random.Random(2)
    drawn = [programs.draw("x", front(), dice, plain=0, rows=rows) for _ in range(1000)]
    assert 1 <= sum(row.allows(p) for p in drawn for row in rows) <= 50


@pytest.mark.parametrize("name", FRONTS)
def test_each_exclusion_has_a_reason_and_leaves_something_out(name: str) -> None:
    """A pattern whose values are gone from the table would leave nothing out."""
    for reason, patterns in FRONTS[name].left_out.items():
        assert len(reason.split()) >= 3, reason
        for each in patterns:
            assert programs.pattern(each).stands_in(FRONTS[name].table), f"{reason}: {each}"


def test_each_row_of_the_page_is_a_program_that_is_drawn() -> None:
    for row in programs.refusals(programs.REFUSALS.read_text()):
        for name in row.fronts:
            assert row.pattern.stands_in(FRONTS[name].table), row
    hidden = [str(p) for p in programs.refused(FRONTS) if not FRONTS[p.front].fits(p)]
    assert not hidden


@pytest.mark.parametrize("name", FRONTS)
def test_few_of_the_programs_that_are_drawn_may_be_refused(name: str) -> None:
    rows = programs.refusals(programs.REFUSALS.read_text())
    dice = random.Random(4)
    drawn = [programs.draw(name, FRONTS[name], dice, rows=rows) for _ in range(400)]
    refused = [p for p in drawn if any(row.allows(p) for row in rows)]
    assert len(refused) <= search.MOST_REFUSED * len(drawn)


class Verdicts:
    """A runner that refuses these."""

    rows = ()

    def __init__(self, *refused: str) -> None:
        self.refused = refused

    def check(self, program: Program, _: int) -> None:
        if program["touch"] in self.refused:
            raise search.Refused("no")


def searched(*refused: str) -> search.Search:
    runner = cast("search.Runner", Verdicts(*refused))
    made = search.Search(runner, {"x": front()}, seed=1)
    for number in range(20):
        touch = "data" if number else "clip"
        made.one(programs.read(f"front=x touch={touch}", made.fronts), 2)
    return made


def test_all_rows_with_a_refusal_are_printed_with_their_share() -> None:
    report = searched("clip").report()
    assert "20 programs, 5.0% refused: 20 of x" in report
    assert "1 of 1 refused (100.0%): x touch=clip" in report
    assert "1 of 20 refused (5.0%): x model=mlp" in report
    assert "touch=data" not in report


def test_a_search_fails_where_more_than_a_twentieth_was_refused() -> None:
    assert searched("clip").verdict() is None
    assert searched("data").verdict() == "more than 5% of the programs were refused"
