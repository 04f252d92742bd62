"""A rank of which something goes wrong, or that hears of it. faults.py starts it with the name of a
case; what it saw is one line of JSON."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import farandole as fd
from farandole._bench.devices import DeviceArray, driver

VICTIM = 1
BEFORE = 50  # sums that are right
LIMIT = 40  # seconds, after which a waiting process prints where it waits, and ends
COUNT, SHORT = 50_000, 1000  # elements; what one kernel may take
OURS = 8 << 30  # bytes that ranks have at most when they begin
COMING_BACK = 5  # seconds that memory may take
HOST = "--device=cpu" in sys.argv
# Stores to an address that no device has. Drivers compile it themselves.
WILD = b"""
.version 6.0
.target sm_70
.address_size 64
.visible .entry wild() {
  .reg .u64 %a;
  .reg .u32 %v;
  mov.u64 %a, 1024;
  mov.u32 %v, 7;
  st.global.u32 [%a], %v;
  ret;
}
\0"""


# ---- the device ----


def memory() -> tuple[int, int]:
    """The free bytes and all bytes of the device, for all its processes together."""
    free, whole = ctypes.c_size_t(), ctypes.c_size_t()
    driver().call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(whole))
    return free.value, whole.value


class Late:
    """Later work in this rank's stream waits until end()."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._act = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: self._wait())
        driver().call("cuLaunchHostFunc", driver().stream, self._act, None)

    def _wait(self) -> None:
        self._over.wait(LIMIT)

    def end(self) -> None:
        self._over.set()


def touch_a_wrong_address() -> None:
    """A kernel that is not farandole's does so, in a stream of its own. The fake driver, which
    compiles none, loses its contexts by a call."""
    library = ctypes.CDLL("libcuda.so.1")
    if hasattr(library, "fake_cuda_control"):
        functions = ctypes.cast(library.fake_cuda_control, ctypes.CFUNCTYPE(ctypes.c_void_p))()
        lose = ctypes.c_void_p.from_address(functions + 3 * ctypes.sizeof(ctypes.c_void_p)).value
        ctypes.CFUNCTYPE(None, ctypes.c_int)(lose or 0)(700)
        return
    module = driver().made("cuModuleLoadDataEx", WILD, 0, None, None)
    kernel = driver().made("cuModuleGetFunction", module, b"wild")
    stream = driver().made("cuStreamCreateWithPriority", 1, 0)
    driver().call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None)


def take_all_memory() -> list[int]:
    """Allocates until less than a MiB is left."""
    taken, size = [], 1 << 40
    while size >= 1 << 20:
        try:
            taken.append(driver().allocate(size))
        except RuntimeError:
            size >>= 1
    return taken


# ---- what a rank sees ----


class Rank:
    """Two arrays, and the peers' processes. Where the victim `dies`, what it has on the device does
    not lack in what was free before."""

    def __init__(self, count: int = COUNT, *, dies: bool = True) -> None:
        fd.init()
        self.is_victim = fd.rank() == VICTIM
        self.pids = fd.all_gather(np.array([os.getpid()]))
        self.seen: dict[str, Any] = {"rank": fd.rank()}
        self.wanted = np.arange(count) % 61 * fd.size() + sum(range(fd.size()))
        begins_late = self.is_victim and dies
        if not begins_late:
            self._make(count)
        fd.barrier()
        self.free_before, self.whole = (0, 0) if begins_late else memory()
        fd.barrier()
        if begins_late:
            self._make(count)

    def _make(self, count: int) -> None:
        given, result = (driver().pinned(count, np.float32) for _ in range(2))
        given[:] = np.arange(count) % 61 + fd.rank()
        self.x, self.y = DeviceArray(given, "float32"), DeviceArray(result, "float32")
        self.x.put()

    def reduce(self, **options: Any) -> Any:
        return fd.all_reduce(self.x, out=self.y, **options)

    def check(self) -> None:
        self.y.get()
        if not np.array_equal(self.y.host, self.wanted):
            self.seen["wrong"] = f"the sum is wrong, by {fd.world().last_path}"

    def wait_for_the_victim(self, **options: Any) -> tuple[Late | None, Any]:
        """The devices of the others do, in a sum after one that is right."""
        self.reduce()
        self.check()
        late = Late() if self.is_victim else None
        handle = self.reduce(async_op=True, **options)
        self.seen["path"] = fd.world().last_path
        return late, handle

    def strike(self, act: Callable[[int], None]) -> None:
        """By rank 0, when all have had time to come to their wait."""
        if fd.rank() == 0:
            time.sleep(0.3)
            self.seen["struck"] = time.monotonic()
            act(int(self.pids[VICTIM]))

    def hear(self, call: Callable[[], Any] = fd.barrier) -> None:
        """The verdict, and when this rank's device is at rest."""
        try:
            while True:
                call()
        except fd.Error as error:
            self.seen.update(
                heard=time.monotonic(), kind=type(error).__name__, verdict=error.verdict
            )

    def rest(self) -> None:
        driver().call("cuCtxSynchronize")
        self.seen["rested"] = time.monotonic()

    def leave(self) -> None:
        with contextlib.suppress(fd.Error):
            fd.shutdown()
        gc.collect()
        for _ in range(COMING_BACK * 20):
            self.seen["lacking"] = self.free_before - memory()[0]
            if self.seen["lacking"] <= 0:
                break
            time.sleep(0.05)


