"""The strategies, with the names and signatures of tf.distribute's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import tensorflow as tf

from farandole import _world
from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole.strategy import _central_keras, _checkpoint, _keras, _loops, _outside
from farandole.strategy._central import CentralExtended
from farandole.strategy._checks import (
    check_axis,
    check_call,
    check_communication_options,
    check_device,
    check_function,
    check_input_options,
    check_resolver,
    explained,
)
from farandole.strategy._cluster import join
from farandole.strategy._collectives import op_of
from farandole.strategy._extended import Extended, as_is
from farandole.strategy._options import Packing, packing_of, refuse_nccl
from farandole.strategy._presence import filled


class Misused(InvalidArgument, RuntimeError):
    """A wrong use of contexts: farandole's class, and the one that TensorFlow raises."""


def teach_keras() -> None:
    keras = _keras.imported()
    if keras is not None:
        _keras.teach(keras.Model)
        _central_keras.teach(keras.optimizers)
        if hasattr(keras.callbacks, "SwapEMAWeights"):  # since Keras 3.2
            _central_keras.teach_swapping(keras.callbacks.SwapEMAWeights)
        _loops.teach(keras.optimizers)
        _loops.teach_normalization(keras.layers.BatchNormalization)
        _loops.teach_spectral(keras.layers.SpectralNormalization)


class OneOfMany(tf.distribute.Strategy):  # type: ignore[misc]  # TensorFlow has no types
    """The base of all our strategies: the objects of all processes together are one strategy."""

    @as_is
    def scope(self) -> Any:
        """As TensorFlow's.

        Raises:
            InvalidArgument: in the scope of another strategy.
        """
        teach_keras()
        other = tf.distribute.get_strategy() if tf.distribute.has_strategy() else self
        if other is not self:
            raise Misused(
                f"the scope of a {type(self).__name__} was entered inside that of another "
                f"{type(other).__name__}; strategies do not nest\n  advice: make one strategy, "
                "and leave the other's scope first"
            )
        return super().scope()

    @as_is
    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """As TensorFlow's, as all that follow.

        Raises:
            InvalidArgument: an argument is wrong; in all that follow, too.
        """
        check_call("run()", fn, args, kwargs, options)
        return super().run(fn, args, kwargs, options)

    @as_is
    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """As TensorFlow's."""
        op = op_of(reduce_op)
        check_axis("reduce()", axis)
        reduce = super().reduce
        return explained("reduce()", value, axis, lambda: reduce(op, value, axis))

    @as_is
    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """As TensorFlow's."""
        check_input_options(options)
        return super().experimental_distribute_dataset(dataset, options)

    @as_is
    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        """As TensorFlow's."""
        check_function("distribute_datasets_from_function()", "dataset_fn", dataset_fn)
        check_input_options(options)
        return super().distribute_datasets_from_function(dataset_fn, options)

    @as_is
    def experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        """As TensorFlow's."""
        check_function("experimental_distribute_values_from_function()", "value_fn", value_fn)
        return super().experimental_distribute_values_from_function(value_fn)

    def __copy__(self) -> OneOfMany:
        return self  # what is copied with it goes on in the same scope

    def __deepcopy__(self, memo: Any) -> OneOfMany:
        return self

    def __reduce__(self) -> NoReturn:
        raise Misused(f"a {type(self).__name__} is not pickled; make one in each process")


class _OneProcessAReplica(OneOfMany):
    """A strategy that trains synchronously. A replica is a process; its number is the rank."""

    replicas_are_ranks = True  # for layers that sum over ranks

    def __init__(self, extended: Extended) -> None:
        super().__init__(extended)
        _checkpoint.learn()
        _outside.learn()
        teach_keras()

    @as_is
    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """As TensorFlow's: ``fn`` once on this process' replica; returns what it returns.

        A replica whose part of the batch is empty calls it with a sample of zeros, which counts
        nowhere: docs/strategies.md.
        """
        check_call("run()", fn, args, kwargs, options)
        extended = self.extended
        share = _keras.share_in(args)
        if share is not None:  # a step of Keras'
            counts = share[0, 0] > 0 if extended.presence.needed else None
            with extended.keras(), extended.presence.of(counts):
                return self._run_as_given(fn, args, kwargs)
        if not extended.presence.needed:
            return self._run_as_given(fn, args, kwargs)
        (given, named), has_samples = filled((tuple(args), kwargs or {}))
        if has_samples is None:
            return self._run_as_given(fn, args, kwargs)
        with extended.presence.of(has_samples):
            return extended.presence.returned(self._run_as_given(fn, given, named))

    @as_is
    def _run_as_given(self, fn: Any, args: Any, kwargs: Any) -> Any:
        eager = self.extended.eager
        if eager.are_possible():
            return eager.call(fn, args, kwargs)
        return super().run(fn, args, kwargs)


def device_of(name: str, devices: Any) -> str:
    """The device that this process computes on."""
    given = [devices] if isinstance(devices, str) else devices
    if given is None:
        found = tf.config.list_logical_devices("GPU")
        if not found:
            return "/device:CPU:0"
        return str(found[_world.local_rank() % len(found)].name)
    if not isinstance(given, Sequence) or not all(isinstance(each, str) for each in given):
        raise InvalidArgument(f"{name} is {shown(devices)}; it is a list of names of devices")
    if len(given) != 1:
        raise InvalidArgument(
            f"{name} is {shown(devices)}; each process has one replica, on one device\n"
            f"  advice: farandole run -np {max(len(given), 2)} -- python train.py, without {name}"
        )
    check_device(name, devices, given[0])
    return given[0]


