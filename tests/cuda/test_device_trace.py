"""A trace shows when gradients are reduced on a device, by the device's own clock."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path

from device_model import batch, small
from fake_device import Rank
from fake_tensors import Tensors

import farandole as fd
from farandole import _trace
from harness import World

Start = Callable[..., World]
STEPS = 4


def train() -> list[str]:
    """The calls of the driver."""
    rank = Rank()
    tensors = Tensors(rank)
    model, optimizer = small(tensors)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step)[:, :30]).sum().backward()
        tensors.settle()
        optimizer.step()
        tensors.settle()
    calls = rank.machine.log()
    del model, optimizer
    gc.collect()
    rank.end()
    return calls


def traced() -> tuple[float, float]:
    """Between which times, in microseconds of the host's clock, there were steps."""
    begin = time.monotonic_ns() / 1e3
    train()
    end = time.monotonic_ns() / 1e3
    fd.shutdown()
    return begin, end


def test_reductions_on_the_device_are_shown_by_its_clock(by_steps: Start, tmp_path: Path) -> None:
    directory = tmp_path / "trace"
    started = by_steps(2, framework="torch", FAKE_CUDA_JITTER="3", FARANDOLE_TRACE=str(directory))
    between = started.run(traced)
    for rank, (earliest, latest) in enumerate(between):
        lines = (directory / f"rank-{rank}.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        shown = [e for e in events if e.get("cat") == "device"]
        assert len(shown) >= STEPS
        rows = {e["tid"] for e in shown}
        named = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
        assert {named[row] for row in rows} == {"device 0"}
        reached = earliest
        for e in shown:
            says, begin = e["args"], e["ts"]
            assert says["path"] == "step"
            assert says["collective"] == "all_reduce"
            assert says["bytes"] > 0
            assert earliest <= says["ready"] <= begin
            assert reached <= begin
            reached = begin + e["dur"]
        assert reached <= latest
    found = _trace.summary(directory)
    assert found.device_overlap is not None
    for by_rank in found.by_rank:
        assert by_rank.on_devices > 0


def test_nothing_is_timed_without_a_trace(by_steps: Start) -> None:
    for calls in by_steps(2, framework="torch").run(train):
        assert "cuLaunchKernel" in calls
        assert not {"cuEventElapsedTime", "cuEventSynchronize"} & set(calls)
