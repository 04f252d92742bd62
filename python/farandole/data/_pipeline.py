"""A tf.data pipeline as steps that can be applied again, as the program wrote them.

TensorFlow keeps in each dataset what it was made of, in attributes that are not public. What cannot
be read of them, in this version or another, is a step that stays as it is, with all below it. What
is applied again goes by TensorFlow's public names.

Note [Orders that go on]

A shuffle() draws a new order for each pass, and goes on from one fit() to the next. So one that is
made anew, with a seed or of other samples, is kept with the user's own, and is the same one when
that comes again. A cache() is kept likewise.

Below a repeat(), how many orders have been drawn depends on how far was read ahead, which differs
between ranks. So from the second call on that reads it, such a shuffle is a new one, whose seeds
say how many calls there have been.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

_UNKNOWN = (AttributeError, KeyError, TypeError, ValueError)  # another version's attributes
_PROGRAM_SEED = 87654321  # TensorFlow's, of one that sets none: then shuffle(n, seed) is the same
_BETWEEN_CALLS = 1_000_003  # from one seed to the next, of a shuffle below a repeat()
# Where the program asks for no order, one of all ranks is well.
_DETERMINISTIC = {"true": True, "false": True, "default": None}

Again = Callable[..., Any]
_Read = tuple[list[Any], dict[str, Any]]  # inputs, and what else a step is made of


@dataclass(frozen=True, eq=False)
class Step:
    """A transformation, or a source."""

    name: str  # as programs write it
    dataset: Any  # the user's own
    inputs: tuple[Step, ...] = ()
    # The same of other datasets; of a shuffle: of a seed, where it has none, and of a call.
    again: Again | None = None
    unseeded: bool = False
    reshuffles: bool = False
    function: Any = None  # of a map
    options: tuple[tuple[str, Any], ...] = ()  # of a map
    size: int = 0  # of a batch

    @cached_property
    def place(self) -> int:
        """Counted from the source, which is 1."""
        return 1 + max((each.place for each in self.inputs), default=0)

    def __str__(self) -> str:
        return f"{self.name} (step {self.place} from the source)"

    @property
    def keeps_state(self) -> bool:
        return self.name in ("shuffle", "cache")


def read_pipeline(dataset: Any) -> Step:
    """Its last step, with those before it."""
    return _read(dataset, {})


def chain(step: Step) -> Iterator[Step]:
    """The steps from the last one on, as far as each has one input."""
    yield step
    while len(step.inputs) == 1:
        (step,) = step.inputs
        yield step


def _read(dataset: Any, known: dict[int, Step]) -> Step:
    """Raises nothing: what cannot be read is a step without `again`."""
    if id(dataset) not in known:
        kind = re.sub(r"^_?(Parallel)?|(Dataset)?$", "", type(dataset).__name__)
        name, reader = _READERS.get(kind, (_in_words(kind), _opaque))
        found = _tried(reader, dataset) or _tried(_opaque, dataset) or ([], {})
        below = tuple(_read(each, known) for each in found[0])
        known[id(dataset)] = Step(name, dataset, below, **found[1])
    return known[id(dataset)]


def _tried(reader: Callable[[Any], _Read], dataset: Any) -> _Read | None:
    try:
        return reader(dataset)
    except _UNKNOWN:
        return None


def _in_words(kind: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()


# ---- what TensorFlow keeps in its datasets ----


def _opaque(dataset: Any) -> _Read:
    return list(dataset._inputs()), {}


def _one(again: Callable[[Any, Any], Again]) -> Callable[[Any], _Read]:
    """A reader of datasets with one input. `again` returns the function that applies it anew."""
    return lambda dataset: ([dataset._input_dataset], {"again": again(dataset, _value)})


def _value(tensor: Any) -> Any:
    """A tensor's value. Raises ValueError where it is not known before the pipeline runs."""
    import tensorflow as tf

    value = tf.get_static_value(tensor)
    if value is None:
        raise ValueError("not known yet")
    return value.item() if hasattr(value, "item") else value


def _counted(name: str, attribute: str) -> Callable[[Any], _Read]:
    def again(dataset: Any, value: Any) -> Again:
        count = value(getattr(dataset, attribute))
        return lambda below: getattr(below, name)(count)

    return _one(again)


def _shard(dataset: Any, value: Any) -> Again:
    shards, index = value(dataset._num_shards), value(dataset._index)
    return lambda below: below.shard(shards, index)


def _cache(dataset: Any, value: Any) -> Again:
    filename = value(dataset._filename)
    return lambda below: below.cache(filename)


def _with_options(dataset: Any, _: Any) -> Again:
    options = dataset.options()
    return lambda below: below.with_options(options)