# ---- cases ----


def is_killed(count: int = COUNT) -> dict[str, Any]:
    """While the others' devices wait for what its own has not begun."""
    rank = Rank(count)
    late, handle = rank.wait_for_the_victim()
    rank.strike(lambda pid: os.kill(pid, signal.SIGKILL))
    rank.hear()
    del handle, late
    rank.rest()
    rank.leave()
    return rank.seen


def is_stopped() -> dict[str, Any]:
    """Its peers go on at their deadline; it hears the same when it goes on."""
    rank = Rank(dies=False)
    late, handle = rank.wait_for_the_victim(timeout=1.0)
    rank.strike(lambda pid: os.kill(pid, signal.SIGSTOP))
    rank.hear()
    if fd.rank() == 0:
        os.kill(int(rank.pids[VICTIM]), signal.SIGCONT)
    if late is not None:
        late.end()
    del handle, late
    rank.rest()
    rank.leave()
    return rank.seen


def has_no_memory() -> dict[str, Any]:
    """Neither for the group's bucket, nor, in another group, when that is there: sums are right."""
    rank = Rank(dies=False)
    used = int(fd.all_reduce(np.array([rank.whole - rank.free_before]), "max")[0])
    if used > OURS:
        return {**rank.seen, "skipped": f"others use the device, {used >> 30} GiB in all"}
    group, paths = None, []
    for before in (False, True):
        if before:
            group = fd.split(0)
            rank.reduce(group=group)
        fd.barrier()
        taken = take_all_memory() if rank.is_victim else []
        fd.barrier()
        rank.reduce(group=group)
        rank.check()
        paths.append((group or fd.world()).last_path)
        fd.barrier()
        for address in taken:
            driver().call("cuMemFree_v2", ctypes.c_ulonglong(address))
    rank.seen["path"] = " and ".join(paths)
    del group
    rank.rest()
    rank.leave()
    return rank.seen


def touches_a_wrong_address() -> dict[str, Any]:
    rank, done = Rank(), itertools.count()

    def reduce() -> None:
        if next(done) == BEFORE and rank.is_victim:
            rank.seen["struck"] = time.monotonic()
            touch_a_wrong_address()
        rank.reduce()

    rank.hear(reduce)
    if not rank.is_victim:  # whose device does nothing any more
        rank.rest()
        rank.leave()
    return rank.seen


def is_killed_in_training() -> dict[str, Any]:
    """By PyTorch: DistributedOptimizer."""
    import torch
    import torch_training
    from cases import asked

    import farandole.torch as hvd

    asked.device = "cpu" if HOST else "cuda"
    torch_training.begin()
    model = torch_training.network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters()
    )
    seen: dict[str, Any] = {"rank": fd.rank(), "path": "gradients"}
    pids = fd.all_gather(np.array([os.getpid()]))

    def step(number: int) -> None:
        optimizer.zero_grad()
        torch_training.loss_of(model, torch_training.batch(number, fd.rank())).backward()
        optimizer.step()

    for number in range(3):
        step(number)
    if fd.rank() == 0:

        def kill() -> None:
            seen["struck"] = time.monotonic()
            os.kill(int(pids[VICTIM]), signal.SIGKILL)

        threading.Timer(0.3, kill).start()
    try:
        while True:
            step(3)
    except fd.Error as error:
        seen.update(heard=time.monotonic(), kind=type(error).__name__, verdict=error.verdict)
    torch_training.rest()
    seen["rested"] = time.monotonic()
    with contextlib.suppress(fd.Error):
        fd.shutdown()
    return seen


CASES = {
    "killed": is_killed,
    "killed, small": lambda: is_killed(SHORT),
    "stopped": is_stopped,
    "no memory": has_no_memory,
    "wrong address": touches_a_wrong_address,
    "killed in training": is_killed_in_training,
}

if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    print("saw " + json.dumps(CASES[sys.argv[1]]()), flush=True)
    sys.stdout.flush()
    os._exit(0)  # whose device is lost has nothing to give back
