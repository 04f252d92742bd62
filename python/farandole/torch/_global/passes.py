"""Passes over the data: every rank reads the same batches, and all stand at the same one."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from farandole._arguments import shown
from farandole.data._same import compares_after
from farandole.torch._global import agreement
from farandole.torch._global.numbers import Position
from farandole.torch._global.reading import Reader, Whole


class Passes:
    """The passes of one program over one DataLoader.

    Args:
        loader: of batches of all ranks.
        reader: of this rank's part of them.
        logical_ranks: that compute them; None where these are the ranks.
    """

    def __init__(self, loader: Any, reader: Reader, logical_ranks: int | None) -> None:
        self._loader, self._reader, self._logical_ranks = loader, reader, logical_ranks
        self.position = Position()
        self._reading = False  # a pass has begun and is not over
        self._goes_on = False  # the next pass was begun before

    @property
    def batch_size(self) -> int | None:
        """Samples of all ranks in a batch; None where the batch sampler does not say."""
        size: int | None = self._loader.batch_size
        if size is None:
            size = getattr(self._loader.batch_sampler, "batch_size", None)
        return size

    def __iter__(self) -> Iterator[Whole]:
        """Collective: the batches of a pass, or of the rest of one."""
        numbers = self._reader.numbers
        for whole in self._begun():
            self.position.batches += 1
            if numbers is not None and compares_after(self.position.batches):
                agreement.same_so_far(self.position, numbers.sums)
            yield whole
        if numbers is not None:
            agreement.end(self.position, numbers.sums)
        self.position = Position(self.position.epoch + 1)
        self._reading = False

    def _begun(self) -> Iterator[Whole]:
        numbers = self._reader.numbers
        if self._reading and not self._goes_on:  # the last loop was left
            if numbers is not None:
                numbers.leave(self.position)
            self.position = Position(self.position.epoch + 1)
        if self._goes_on and numbers is not None:
            numbers.go_on(self.position)
        self._reading = self._goes_on = False  # as long as ranks may find that they disagree
        reads = self._reader.read(self.position.batches)
        first: list[str] = []
        whole = agreement.begin(self._told(reads, first), self._rows(), first)
        if numbers is not None:
            self.position.generators = numbers.began()
        self._reading = True
        if whole is None:
            return
        yield whole
        yield from reads if numbers is not None else agreement.in_step(reads, self.position)

    def _told(self, reads: Iterator[Whole], first: list[str]) -> Iterator[Whole]:
        """The batches, each of which is described in `first` as it is read."""
        for whole in reads:
            numbers = self._reader.numbers
            if numbers is None:
                first.append(f"values of checksum {whole.checksum:08x}")
            else:
                checksum = numbers.sums[self.position.batches + 1]
                first.append(f"samples {shown(numbers.first)}, of checksum {checksum:08x}")
            yield whole

    def _rows(self) -> list[str]:
        data = [f"{key} {value}" for key, value in self._data().items() if value >= 0]
        return [*data, f"epoch {self.position.epoch}, after {self.position.batches} batches"]

    def _data(self) -> dict[str, int]:
        """Sizes that must be the same in a resumed program; -1 where they are unknown."""
        samples = -1
        if not isinstance(self._loader.dataset, IterableDataset):
            samples = operator.length_hint(self._loader.dataset, -1)
        size = self.batch_size
        data = {"samples": samples, "batch_size": -1 if size is None else size}
        if self._logical_ranks is not None:
            data["logical_ranks"] = self._logical_ranks
        return data

    def state(self) -> dict[str, Any]:
        """The position of the program, as a state dict."""
        position, numbers = self.position, self._reader.numbers
        if numbers is not None and not self._goes_on:
            if self._reading:
                position.checksum = numbers.sums[position.batches]
            else:
                position.generators = numbers.generators()
        return position.state(self._data())

    def load(self, state: Mapping[str, Any]) -> None:
        """Makes the next pass the rest of the saved one. Raises InvalidArgument."""
        self.position = Position.of(state, self._data())
        self._goes_on = True
