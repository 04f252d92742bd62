"""How ranks of several hosts hand each other their words."""

from __future__ import annotations

import queue
import re
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from farandole import Error, LinkError, RendezvousError, _store
from farandole._store import guest, talk

HERE = "127.0.0.1"


def met(*arguments: Any) -> list[dict[str, Any]]:
    table, line = _store.exchange(*arguments)
    line.end()
    return table


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
        words = words_of(rank)
        found_by[rank] = met(meeting, words, lambda _: None)

    other = threading.Thread(target=meet, args=(1,))
    other.start()
    assert reached_itself.wait(10)
    meet(0)
    other.join(20)
    assert [each["pid"] for each in found_by[0]] == [100, 101]
    assert found_by[1] == [{**each, "among": ""} if each["rank"] else each for each in found_by[0]]


# ---- whom rank 0 waits for, and what it says meanwhile ----


def free_port() -> int:
    with socket.create_server((HERE, 0)) as found:
        return int(found.getsockname()[1])


def words_of(rank: int, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "size": 9, "pid": 100 + rank, "host": "here", **more}


def odd(table: list[dict[str, Any]]) -> Error | None:
    said = (f"rank {words['rank']} is odd" for words in table if words.get("odd"))
    return next(map(RendezvousError, said), None)


Meet = Callable[..., "Future[list[dict[str, Any]]]"]


@pytest.fixture
def meet() -> Any:
    """Begins a rank's meeting in a thread of its own."""
    with ThreadPoolExecutor(4) as threads:

        def begin(rank: int, size: int, port: int, **how: Any) -> Any:
            own = {k: how.pop(k) for k in ("odd", "pid", "host") if k in how}
            words = words_of(rank) | own
            until = time.monotonic() + how.pop("seconds", 20)
            secret = how.pop("secret", b"secret")
            meeting = _store.Meeting(rank, size, HERE, port, secret, until, **how)
            return threads.submit(met, meeting, words, odd)

        yield begin


def test_rank_0_names_a_stranger_and_who_is_missing_at_once_and_once(meet: Meet) -> None:
    port, said = free_port(), queue.Queue[str]()
    first = meet(0, 3, port, warn=said.put)
    for secret in (b"another", b"another"):
        with pytest.raises(_store.AuthError, match="does not know the secret of rank 1's job"):
            meet(1, 3, port, secret=secret).result(20)
    text = said.get(timeout=20)
    assert f"somebody at {HERE} has knocked at {HERE}:{port} without the job's secret" in text
    assert text.endswith(f"1 of 3 ranks arrived at {HERE}:{port}; missing: 1, 2")
    with socket.create_connection((HERE, port), timeout=20) as scanner:
        scanner.sendall(b"GET / HTTP/1.0" + 64 * b"\r\n")
        assert "without farandole's first words" in said.get(timeout=20)
    others = [meet(r, 3, port) for r in (1, 2)]
    assert [each["rank"] for each in first.result(20)] == [0, 1, 2]
    assert all(other.result(20) for other in others)
    assert said.empty()


def test_who_is_missing_is_said_while_others_wait(meet: Meet) -> None:
    port, said, heard = free_port(), queue.Queue[str](), queue.Queue[str]()
    second = meet(1, 2, port, warn=heard.put, warn_after=0.2)
    assert f"rank 1 does not reach rank 0 at {HERE}:{port}: " in heard.get(timeout=20)
    first = meet(0, 3, port, warn=said.put, warn_after=0.2, seconds=1)
    assert f"s 2 of 3 ranks arrived at {HERE}:{port}; missing: 2" in said.get(timeout=20)
    for outcome in (first, second):
        with pytest.raises(RendezvousError, match="2 of 3 ranks arrived"):
            outcome.result(20)


def test_rank_0_does_not_stay_where_all_have_come_and_one_is_refused(meet: Meet) -> None:
    port, began = free_port(), time.monotonic()
    first, second = meet(0, 3, port), meet(1, 3, port)
    time.sleep(0.3)  # the last one is the one that is refused
    for outcome in (meet(2, 3, port, odd=True), first, second):
        with pytest.raises(RendezvousError, match=r"^rank 2 is odd$"):
            outcome.result(20)
    assert time.monotonic() - began < 5, "and not the 5 s in which others may come"


def test_what_is_wrong_with_one_rank_is_told_before_and_after_others_come(meet: Meet) -> None:
    port = free_port()
    first, second = meet(0, 4, port), meet(1, 4, port)
    outcomes = [first, second, meet(2, 4, port, odd=True), meet(3, 4, port)]
    for outcome in outcomes:
        with pytest.raises(RendezvousError, match=r"^rank 2 is odd$"):
            outcome.result(20)


def test_rank_0_that_cannot_join_tells_the_others(meet: Meet) -> None:
    port = free_port()
    for outcome in [meet(0, 3, port, odd=True), meet(1, 3, port), meet(2, 3, port)]:
        with pytest.raises(RendezvousError, match=r"^rank 0 is odd$"):
            outcome.result(20)


