"""Looks for programs that farandole trains wrongly: draws, trains alone and on ranks, compares.

    search.py --seconds 90             every front, by a seed that is printed
    search.py --fronts torch.hook …    these
    search.py --singly                 each value of each column once, the other columns plain
    search.py --program "front=torch.hook model=tied touch=data" [--ranks 2]

A program on ranks must give what the same program gives in one process with the framework alone, on
every rank the same bits; or all ranks refuse it by one sentence, and docs/refusals.md has a row for
it. All else is a fault. It is shrunk to the fewest columns and printed once; programs that have
them are not tried again. A run with a fault fails, and so does a search of whose programs more than
5 % were refused.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import programs  # noqa: E402
from fronts import FRONTS, begin, train  # noqa: E402
from programs import Front, Program  # noqa: E402

from harness import Ended, Nursery, Outcome, World, jax_that_compiles_quickly  # noqa: E402

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
LIMIT = 150.0  # seconds of one program on all ranks; TensorFlow's Deadlock takes 90
HANGS = {"Deadlock", "Stalled"}  # a verdict on all ranks, but no refusal
MOST_REFUSED = 0.05  # of all programs of a search
ONE_SIZE = 8  # programs of a framework on as many ranks: new ones take seconds to begin

Key = tuple[str, Callable[[], None] | None, int]  # framework, how its ranks begin, how many


def _key(front: str, size: int) -> Key:
    """Fronts whose ranks begin alike have the same ranks; those that train alone have not begun."""
    return FRONTS[front].framework, FRONTS[front].begin if size else None, size


class Fault(Exception):
    """A program that is neither right nor refused by one sentence."""


class Refused(Exception):
    """All ranks said the same sentence."""


class Runner:
    """Trains programs on ranks that stay, forked from a process that has imported the framework."""

    def __init__(self, nursery_of: Callable[[str], Nursery]) -> None:
        """`nursery_of`: that of a framework."""
        self._nursery_of = nursery_of
        self.rows = programs.refusals(programs.REFUSALS.read_text())
        self._worlds: dict[Key, World] = {}
        self._alone: dict[Program, Outcome] = {}
        self.beginning = 0.0  # seconds until ranks were there

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()

    def check(self, program: Program, size: int) -> None:
        """Raises Fault or Refused."""
        if program not in self._alone:
            [self._alone[program]] = self._outcomes(program, 0)
        alone = self._alone[program]
        if alone.error is not None:
            raise Refused(f"by the framework: {alone.text.splitlines()[:1]}")
        outcomes = self._outcomes(program, size)
        errors = {outcome.error for outcome in outcomes}
        if errors != {None}:
            self._leave(program.front, size)
            self._judge_refusal(program, outcomes)
        results = [outcome.value for outcome in outcomes]
        tolerance = programs.tolerance_of(program)
        for result in results:
            if wrong := programs.difference(alone.value, result, tolerance):
                raise Fault(wrong)
        if wrong := programs.same_bits(results):
            raise Fault(wrong)

    def _judge_refusal(self, program: Program, outcomes: list[Outcome]) -> None:
        said = {(outcome.text.splitlines() or [""])[0] for outcome in outcomes}
        ours = all("Error" in outcome.bases and outcome.error for outcome in outcomes)
        hang = HANGS & {outcome.error for outcome in outcomes}
        if len(said) == 1 and ours and not hang:
            if any(row.allows(program) for row in self.rows):
                raise Refused(said.pop())
            raise Fault(f"refused, and docs/refusals.md has no row for it: {said.pop()}")
        told = [f"rank {r}: {o.error}: {o.text[:300]}" for r, o in enumerate(outcomes)]
        raise Fault("not refused by one sentence\n  " + "\n  ".join(told))

    def _outcomes(self, program: Program, size: int) -> list[Outcome]:
        """The outcomes of the ranks. `size` 0: one process, without farandole."""
        world = self._world(program.front, size)
        world.start(train, str(program), size > 0)
        try:
            return world.outcomes(timeout=LIMIT)
        except (TimeoutError, Ended) as error:
            self._leave(program.front, size)
            raise Fault(f"{type(error).__name__}: {str(error)[:9000]}") from error

    def _world(self, front: str, size: int) -> World:
        key = _key(front, size)
        if key not in self._worlds:
            began = time.monotonic()
            self._worlds[key] = World(max(size, 1), self._nursery_of(FRONTS[front].framework))
            if size:
                self._worlds[key].run(begin, front)
            self.beginning += time.monotonic() - began
        return self._worlds[key]

    def _leave(self, front: str, size: int) -> None:
        if world := self._worlds.pop(_key(front, size), None):
            world.close()


class Search:
    def __init__(self, runner: Runner, fronts: Mapping[str, Front], seed: int) -> None:
        self.runner = runner
        self.fronts = fronts
        self.dice = random.Random(seed)
        self.drawn: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.sentences: Counter[str] = Counter()
        self.faults: list[Program] = []  # shrunk
        self._sizes: dict[str, Iterator[int]] = {}  # by framework

    def run(self, seconds: float) -> None:
        """Until time is up, of which every front gets the same, besides what its ranks take to
        begin."""
        spent = dict.fromkeys(self.fronts, 0.0)
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            beginning = self.runner.beginning
            name = min(spent, key=lambda front: spent[front])
            front = self.fronts[name]
            program = programs.draw(name, front, self.dice, rows=self.runner.rows)
            if not any(self._has(program, fault) for fault in self.faults):
                sizes = self._sizes.setdefault(front.framework, self._some_sizes())
                self.one(program, next(sizes))
            spent[name] += time.monotonic() - now - (self.runner.beginning - beginning)

    def singly(self) -> None:
        """Every value of every column, with the others plain."""
        for name, front in self.fronts.items():
            for program in programs.singles(name, front):
                self.one(program, self.dice.choice((2, 3)))

    def _some_sizes(self) -> Iterator[int]:
        while True:
            yield from [self.dice.choice((2, 3, 1))] * ONE_SIZE

    def _has(self, program: Program, fault: Program) -> bool:
        """All that matters in a fault that is known."""
        table = self.fronts[fault.front].table
        needed = {(c, v) for c, v in fault.values if v != table[c][0]}
        return program.front == fault.front and needed <= set(program.values)

    def one(self, program: Program, size: int) -> None:
        rows = [program.front, *(f"{program.front} {c}={v}" for c, v in program.values)]
        self.drawn.update(rows)
        try:
            self.runner.check(program, size)
        except Refused as refusal:
            self.refused.update(rows)
            self.sentences[str(refusal)] += 1
        except Fault as fault:
            small = programs.shrunk(program, self.fronts[program.front], self.fails(size))
            self.faults.append(small)
            print(f"wrong: {small} --ranks {size}: {fault}", flush=True)

    def fails(self, size: int) -> Callable[[Program], bool]:
        def check(program: Program) -> bool:
            try:
                self.runner.check(program, size)
            except Fault:
                return True
            except Refused:
                pass
            return False

        return check

    def share_refused(self) -> float:
        total = sum(self.drawn[name] for name in self.fronts)
        return sum(self.refused[name] for name in self.fronts) / max(total, 1)

    def report(self) -> str:
        total = sum(self.drawn[name] for name in self.fronts)
        each = ", ".join(f"{self.drawn[name]} of {name}" for name in self.fronts)
        lines = [f"{total} programs, {self.share_refused():.1%} refused: {each}"]
        lines += [
            f"  {n} of {self.drawn[row]} refused ({n / self.drawn[row]:.1%}): {row}"
            for row, n in self.refused.most_common()
        ]
        lines += [f"  {n} times: {sentence}" for sentence, n in self.sentences.most_common()]
        return "\n".join(lines)

    def verdict(self) -> str | None:
        """The reason why a search fails; None if it does not."""
        if self.faults:
            return f"{len(self.faults)} faults, the first: {self.faults[0]}"
        if self.share_refused() > MOST_REFUSED:
            return f"more than {MOST_REFUSED:.0%} of the programs were refused"
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--fronts", nargs="*", default=list(FRONTS))
    parser.add_argument("--singly", action="store_true", help="each value once, the others plain")
    parser.add_argument("--program", help="one, as a run has printed it")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    fronts = {name: FRONTS[name] for name in options.fronts}
    nurseries: dict[str, Nursery] = {}
    cache = tempfile.TemporaryDirectory()  # of what JAX has compiled

    def nursery_of(framework: str) -> Nursery:
        if framework not in nurseries:
            quick = jax_that_compiles_quickly(cache.name) if "jax" in framework else {}
            nurseries[framework] = Nursery(framework=framework, **ENVIRONMENT | quick)
        return nurseries[framework]

    runner = Runner(nursery_of)
    search = Search(runner, fronts, options.seed)
    try:
        if options.program:
            search.fronts = FRONTS
            search.one(programs.read(options.program, FRONTS), options.ranks)
        else:
            print(f"--seed {options.seed}, fronts {' '.join(fronts)}", flush=True)
            for front in fronts.values():
                nursery_of(front.framework)  # all import at the same time
            search.singly() if options.singly else search.run(options.seconds)
    finally:
        runner.close()
        for nursery in nurseries.values():
            nursery.close()
        cache.cleanup()
    print(search.report())
    named = bool(options.program or options.singly)  # not drawn
    if search.faults or not named:
        raise SystemExit(search.verdict())


if __name__ == "__main__":
    main()
