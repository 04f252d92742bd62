"""A stranger between two hosts, who knows no secret: all their bytes pass its relay, as they pass a
router that translates addresses. Once in a job's life it changes, leaves out, repeats, exchanges or
makes up some of them, at any place from the first word of the meeting to the last of the job.

Then each rank has the right results (who is disturbed while it connects connects again; what comes
too late harms nobody), or an error that has a name, in time. STRANGER_JOBS: how many jobs it
visits; STRANGER_SEED: the same ones again; `pytest -rP` shows how each ended.
"""

from __future__ import annotations

import os
import pickle
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farandole as fd
import harness
from farandole import _core
from farandole.common import _objects
from harness import World, split

Spawn = Callable[..., World]
JOBS = int(os.environ.get("STRANGER_JOBS", "20"))
SEED = int(os.environ.get("STRANGER_SEED", "0")) or random.randrange(1, 2**31)
HERE = "127.0.0.1"
MEETING = -1  # the door of rank 0 at MASTER_PORT; others have the numbers of their ranks
LATE = 40.0  # seconds; all deadlines of these jobs are shorter
PATIENCE = {"FARANDOLE_TIMEOUT": "6", "FARANDOLE_START_TIMEOUT": "8"}
ERRORS = {"LinkError", "AuthError", "RendezvousError", "VersionMismatch", "Stalled"}


# ---- the job ----


class Thing:
    """A value that travels as a pickle."""

    def __init__(self, number: int) -> None:
        self.number = number


