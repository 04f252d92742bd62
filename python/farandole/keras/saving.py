"""Models from files, with their optimizer distributed again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from farandole._arguments import encodable, explained, one_of, shown
from farandole._core import InvalidArgument
from farandole.keras.compression import Compression, Compressor
from farandole.keras.optimizer import DistributedOptimizer


def _are_classes(value: Any) -> bool:
    return isinstance(value, Iterable) and all(isinstance(each, type) for each in value)


@explained(
    custom_optimizers=("a list of classes", _are_classes),
    custom_objects=one_of("a dictionary", Mapping),
)
def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Compressor | type[Compressor] = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Loads a model, and makes its optimizer a ``DistributedOptimizer`` with the saved state.

    Files name the plain optimizer: plain Keras loads what was saved in a distributed job, and this
    loads what plain Keras has saved.

    Args:
        filepath: of ``model.save()``.
        custom_optimizers: classes of your own that the file may name.
        custom_objects: other things of your own, by name.
        compression: as in ``DistributedOptimizer``.
        legacy_opts: of Keras 2; there are none in Keras 3.
        options: further arguments of ``DistributedOptimizer``, which files do not keep.

    Raises:
        InvalidArgument: ``legacy_opts``, a file that cannot be loaded, or a wrong option.

    Examples:
        >>> model = hvd.load_model("checkpoint.keras")  # doctest: +SKIP
    """
    if legacy_opts:
        raise InvalidArgument("legacy_opts=True: Keras 3 has no legacy optimizers")
    known = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    named = known | dict(custom_objects or {})
    try:
        model = keras.models.load_model(filepath, custom_objects=named)
    except ValueError as error:
        raise InvalidArgument(
            f"load_model(): filepath is {shown(filepath)}: {encodable(error)}"
        ) from error
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression, **options)
    return model
