"""Messages between neighbours: what a stage makes of a micro-batch, and the gradients of that.

A message is a head of eight numbers, and what it announces. Tensors travel as they lie, without
their shapes: what these are is a *form*, which is sent when it is new, and has a number from then
on. So sizes are agreed at first use, and a head always fits.

A message may also say that there is nothing: of an empty micro-batch, or of a step that has failed
on the sender. It is sent nevertheless, so that no rank waits in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from farandole._core import Group, Handle
from farandole.common._pickles import packed, seal, unsealed

# Numbers of a head: status, micro-batch, samples, form, bytes of a new form, which tensors come,
# and of which step and kind of step they are.
_HEAD = 8
_FORM = "a form of a pipeline's messages"
MOST_TENSORS = 62  # bits of a number


class Status(IntEnum):
    FULL = 0
    EMPTY = 1  # of a micro-batch without samples
    FAILED = 2


class Leaf(NamedTuple):
    """A tensor of a form."""

    dtype: str  # the engine's name
    shape: tuple[int, ...]
    differentiable: bool  # its gradient comes back

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Form(NamedTuple):
    """The structure and the leaves of the tensors that are sent between two stages."""

    structure: Any  # of dicts, tuples and lists; at its leaves their numbers
    leaves: tuple[Leaf, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.leaves)) or "nothing"


class Tensors(Protocol):
    """A framework's tensors, as the engine's buffers."""

    def sent(self, tensor: Any) -> Any:
        """The memory of a contiguous tensor."""

    def empty(self, leaf: Leaf) -> Any:
        """A tensor to receive into, which sent() takes, too."""


class Message(NamedTuple):
    """A message as it arrives."""

    status: Status
    micro_batch: int
    samples: int
    step: tuple[int, int]  # its number and kind
    form: Form | None  # None where the status is not FULL
    tensors: list[Any]  # None stands for one that is not sent


def _key_of(form: Form) -> Any:
    return form.leaves, repr(form.structure)


class Channel:
    """The messages to and from one neighbour.

    Args:
        what: of names in errors and traces, "stage 0 to 1".
    """

    def __init__(self, group: Group, peer: int, tensors: Tensors, what: str) -> None:
        self._group, self._peer, self._tensors, self._what = group, peer, tensors, what
        self._sent: dict[Any, int] = {}  # the number of a form, by its leaves and structure
        self._packed: dict[Any, bytes] = {}  # forms that are still to be sent, likewise
        self._received: list[Form] = []
        self._flying: list[tuple[Handle[None], Any]] = []

    def _numbered(self, form: int, sender: int) -> str:
        return f"{_FORM}, number {form} from {sender}, {self._what}"

    def prepare(self, form: Form) -> None:
        """Packs a new form, before anything of it is sent. Raises InvalidArgument."""
        key = _key_of(form)
        if key not in self._sent and key not in self._packed:
            self._packed[key] = packed(form)

    def send(
        self,
        status: Status,
        micro_batch: int,
        samples: int,
        step: tuple[int, int],
        form: Form | None = None,
        tensors: Sequence[Any] = (),
    ) -> None:
        """Sends without waiting. The tensors must not change until ``settle`` has returned.

        Args:
            tensors: those of the form; None for one that is left out.
        """
        words, number = b"", 0
        if form is not None:
            self.prepare(form)
            key = _key_of(form)
            number = self._sent.setdefault(key, len(self._sent))
            if key in self._packed:
                words = seal(self._packed.pop(key), self._numbered(number, self._group.rank))
        mask = sum(1 << i for i, each in enumerate(tensors) if each is not None)
        head = [status, micro_batch, samples, number, len(words), mask, *step]
        # All before the first one is sent: a head is followed by what it announces.
        parts: list[tuple[str, Any, Any]] = [("head", np.array(head, np.int64), None)]
        if words:
            parts.append(("form", np.frombuffer(bytearray(words), np.uint8), None))
        leaves = () if form is None else form.leaves
        for leaf, tensor in zip(leaves, tensors, strict=True):
            if tensor is not None and 0 not in leaf.shape:
                parts.append(("tensor", self._tensors.sent(tensor), tensor))
        for name, buffer, tensor in parts:
            label = f"{name}, {self._what}"
            handle = self._group.start_between("send", buffer, self._peer, 0, None, label)
            self._flying.append((handle, (buffer, tensor)))

    def receive(self) -> Message:
        """The neighbour's next message, when it is there."""
        head = np.empty(_HEAD, np.int64)
        self._take(head, "head")
        status, micro_batch, samples, number, length, mask, *step = head.tolist()
        if length:
            words = np.empty(length, np.uint8)
            self._take(words, "form")
            what = self._numbered(len(self._received), self._peer)
            self._received.append(unsealed(words.tobytes(), what))
        of_step = step[0], step[1]
        if status != Status.FULL:
            return Message(Status(status), micro_batch, samples, of_step, None, [])
        form = self._received[number]
        tensors: list[Any] = []
        for i, leaf in enumerate(form.leaves):
            tensors.append(self._tensors.empty(leaf) if mask >> i & 1 else None)
            if tensors[-1] is not None and 0 not in leaf.shape:
                self._take(self._tensors.sent(tensors[-1]), "tensor")
        return Message(Status.FULL, micro_batch, samples, of_step, form, tensors)

    def _take(self, buffer: Any, name: str) -> None:
        self._group.run_between("recv", buffer, self._peer, 0, f"{name}, {self._what}")

    def let_go(self) -> None:
        """Releases messages that have arrived."""
        while self._flying and self._flying[0][0].done():
            self._flying.pop(0)[0].wait()  # says what failed

    def settle(self) -> None:
        """Waits until all has arrived."""
        for handle, _ in self._flying:
            handle.wait()
        self._flying.clear()
