"""The rendezvous: how ranks of several hosts exchange what they know of themselves."""

from __future__ import annotations

import hashlib
import os
import queue
import re
import resource
import select
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import harness
from farandole import AuthError, Error, LinkError, RendezvousError, _core, _meeting
from farandole._meeting import MasterPort, connection, guest, rounds
from farandole._meeting.connection import Connection, proof
from farandole._meeting.here import Here, meet_here
from farandole._meeting.translated import seen_at

HERE = "127.0.0.1"


def met(*arguments: Any) -> list[dict[str, Any]]:
    found = _meeting.exchange(*arguments)
    found.line.end()
    return found.table


def meeting_of(rank: int, size: int, seconds: float, **how: Any) -> _meeting.Meeting:
    return _meeting.Meeting(rank, range(size), time.monotonic() + seconds, **how)


def test_a_rank_that_reaches_itself_at_a_free_port_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before rank 0 listens there, the kernel may give rank 1 the very port that it connects to."""
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
    found_by: dict[int, Any] = {}

    def meet(rank: int) -> None:
        meeting = meeting_of(rank, 2, 10, secret=b"secret")
        found_by[rank] = met(meeting, MasterPort(HERE, port), words_of(rank), lambda _: None)

    other = threading.Thread(target=meet, args=(1,))
    other.start()
    assert reached_itself.wait(10)
    meet(0)
    other.join(20)
    assert [each["pid"] for each in found_by[0]] == [100, 101]
    assert found_by[1] == found_by[0]


# ---- the ranks that rank 0 waits for, and its warnings meanwhile ----


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
            words = words_of(rank) | own | how.pop("words", {})
            place = MasterPort(HERE, port, how.pop("at", ()))
            how = {"secret": b"secret", "seconds": 20, **how}
            return threads.submit(met, meeting_of(rank, size, **how), place, words, odd)

        yield begin


def test_rank_0_names_a_stranger_and_who_is_missing_at_once_and_once(meet: Meet) -> None:
    port, said = free_port(), queue.Queue[str]()
    first = meet(0, 3, port, warn=said.put)
    for secret in (b"another", b"another"):
        with pytest.raises(AuthError, match="does not know the secret of rank 1's job"):
            meet(1, 3, port, secret=secret).result(20)
    text = said.get(timeout=20)
    assert f"somebody at {HERE} has knocked at {HERE}:{port} without the job's secret" in text
    assert text.endswith(f"1 of 3 ranks arrived at {HERE}:{port}; missing: 1-2")
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
    time.sleep(0.3)  # so that the last one is refused
    for outcome in (meet(2, 3, port, odd=True), first, second):
        with pytest.raises(RendezvousError, match=r"^rank 2 is odd\n"):
            outcome.result(20)
    assert time.monotonic() - began < 5, "and not the 5 s in which others may come"


def test_what_is_wrong_with_one_rank_is_told_before_and_after_others_come(meet: Meet) -> None:
    port = free_port()
    first, second = meet(0, 4, port), meet(1, 4, port)
    outcomes = [first, second, meet(2, 4, port, odd=True), meet(3, 4, port)]
    for outcome in outcomes:
        with pytest.raises(RendezvousError, match=r"^rank 2 is odd\n"):
            outcome.result(20)


def test_rank_0_that_cannot_join_tells_the_others(meet: Meet) -> None:
    port = free_port()
    for outcome in [meet(0, 3, port, odd=True), meet(1, 3, port), meet(2, 3, port)]:
        with pytest.raises(RendezvousError, match=r"^rank 0 is odd\n"):
            outcome.result(20)


def test_ranks_meet_at_any_address_of_rank_0(meet: Meet) -> None:
    """Such as 127.0.1.1, which its own host has for its name, and the one that other hosts use."""
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


def prove(connected: socket.socket, secret: bytes = b"secret") -> Connection:
    """Greets rank 0 and proves the secret, as a rank does."""
    until, talk = time.monotonic() + 20, Connection(connected)
    nonce = b"n" * connection.NONCE
    talk.send_bytes(connection.MAGIC + nonce, until)
    heard = talk.take(len(connection.MAGIC) + connection.NONCE + connection.PROOF, until)
    nonces = nonce + heard[len(connection.MAGIC) : -connection.PROOF]
    talk.send_bytes(proof(secret, b"client", nonces), until)
    talk.seal(secret, b"client", b"server", nonces)
    return talk


def test_a_rank_that_ended_while_it_waited_leaves_its_place(meet: Meet) -> None:
    port = free_port()
    first = meet(0, 3, port)
    with reached(port) as ended:
        prove(ended).send(words_of(1) | {"pid": 4711})
        time.sleep(0.3)
    others = [meet(rank, 3, port) for rank in (1, 2)]
    assert [each["pid"] for each in first.result(20)] == [100, 101, 102]
    assert all(other.result(20) for other in others)


def test_who_comes_as_a_meeting_ends_is_told_nothing_that_is_no_greeting(meet: Meet) -> None:
    """So a rank of another world tries again, and reaches the next rank 0."""
    port = free_port()
    first = meet(0, 2, port)
    with reached(port) as early:
        assert meet(1, 2, port).result(20) == first.result(20)
        early.settimeout(20)
        with suppress(ConnectionResetError):
            assert early.recv(100) == b""


def test_a_rank_that_tries_again_after_a_refusal_takes_nobodys_place(meet: Meet) -> None:
    port = free_port()
    first = meet(0, 4, port)
    for _ in range(3):
        assert "rank 1 is odd" in str(meet(1, 4, port, odd=True).exception(20))
    for outcome in (meet(2, 4, port), meet(3, 4, port), first):
        with pytest.raises(RendezvousError, match=r"^rank 1 is odd\n"):
            outcome.result(20)


def test_a_rank_of_another_world_that_ended_leaves_its_place_too(meet: Meet) -> None:
    port, which = free_port(), "2,3:0"
    first = meet(0, 2, port)
    with reached(port) as ended:
        prove(ended).send(words_of(0) | {"size": 2, "pid": 4711, "among": which})
        time.sleep(0.3)
    others = [meet(rank, 2, port, among=which, words={"size": 2}) for rank in (0, 1)]
    for other in others:
        assert [each["pid"] for each in other.result(20)] == [100, 101]
    assert meet(1, 2, port).result(20) == first.result(20)


def test_ranks_of_another_job_are_told_too_if_they_come_late(meet: Meet) -> None:
    port = free_port()
    early = [meet(rank, 3, port, pid=pid) for rank, pid in ((0, 1), (1, 2), (1, 3))]
    for outcome in early[1:]:
        with pytest.raises(RendezvousError, match="two processes are rank 1: pid "):
            outcome.result(20)
    with pytest.raises(RendezvousError, match="two processes are rank 1: pid "):
        meet(2, 3, port, pid=4).result(20)


def test_a_rank_of_no_such_number_is_named_with_its_host(meet: Meet) -> None:
    port = free_port()
    ranks = [meet(0, 2, port), meet(5, 2, port, host="there")]
    for outcome in ranks:
        with pytest.raises(
            RendezvousError, match=r"rank 5 \(pid 105 on there\) does not exist in a"
        ):
            outcome.result(20)


def test_what_no_rank_says_is_a_strangers_word(meet: Meet) -> None:
    port, said = free_port(), queue.Queue[str]()
    first = meet(0, 2, port, warn=said.put)
    with pytest.raises(RendezvousError, match="lost rank 0"):
        meet(1, 2, port, host=3).result(20)
    assert "without a rank's words" in said.get(timeout=20)
    second = meet(1, 2, port)
    assert first.result(20) == second.result(20)


def test_words_that_drip_are_given_up_in_time() -> None:
    """The deadline is for the whole message, not for each byte."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor() as pool:

        def drip() -> None:
            with suppress(OSError):
                for _ in range(20):
                    ours.sendall(b"\0")
                    time.sleep(0.05)

        dripping = pool.submit(drip)
        with pytest.raises(TimeoutError):
            Connection(theirs).take(20, time.monotonic() + 0.2)
        theirs.close()
        dripping.result()


