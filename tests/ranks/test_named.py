"""Operations by name: any order of submission, one result; who disagrees, who is missing."""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farandole as fd
from farandole import _core, _world
from harness import World, listen, tell

Spawn = Callable[..., World]


# ---- inside the ranks ----


def names() -> _core.Names:
    fd.init()
    return _core.names_of(_world.world())


def reduce(name: str | None, x: np.ndarray, **options: Any) -> int:
    return names().submit("all_reduce", name, [(x, x, x.shape)], result=x, **options)


def wait(handle: int) -> Any:
    return _core.wait_by_number(handle)


def total(size: int) -> int:
    return size * (size + 1) // 2


def works(name: str = "next") -> None:
    """The next operation does."""
    x = np.full(3, fd.rank() + 1.0)
    assert (wait(reduce(name, x)) == total(fd.size())).all()


DTYPES = ["float16", "float32", "float64", "int8", "int32", "int64", "uint8"]
COUNTS = [0, 1, 7, 250, 3000, 70000]


def reduce_in_random_orders(seed: int) -> None:
    fd.init()
    rank, size = fd.rank(), fd.size()
    table = [(f"x{i}", DTYPES[i % len(DTYPES)], COUNTS[i % len(COUNTS)]) for i in range(50)]
    draw = random.Random(seed * 100 + rank)
    for _ in range(4):
        arrays = {n: np.full(count, rank + 1, dtype) for n, dtype, count in table}
        order = list(arrays)
        draw.shuffle(order)
        handles = {n: reduce(n, arrays[n]) for n in order}
        draw.shuffle(order)
        for n in order:
            result = wait(handles[n])
            assert result is arrays[n]
            assert (result == total(size)).all(), (n, result)


def move_in_random_orders(seed: int) -> None:
    """All kinds at once; rows differ from rank to rank and step to step."""
    fd.init()
    rank, size = fd.rank(), fd.size()
    draw = random.Random(seed * 100 + rank)
    for step in range(4):
        expected: dict[int, np.ndarray] = {}

        def made(rows: list[Any], _: Any) -> np.ndarray:
            memory, dtype, shape = rows[0]
            return np.frombuffer(memory, dtype).reshape(shape)

        def gather(n: int, step: int = step, expected: Any = expected) -> None:
            rows = [(r + step + n) % 3 for r in range(size)]
            mine = np.full((rows[rank], 2), rank, np.int32)
            h = names().submit("all_gather", f"g{n}", [(mine, None, mine.shape)], finish=made)
            expected[h] = np.repeat(np.arange(size), rows)[:, None].repeat(2, 1)

        def exchange(n: int, step: int = step, expected: Any = expected) -> None:
            splits = [[(a + b + step + n) % 3 for b in range(size)] for a in range(size)]
            mine = np.full(sum(splits[rank]), rank, np.int64)
            h = names().submit(
                "all_to_all", f"t{n}", [(mine, None, mine.shape)], splits=splits[rank], finish=made
            )
            expected[h] = np.repeat(np.arange(size), [splits[a][rank] for a in range(size)])

        def spread(n: int, step: int = step, expected: Any = expected) -> None:
            root = (step + n) % size
            mine = np.full(5 + n, rank, np.float32)
            row = [(mine, mine, mine.shape)]
            h = names().submit("broadcast", f"b{n}", row, root=root, result=mine)
            expected[h] = np.full(5 + n, root)

        def scatter(n: int, expected: Any = expected) -> None:
            whole = np.arange(2 * (size + n), dtype=np.float64).reshape(size + n, 2)
            part = np.array_split(whole, size)[rank]
            out = np.empty_like(part)
            row = [(whole, out, whole.shape)]
            h = names().submit("reduce_scatter", f"s{n}", row, result=out)
            expected[h] = part * size

        def meet(_: int, expected: Any = expected) -> None:
            expected[names().submit("barrier", f"m{_}", [])] = np.zeros(0)

        calls = [(f, n) for f in (gather, exchange, spread, scatter, meet) for n in range(4)]
        draw.shuffle(calls)
        for call, n in calls:
            call(n)
        for handle, right in expected.items():
            result = wait(handle)
            if result is not None:
                assert result.shape == right.shape, (result, right)
                assert (result == right).all(), (result, right)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_ranks_may_submit_in_any_order(spawn: Spawn, size: int) -> None:
    spawn(size).run(reduce_in_random_orders, size)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_kinds_in_any_order(spawn: Spawn, size: int) -> None:
    spawn(size).run(move_in_random_orders, size)


