"""Options of tf.distribute that say how values are sent: those that mean something here have an
effect, the others are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from farandole._arguments import type_of
from farandole._core import InvalidArgument
from farandole.strategy import _collectives as collectives
from farandole.strategy._checks import check_communication_options

_NCCL = "NCCL"


@dataclass(frozen=True)
class Packing:
    """How values are packed, to be sent together."""

    bytes_per_pack: int = 0  # 0: what is ready together, up to FARANDOLE_FUSION_BYTES
    packs: int = 0

    def of(self, values: Sequence[Any]) -> Any:
        """The packs of values, for `reduce_all`."""
        if self.bytes_per_pack:
            return collectives.packed(values, self.bytes_per_pack)
        return self.packs

    def groups_of(self, variables: Sequence[Any]) -> Any:
        """The same of Keras variables, for a DistributedOptimizer: packs of gradients."""
        if not self.bytes_per_pack:
            return self.packs
        by_value = {id(variable.value): variable for variable in variables}
        packs = collectives.packed([v.value for v in variables], self.bytes_per_pack)
        return [[by_value[id(value)] for value in pack] for pack in packs]

    def merged(self, options: Any) -> Packing:
        """With the options of one call, which take precedence.

        Raises:
            InvalidArgument: they ask for what is not there.
        """
        if options is None:
            return self
        check_communication_options(options)
        refuse_nccl(options)
        if options.timeout_seconds:
            raise InvalidArgument(
                f"options: timeout_seconds={options.timeout_seconds} of a single call is not "
                "supported\n  advice: MultiWorkerMirroredStrategy(communication_options=…) has "
                "it for all calls, as FARANDOLE_TIMEOUT has"
            )
        return Packing(options.bytes_per_pack or self.bytes_per_pack, self.packs)


def refuse_nccl(options: Any) -> None:
    if options.implementation.name == _NCCL:
        raise InvalidArgument(
            "implementation NCCL: farandole sends tensors from host memory, without NCCL\n"
            "  advice: leave out implementation, or pass AUTO or RING"
        )


def packing_of(cross_device_ops: Any) -> Packing:
    """The packing that MirroredStrategy's argument asks for. Sums are right with any of them.

    Raises:
        InvalidArgument: it is no algorithm that has a counterpart.
    """
    if cross_device_ops is None:
        return Packing()
    known = tf.distribute
    if isinstance(cross_device_ops, known.NcclAllReduce | known.HierarchicalCopyAllReduce):
        packs = int(cross_device_ops._num_packs)
        return Packing(packs=packs if packs > 1 else 0)
    if isinstance(cross_device_ops, known.ReductionToOneDevice):
        if cross_device_ops.reduce_to_device is not None:
            raise InvalidArgument(
                "ReductionToOneDevice(reduce_to_device=…): each rank has its sums in its own "
                "process\n  advice: leave out reduce_to_device"
            )
        if cross_device_ops.accumulation_fn not in (None, _added()):
            raise InvalidArgument(
                "ReductionToOneDevice(accumulation_fn=…): farandole adds in canonical order "
                "(docs/determinism.md)\n  advice: leave out accumulation_fn"
            )
        return Packing()
    raise InvalidArgument(
        f"cross_device_ops is {type_of(cross_device_ops)}; it is a NcclAllReduce, "
        "HierarchicalCopyAllReduce or ReductionToOneDevice of tf.distribute, or None"
    )


def _added() -> Any:
    return tf.distribute.ReductionToOneDevice().accumulation_fn
