"""Training programs as values: a front, and one value of each column that the front knows.

A program is drawn from tables, printed in one line, read back from it, and shrunk column by column
to the values that matter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Table = Mapping[str, Sequence[str]]  # of a front: by column its values, the plain one first
Fits = Callable[["Program"], bool]


@dataclass(frozen=True)
class Program:
    front: str
    values: tuple[tuple[str, str], ...]  # by column, in the table's order

    def __getitem__(self, column: str) -> str:
        return dict(self.values)[column]

    def __str__(self) -> str:
        return " ".join([f"front={self.front}", *(f"{c}={v}" for c, v in self.values)])

    def having(self, column: str, value: str) -> Program:
        return Program(self.front, tuple((c, value if c == column else v) for c, v in self.values))


@dataclass(frozen=True)
class Front:
    """One way into farandole, in the words of its users.

    `framework`: what ranks have imported (harness.Nursery). `begin` is called once on each rank,
    and not in the process that trains alone. `train` runs a program to its end: with farandole, or
    with the framework alone on the whole batch if `parallel` is False.
    """

    framework: str
    table: Table
    begin: Callable[[], None]
    train: Callable[[Program, bool], Result]
    fits: Fits = lambda _: True  # which combinations mean something


@dataclass
class Result:
    """The results of a program: weights by name before and after, and the losses that it got."""

    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    losses: list[float]


def draw(name: str, front: Front, dice: random.Random, plain: float = 0.5) -> Program:
    """`plain`: how often a column has its first value, so that failures come with few causes."""
    while True:
        values = tuple(
            (column, choices[0] if dice.random() < plain else dice.choice(choices))
            for column, choices in front.table.items()
        )
        program = Program(name, values)
        if front.fits(program):
            return program


def singles(name: str, front: Front) -> Iterator[Program]:
    """The plain program, and for each other value of a column the one that has it alone."""
    plain = Program(name, tuple((column, choices[0]) for column, choices in front.table.items()))
    yield plain
    for column, choices in front.table.items():
        for value in choices[1:]:
            if front.fits(program := plain.having(column, value)):
                yield program


def read(text: str, fronts: Mapping[str, Front]) -> Program:
    """The program that str() has printed; columns that are left out have their plain value."""
    given = dict(word.split("=", 1) for word in text.split())
    name = given.pop("front")
    table = fronts[name].table
    unknown = {c: v for c, v in given.items() if c not in table or v not in table[c]}
    if unknown:
        raise SystemExit(f"{name} has no {unknown}")
    return Program(name, tuple((c, given.get(c, choices[0])) for c, choices in table.items()))


def simpler(program: Program, front: Front) -> Iterator[Program]:
    """The program with one column plain, for each that is not."""
    for column, value in program.values:
        plain = front.table[column][0]
        if value != plain and front.fits(changed := program.having(column, plain)):
            yield changed


def shrunk(program: Program, front: Front, fails: Callable[[Program], bool]) -> Program:
    """A program that fails and has no column that could be plain."""
    while smaller := next((each for each in simpler(program, front) if fails(each)), None):
        program = smaller
    return program


# ---- programs that ranks refuse although one process trains them ----

REFUSALS = Path(__file__).parents[2] / "docs" / "refusals.md"


@dataclass(frozen=True)
class Refusal:
    """A row of docs/refusals.md."""

    fronts: tuple[str, ...]
    values: tuple[tuple[str, str], ...]

    def allows(self, program: Program) -> bool:
        return program.front in self.fronts and set(self.values) <= set(program.values)


def refusals(text: str) -> list[Refusal]:
    rows = [
        [cell.strip() for cell in line.split("|")[1:3]]
        for line in text.splitlines()
        if line.startswith("|") and "=" in line
    ]
    return [
        Refusal(
            tuple(front.strip() for front in fronts.split(",")),
            tuple(tuple(word.split("=", 1)) for word in values.split()),  # type: ignore[misc]
        )
        for fronts, values in rows
    ]


# ---- data: the same samples in every process ----

BATCH = 12  # samples of a step; 1, 2 and 3 ranks share them evenly
WIDTH = 4
STEPS = 4


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (BATCH, WIDTH) and targets (BATCH, 2) of one step, float32."""
    rng = np.random.default_rng(1000 + step)
    x = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
    y = np.stack([x.sum(1), np.abs(x).max(1)], 1).astype(np.float32)
    return x, y


def rows_of(rank: int, size: int, count: int = BATCH) -> slice:
    """A rank's samples, contiguous; the first ranks have one more where they do not divide."""
    cut = [count * r // size for r in range(size + 1)]
    return slice(cut[rank], cut[rank + 1])


# ---- comparison ----

# Relative to the parameter's largest change: a factor of R or a local gradient is off by a third
# and more, the order of sums by 1e-6.
TOLERANCE: dict[str, float] = {"float32": 1e-3, "scaler": 1e-3}


def difference(serial: Result, parallel: Result, tolerance: float) -> str | None:
    """The first difference, in one line; None if there is none."""
    if serial.after.keys() != parallel.after.keys():
        return f"parameters {sorted(parallel.after)}, not {sorted(serial.after)}"
    for name, right in serial.after.items():
        got, begin = parallel.after[name], serial.before[name]
        if got.shape != right.shape or got.dtype != right.dtype:
            return f"{name} is {got.dtype}{got.shape}, not {right.dtype}{right.shape}"
        if not right.size:
            continue
        moved = np.abs(right - begin).max()
        off = np.abs(got - right).max()
        if not off <= tolerance * moved + 1e-7:
            return f"{name} is off by {off:.3g}; its update is {moved:.3g}"
    for step, (right, got) in enumerate(zip(serial.losses, parallel.losses, strict=False)):
        if not abs(got - right) <= 1e-3 * abs(right) + 1e-6:
            return f"loss {step} is {got:.6g}, not {right:.6g}"
    if len(serial.losses) != len(parallel.losses):
        return f"{len(parallel.losses)} losses, not {len(serial.losses)}"
    return None


def same_bits(results: Sequence[Result]) -> str | None:
    """The first difference between ranks; None if there is none."""
    first, *others = results
    for rank, other in enumerate(others, 1):
        for name, value in first.after.items():
            if other.after[name].tobytes() != value.tobytes():
                return f"{name} differs between ranks 0 and {rank}"
    return None


def copied(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in values.items()}