def _parallel(dataset: Any) -> tuple[tuple[str, Any], ...]:
    calls = getattr(dataset, "_num_parallel_calls", None)
    if calls is None:
        return ()
    return (
        ("num_parallel_calls", _value(calls)),
        ("deterministic", _DETERMINISTIC[getattr(dataset, "_deterministic", "default")]),
    )


def _batch(dataset: Any) -> _Read:
    size, drop = _value(dataset._batch_size), _value(dataset._drop_remainder)
    options = dict(_parallel(dataset))

    def again(below: Any) -> Any:
        return below.batch(size, drop_remainder=drop, **options)

    return [dataset._input_dataset], {"again": again, "size": size}


def _padded_batch(dataset: Any, value: Any) -> Again:
    size, drop = value(dataset._batch_size), value(dataset._drop_remainder)
    shapes, values = dataset._padded_shapes, dataset._padding_values
    return lambda below: below.padded_batch(size, shapes, values, drop)


def _shuffle(dataset: Any) -> _Read:
    import tensorflow as tf

    buffer = _value(dataset._buffer_size)
    seeds = _value(dataset._seed), _value(dataset._seed2)
    reshuffles = dataset._reshuffle_each_iteration
    flat = tf.nest.flatten(dataset.element_spec)
    _require_dense(flat)

    def seeded(below: Any, seeds: tuple[int, int]) -> Any:
        # shuffle() would derive other seeds of these, once there is one of the whole program.
        variant = tf.raw_ops.ShuffleDatasetV3(
            input_dataset=tf.data.experimental.to_variant(below),
            buffer_size=buffer,
            seed=seeds[0],
            seed2=seeds[1],
            seed_generator=tf.raw_ops.DummySeedGenerator(),
            output_types=[each.dtype for each in flat],
            output_shapes=[each.shape for each in flat],
            reshuffle_each_iteration=True if reshuffles is None else reshuffles,
        )
        made = tf.data.experimental.from_variant(variant, below.element_spec)
        made._farandole_below = below  # with its Python functions, which TensorFlow does not hold
        return made

    unseeded = seeds == (0, 0)  # by which TensorFlow means: draw them

    def again(below: Any, seed: int, call: int) -> Any:
        first, second = (_PROGRAM_SEED, seed) if unseeded else seeds
        return seeded(below, (first, second + call * _BETWEEN_CALLS))

    about = {"again": again, "unseeded": unseeded, "reshuffles": reshuffles is not False}
    return [dataset._input_dataset], about


def _require_dense(specs: list[Any]) -> None:
    """Raises TypeError: the others have forms of their own, in functions and as arguments."""
    import tensorflow as tf

    if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
        raise TypeError("not dense tensors")


def _map(dataset: Any) -> _Read:
    function = _function(dataset._map_func)
    options = _parallel(dataset)
    for attribute in ("_use_unbounded_threadpool", "_force_synchronous"):  # newer versions'
        if getattr(dataset, attribute, False):
            options += ((attribute.removeprefix("_").removeprefix("force_"), True),)

    def again(below: Any) -> Any:
        return below.map(on_element(function, below.element_spec), **dict(options))

    return [dataset._input_dataset], {"again": again, "function": function, "options": options}


def _filter(dataset: Any, _: Any) -> Again:
    function = _function(dataset._predicate)
    return lambda below: below.filter(on_element(function, below.element_spec))


def _flat_map(dataset: Any, _: Any) -> Again:
    function = _function(dataset._map_func)
    return lambda below: below.flat_map(on_element(function, below.element_spec))


def _interleave(dataset: Any, value: Any) -> Again:
    function = _function(dataset._map_func)
    cycle, block = value(dataset._cycle_length), value(dataset._block_length)
    options = dict(_parallel(dataset))
    return lambda below: below.interleave(
        on_element(function, below.element_spec), cycle, block, **options
    )


class Function:
    """A function of one element, as TensorFlow has traced it: traced anew, it could be another one,
    as names in it may stand for other things by now."""

    def __init__(self, traced: Any, made: Any) -> None:
        self.traced, self._made = traced, made

    def __call__(self, element: Any) -> Any:
        import tensorflow as tf

        flat = self.traced(*tf.nest.flatten(element))
        if isinstance(self._made, tf.data.DatasetSpec):
            return tf.data.experimental.from_variant(flat[0], self._made.element_spec)
        return tf.nest.pack_sequence_as(self._made, flat)


def _function(wrapper: Any) -> Function:
    import tensorflow as tf

    _require_dense(tf.nest.flatten(wrapper._input_structure))
    made = wrapper.output_structure
    if not isinstance(made, tf.data.DatasetSpec):
        _require_dense(tf.nest.flatten(made))
    return Function(wrapper.function, made)


def element_of(arguments: tuple[Any, ...], spec: Any) -> Any:
    """The element that tf.data passes to a function, which gets a tuple's parts one by one."""
    return arguments if type(spec) is tuple else arguments[0]