class MirroredStrategy(_OneProcessAReplica):
    """Synchronous training on one host or several: every replica is a process, all have the same
    variables, and gradients are summed in every step.

    It is a ``tf.distribute.Strategy``. Start as many processes as there are to be replicas, by
    ``farandole run -np 4 -- python train.py`` or another launcher; a program that nobody started
    has one replica. Making the strategy joins them: all ranks make it.

    Args:
        devices: None, or a list with the one device of this process.
        cross_device_ops: ``tf.distribute.NcclAllReduce``, ``HierarchicalCopyAllReduce`` or
            ``ReductionToOneDevice``: each is accepted and right for any number of replicas; which
            algorithm runs is chosen by measurement. ``num_packs`` above 1 is the number of packs
            that gradients are sent in.

    Raises:
        InvalidArgument: several devices, or an argument without a counterpart.
        RendezvousError: ranks are missing, or disagree about who there is.

    Examples:
        >>> import farandole.strategy, tensorflow as tf
        >>> strategy = farandole.strategy.MirroredStrategy()
        >>> with strategy.scope():
        ...     v = tf.Variable(1.0)
        >>> float(strategy.reduce("SUM", strategy.run(lambda: v + 1), axis=None))
        2.0
    """

    def __init__(self, devices: Sequence[str] | None = None, cross_device_ops: Any = None) -> None:
        packing = packing_of(cross_device_ops)
        join()
        super().__init__(Extended(self, device_of("devices", devices), packing))


class MultiWorkerMirroredStrategy(_OneProcessAReplica):
    """The same over several hosts, as ``tf.distribute.MultiWorkerMirroredStrategy``; Keras' ``fit``
    works as well.

    Workers are found by ``TF_CONFIG``, if nothing else says where this process stands: ``farandole
    run``, torchrun, mpiexec, srun. Between hosts all workers need one secret: docs/hosts.md.

    Args:
        cluster_resolver: of ``tf.distribute.cluster_resolver``; default: what the environment says.
        communication_options: ``tf.distribute.experimental.CommunicationOptions``.
            ``bytes_per_pack`` is how many bytes of gradients are sent together.
            ``timeout_seconds`` is how long an operation waits for other ranks, and then fails with
            ``tf.errors.DeadlineExceededError``; it counts if this is what joins the ranks.
            ``implementation`` is AUTO or RING, which are the same here.

    Raises:
        InvalidArgument: NCCL, or a deadline that comes too late.
        RendezvousError: ranks are missing, or disagree about who there is.
    """

    def __init__(self, cluster_resolver: Any = None, communication_options: Any = None) -> None:
        packing, timeout = Packing(), None
        check_resolver(cluster_resolver)
        if communication_options is not None:
            check_communication_options(communication_options)
            refuse_nccl(communication_options)
            packing = Packing(bytes_per_pack=communication_options.bytes_per_pack)
            timeout = communication_options.timeout_seconds
        join(cluster_resolver, timeout)
        super().__init__(Extended(self, device_of("devices", None), packing))
        self._resolver = cluster_resolver

    @property
    def cluster_resolver(self) -> Any:
        """The resolver with which the strategy was made."""
        return self._resolver


class CentralStorageStrategy(_OneProcessAReplica):
    """Synchronous training on one host whose processes share the variables, as
    ``tf.distribute.experimental.CentralStorageStrategy``; metrics are right.

    Trainable variables are once per host, in memory that all ranks map, and optimizers' state is
    once, in the process of rank 0, which updates: docs/strategies.md says what is stored where.

    Args:
        compute_devices: None, or a list with the one device of this process.
        parameter_device: the device of the variables: None or ``"/cpu:0"``, the host's memory.

    Raises:
        InvalidArgument: several devices, another place for the variables, or several hosts.
        RendezvousError: ranks are missing, or disagree about who there is.
    """

    def __init__(
        self, compute_devices: Sequence[str] | None = None, parameter_device: str | None = None
    ) -> None:
        place = _place_of_parameters(parameter_device)
        join()
        device = device_of("compute_devices", compute_devices)
        if _world.local_size() != _world.size():
            raise InvalidArgument(
                f"CentralStorageStrategy: {_world.size()} ranks are on several hosts, which share "
                "no memory for variables\n  advice: farandole.strategy.MultiWorkerMirroredStrategy"
            )
        super().__init__(CentralExtended(self, device, place))


def _place_of_parameters(device: str | None) -> str:
    """Raises InvalidArgument where processes cannot share variables."""
    if device is None:
        return "/device:CPU:0"
    if not isinstance(device, str):
        raise InvalidArgument(f"parameter_device is {shown(device)}; it is the name of a device")
    check_device("parameter_device", device, device)
    if tf.DeviceSpec.from_string(device).device_type not in (None, "CPU"):
        raise InvalidArgument(
            f"parameter_device is {shown(device)}; processes share variables in the host's memory"
            '\n  advice: parameter_device="/cpu:0"'
        )
    return device


class TPUStrategy:
    """TensorFlow's own, with its arguments, where there are TPUs: farandole has no part in it.

    Raises:
        InvalidArgument: there are none.
    """

    def __new__(
        cls, tpu_cluster_resolver: Any = None, experimental_device_assignment: Any = None
    ) -> Any:
        if not tf.config.list_logical_devices("TPU"):
            raise InvalidArgument(
                "TPUStrategy: TensorFlow finds no TPU here\n  advice: connect to one as "
                "TensorFlow says (experimental_connect_to_cluster, initialize_tpu_system), or use "
                "farandole.strategy.MirroredStrategy on other machines"
            )
        return tf.distribute.TPUStrategy(tpu_cluster_resolver, experimental_device_assignment)