class Command:
    """A pickle that makes a folder where it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def moves_bytes(wire: str) -> None:
    """With wire "plain" nobody protects tensors: there are none."""

    def by_the_relay(listener: int) -> bytes:
        with socket.socket(fileno=os.dup(listener)) as own:
            harness.tell(own.getsockname())
        address: bytes = harness.listen()
        return address

    _core.tcp_address = by_the_relay
    fd.init()
    for turn in range(4):
        for count in (1, 1000, 300_000) if wire != "plain" else ():
            total = fd.all_reduce(np.full(count, turn + fd.rank(), np.int64))
            assert (total == 2 * turn + 1).all(), "a wrong number"
        things = _objects.allgather_object(Thing(turn + fd.rank()))
        assert [thing.number for thing in things] == [turn, turn + 1], "a wrong object"
        assert _objects.broadcast_object([turn, "words"], turn % 2) == [turn, "words"]
        fd.barrier()
    harness.tell("done")
    time.sleep(0.3)  # control connections say something now and then
    fd.barrier()
    fd.shutdown()


# ---- the stranger ----

Flow = tuple[int, int, bool]  # the door, which of its connections, whether from who has come in


@dataclass(frozen=True)
class Deed:
    what: str
    flow: Flow
    at: int  # the byte in that flow where it begins
    count: int
    more: bytes

    def done_to(self, data: bytes) -> bytes:
        """What goes on in place of the bytes that begin there."""
        its, left = data[: self.count], data[self.count :]
        half = len(its) // 2
        acts = {
            "changes": bytes(a ^ (b or 1) for a, b in zip(its, self.more, strict=False)),
            "leaves out": b"",
            "repeats": its + its,
            "exchanges": its[half:] + its[:half],
            "makes up": self.more + its,
        }
        return acts[self.what] + left


class Relay:
    """Listens in the place of ranks. Each direction of each connection has a thread."""

    def __init__(self, deed: Deed | None) -> None:
        self.passed: dict[Flow, int] = {}  # bytes
        self.has_changed = False
        self._deed = deed
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._open:
            each.close()

    def door(self, door: int, where: tuple[str, int]) -> socket.socket:
        """A listener that leads there."""
        listener = socket.create_server((HERE, 0), backlog=64)
        self._open.append(listener)
        self._begin(self._let_in, listener, door, where)
        return listener

    def _begin(self, act: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=act, args=arguments, daemon=True))
        self._threads[-1].start()

    def _let_in(self, listener: socket.socket, door: int, where: tuple[str, int]) -> None:
        number = 0
        while True:
            try:
                come = listener.accept()[0]
            except OSError:
                return
            self._open.append(come)
            try:
                onward = socket.create_connection(where, timeout=5)
            except OSError:
                come.close()  # as where nobody listens yet
                continue
            onward.settimeout(None)
            self._open.append(onward)
            for source, sink in ((come, onward), (onward, come)):
                self._begin(self._pass, (door, number, source is come), source, sink)
            number += 1

    def _pass(self, flow: Flow, source: socket.socket, sink: socket.socket) -> None:
        at, deed = 0, self._deed if self._deed is not None and self._deed.flow == flow else None
        with suppress(OSError):
            while data := source.recv(1 << 16):
                here = -1 if deed is None else deed.at - at
                self.passed[flow] = at = at + len(data)
                if deed is not None and 0 <= here < len(data):
                    changed = data[:here] + deed.done_to(data[here:])
                    self.has_changed, data = changed != data, changed
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def job(spawn: Spawn, wire: str, deed: Deed | None) -> Iterator[tuple[Relay, World]]:
    """One that has begun, of two hosts."""
    with Relay(deed) as relay:
        with socket.create_server((HERE, 0)) as free:
            meets = free.getsockname()
        ports = (meets[1], relay.door(MEETING, meets).getsockname()[1])
        env = split("1,1") | PATIENCE | {"FARANDOLE_WIRE": wire}
        world = spawn(2, env=env, each=[{"MASTER_PORT": str(port)} for port in ports])
        world.start(moves_bytes, wire)
        for rank in range(2):
            door = relay.door(rank, tuple(world.hear(rank, LATE)))
            world.say(rank, _core.tcp_address(door.fileno()))
        yield relay, world


# ---- what each rank is told ----


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict[Flow, int]]:
    """Bytes of each flow of the job, by wire."""
    return {}


def flows_of(spawn: Spawn, wire: str, known: dict[str, dict[Flow, int]]) -> dict[Flow, int]:
    if wire not in known:
        with job(spawn, wire, None) as (relay, world):
            world.hear_all()
            known[wire] = dict(sorted(relay.passed.items()))  # what comes later may come to nobody
            for o in world.outcomes(timeout=LATE):
                assert o.error is None, o.trace
    return known[wire]


def drawn(chance: random.Random, flows: dict[Flow, int], command: bytes) -> Deed:
    """The beginnings of flows as often as the rest, which is long."""
    flow = chance.choice([flow for flow, passed in flows.items() if passed])
    at = chance.randrange(chance.choice([min(flows[flow], 400), flows[flow]]))
    what = chance.choice(["changes", "leaves out", "repeats", "exchanges", "makes up"])
    more = chance.choice([command, chance.randbytes(chance.choice([1, 4, 60]))])
    return Deed(what, flow, at, chance.choice([1, 4, 60, len(more)]), more)


@pytest.mark.parametrize("number", range(JOBS))
def test_each_rank_has_the_right_results_or_an_error_that_has_a_name(
    spawn: Spawn, undisturbed: dict[str, dict[Flow, int]], tmp_path: Path, number: int
) -> None:
    chance = random.Random(f"{SEED} {number}")
    wire = chance.choice(["plain", "checked", "sealed"])
    folder = tmp_path / "made by a stranger"
    flows = flows_of(spawn, wire, undisturbed)
    deed = drawn(chance, flows, pickle.dumps(Command(folder)))
    with job(spawn, wire, deed) as (relay, world):
        outcomes = world.outcomes(timeout=LATE)
    said = f"STRANGER_SEED={SEED}: {wire}, {deed}"
    print(said, relay.has_changed, [(o.error, o.fields.get("verdict")) for o in outcomes])
    assert not folder.exists(), f"{said} ran a command"
    allowed = {None, *ERRORS} if relay.has_changed else {None}
    for o in outcomes:
        assert o.error in allowed, f"{said}\n{o.trace}"