def on_element(function: Callable[[Any], Any], spec: Any) -> Callable[..., Any]:
    return lambda *arguments: function(element_of(arguments, spec))


def _zip(dataset: Any) -> _Read:
    import tensorflow as tf

    datasets = dataset._datasets
    inputs = tf.nest.flatten(datasets)

    def again(*below: Any) -> Any:
        return tf.data.Dataset.zip(tf.nest.pack_sequence_as(datasets, below))

    return inputs, {"again": again}


def _concatenate(dataset: Any) -> _Read:
    inputs = [dataset._input_dataset, dataset._dataset_to_concatenate]
    return inputs, {"again": lambda first, second: first.concatenate(second)}


def _adapter(dataset: Any) -> _Read:
    return [dataset._dataset], {"again": lambda below: below}


_READERS: dict[str, tuple[str, Callable[[Any], _Read]]] = {
    "Batch": ("batch", _batch),
    "Cache": ("cache", _one(_cache)),
    "Concatenate": ("concatenate", _concatenate),
    "Filter": ("filter", _one(_filter)),
    "FlatMap": ("flat_map", _one(_flat_map)),
    "Interleave": ("interleave", _one(_interleave)),
    "Map": ("map", _map),
    "Options": ("with_options", _one(_with_options)),
    "PaddedBatch": ("padded_batch", _one(_padded_batch)),
    "Prefetch": ("prefetch", _counted("prefetch", "_buffer_size")),
    "Repeat": ("repeat", _counted("repeat", "_count")),
    "Shard": ("shard", _one(_shard)),
    "Shuffle": ("shuffle", _shuffle),
    "Skip": ("skip", _counted("skip", "_count")),
    "Take": ("take", _counted("take", "_count")),
    "TensorSlice": ("from_tensor_slices", _opaque),
    "Tensor": ("from_tensors", _opaque),
    "DatasetV1Adapter": ("with_options", _adapter),
    "Zip": ("zip", _zip),
}


# ---- made anew ----


def rebuilt(step: Step, seed: int, without: frozenset[Step] = frozenset()) -> Any:
    """The dataset, in which each shuffle without a seed has one: the first from the source `seed`,
    the next `seed + 1`, so that their orders have nothing in common. What is not touched is the
    user's own.

    Args:
        without: maps to leave out. Every step after them can be applied again.
    """
    made = _Rebuilding(seed, without, drawn_below_a_repeat(step)).of(step)
    if made is not step.dataset:
        made = made.with_options(step.dataset.options())  # of all steps; some are made of ops
    return made


# By the user's own: what was made of it, and calls that have read it, below a repeat().
_kept: WeakKeyDictionary[Any, dict[tuple[int, int, bool, int], Any]] = WeakKeyDictionary()
_calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def drawn_below_a_repeat(step: Step, below: bool = False) -> frozenset[Step]:
    """Shuffles below a repeat() that draw more than one order."""
    mine = {step} if below and step.name == "shuffle" and step.reshuffles else set[Step]()
    below = below or step.name == "repeat"
    return frozenset(mine).union(*(drawn_below_a_repeat(each, below) for each in step.inputs))


class _Rebuilding:
    def __init__(self, seed: int, without: frozenset[Step], repeated: frozenset[Step]) -> None:
        self._seed, self._without, self._repeated = seed, without, repeated
        self._shuffles = 0  # without a seed, so far
        self._made: dict[Step, tuple[Any, bool]] = {}

    def of(self, step: Step) -> Any:
        return self._of(step)[0]

    def _of(self, step: Step) -> tuple[Any, bool]:
        """The dataset of a step, and whether maps are left out of it."""
        if step not in self._made:
            self._made[step] = self._anew(step)
        return self._made[step]

    def _anew(self, step: Step) -> tuple[Any, bool]:
        if step.again is None:
            return step.dataset, False
        found = [self._of(each) for each in step.inputs]
        below = [dataset for dataset, _ in found]
        if step in self._without:
            return below[0], True
        short = any(lacks for _, lacks in found)
        number = self._shuffles
        self._shuffles += step.unseeded
        call = self._call_of(step)
        same = all(mine is own.dataset for mine, own in zip(below, step.inputs, strict=True))
        if same and not step.unseeded and call == 0:
            return step.dataset, False
        if not step.keeps_state:
            return step.again(*below), short
        orders = [self._seed + number, call] if step.name == "shuffle" else []
        kept = _kept.setdefault(step.dataset, {})  # Note [Orders that go on]
        key = self._seed, number, short, call
        if key not in kept:
            if call > 0:
                kept.clear()
            kept[key] = step.again(*below, *orders)
        return kept[key], short

    def _call_of(self, step: Step) -> int:
        if step not in self._repeated:
            return 0
        call = _calls.get(step.dataset, 0)
        _calls[step.dataset] = call + 1
        return call