def test_words_of_many_ranks_are_heard() -> None:
    table = [words_of(rank, addresses="x" * 900) for rank in range(4096)]
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as thread:
        sent = thread.submit(Connection(ours).send, table)
        assert Connection(theirs).hear(time.monotonic() + 20) == table
        sent.result(20)


def test_descriptors_of_many_ranks_come_with_words() -> None:
    """They are more than the kernel passes in one message."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as thread:
        sent = thread.submit(Connection(ours).send, {"words": 1}, [ours.fileno()] * 600)
        other = Connection(theirs)
        assert other.hear(time.monotonic() + 20) == {"words": 1}
        sent.result(20)
        descriptors = other.take_descriptors()
        assert len(set(descriptors)) == 600
        assert not any(os.get_inheritable(descriptor) for descriptor in descriptors)
        connection.close_all(descriptors)


class Store:
    """A store like that of torch.distributed: ``get`` waits."""

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
    meeting = meeting_of(0, 3, 20, warn=said.put, warn_after=0.2)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(_meeting.exchange_in, store, "name", meeting, words_of(0), odd)
        assert "1 of 3 ranks came to torch.distributed's store; missing: ranks 1, 2" in said.get(
            timeout=20
        )
        for rank in (1, 2):  # the second one comes late
            with pytest.raises(RendezvousError, match=r"^rank 1 is odd\n"):
                in_store(store, rank, name="name", odd=rank == 1)
        with pytest.raises(RendezvousError, match=r"^rank 1 is odd\n"):
            first.result(20)


def in_store(
    store: Store, rank: int, size: int = 3, seconds: float = 20, name: str = "job", **more: Any
) -> Any:
    """Meets the other ranks through the store. Returns the round in which they met."""
    meeting = meeting_of(rank, size, seconds)
    return _meeting.meet_in(store, name, meeting, words_of(rank, **more), odd)


def test_words_of_ranks_that_met_there_before_count_for_nothing() -> None:
    """torchrun's store outlives ranks. A rank may find the last round, which succeeded, was refused
    or was cut off by a death, and rank 0 may find words of ranks that are gone."""
    store = Store()
    with ThreadPoolExecutor(3) as threads:
        for came in (3, 2, 1, 3):
            seconds = 20 if came == 3 else 0.3
            others = [threads.submit(in_store, store, r, run=came) for r in range(1, came)]
            time.sleep(0.1)  # so that they find the round before
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


class Changing(Store):
    """A stranger's: it hands out other words than were set under keys that end like this."""

    def __init__(self, end: str, change: Callable[[str], str]) -> None:
        super().__init__()
        self._end, self._change = end, change

    def set(self, key: str, value: str) -> None:
        super().set(key, self._change(value) if key.endswith(self._end) else value)


