"""How ranks of several hosts hand each other their words."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from farandole import _store

HERE = "127.0.0.1"


def test_a_rank_that_reaches_itself_at_a_free_port_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While nobody listens there yet, the kernel may give rank 1 the port that it connects to."""
    with socket.create_server((HERE, 0)) as found:
        port = found.getsockname()[1]
    connect, reached_itself = socket.create_connection, threading.Event()

    def connect_from_there(where: tuple[str, int], timeout: float) -> socket.socket:
        if reached_itself.is_set():
            return connect(where, timeout)
        connection = connect(where, timeout, source_address=(HERE, port))
        assert connection.getsockname() == connection.getpeername()
        reached_itself.set()
        return connection

    monkeypatch.setattr(socket, "create_connection", connect_from_there)
    until = time.monotonic() + 10
    found_by: dict[int, Any] = {}

    def meet(rank: int) -> None:
        meeting = _store.Meeting(rank, 2, HERE, port, b"secret", until)
        words = {"rank": rank, "pid": 100 + rank, "host": "here"}
        found_by[rank] = _store.exchange(meeting, words, lambda _: None)

    other = threading.Thread(target=meet, args=(1,))
    other.start()
    assert reached_itself.wait(10)
    meet(0)
    other.join(20)
    assert [each["pid"] for each in found_by[0]] == [100, 101]
    assert found_by[1] == [{**each, "among": ""} if each["rank"] else each for each in found_by[0]]
