"""The policies by which ranks read a batch.

index   a rank touches its own samples only: arrays, PyTorch's map-style datasets. Of a
        tf.data.Dataset it runs the maps for them only (_moving.py)
slice   a rank makes the whole batch and keeps its part: any source of batches
leader  rank 0 makes the batch, and deals out the parts (_leader.py)
auto    index where it can be, else slice
"""

from __future__ import annotations

from typing import Any, Literal

from farandole._arguments import shown
from farandole._core import InvalidArgument

Policy = Literal["auto", "index", "slice", "leader"]

_POLICIES = ("auto", "index", "slice", "leader")


def check_policy(policy: Any, argument: str, without: tuple[str, ...] = ()) -> None:
    """Raises InvalidArgument for what is none.

    Args:
        argument: for the error.
    """
    known = [each for each in _POLICIES if each not in without]
    if policy not in known:
        raise InvalidArgument(
            f"{argument} is {shown(policy)}; it is one of {', '.join(map(repr, known))}"
        )


def refuse_index(what: str, why: str) -> InvalidArgument:
    """The error for data of which ranks cannot read their own samples alone."""
    return InvalidArgument(
        f"policy 'index' does not go with {what}: {why}\n"
        "  advice: 'auto' takes 'index' where it can, and else 'slice', by which every rank makes "
        "the whole batch"
    )