def all_in(
    store: Store, *secrets: bytes, seconds: float = 20, late: int = -1
) -> list[BaseException | None]:
    """How it ends on each rank, also that all are connected. One rank may come late."""

    def come(rank: int, secret: bytes) -> None:
        if rank == late:
            time.sleep(1)
        meeting = meeting_of(rank, len(secrets), seconds, secret=secret)
        mine = words_of(rank, key=f"{rank:02x}")
        found = _meeting.exchange_in(store, "job", meeting, mine, odd)
        assert [words["key"] for words in found.table] == ["00", "01", "02"][: len(secrets)]
        found.line.end()

    with ThreadPoolExecutor(len(secrets)) as threads:
        coming = [threads.submit(come, rank, secret) for rank, secret in enumerate(secrets)]
        return [each.exception(40) for each in coming]


WORDS_IN_A_STORE = {"the round": "/round", "a rank's words": "/1", "an answer": "/1/answer"}
LINES_IN_A_STORE = {"that a rank has met": "/met/1", "that all have": "/met"}


@pytest.mark.parametrize("what", [*WORDS_IN_A_STORE, "the table", *LINES_IN_A_STORE])
def test_no_word_in_a_store_can_be_changed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "POLITE", 0.2)
    end = (WORDS_IN_A_STORE | LINES_IN_A_STORE).get(what)
    store = Store()
    if end is None:  # its key is the round's
        store.set = lambda key, value: Store.set(  # type: ignore[method-assign]
            store, key, value.replace('"key": "01"', '"key": "ff"') if '"ranks"' in value else value
        )
    else:
        store = Changing(end, lambda value: value[:-1] + ("1" if value[-1] == "0" else "0"))
    ends = all_in(store, b"secret", b"secret", seconds=1)
    last = what == "that all have"  # which rank 0 says once it knows it
    assert all(isinstance(each, Error) for each in ends[last:]), ends
    assert any("no seal of this job's secret" in str(each) for each in ends), ends


