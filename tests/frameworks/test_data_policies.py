"""A rank's part of a tf.data.Dataset, by each policy, for any transformations: without a world, as
`split_dataset` takes the number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import farandole as fd
from farandole.data import DEFAULT_SEED, ReadBatches, split_dataset
from farandole.data._logical import Block, block_of
from farandole.data._tensorflow import split_dataset_in

tf: Any = pytest.importorskip("tensorflow")

N = 23
X = np.arange(2.0 * N).reshape(N, 2).astype("float32")
Y = np.arange(N)


@pytest.fixture(autouse=True)
def without_a_seed() -> None:
    tf.random.set_seed(None)


def rows() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y))


def double(x: Any, y: Any) -> Any:
    return 2 * x + tf.cast(y, x.dtype), {"y": y, "name": tf.strings.as_string(y)}


def widen(x: Any, others: Any) -> Any:
    return tf.concat([x, -x], 0), others["y"]


def odd(x: Any, _: Any) -> Any:
    return tf.cast(x[0], tf.int64) % 3 > 0


def drawn(x: Any, y: Any) -> Any:
    return x + tf.random.uniform(()), y


def by_python(x: Any, y: Any) -> Any:
    return tf.ensure_shape(tf.py_function(lambda a: a, [x], tf.float32), [2]), y


def flat(batch: Any) -> list[Any]:
    return [np.asarray(each) for each in tf.nest.flatten(batch)]


def assert_parts_of(whole: list[Any], make: Callable[[], Any], ranks: int, policy: Any) -> None:
    """The parts of all ranks, joined, are the batches of one process."""
    parts = []
    for rank in range(ranks):
        split = split_dataset(make(), ReadBatches(), ranks, rank, policy=policy)
        assert split.cardinality() == make().cardinality()
        parts.append(list(split))
    assert {len(each) for each in parts} == {len(whole)}
    for i, batch in enumerate(whole):
        shares = [np.asarray(part[i][1]) for part in parts]
        counts = [int(share[0, 0]) for share in shares]
        assert counts == [len(each) for each in np.array_split(flat(batch)[0], ranks)]
        for k, right in enumerate(flat(batch)):
            mine = [flat(part[i][0])[k] for part in parts]
            assert [len(each) for each in mine] == [max(count, 1) for count in counts]
            cut = [each[:count] for each, count in zip(mine, counts, strict=True)]
            np.testing.assert_array_equal(np.concatenate(cut), right)
        assert all(share[0, 1] == len(flat(batch)[0]) for share in shares)


MAPPED: dict[str, Callable[[], Any]] = {
    "map": lambda: rows().map(double).batch(5),
    "maps, one in parallel": lambda: rows().map(double).map(widen, num_parallel_calls=3).batch(5),
    "shuffle after map": lambda: rows().map(double).shuffle(7, seed=3).map(widen).batch(5),
    "repeat before batch": lambda: rows().map(double).repeat(2).batch(5),
    "repeat after batch": lambda: rows().map(double).batch(5).repeat(2),
    "take and skip": lambda: rows().map(double).take(20).skip(3).batch(4).skip(1).take(2),
    "shard": lambda: rows().map(double).shard(2, 1).batch(5),
    "prefetch": lambda: rows().prefetch(2).map(double).prefetch(1).batch(4).prefetch(-1),
    "drop_remainder": lambda: rows().map(double).batch(5, drop_remainder=True),
    "shuffled batches": lambda: rows().map(double).batch(4).shuffle(3, seed=1),
    "a parallel batch": lambda: rows().map(double).batch(4, num_parallel_calls=2),
    "cache below": lambda: rows().map(double).cache().map(widen).batch(6).repeat(2),
    "filter below": lambda: rows().map(double).filter(odd).map(widen).batch(6),
    "zip below": lambda: tf.data.Dataset.zip((rows().map(double), rows())).map(
        lambda a, b: (a[0] - b[0], b[1])
    ).batch(6),
    "a random map below": lambda: rows().map(drawn).map(lambda x, y: (0 * x, y)).batch(6),
    "few samples": lambda: rows().take(5).map(double).batch(2),
    "one thread, and any number": lambda: rows().map(double, synchronous=True).map(
        widen, num_parallel_calls=2, use_unbounded_threadpool=True
    ).batch(6),
    "options": lambda: rows().map(double).batch(5).with_options(tf.data.Options()),
}  # fmt: skip
WHOLE: dict[str, Callable[[], Any]] = {
    "no map": lambda: rows().shuffle(9, seed=1).batch(5),
    "filter": lambda: rows().map(double).filter(odd).batch(5),
    "cache of samples": lambda: rows().map(double).cache().batch(5),
    "cache of batches": lambda: rows().map(double).batch(5).cache().repeat(2),
    "map of batches": lambda: rows().batch(5).map(lambda x, y: (x - x[:1], y)),
    "padded_batch": lambda: rows().map(double).padded_batch(4),
    "zip": lambda: tf.data.Dataset.zip((rows().batch(4), rows().map(double).batch(4))),
    "concatenate": lambda: rows().batch(4).concatenate(rows().batch(5)),
    "interleave": lambda: rows().interleave(
        lambda x, _: tf.data.Dataset.from_tensors(x), cycle_length=2
    ).batch(4),
    "no one shape": lambda: tf.data.Dataset.range(9).map(tf.range).cache().map(
        tf.reduce_sum
    ).batch(4),
    "unbatch": lambda: rows().map(double).batch(4).unbatch().batch(5),
}  # fmt: skip
IN_THE_WAY = {
    "no map": "there is no map() between from_tensor_slices (step 1 from the source) and",
    "filter": "there is no map() between filter (step 3 from the source) and batch()",
    "cache of samples": "there is no map() between cache (step 3 from the source) and batch()",
    "cache of batches": "cache (step 4 from the source) comes after batch(): it keeps",
    "map of batches": "map (step 3 from the source) comes after batch(): it works on whole",
    "padded_batch": "padded_batch (step 3 from the source) makes or changes batches by itself",
    "zip": "zip (step 4 from the source) makes",
    "concatenate": "concatenate (step 3 from the source) makes",
    "interleave": "there is no map() between interleave (step 2 from the source)",
    "no one shape": "map (step 4 from the source) takes tensors of shape (None,)",
    "unbatch": "there is no map() between unbatch (step ",
}


@pytest.mark.parametrize("name", MAPPED)
def test_a_rank_maps_its_own_samples_and_all_are_those_of_one_process(name: str) -> None:
    make = MAPPED[name]
    for ranks in (2, 4) if name in ("map", "repeat after batch", "few samples") else (3,):
        assert_parts_of(list(make()), make, ranks, "index")


@pytest.mark.parametrize("name", WHOLE)
def test_a_rank_keeps_its_part_where_maps_stay_and_is_told_why(name: str) -> None:
    make = WHOLE[name]
    assert_parts_of(list(make()), make, 3, "auto")
    with pytest.raises(fd.InvalidArgument) as refusal:
        split_dataset(make(), size=3, rank=0, policy="index")
    assert IN_THE_WAY[name] in str(refusal.value)
    assert "'slice'" in str(refusal.value)


@pytest.mark.parametrize(
    ("function", "why"), [(drawn, "RandomUniform"), (by_python, "runs Python code (EagerPyFunc)")]
)
def test_maps_that_keep_a_state_are_not_moved(
    function: Any, why: str, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("farandole.data._tensorflow._said", [])

    def make() -> Any:
        return rows().shuffle(4, seed=2).map(function).map(double).map(function).batch(4)

    for _ in range(2):
        list(split_dataset(make(), size=2, rank=0).take(1))
    said = capsys.readouterr().out
    assert said.count("every rank makes whole batches") == 1
    assert "map (step 5 from the source)" in said
    with pytest.raises(fd.InvalidArgument) as refusal:
        split_dataset(make(), size=2, rank=0, policy="index")
    assert f"map (step 5 from the source) {'draws' if function is drawn else 'runs'}" in str(
        refusal.value
    )
    assert why in str(refusal.value)


def counted(made: Counter[int]) -> Callable[..., Any]:
    def count(y: Any) -> Any:
        made[int(y)] += 1
        return y

    return lambda x, y: (x, tf.ensure_shape(tf.numpy_function(count, [y], tf.int64, False), []))


def test_maps_run_for_a_ranks_own_samples_alone() -> None:
    for policy, ranges in (("index", [(0, 3), (6, 9), (12, 15)]), ("slice", [(0, 18)])):
        made: Counter[int] = Counter()
        data = rows().take(18).map(counted(made)).batch(6)
        list(split_dataset(data, size=2, rank=0, policy=policy))
        assert made == Counter({i: 1 for begin, end in ranges for i in range(begin, end)})


def test_a_function_is_the_one_that_was_traced() -> None:
    """Names in it may stand for something else by now."""
    data = rows()
    for factor in (2.0, 3.0):
        data = data.map(lambda x, y: (factor * x, y))  # noqa: B023
    data = data.batch(4)
    right = list(data)
    assert_parts_of(right, lambda: data, 2, "index")


def test_parts_of_logical_ranks_are_cut_alike_by_both_ways() -> None:
    for rank in range(3):
        block = block_of(rank, 3, 4)
        both = [
            list(split_dataset_in(MAPPED["few samples"](), None, block, policy, 1).data)
            for policy in ("index", "slice")
        ]
        assert len(both[0]) == 3
        for mine, right in zip(*both, strict=True):
            assert len(mine[0]) == len(block.mine)
            for a, b in zip(flat(mine), flat(right), strict=True):
                np.testing.assert_array_equal(a, b)
    alone = split_dataset_in(MAPPED["map"](), None, Block(1, range(1)), "index", 1)
    assert len(list(alone.data)) == 5


# ---- orders ----


def order(data: Any, **options: Any) -> list[int]:
    split = split_dataset(data, **({"size": 1, "rank": 0} | options))
    return [int(y) for (_, y), share in split for y in y[: int(share[0, 0])]]


def test_a_shuffle_without_a_seed_has_one() -> None:
    def make(first: int | None = None, second: int | None = None) -> Any:
        files = tf.data.Dataset.range(4).shuffle(4, first)
        data = files.interleave(
            lambda i: rows().shard(4, i), cycle_length=2, num_parallel_calls=2, deterministic=True
        )
        data = data.cache().shuffle(9, second).filter(lambda _, y: y > 2)
        return tf.data.Dataset.zip((data, data)).map(lambda a, b: (a[0], b[1])).batch(4)

    right = [int(y) for _, y in make(DEFAULT_SEED, DEFAULT_SEED + 1).unbatch()]
    assert order(make()) == right != sorted(right)
    assert order(make(), policy="slice") == right
    assert order(make(), seed=7) == order(make(7, 8)) != right
    for policy in ("index", "slice"):
        both = [order(make(), size=2, rank=rank, policy=policy) for rank in (0, 1)]
        assert sorted(both[0] + both[1]) == sorted(right)
        assert both[0][:4] == right[:2] + right[4:6]


def test_orders_go_on_from_one_split_to_the_next() -> None:
    for policy in ("index", "slice"):
        for seed in (None, 3):
            data = rows().map(lambda x, y: (x, y)).shuffle(9, seed).batch(N)
            serial = rows().shuffle(9, DEFAULT_SEED if seed is None else seed).batch(N)
            passes = [order(data, size=2, rank=0, policy=policy) for _ in range(2)]
            assert passes == [[int(y) for _, y in serial.unbatch()][:12] for _ in range(2)]
            assert passes[0] != passes[1]
    shuffled = rows().shuffle(N, reshuffle_each_iteration=False)
    train, held = shuffled.take(15).batch(4), shuffled.skip(15).batch(4)
    assert sorted(order(train) + order(held)) == list(range(N))


@pytest.mark.parametrize("policy", ["index", "slice"])
@pytest.mark.parametrize("seed", [None, 3])
def test_orders_below_a_repeat_do_not_depend_on_what_was_read_ahead(
    policy: Any, seed: int | None
) -> None:
    def orders(read: int) -> list[list[int]]:
        """The orders of three calls, the first of which reads so many batches."""
        data = rows().map(lambda x, y: (x, y)).shuffle(9, seed).repeat().batch(4)
        calls = []
        for take in (read, 6, 6):
            split = split_dataset(data, size=1, rank=0, policy=policy).take(take)
            calls.append([int(y) for (_, each), _ in split for y in each])
        return calls

    first, *later = orders(12)
    serial = rows().shuffle(9, DEFAULT_SEED if seed is None else seed).repeat().batch(4).take(12)
    assert first == [int(y) for _, each in serial for y in each]
    assert later[0] != later[1]
    assert first[:24] not in later
    assert orders(1)[1:] == later


def test_lookups_move_and_no_order_is_an_order() -> None:
    names = tf.lookup.KeyValueTensorInitializer(tf.constant(range(N)), tf.constant(range(N)) * 2)
    table = tf.lookup.StaticHashTable(names, -1)

    def data() -> Any:
        options = tf.data.Options()
        options.deterministic = False
        read = rows().interleave(
            lambda x, y: tf.data.Dataset.from_tensors((x, y)), 4, num_parallel_calls=4
        )
        return read.map(lambda x, y: (x, table.lookup(tf.cast(y, tf.int32)))).with_options(options)

    order_of = [
        [int(y) for (_, each), _ in split_dataset(data().batch(4), size=1, rank=0, policy="index")
         for y in each]
        for _ in range(2)
    ]  # fmt: skip
    assert order_of == [list(range(0, 2 * N, 2))] * 2


def test_a_pass_that_is_given_up_changes_orders_alone() -> None:
    def may(data: Any) -> bool:
        block = Block(2, range(1))
        return bool(split_dataset_in(data.batch(4), None, block, "auto", 1).may_be_looked_into)

    shuffled = rows().shuffle(9, seed=1)
    assert may(shuffled.map(double).take(9).prefetch(2))
    for other in (
        shuffled.cache(), shuffled.repeat(2), shuffled.map(drawn), rows().cache().shuffle(9),
        shuffled.interleave(lambda *row: tf.data.Dataset.from_tensors(row)),
    ):  # fmt: skip
        assert not may(other)


def test_a_seed_of_the_program_stays() -> None:
    def make() -> Any:
        tf.random.set_seed(5)
        data = rows().map(lambda x, y: (x, y)).shuffle(9).batch(4)
        tf.random.set_seed(6)
        return data

    right = [int(y) for _, y in make().unbatch()]
    both = [order(make(), size=2, rank=rank, policy="index") for rank in (0, 1)]
    assert both[0][:2] + both[1][:2] == right[:4]


# ---- what differs, what is wrong ----


def test_checksums_tell_what_is_read_and_how_it_is_mapped() -> None:
    def sums(data: Any) -> dict[Any, int]:
        read = ReadBatches()
        list(split_dataset(data, read, 2, 0, policy="index"))
        return read._sums

    table = tf.constant([1.0, 2.0])
    same = [sums(rows().map(lambda x, y: (x * table, y)).batch(8)) for _ in range(2)]
    assert same[0] == same[1]
    assert len(same[0]) == 3
    other = tf.constant([1.0, 3.0])
    for data in (
        rows().map(lambda x, y: (x * other, y)),
        rows().map(lambda x, y: (x + table, y)),
        rows().skip(1).concatenate(rows().take(1)).map(lambda x, y: (x * table, y)),
    ):
        assert sums(data.batch(8)) != same[0]
    paths = [
        tf.data.Dataset.from_tensor_slices([f"{i}" * 99 for i in order]) for order in ("12", "13")
    ]
    a, b = (sums(each.map(tf.strings.length).batch(2)) for each in paths)
    assert a != b


def test_rows_that_are_taken_for_batches_warn() -> None:
    numbers = tf.data.Dataset.from_tensor_slices(X)
    with pytest.warns(UserWarning, match=r"rows of arrays(.|\n)*dataset\.batch\(B\)"):
        split_dataset(numbers.shuffle(4, seed=1).repeat(2), size=2, rank=0)


@pytest.mark.filterwarnings("error")
def test_what_may_be_batches_does_not_warn() -> None:
    for data in (
        tf.data.Dataset.from_tensor_slices(X.reshape(-1, 2, 1)),
        tf.data.Dataset.from_tensor_slices(X).map(lambda x: x),
        tf.data.Dataset.from_tensor_slices(X[:, 0]).batch(4),
        tf.data.Dataset.from_tensors(X[0]),
    ):
        split_dataset(data, size=2, rank=0)


def test_what_is_no_policy_is_refused() -> None:
    for policy in ("indexed", "leader", None):
        with pytest.raises(fd.InvalidArgument, match=r"policy is .*'auto', 'index', 'slice'"):
            split_dataset(rows().batch(4), policy=policy)


def test_a_version_that_keeps_other_attributes_gets_slices(monkeypatch: Any) -> None:
    from farandole.data import _pipeline

    def missing(_: Any) -> Any:
        raise AttributeError("_input_dataset")

    readers = {name: (words, missing) for name, (words, _) in _pipeline._READERS.items()}
    monkeypatch.setattr(_pipeline, "_READERS", readers)
    assert_parts_of(list(MAPPED["map"]()), MAPPED["map"], 2, "auto")
    with pytest.raises(fd.InvalidArgument, match=r"batch .step 3 from the source. makes"):
        split_dataset(MAPPED["map"](), size=2, rank=0, policy="index")