def lacks_room(poor: list[int], kind: str) -> None:
    """For the result of an operation whose size the others decide."""
    fd.init()
    rank, size = fd.rank(), fd.size()
    works("before")
    if rank in poor:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        room = pages * resource.getpagesize() + (100 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    rows = 0 if rank in poor else (400 << 20) // size
    mine = np.zeros(rows * (size if kind == "all_to_all" else 1), np.uint8)
    options = {"splits": [rows] * size} if kind == "all_to_all" else {}
    handle = names().submit(kind, "large", [(mine, None, mine.shape)], **options)
    wait(handle)


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("poor", [[0], [1], [0, 1]])
def test_a_rank_without_room_for_a_result_ends_it_everywhere(
    spawn: Spawn, poor: list[int], kind: str
) -> None:
    world = spawn(3)
    world.start(lacks_room, poor, kind)
    outcomes = world.outcomes()
    assert {o.error for o in outcomes} == {"ResourceError"}, outcomes[0].trace
    assert {o.tensor for o in outcomes} == {"large"}
    assert outcomes[0].rank in poor
    assert len({o.verdict for o in outcomes}) == 1


def use_many_names() -> None:
    fd.init()
    for step in range(2):
        for begin in range(0, 20000, 5000):
            arrays = [np.full(2, fd.rank() + 1.0) for _ in range(5000)]
            handles = [reduce(f"x{begin + i}", a) for i, a in enumerate(arrays)]
            for handle in handles:
                assert (wait(handle) == total(fd.size())).all(), step


@pytest.mark.parametrize("cache", ["16384", "100"])
def test_more_names_than_are_remembered(spawn: Spawn, cache: str) -> None:
    spawn(2, env={"FARANDOLE_NAME_CACHE": cache}).run(use_many_names)


def reduce_in_groups() -> None:
    fd.init()
    rank, size = fd.rank(), fd.size()
    for step in range(3):
        arrays = [
            np.full(n, rank + 1, d) for n, d in [(3, "f4"), (0, "f8"), (70000, "f4"), (5, "i8")]
        ]
        alone = np.full(4, rank + 1.0)
        first = reduce("alone", alone) if rank % 2 else None
        group = names().submit("all_reduce", "g", [(a, a, a.shape) for a in arrays], result=arrays)
        for a in wait(group):
            assert (a == total(size)).all(), step
        wait(reduce("alone", alone) if first is None else first)
        assert (alone == total(size)).all()


def test_groups_go_together_whatever_their_dtypes(spawn: Spawn) -> None:
    spawn(3).run(reduce_in_groups)


# ---- disagreement ----

ROW = np.ones((4, 3), np.float32)
FIELDS: dict[str, tuple[str, Any, Any]] = {
    "dtype": ("all_reduce", {}, {"x": ROW.astype(np.float64)}),
    "shape": ("all_reduce", {}, {"x": ROW.reshape(3, 4)}),
    "op": ("all_reduce", {"op": "sum"}, {"op": "max"}),
    "prescale": ("all_reduce", {"prescale": 2.0}, {"prescale": 1.0}),
    "postscale": ("all_reduce", {"postscale": 2.0}, {"postscale": 1.0}),
    "root": ("broadcast", {"root": 0}, {"root": 1}),
    "number of tensors": ("all_reduce", {}, {"more": 1}),
    "inner dimension": ("all_gather", {}, {"x": np.ones((4, 5), np.float32)}),
    "number of dimensions": ("all_gather", {}, {"x": np.ones((4, 3, 1), np.float32)}),
}  # fmt: skip


def submit_field(field: str) -> None:
    kind, mine, theirs = FIELDS[field]
    fd.init()
    options = dict(theirs if fd.rank() == 1 else mine)
    x, more = options.pop("x", ROW), options.pop("more", 0)
    before = x.copy()
    out = None if kind == "all_gather" else x
    rows = [(x, out, x.shape)] * (1 + more)
    handle = names().submit(kind, "tensor", rows, finish=lambda *_: None, **options)
    try:
        wait(handle)
    finally:
        assert (x == before).all(), "nothing has been reduced"
        works()
        y = np.full(5, fd.rank() + 1.0)  # the same name again, now alike
        assert (wait(reduce("tensor", y)) == total(fd.size())).all()


@pytest.mark.parametrize("field", FIELDS)
def test_disagreement_is_told_to_all_and_the_next_works(spawn: Spawn, field: str) -> None:
    with spawn(3) as world:
        world.start(submit_field, field)
        for outcome in world.outcomes():
            assert outcome.error == "Mismatch", outcome.trace
            assert "ranks disagree on the" in outcome.text
            assert outcome.tensor == "tensor"
            assert sorted(outcome.values.values()) == [[0, 2], [1]], outcome.values


def submit_twice() -> str:
    fd.init()
    x = np.ones(3)
    first = reduce("x", x) if fd.rank() == 0 else None
    text = ""
    if first is not None:
        with pytest.raises(fd.InvalidArgument, match="all_reduce 'x' is in flight already") as e:
            reduce("x", x)
        text = e.value.tensor
        tell("twice")
    else:
        assert listen() == "go on"
        first = reduce("x", x)
    assert (wait(first) == fd.size()).all()
    with pytest.raises(fd.InvalidArgument, match="synchronized already"):
        wait(first)
    with pytest.raises(fd.InvalidArgument, match="synchronized already"):
        _core.done_by_number(first)
    works()
    return text


def test_a_name_in_flight_is_refused_on_that_rank_alone(spawn: Spawn) -> None:
    with spawn(2) as world:
        world.start(submit_twice)
        assert world.hear(0) == "twice"
        world.say(1, "go on")
        outcomes = world.outcomes()
        assert [o.error for o in outcomes] == [None, None], [o.trace for o in outcomes]
        assert outcomes[0].value == "x"


# ---- who is missing ----


def submit_all_but_on(late: int) -> None:
    fd.init()
    works("first")
    tell("met")
    if fd.rank() == late:
        assert listen() == "go on"
    assert (wait(reduce("lonely", np.ones(3))) == fd.size()).all()


@pytest.mark.parametrize("late", [0, 1])
def test_a_stall_names_the_tensor_and_the_missing_rank(spawn: Spawn, late: int) -> None:
    with spawn(3, env={"FARANDOLE_WARN_AFTER": "0.3"}) as world:
        world.start(submit_all_but_on, late)
        teller = 0 if late == 1 else 1
        for _ in range(300):
            if "'lonely'" in world.output(teller):
                break
            world.died(teller, 0.1)
        text = world.output(teller)
        assert "all_reduce 'lonely' has waited" in text, text
        assert f"rank {late} (pid {world.pids[late]})" in text
        world.say(late, "go on")
        assert [o.error for o in world.outcomes()] == [None] * 3


def test_a_timeout_says_who_did_not_come(spawn: Spawn) -> None:
    with spawn(3, env={"FARANDOLE_TIMEOUT": "4"}) as world:
        world.start(submit_all_but_on, 2)
        for outcome in world.outcomes([0, 1]):
            assert outcome.error == "Stalled", outcome.trace
            assert "all_reduce 'lonely'" in outcome.text
            assert outcome.rank == 2, outcome.text


def submit_as_something_else() -> list[str]:
    """Two mistakes, and what comes after each of them works."""
    fd.init()
    rank, said = fd.rank(), []
    pair = fd.split(int(rank > 1))
    number = _core.names_of(_world.world()).add_set(pair if rank < 2 else None, [0, 1])
    x = np.ones(3)
    for _ in range(2):
        if rank == 1:
            mistaken = names().submit("broadcast", "x", [(x, x, x.shape)], root=0, result=x)
        else:
            mistaken = reduce("x", x)
        with pytest.raises(fd.Mismatch) as caught:
            wait(mistaken)
        said.append(caught.value.verdict)
        works("x")
        with pytest.raises(fd.Mismatch) as caught:
            wait(reduce("y", x, set=number if rank == 1 else 0))
        said.append(caught.value.verdict)
        works("y")
    return said


def test_one_name_for_different_things_is_refused_on_every_rank(spawn: Spawn) -> None:
    for said in spawn(3, env={"FARANDOLE_WARN_AFTER": "0.3"}).run(submit_as_something_else):
        kinds = "all_reduce on ranks 0, 2; broadcast on rank 1"
        sets = "ranks 0-2 on ranks 0, 2; ranks 0-1 on rank 1"
        assert said == 2 * [
            f"ranks disagree on the operation of 'x': {kinds}",
            f"ranks disagree on the process set of all_reduce 'y': {sets}",
        ]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_death_ends_what_waits_for_its_order(spawn: Spawn, victim: int) -> None:
    with spawn(3) as world:
        world.start(submit_all_but_on, victim)
        rest = [r for r in range(3) if r != victim]
        assert world.hear_all() == ["met"] * 3
        world.signal(victim, signal.SIGKILL)
        for outcome in world.outcomes(rest):
            assert outcome.error == "PeerLost", outcome.trace
            assert outcome.rank == victim


def leave_early(rank: int) -> None:
    fd.init()
    works("first")
    if fd.rank() == rank:
        fd.shutdown()
    else:
        wait(reduce("lonely", np.ones(3)))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_leaves_ends_what_waits_for_it(spawn: Spawn, rank: int) -> None:
    with spawn(3) as world:
        world.start(leave_early, rank)
        for r, outcome in enumerate(world.outcomes()):
            if r != rank:
                assert outcome.error == "EarlyExit", outcome.trace
                assert outcome.rank == rank


def abort_the_world() -> None:
    """Ends what waits in any set."""
    fd.init()
    group = _world.world().split(0 if fd.rank() > 0 else -1)
    number = names().add_set(group, [1, 2])
    _world.world().barrier()
    if fd.rank() == 2:
        _world.world().abort("enough")
    elif fd.rank() == 1:
        wait(reduce("lonely", np.ones(3), set=number))
    else:
        wait(reduce("lonely", np.ones(3)))


def test_the_end_of_the_world_is_that_of_its_sets(spawn: Spawn) -> None:
    with spawn(3) as world:
        world.start(abort_the_world)
        outcomes = world.outcomes()
        assert [o.error for o in outcomes] == ["Aborted", "Aborted", None]
        assert "enough" in outcomes[1].text


def root_leaves_after_its_share() -> None:
    fd.init()
    for i in range(20):
        x = np.full(4, float(fd.rank()))
        handle = names().submit("broadcast", f"b{i}", [(x, x, x.shape)], result=x)
        assert (wait(handle) == 0).all()
    fd.shutdown()


def test_a_rank_may_leave_when_it_has_done_its_share(spawn: Spawn) -> None:
    for _ in range(3):
        with spawn(3) as world:
            world.run(root_leaves_after_its_share)


# ---- join ----


def join_unevenly() -> int:
    fd.init()
    rank, size = fd.rank(), fd.size()
    batches = 2 + rank
    for op in ("sum", "mean", "min", "max", "product"):
        for dtype in ("float32", "int64", "float16"):
            for batch in range(batches):
                present = [r for r in range(size) if batch < 2 + r]
                x = np.full(5, rank + 1, dtype)
                result = wait(reduce(f"{op} {dtype}", x, op=op))
                values = [r + 1 for r in present]
                right = {
                    "sum": sum(values), "mean": sum(values) / size, "min": min(values),
                    "max": max(values), "product": int(np.prod(values)),
                }[op]  # fmt: skip
                # Means multiply by 1/3, which is not what numpy divides.
                assert np.allclose(result, np.array(right).astype(dtype), 1e-3), (op, dtype, result)
            last = wait(names().join())
            assert last in range(size)
    for batch in range(batches):
        present = [r for r in range(size) if batch < 2 + r]
        mine = np.full((1, 2), rank, np.int32)
        rows: list[Any] = []
        handle = names().submit(
            "all_gather", "g", [(mine, None, mine.shape)],
            finish=lambda made, _, rows=rows: rows.append(np.frombuffer(made[0][0], "i4")),
        )  # fmt: skip
        wait(handle)
        assert rows[0].tolist() == [r for r in present for _ in range(2)]
        names_of_live = names().submit("barrier", "b", [])
        wait(names_of_live)
    return int(wait(names().join()))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_joined_ranks_add_nothing(spawn: Spawn, size: int) -> None:
    last = spawn(size).run(join_unevenly)
    assert len(set(last)) == 1


def call_without_names_unevenly() -> None:
    fd.init()
    for _ in range(2):
        for _ in range(fd.rank()):
            wait(reduce(None, np.ones(2)))
        wait(names().join())
        total_of_ranks = wait(reduce(None, np.full(2, fd.rank() + 1.0)))
        assert (total_of_ranks == total(fd.size())).all()


def test_nameless_calls_meet_again_after_a_join(spawn: Spawn) -> None:
    spawn(3).run(call_without_names_unevenly)


def broadcast_from_joined() -> None:
    fd.init()
    works("first")
    if fd.rank() == 1:
        wait(names().join())
        works()
        return
    x = np.ones(3)
    try:
        wait(names().submit("broadcast", "b", [(x, x, x.shape)], root=1, result=x))
    finally:
        wait(names().join())
        works()


def test_a_joined_root_is_an_error_of_all_others(spawn: Spawn) -> None:
    with spawn(3) as world:
        world.start(broadcast_from_joined)
        outcomes = world.outcomes()
        assert [o.error for o in outcomes] == ["Mismatch", None, "Mismatch"]
        assert "has joined and has nothing to send" in outcomes[0].text


# ---- process sets ----


def use_sets() -> None:
    fd.init()
    rank, world = fd.rank(), _world.world()
    numbers = {}
    for ranks in ([0, 1], [1, 2], [2]):
        group = world.split(0 if rank in ranks else -1)
        numbers[tuple(ranks)] = names().add_set(group, ranks)
        world.barrier()
    for step in range(5):
        handles = []
        order = list(numbers)
        random.Random(rank * 10 + step).shuffle(order)
        for ranks in [*order, (0, 1, 2)]:
            if rank in ranks:
                for i in range(5):
                    x = np.full(3, rank + 1.0)
                    number = numbers.get(ranks, 0)
                    handles.append((ranks, reduce(f"x{i}", x, set=number)))
            else:
                with pytest.raises(fd.InvalidArgument, match=f"rank {rank} is not in process set"):
                    reduce("x", np.ones(1), set=numbers[ranks])
        for ranks, handle in handles:
            assert (wait(handle) == sum(r + 1 for r in ranks)).all()
    if rank > 0:  # rank 0 orders it while it does something else
        assert (wait(reduce("without rank 0", np.ones(2), set=numbers[1, 2])) == 2).all()
        tell("done")
    else:
        assert listen() == "go on"
    world.barrier()


def test_sets_have_operations_of_their_own(spawn: Spawn) -> None:
    with spawn(3) as world:
        world.start(use_sets)
        world.hear_all([1, 2])
        world.say(0, "go on")
        outcomes = world.outcomes()
        assert [o.error for o in outcomes] == [None] * 3, [o.trace for o in outcomes]