def test_who_comes_behind_words_that_were_changed_is_told_of_them() -> None:
    store = Changing("/1", lambda value: value[:-1] + ("1" if value[-1] == "0" else "0"))
    first, _, late = all_in(store, *[b"secret"] * 3, seconds=5, late=2)
    for each in (first, late):
        assert isinstance(each, AuthError), each
        assert "words of rank 1 have no seal of this job's secret" in str(each)


def test_words_of_one_place_in_a_store_fit_no_other() -> None:
    """Nor do those of the past: each meeting has another number in what its words are for."""
    store, stolen = Store(), []
    its = rounds.SealedStore(store, b"secret")
    its.set("job/1/2", {"rank": 2})
    stolen.append(store.get("job/1/2").decode())
    for key in ("job/1/3", "job/2/2"):
        store.set(key, stolen[0])
        with pytest.raises(AuthError, match="words of rank 2 have no seal of this job's secret"):
            its.find(key, 2)
    assert its.find("job/1/2", 2) == {"rank": 2}


@pytest.mark.parametrize("other", [b"another", b""])
def test_a_rank_with_another_secret_or_none_is_named_in_a_store(
    other: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "POLITE", 0.2)
    first, second, third = all_in(Store(), b"secret", b"secret", other, seconds=1)
    for each in (first, second):
        assert isinstance(each, RendezvousError)
        assert "missing: rank 2" in str(each)
    assert isinstance(third, AuthError)
    assert "words of rank 0 have no seal of this job's secret" in str(third)


def test_ranks_without_rank_0_do_not_take_an_old_answer() -> None:
    store = Store()
    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(in_store, store, rank, size=2) for rank in range(2)]:
            each.result(20)
    alone = meeting_of(1, 2, -_meeting.GRACE)
    with pytest.raises(
        RendezvousError, match="rank 1 did not meet all others: rank 0 has not answered"
    ):
        _meeting.meet_in(store, "job", alone, words_of(1), odd)
    with pytest.raises(RendezvousError, match="rank 0 has opened no round"):
        _meeting.meet_in(store, "other", alone, words_of(1), odd)


# ---- the line, while ranks that have met connect to each other ----


