"""Training programs as values: a front, and one value of each column that the front knows.

A program is drawn from tables, printed in one line, read back from it, and shrunk column by column
to the values that matter.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Table = Mapping[str, Sequence[str]]  # of a front: by column its values, the plain one first
LeftOut = Mapping[str, Sequence[str]]  # by reason: patterns of programs that are not drawn


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
    with the framework alone on the whole batch if `parallel` is False. `left_out`: programs that
    the framework alone cannot train, or that the front is not for.
    """

    framework: str
    table: Table
    begin: Callable[[], None]
    train: Callable[[Program, bool], Result]
    left_out: LeftOut = field(default_factory=dict)

    def fits(self, program: Program) -> bool:
        patterns = (each for patterns in self.left_out.values() for each in patterns)
        return not any(pattern(each).matches(program) for each in patterns)


@dataclass(frozen=True)
class Pattern:
    """Some columns' values, such as `model=odd,tied loss!=mean`: a program must have them all."""

    columns: tuple[tuple[str, bool, frozenset[str]], ...]  # column, whether it must be one of these

    def matches(self, program: Program) -> bool:
        has = dict(program.values)
        return all((has[column] in values) == wanted for column, wanted, values in self.columns)

    def stands_in(self, table: Table) -> bool:
        """Whether the table has all these columns and values, and more values of each."""
        return all(values < set(table.get(column, ())) for column, _, values in self.columns)

    def programs(self, front: str, table: Table) -> Iterator[Program]:
        """Programs that match, with all other columns plain."""
        chosen = [
            [(c, v) for v in table[c] if (v in values) == wanted]
            for c, wanted, values in self.columns
        ]
        plain = Program(front, tuple((column, choices[0]) for column, choices in table.items()))
        for values in itertools.product(*chosen):
            program = plain
            for column, value in values:
                program = program.having(column, value)
            yield program


@functools.cache
def pattern(text: str) -> Pattern:
    def column(word: str) -> tuple[str, bool, frozenset[str]]:
        name, values = word.split("=", 1)
        return name.removesuffix("!"), not name.endswith("!"), frozenset(values.split(","))

    return Pattern(tuple(column(word) for word in text.split()))


@dataclass
class Result:
    """The results of a program: weights by name before and after, and the losses that it got."""

    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    losses: list[float]


def draw(
    name: str,
    front: Front,
    dice: random.Random,
    plain: float = 0.5,
    rows: Sequence[Refusal] = (),
) -> Program:
    """`plain`: how often a column has its first value, so that failures come with few causes.

    `rows`: of the programs that these allow to be refused, one in REFUSED_ONCE_IN is drawn.
    """
    while True:
        values = tuple(
            (column, choices[0] if dice.random() < plain else dice.choice(choices))
            for column, choices in front.table.items()
        )
        program = Program(name, values)
        if not front.fits(program):
            continue
        if any(row.allows(program) for row in rows) and dice.randrange(REFUSED_ONCE_IN):
            continue
        return program


def singles(name: str, front: Front) -> Iterator[Program]:
    """The plain program, and for each other value of a column the one that has it alone."""
    plain = Program(name, tuple((column, choices[0]) for column, choices in front.table.items()))
    yield plain
    for column, choices in front.table.items():
        for value in choices[1:]:
            if front.fits(program := plain.having(column, value)):
                yield program


def short(program: Program, front: Front) -> str:
    """Its line without the columns that are plain, as read() takes it."""
    told = [f"{c}={v}" for c, v in program.values if v != front.table[c][0]]
    return " ".join([f"front={program.front}", *told])


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

REFUSED_ONCE_IN = 40  # a refusal shows a sentence, and no number
REFUSALS = Path(__file__).parents[2] / "docs" / "refusals.md"


@dataclass(frozen=True)
class Refusal:
    """A row of docs/refusals.md."""

    fronts: tuple[str, ...]
    pattern: Pattern

    def allows(self, program: Program) -> bool:
        return program.front in self.fronts and self.pattern.matches(program)


def refusals(text: str) -> list[Refusal]:
    rows = [
        [cell.strip() for cell in line.split("|")[1:3]]
        for line in text.splitlines()
        if line.startswith("|") and "=" in line
    ]
    return [
        Refusal(tuple(front.strip() for front in fronts.split(",")), pattern(values))
        for fronts, values in rows
    ]


def refused(fronts: Mapping[str, Front]) -> Iterator[Program]:
    """For each row of the page, front and value in it: the program with all other columns plain."""
    for row in refusals(REFUSALS.read_text()):
        for name in row.fronts:
            yield from row.pattern.programs(name, fronts[name].table)


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
# and more, the order of sums by 1e-6, and bfloat16, in which Muon computes too, rounds by 4e-3.
TOLERANCES = {
    **dict.fromkeys(["autocast", "mixed_bfloat16", "parameters", "computing", "muon"], 3e-2),
    "mixed_float16": 1e-2,
}


def tolerance_of(program: Program) -> float:
    return max((TOLERANCES.get(value, 1e-3) for _, value in program.values), default=1e-3)


def difference(serial: Result, parallel: Result, tolerance: float) -> str | None:
    """The first difference, in one line; None if there is none."""
    if serial.after.keys() != parallel.after.keys():
        return f"parameters {sorted(parallel.after)}, not {sorted(serial.after)}"
    for name, right in serial.after.items():
        got, begin = parallel.after[name], serial.before.get(name, 0.0)  # 0: a new parameter
        if got.shape != right.shape or got.dtype != right.dtype:
            return f"{name} is {got.dtype}{got.shape}, not {right.dtype}{right.shape}"
        if not right.size:
            continue
        moved = np.abs(right - begin).max()
        off = np.abs(got - right).max()
        if not off <= tolerance * moved + _rounding(right):
            return f"{name} is off by {off:.3g}; its update is {moved:.3g}"
    for step, (right, got) in enumerate(zip(serial.losses, parallel.losses, strict=False)):
        if not abs(got - right) <= tolerance * abs(right) + 1e-6:
            return f"loss {step} is {got:.6g}, not {right:.6g}"
    if len(serial.losses) != len(parallel.losses):
        return f"{len(parallel.losses)} losses, not {len(serial.losses)}"
    return None


def _rounding(values: np.ndarray) -> float:
    """What a few steps may round, each by half of the last bit of the largest weight."""
    if values.dtype.name == "bfloat16":  # which is none of NumPy's own
        return 8 * 2.0**-8 * float(np.abs(values).max())
    exact = not np.issubdtype(values.dtype, np.inexact)
    return 0.0 if exact else 8 * float(np.finfo(values.dtype).eps * np.abs(values).max())


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