def test_ranks_meet_at_any_address_of_rank_0(meet: Meet) -> None:
    """Such as 127.0.1.1, which its name means on its own host, and the one that others know."""
    port = free_port()
    first = meet(0, 2, port, at=["127.0.1.1", HERE])
    assert meet(1, 2, port).result(20) == first.result(20)


def test_a_port_that_is_taken_at_one_address_is_taken(meet: Meet) -> None:
    with socket.create_server(("127.0.1.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"rank 0 .* at {HERE}:{port}: "):
            meet(0, 2, port, at=[HERE, "127.0.1.1"], seconds=0.2).result(20)


def test_who_listens_in_rank_0s_place_and_says_nothing_is_named(
    meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "POLITE", 0.1)
    with socket.create_server((HERE, 0)) as silent:
        port = silent.getsockname()[1]
        first, second = meet(0, 2, port, seconds=0.5), meet(1, 2, port, seconds=0.5)
        with pytest.raises(RendezvousError, match=f"rank 0 cannot listen at {HERE}:{port}: Addr"):
            first.result(20)
        with pytest.raises(RendezvousError, match="who listens there says nothing"):
            second.result(20)
        second = meet(1, 2, port)
    assert meet(0, 2, port).result(20) == second.result(20)  # it may go away


def reached(port: int) -> socket.socket:
    for _ in range(400):
        with suppress(ConnectionRefusedError):
            return socket.create_connection((HERE, port), timeout=20)
        time.sleep(0.05)
    raise TimeoutError


def test_a_rank_that_ended_while_it_waited_leaves_its_place(meet: Meet) -> None:
    port = free_port()
    first = meet(0, 3, port)
    with reached(port) as ended:
        nonce = b"n" * talk.NONCE
        ended.sendall(talk.MAGIC + nonce)
        nonces = nonce + talk.take(ended, talk.NONCE)
        talk.take(ended, talk.PROOF)
        ended.sendall(talk.proof(b"secret", b"client", nonces))
        talk.send(ended, words_of(1) | {"pid": 4711})
        time.sleep(0.3)
    others = [meet(rank, 3, port) for rank in (1, 2)]
    assert [each["pid"] for each in first.result(20)] == [100, 101, 102]
    assert all(other.result(20) for other in others)


def test_ranks_of_another_job_are_told_too_if_they_come_late(meet: Meet) -> None:
    port = free_port()
    early = [meet(rank, 3, port, pid=pid) for rank, pid in ((0, 1), (1, 2), (1, 3))]
    for outcome in early[1:]:
        with pytest.raises(RendezvousError, match="two processes are rank 1: pid "):
            outcome.result(20)
    with pytest.raises(RendezvousError, match="two processes are rank 1: pid "):
        meet(2, 3, port, pid=4).result(20)


def test_what_no_rank_says_is_a_strangers_word(meet: Meet) -> None:
    port, said = free_port(), queue.Queue[str]()
    first = meet(0, 2, port, warn=said.put)
    with pytest.raises(RendezvousError, match="lost rank 0"):
        meet(1, 2, port, host=3).result(20)
    assert "without a rank's words" in said.get(timeout=20)
    second = meet(1, 2, port)
    assert first.result(20) == second.result(20)


def test_words_that_drip_are_given_up_in_time() -> None:
    """The deadline is for all that is taken, and not for each byte."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor() as pool:

        def drip() -> None:
            with suppress(OSError):
                for _ in range(20):
                    ours.sendall(b"\0")
                    time.sleep(0.05)

        dripping = pool.submit(drip)
        theirs.settimeout(0.2)
        with pytest.raises(TimeoutError):
            talk.take(theirs, 20)
        theirs.close()
        dripping.result()


def test_words_of_many_ranks_are_heard() -> None:
    table = [words_of(rank, addresses="x" * 900) for rank in range(4096)]
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as thread:
        sent = thread.submit(talk.send, ours, table)
        assert talk.hear(theirs) == table
        sent.result(20)


class Store:
    """As torch.distributed's: ``get`` waits."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, 20):
                raise RuntimeError("timeout")
            return self._values[key].encode()

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)


def test_in_a_store_too_a_rank_that_fails_and_one_that_is_missing_are_named() -> None:
    store, said = Store(), queue.Queue[str]()
    until = time.monotonic() + 20
    meeting = _store.Meeting(0, 3, HERE, 0, b"", until, warn=said.put, warn_after=0.2)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(_store.exchange_in, store, "name", meeting, words_of(0), odd)
        assert "1 of 3 ranks came to torch.distributed's store; missing: ranks 1, 2" in said.get(
            timeout=20
        )
        for rank in (1, 2):  # the second one comes late
            with pytest.raises(RendezvousError, match=r"^rank 1 is odd$"):
                in_store(store, rank, name="name", odd=rank == 1)
        with pytest.raises(RendezvousError, match=r"^rank 1 is odd$"):
            first.result(20)


def in_store(
    store: Store, rank: int, size: int = 3, seconds: float = 20, name: str = "job", **more: Any
) -> Any:
    """The round of these ranks, as one of them meets the others."""
    meeting = _store.Meeting(rank, size, HERE, 0, b"", time.monotonic() + seconds)
    return _store.meet_in(store, name, meeting, words_of(rank, **more), odd)


def test_words_of_ranks_that_met_there_before_count_for_nothing() -> None:
    """torchrun's store stays: a rank that comes first finds the last round, which has ended well,
    was refused, or was cut off by a death; and so does rank 0 find words that others have left."""
    store = Store()
    with ThreadPoolExecutor(3) as threads:
        for came in (3, 2, 1, 3):
            seconds = 20 if came == 3 else 0.3
            others = [threads.submit(in_store, store, r, run=came) for r in range(1, came)]
            time.sleep(0.1)  # they find the round before
            first = threads.submit(in_store, store, 0, seconds=seconds, run=came)
            if came < 3:
                for each in (first, *others):
                    with pytest.raises(RendezvousError, match=f"{came} of 3 ranks came.* rank.*2"):
                        each.result(20)
                continue
            rounds = [each.result(20) for each in (first, *others)]
            assert len({met.key for met in rounds}) == 1
            for met in rounds:
                assert [words["rank"] for words in met.table] == [0, 1, 2]
                assert {words["run"] for words in met.table} == {came}


def test_ranks_without_rank_0_do_not_take_an_old_answer() -> None:
    store = Store()
    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(in_store, store, rank, size=2) for rank in range(2)]:
            each.result(20)
    alone = _store.Meeting(1, 2, HERE, 0, b"", time.monotonic() - _store.GRACE)
    with pytest.raises(
        RendezvousError, match="rank 1 did not meet all others: rank 0 has not answered"
    ):
        _store.meet_in(store, "job", alone, words_of(1), odd)
    with pytest.raises(RendezvousError, match="rank 0 has opened no round"):
        _store.meet_in(store, "other", alone, words_of(1), odd)


