"""Controls of the fake NCCL of this process (fake_libnccl), and a rank that goes by it."""

from __future__ import annotations

import ctypes
import os

from fake_device import Rank

import farandole as fd


class Nccl:
    """The library that farandole finds by FARANDOLE_NCCL."""

    def __init__(self) -> None:
        library = ctypes.CDLL(os.environ["FAKE_LIBNCCL"])
        self._fail, self._fail_later = library.fake_nccl_fail, library.fake_nccl_fail_later
        self._calls, self._left = library.fake_nccl_calls, library.fake_nccl_left
        self._hold = library.fake_nccl_hold
        self._calls.restype, self._left.restype = ctypes.c_size_t, ctypes.c_char_p

    def fail(self, call: str, nth: int, code: int) -> None:
        """The nth such call from now on comes to that code."""
        self._fail(call.encode(), nth, code)

    def fail_later(self, code: int) -> None:
        """Communicators have that asynchronous error from now on."""
        self._fail_later(code)

    def hold(self, held: bool) -> None:
        """Whether this rank does not come to meet the others."""
        self._hold(int(held))

    def calls(self, call: str) -> int:
        return int(self._calls(call.encode()))

    def left(self) -> str:
        """Wrong uses, and objects that are left; empty if there are none."""
        return str(self._left().decode())


class NcclRank(Rank):
    """A rank that has a device of its host for itself."""

    def __init__(self, kind: str = "both") -> None:
        super().__init__(kind)
        self.nccl = Nccl()
        self.device = fd.local_rank()
        os.environ["FAKE_NCCL_HOST"] = str(fd.cross_rank())

    def end(self) -> None:
        super().end()
        assert self.nccl.left() == ""
