"""Checks the arguments of strategies, before or after TensorFlow does, and names a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from farandole._arguments import is_whole, shown
from farandole._core import InvalidArgument
from farandole.strategy._variables import local
from farandole.tensorflow._calls import tensor_from
from farandole.tensorflow._graph import refused


def check_function(what: str, name: str, value: Any) -> None:
    if not callable(value):
        raise refused(f"{what}: {name} is {shown(value)}; it is a function")


def check_call(what: str, fn: Any, args: Any, kwargs: Any, options: Any = None) -> None:
    """Raises Refused for what cannot be called as ``fn(*args, **kwargs)``."""
    check_function(what, "fn", fn)
    if not isinstance(args, list | tuple):
        raise refused(f"{what}: args is {shown(args)}; it is a tuple, as in args=(batch,)")
    if kwargs is not None and not (
        isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    ):
        raise refused(f"{what}: kwargs is {shown(kwargs)}; it is a dictionary of names")
    if options is not None and not isinstance(options, tf.distribute.RunOptions):
        raise refused(f"{what}: options is {shown(options)}; it is a tf.distribute.RunOptions")


def check_axis(what: str, axis: Any) -> None:
    several = isinstance(axis, tuple) and all(map(is_whole, axis))
    if not (axis is None or is_whole(axis) or several):
        raise refused(f"{what}: axis is {shown(axis)}; it is a whole number, or None")


def explained(what: str, value: Any, axis: Any, call: Callable[[], Any]) -> Any:
    """The result of the call. Raises Refused if it failed because of the value, which may be a
    structure."""
    try:
        return call()
    except InvalidArgument:
        raise
    except (TypeError, ValueError):
        for each in tf.nest.flatten(value):
            tensor = tensor_from(local(each), f"{what}: value")
            _check_dimensions(what, tensor.shape.rank, axis)
        raise


def _check_dimensions(what: str, rank: int | None, axis: Any) -> None:
    for number in axis if isinstance(axis, tuple) else (axis,):
        if number is not None and rank is not None and not -rank <= number < rank:
            has = f"the dimensions 0 to {rank - 1}" if rank else "no dimension"
            raise refused(f"{what}: axis is {number}; the value has {has}")


def check_input_options(options: Any) -> None:
    if options is not None and not isinstance(options, tf.distribute.InputOptions):
        raise InvalidArgument(f"options is {shown(options)}; it is a tf.distribute.InputOptions")


def check_communication_options(options: Any) -> None:
    """Checks by attributes, since TensorFlow's class makes objects of another one."""
    if not all(hasattr(options, name) for name in ("bytes_per_pack", "implementation")):
        raise InvalidArgument(
            f"options are {shown(options)}; they are a "
            "tf.distribute.experimental.CommunicationOptions"
        )


def check_resolver(resolver: Any) -> None:
    if resolver is not None and not hasattr(resolver, "cluster_spec"):
        raise InvalidArgument(
            f"cluster_resolver is {shown(resolver)}; it is one of "
            "tf.distribute.cluster_resolver, or None"
        )


def check_device(name: str, given: Any, device: str) -> None:
    """Raises InvalidArgument where TensorFlow has no such device here."""
    here = tf.config.list_logical_devices()
    try:
        asked = tf.DeviceSpec.from_string(device)
    except ValueError:
        asked = None
    found = asked is not None and any(
        asked.device_type in (None, each.device_type)
        and asked.device_index in (None, int(each.name.rpartition(":")[2]))
        for each in here
    )
    if not found:
        raise InvalidArgument(
            f"{name} is {shown(given)}; TensorFlow has here "
            + ", ".join(each.name.partition("/device:")[2] for each in here)
        )