# ---- the line, while ranks that have met connect to each other ----


def lines_in_a_store() -> list[Any]:
    store = Store()
    meeting = _store.Meeting(0, 3, HERE, 0, b"", time.monotonic() + 20)
    with ThreadPoolExecutor(3) as threads:
        met = [
            threads.submit(
                _store.exchange_in, store, "job", replace(meeting, rank=r), words_of(r), odd
            )
            for r in range(3)
        ]
        return [each.result(20).line for each in met]


def test_a_store_of_torchruns_that_is_not_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_answers(*_: Any, **__: Any) -> None:
        time.sleep(0.3)
        raise RuntimeError("timed out")  # torch's DistNetworkError is one

    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    torchs = types.SimpleNamespace(TCPStore=nobody_answers)
    monkeypatch.setitem(sys.modules, "torch.distributed", torchs)
    said: list[str] = []
    until = time.monotonic() + 1
    meeting = _store.Meeting(
        1, 2, "first", 29500, b"secret", until, warn=said.append, warn_after=0.1
    )
    why = "rank 1 does not reach torchrun's store at first:29500"
    with pytest.raises(RendezvousError, match=f"^{why}: timed out"):
        _store.torchruns(meeting)
    assert said == [f"after 0 s {why}"]


def test_in_a_store_too_all_wait_until_all_are_connected() -> None:
    lines = lines_in_a_store()
    with ThreadPoolExecutor(3) as threads:
        ends = [threads.submit(line.end) for line in lines[:2]]
        time.sleep(0.2)
        assert not any(end.done() for end in ends)
        lines[2].end()
        for end in ends:
            end.result(20)


@pytest.mark.parametrize("who", [0, 2])
def test_in_a_store_too_a_rank_that_cannot_connect_is_told(who: int) -> None:
    lines = lines_in_a_store()
    others = [line for rank, line in enumerate(lines) if rank != who]
    others[0].look()
    lines[who].fail("no route")
    why = f"rank {who} (pid {100 + who} on here) could not connect to all others: no route"
    for line in others:
        with pytest.raises(RendezvousError, match=re.escape(why)):
            line.end()


CONSEQUENCE = "rank 2 left while the ranks met"


def test_what_follows_from_another_ranks_failure_is_not_raised_for_it() -> None:
    lines = lines_in_a_store()
    lines[2].fail("no route")
    cause = re.escape("rank 2 (pid 102 on here) could not connect to all others: no route")
    with pytest.raises(RendezvousError, match=cause), _store.told(lines[0]):
        raise LinkError(CONSEQUENCE)
    with pytest.raises(RendezvousError, match=cause):
        lines[1].end()


def test_what_nobody_has_told_is_raised_and_told() -> None:
    lines = lines_in_a_store()
    with pytest.raises(LinkError, match=CONSEQUENCE), _store.told(lines[0]):
        raise LinkError(CONSEQUENCE)
    with pytest.raises(RendezvousError, match=f"could not connect to all others: {CONSEQUENCE}"):
        lines[1].end()