def lines_in_a_store() -> list[Any]:
    store = Store()
    meeting = meeting_of(0, 3, 20)
    with ThreadPoolExecutor(3) as threads:
        met = [
            threads.submit(
                _meeting.exchange_in, store, "job", replace(meeting, rank=r), words_of(r), odd
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
    meeting = meeting_of(1, 2, 1, warn=said.append, warn_after=0.1)
    why = "rank 1 does not reach torchrun's store at first:29500"
    with pytest.raises(RendezvousError, match=f"^{why}: timed out"):
        _meeting.torchruns(meeting, MasterPort("first", 29500))
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
    lines[who].fail(LinkError("no route"))
    why = f"rank {who} (pid {100 + who} on here) could not meet the others: no route"
    for line in others:
        with pytest.raises(LinkError, match=re.escape(why)):
            line.end()


CONSEQUENCE = "rank 2 left while the ranks met"


def test_what_follows_from_another_ranks_failure_is_not_raised_for_it() -> None:
    lines = lines_in_a_store()
    lines[2].fail(LinkError("no route"))
    cause = re.escape("rank 2 (pid 102 on here) could not meet the others: no route")
    with pytest.raises(LinkError, match=cause), _meeting.told(lines[0]):
        raise RendezvousError(CONSEQUENCE)
    with pytest.raises(LinkError, match=cause):
        lines[1].end()


def test_what_nobody_has_told_is_raised_and_told() -> None:
    lines = lines_in_a_store()
    with pytest.raises(LinkError, match=CONSEQUENCE), _meeting.told(lines[0]):
        raise LinkError(CONSEQUENCE)
    with pytest.raises(LinkError, match=f"could not meet the others: {CONSEQUENCE}"):
        lines[1].end()


# ---- ranks of one host ----


def comes(job: str, rank: int, ranks: int, size: int | None = None, **how: Any) -> Here:
    """Meets the ranks of this host. `size`: the world's, as this rank believes."""
    size = size or ranks
    seconds = how.pop("seconds", 20)
    mine = _meeting.who(rank, size) | _meeting.alike("") | how
    return meet_here(meeting_of(rank, ranks, seconds), f"{os.getpid()} {job}", size, mine, None)


@pytest.fixture
def come(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Begins a rank's meeting on this host, in a thread of its own."""
    monkeypatch.setenv("FARANDOLE_ARENA_BYTES", "1M")
    with ThreadPoolExecutor(5) as threads:
        yield partial(threads.submit, comes)


def outcome(meets: Callable[[], Here]) -> str:
    """The verdict of the error that a meeting raises; "met" if it raises none."""
    try:
        close(meets())
    except Error as error:
        return str(error.verdict)
    return "met"


def verdict(rank: Any) -> str:
    return outcome(partial(rank.result, 30))


def close(here: Here) -> None:
    for descriptors in here.descriptors.values():
        connection.close_all(descriptors)


def test_ranks_of_a_host_get_each_others_descriptors_and_one_memory(come: Meet) -> None:
    before = harness.descriptors()
    ranks = [come("five", rank, 5, tuning=f"of rank {rank}") for rank in range(5)]
    found: list[Any] = [rank.result(20) for rank in ranks]
    inodes = {os.fstat(here.memory.fileno()).st_ino for here in found}
    assert len(inodes) == 1
    for here in found:
        assert [words["rank"] for words in here.table] == list(range(5))
        assert here.table[0]["tuning"] == "of rank 0"
        assert len({descriptor for pair in here.descriptors.values() for descriptor in pair}) == 10
        os.eventfd_write(here.descriptors[3][0], 1)
    assert os.eventfd_read(found[0].descriptors[3][0]) == 5, "each has rank 3's own doorbell"
    for here in found:
        close(here)
    del here, found, ranks
    assert harness.descriptors() <= before


def test_a_missing_rank_and_one_too_many_are_named_on_this_host(come: Meet) -> None:
    missing = [come("missing", rank, 4, seconds=1) for rank in range(2)]
    twice = [come("twice", rank, 3) for rank in (0, 1)]
    time.sleep(0.3)
    twice.append(come("twice", 1, 3, pid=4711))
    sizes = [come("sizes", rank, 2, 2 + rank) for rank in range(2)]
    assert [verdict(rank) for rank in missing] == [
        "2 of 4 ranks arrived on this host; missing: 2-3"
    ] * 2
    for rank in twice:
        assert verdict(rank).startswith(f"two processes are rank 1: pid {os.getpid()} on ")
    for rank in sizes:
        assert f"rank 1 (pid {os.getpid()} on " in (said := verdict(rank))
        assert "has a world of [3], rank 0" in said


@pytest.mark.usefixtures("come")
def test_a_meeting_can_be_tried_again_at_once_after_a_refusal() -> None:
    def again(rank: int) -> list[str]:
        sizes = [2 + rank, 2] * 30
        return [outcome(partial(comes, "again", rank, 2, size)) for size in sizes]

    with ThreadPoolExecutor(2) as threads:
        for said in threads.map(again, range(2)):
            assert said[1::2] == ["met"] * 30
            assert all("a world of [3]" in each for each in said[::2])


def name_of(job: str) -> str:
    """The abstract address at which the first rank listens: looked up, not computed."""
    for _ in range(2000):
        for line in Path("/proc/net/unix").read_text().splitlines():
            if "@farandole-" in line and line.endswith(f"-{os.getpid()} {job}"):
                return "\0" + line.partition("@")[2]
        time.sleep(0.005)
    raise TimeoutError


def reached_here(job: str) -> socket.socket:
    for _ in range(400):
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            found.connect(name_of(job))
        except ConnectionRefusedError:  # the name is bound before its owner listens
            found.close()
            time.sleep(0.005)
        else:
            return found
    raise TimeoutError


def test_strangers_on_this_host_hold_nobody_up(come: Meet) -> None:
    first = come("strangers", 0, 2, seconds=4)  # a stranger may be silent for 5
    with ExitStack() as stack:
        strangers = [stack.enter_context(reached_here("strangers")) for _ in range(300)]
        strangers[-1].sendall(b"hello?")
        strangers[-2].sendall(b"x" * 5000)
        strangers[-3].close()
        assert verdict(come("strangers", 1, 2, seconds=4)) == "met"
        assert verdict(first) == "met"


def test_a_rank_that_leaves_its_place_ends_the_meeting_on_its_host(come: Meet) -> None:
    """The rank leaves before all have come, or after."""
    for size in (3, 2):
        job = f"leaves {size}"
        first = come(job, 0, size)
        with reached_here(job) as fickle:
            mine = _meeting.who(size - 1, size) | _meeting.alike("") | {"cpus": []}
            pair = [_core.make_doorbell(), _core.own_process()]
            prove(fickle, b"").send(mine, pair)
            connection.close_all(pair)
            time.sleep(0.3)
        what = "left while the ranks met" if size == 3 else "ended before it had met all others"
        assert re.fullmatch(rf"rank {size - 1} \(pid {os.getpid()} on .*\) {what}", verdict(first))


def test_a_process_of_another_user_is_let_in_by_nobody(come: Meet) -> None:
    if os.geteuid() != 0:
        pytest.skip("nobody else can become another user")
    first = come("users", 0, 2)
    name = name_of("users")
    child = os.fork()
    if child == 0:
        os.seteuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.settimeout(20)
            other.connect(name)
            with suppress(OSError):
                os._exit(1 if other.recv(1) else 0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert verdict(come("users", 1, 2)) == "met"
    assert verdict(first) == "met"


# ---- many ranks ----


def tables_of(ranks: list[Connection]) -> set[bytes]:
    """Digests of the tables that ranks receive, read as they arrive, in any order."""
    said = {rank.fileno(): bytearray() for rank in ranks}
    missing = dict.fromkeys(said, connection.HEAD.size)
    by_number = {rank.fileno(): rank for rank in ranks}
    digests = set[bytes]()
    poll = select.poll()
    for rank in ranks:
        poll.register(rank, select.POLLIN)
    while said:
        ready = poll.poll(60_000)
        assert ready, "nothing comes any more"
        for number, _ in ready:
            rank, data = by_number[number], said[number]
            data += rank.receive(missing[number] - len(data)) or b""
            head, words = bytes(data[: connection.HEAD.size]), bytes(data[connection.HEAD.size :])
            if len(data) == connection.HEAD.size:
                missing[number] += sum(rank.sizes(head))
            elif len(data) == missing[number]:
                poll.unregister(number)
                del said[number]
                digests.add(hashlib.sha256(rank.opened(head, words)).digest())
    return digests


def test_a_thousand_ranks_meet_and_strangers_do_not_keep_them_from_it(meet: Meet) -> None:
    """The protocol without processes. The backlog of connections, the descriptors and the tables
    are as in a world of that size."""
    size, port = 1000, free_port()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def come(rank: int) -> Connection:
        mine = prove(reached(port))
        mine.send(words_of(rank, addresses="00" * 160))
        return mine

    try:
        first = meet(0, size, port, seconds=100)
        with ExitStack() as stack, ThreadPoolExecutor(8) as threads:
            for _ in range(1100):
                stack.enter_context(reached(port))
            others = list(threads.map(come, range(1, size)))
            for other in others:
                stack.callback(other.close)
            assert len(tables_of(others)) == 1
            for other in others:
                other.send({})
            assert [words["rank"] for words in first.result(120)] == list(range(size))
            assert all(other.hear(time.monotonic() + 20) == {} for other in others)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


PORT = b"\x39\x30"  # 12345
OWN = b"\x04\x00" + PORT + b"\x0a\x00\x00\x02" + bytes(12)


@pytest.mark.parametrize(
    ("address", "more"),
    [
        ("10.0.0.2", b""),  # its own
        ("", b""),
        ("127.0.0.1", b""),
        ("fe80::1%eth0", b""),
        ("192.0.2.7", b"\x04\x00" + PORT + b"\xc0\x00\x02\x07" + bytes(12)),
        ("::ffff:192.0.2.7", b"\x04\x00" + PORT + b"\xc0\x00\x02\x07" + bytes(12)),
        ("2001:db8::1", b"\x06\x00" + PORT + b"\x20\x01\x0d\xb8" + bytes(11) + b"\x01"),
    ],
)
def test_an_address_at_which_a_rank_is_seen_is_its_last(address: str, more: bytes) -> None:
    assert seen_at({"addresses": OWN.hex()}, address) == {"addresses": (OWN + more).hex()}
    assert seen_at({}, address) == {}
