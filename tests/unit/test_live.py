"""A job seen from outside: pages, rates, the slowest rank, metrics, health, and the server."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from farandole._launch.polling import wait
from farandole._live import openmetrics, pages
from farandole._live.health import health_of
from farandole._live.pages import Elsewhere, Pages, Status, from_fields
from farandole._live.rates import rates
from farandole._live.server import Server, listen, url_of
from farandole._live.slow import LOOK_EVERY, SlowRanks
from farandole._words import CommandError

NOW = 1_000_000.0


def status(rank: int = 0, **fields: Any) -> Status:
    known: dict[str, Any] = {
        "job": "j", "host": "a", "rank": rank, "size": 2, "pid": 100 + rank, "state": "running",
        "joined": NOW - 100, "operations": 0, "bytes": 0, "steps": 0, "stepped": 0.0,
        "waited_for_ranks": 0.0, "waited_for_data": 0.0, "waits_since": 0.0, "waits_in": "",
        "waits_for": [], "verdict": "", "processor": 0.0,
        "seen": NOW,
    }  # fmt: skip
    return Status(**known | fields)


# -- pages --------------------------------------------------------------------------------------

_FIELDS = {
    "pid": ("q", os.getpid()), "joined": ("q", int(NOW * 1e9)), "rank": ("i", 1), "size": ("i", 2),
    "job": ("256s", b"j"), "host": ("256s", b"a"), "state": ("Q", 1), "operations": ("Q", 7),
    "bytes": ("Q", 56), "steps": ("Q", 3), "stepped": ("q", 0), "for_ranks": ("q", 1_500_000_000),
    "for_data": ("q", 0), "wait.version": ("Q", 2),
    "wait.since": ("q", 0),
    "wait.ranks": ("16h", [0] + [-1] * 15), "wait.title": ("192s", b"all_reduce #4"),
    "verdict.version": ("Q", 0), "verdict.text": ("512s", b""), "of_another_version": ("d", 0.5),
}  # fmt: skip


def page(**changed: Any) -> bytes:
    """A rank has waited for 20 seconds."""
    changed = {"wait.since": time.monotonic_ns() - 20 * 10**9} | changed
    table, body = "farandole status\n", b""
    for name, (form, value) in _FIELDS.items():
        value = changed.get(name, value)
        table += f"{name} {form} {2048 + len(body)}\n"
        body += struct.pack(f"<{form}", *(value if isinstance(value, list) else [value]))
    return table.encode().ljust(2048, b"\0") + body


def test_a_page_tells_where_its_fields_are() -> None:
    found = pages.status_of(page())
    assert (found.rank, found.size, found.operations, found.job) == (1, 2, 7, "j")
    assert found.waited_for_ranks == 1.5
    assert (found.waits_for, found.waits_in) == ([0], "all_reduce #4")
    assert found.waits_since == pytest.approx(time.time() - 20, abs=5)
    assert found._replace(seen=found.waits_since + 2).all_waits_for_ranks == pytest.approx(3.5)
    with pytest.raises(ValueError, match="no page"):
        pages.status_of(b"something else")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Shows a page as a rank does, and gives back how to write it anew."""
    monkeypatch.setattr(pages, "_FIRST_PAUSE", 0.0)
    file = os.memfd_create("farandole-status")
    yield lambda content: os.pwrite(file, content, 0)
    os.close(file)


def test_pages_of_a_process_are_found_while_its_world_lasts(shown: Any) -> None:
    me = os.getpid()
    shown(page())
    assert [found.rank for found in pages.of_process(me)] == [1]
    below = Pages(lambda: [me], "j")
    assert Pages(lambda: [me], "another").read(1) == []
    assert [found.rank for found in below.read(1)] == [1]
    shown(page(state=4))
    assert pages.of_process(me) == below.read(1) == []


def test_a_page_that_a_child_has_inherited_is_not_its_own(shown: Any) -> None:
    shown(page(pid=1))
    assert pages.of_process(os.getpid()) == []


def test_a_record_that_is_being_written_is_not_read(shown: Any) -> None:
    shown(page(**{"wait.version": 3}))
    assert pages.of_process(os.getpid()) == []


@pytest.mark.parametrize("end", [0, 100, 2048, 2100, 2600])
def test_a_cut_page_is_no_page(shown: Any, end: int) -> None:
    shown(page()[:end])
    assert pages.of_process(os.getpid()) == []


@pytest.mark.parametrize(
    "line",
    [
        "job  0", "pid q 99999999999999999999999", "pid q -8", "wait.version 8s 0", "job q 0",
        "rank", "\xff", "x y z w",
    ],
)  # fmt: skip
def test_a_damaged_page_is_no_page(shown: Any, line: str) -> None:
    whole = page()
    table, _, _ = whole.partition(b"\0")
    shown((table + line.encode("latin-1") + b"\n").ljust(2048, b"\0") + whole[2048:])
    assert pages.of_process(os.getpid()) == []


def test_the_page_of_the_newest_world_counts(shown: Any) -> None:
    shown(page(joined=2 * 10**9, rank=0))
    older = os.memfd_create("farandole-status")
    os.pwrite(older, page(joined=10**9, rank=1), 0)
    newest = os.memfd_create("farandole-status")
    os.pwrite(newest, page(joined=3 * 10**9, rank=2), 0)
    below = Pages(lambda: [os.getpid()], "j")
    assert [found.rank for found in pages.of_process(os.getpid())] == [2]
    assert [found.rank for found in below.read(1)] == [2]
    os.pwrite(newest, page(state=4), 0)
    assert [found.rank for found in below.read(1)] == [0]
    shown(page(state=4))
    assert [found.rank for found in below.read(1)] == [1]
    os.pwrite(older, page(state=4), 0)
    assert below.read(1) == []
    os.close(older)
    os.close(newest)


def test_ranks_of_other_hosts_are_shown_by_the_launcher_here() -> None:
    elsewhere = Elsewhere()
    for steps in (1, 2):
        elsewhere.show([status(0, steps=steps), status(1, steps=steps)])
        assert [found.steps for found in pages.of_process(os.getpid())] == [steps, steps]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": "1"},
        {"waits_for": ["x"]},
        {"verdict": None},
        {"joined": [1]},
        {"more": 1},
        {"operations": 10**400},
        {"operations": True},
        {"rank": -1},
        {"seen": -1.0},
        {"waits_for": list(range(1000))},
        {"host": "x" * 10_000},
    ],
)
def test_fields_from_another_host_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        from_fields(status()._asdict() | wrong)
    assert from_fields(json.loads(json.dumps(status()._asdict()))) == status()
    assert from_fields(status(host="\x1b[2J\ud800")._asdict()).host == "\\x1b[2J\\ud800"


# -- rates --------------------------------------------------------------------------------------


def later(rank: int, **fields: Any) -> Status:
    return status(rank, seen=NOW + 10, **fields)


def test_rates_are_what_happened_between_two_looks() -> None:
    before = [status(0), status(1)]
    first, second = rates(
        before,
        [
            later(0, steps=100, bytes=10_000_000, waited_for_ranks=6.0, processor=3.0),
            later(1, steps=100, waited_for_data=1.0, waited_for_ranks=1.0, processor=10.0),
        ],
    )
    assert (first.steps, first.bytes, first.for_ranks, first.late) == (10, 1e6, 0.6, 0)
    assert (second.for_data, second.late, second.processors) == (0.1, 0.5, 1.0)


def test_a_wait_that_goes_on_counts() -> None:
    waiting = later(0, waits_since=NOW + 2, waits_for=[1], waits_in="barrier #1")
    first, second = rates([status(0), status(1)], [waiting, later(1)])
    assert first.for_ranks == second.late == 0.8


def test_jobs_are_apart() -> None:
    before = [status(0), status(1), status(0, job="k"), status(1, job="k")]
    after = [
        later(0, waited_for_ranks=6.0), later(1),
        later(0, job="k"), later(1, job="k", waited_for_ranks=2.0),
    ]  # fmt: skip
    assert [rate.for_ranks for rate in rates(before, after)] == [0.6, 0, 0, 0.2]
    assert [rate.late for rate in rates(before, after)] == [0, 0.6, 0.2, 0]


def test_a_rank_of_another_world_has_no_rate() -> None:
    assert not rates([status(0)], [later(0, joined=NOW)])


def test_a_rank_that_was_not_looked_at_anew_has_no_rate() -> None:
    (rate,) = rates([status(0)], [status(0)])
    assert not rate.moved


# -- the slowest rank ---------------------------------------------------------------------------


def test_a_rank_is_told_again_only_after_an_hour() -> None:
    saves = [(0.0, 0.5)] * 8 + [(0.1, 0.1)] * 8
    assert len(told(saves * 3)) == 2
    assert len(told(saves + [(0.1, 0.1)] * 720 + saves)) == 4


def told(waits: Sequence[Sequence[float]], *, share: float = 0.25, steps: int = 10) -> list[str]:
    """The lines for ranks that wait these shares of the time, look by look."""
    judge = SlowRanks(share)
    sums = [0.0] * len(waits[0])
    lines: list[str] = []
    for look, shares in enumerate(waits):
        sums = [total + part * LOOK_EVERY for total, part in zip(sums, shares, strict=True)]
        ranks = [
            status(
                r, size=len(sums), steps=look * steps, waited_for_ranks=waited,
                seen=NOW + look * LOOK_EVERY,
            )
            for r, waited in enumerate(sums)
        ]  # fmt: skip
        lines += judge.look(ranks)
    return lines


def test_the_rank_that_all_others_wait_for_is_told_once_and_when_it_is_over() -> None:
    lines = told([(0.5, 0.4, 0.05)] * 8 + [(0.1, 0.1, 0.1)] * 8)
    assert len(lines) == 2
    assert lines[0].startswith("rank 2 (pid 102 on a) is the slowest: of the last 15 s the others")
    assert "waited 40% to 50% for ranks to begin an operation, and it 5%" in lines[0]
    assert lines[1] == "rank 2 keeps up with the others again"


@pytest.mark.parametrize(
    "waits",
    [(0.2, 0.2, 0.2), (0.5, 0.02, 0.05), (0.22, 0.24, 0.0)],
    ids=["all alike", "no single one", "less than the share"],
)
def test_nobody_is_told_where_no_rank_holds_all_others_up(waits: tuple[float, ...]) -> None:
    assert told([waits] * 8) == []


def test_a_rank_that_was_slow_and_left_is_forgotten() -> None:
    judge = SlowRanks(0.25)
    lines: list[str] = []
    for look in range(20):
        size = 3 if look < 8 else 2  # an elastic job's next world
        lines += judge.look(
            [
                status(
                    r, size=size, steps=look, seen=NOW + look * LOOK_EVERY, joined=NOW + size,
                    waited_for_ranks=0.0 if r == 2 else look * LOOK_EVERY / 2,
                )
                for r in range(size)
            ]
        )  # fmt: skip
    assert len(lines) == 1


def test_nothing_is_told_of_a_job_that_hangs_or_if_nobody_asks() -> None:
    assert told([(0.9, 0.0)] * 8, steps=0) == []
    assert told([(0.9, 0.0)] * 8, share=0) == []
    assert told([(0.9, 0.0)] * 8) != []


# -- metrics and health -------------------------------------------------------------------------


def test_metrics_are_openmetrics_text() -> None:
    text = openmetrics.text_of([status(0, steps=3, host='a"b'), status(1, verdict="gone")])
    lines = text.splitlines()
    assert lines[-1] == "# EOF"
    assert text.endswith("\n")
    assert 'farandole_steps_total{rank="0",host="a\\"b"} 3' in lines
    assert 'farandole_failed{rank="1",host="a"} 1.0' in lines
    assert 'farandole_joined_timestamp_seconds{rank="1",host="a"} 999900.0' in lines
    for metric in openmetrics.METRICS:
        name = f"farandole_{metric.name}"
        assert lines.count(f"# TYPE {name} {metric.kind}") == 1
        assert name.endswith(metric.unit)  # as the format asks for
        suffix = "_total" if metric.kind == "counter" else ""
        assert sum(line.startswith(f"{name}{suffix}{{") for line in lines) == 2


def test_health_is_moving_waiting_or_failed() -> None:
    waits = {"waits_since": NOW - 3, "waits_for": [1], "waits_in": "barrier #1"}
    assert health_of([]) == (True, {"state": "starting", "ranks": 0})
    assert health_of([status(0, **waits), status(1)])[1]["state"] == "moving"
    well, said = health_of([status(0, **waits), status(1, state="stopped")])
    assert well
    assert said == {
        "state": "waiting", "seconds": 3, "in": "barrier #1", "for": [1], "ranks": 2, "stopped": [1]
    }  # fmt: skip
    well, said = health_of([status(0), status(1, verdict="rank 0 died")])
    assert (well, said) == (False, {"state": "failed", "rank": 1, "verdict": "rank 0 died"})


# -- the server ---------------------------------------------------------------------------------


def answer_of(server: Server, asked: bytes, where: tuple[str, int]) -> bytes:
    with socket.create_connection(where) as asking:
        asking.sendall(asked)
        asking.setblocking(False)
        answer = b""
        until = time.monotonic() + 20
        while time.monotonic() < until:
            server.turn(wait(server.descriptors(), time.monotonic() + 0.05), time.monotonic())
            try:
                data = asking.recv(1 << 16)
            except BlockingIOError:
                continue
            if not data:
                return answer
            answer += data
    raise AssertionError(f"no end of {answer!r}")


@pytest.fixture
def served() -> Iterator[tuple[Server, tuple[str, int]]]:
    listener = listen("0")
    server = Server(listener, lambda: [status(0, steps=3), status(1, verdict="rank 0 died")])
    yield server, listener.getsockname()
    server.close()


@pytest.mark.parametrize(
    ("asked", "code", "has"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200, b'farandole_steps_total{rank="0",'),
        (b"GET /healthz?x HTTP/1.1\r\n\r\n", 503, b'"verdict": "rank 0 died"'),
        (b"GET / HTTP/1.1\r\n\r\n", 404, b"/metrics"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405, b"GET"),
        (b"\r\n\r\n", 405, b"GET"),
        (b"GET " + b"x" * 9000, 431, b"long"),
    ],
)
def test_the_server_answers(
    served: tuple[Server, tuple[str, int]], asked: bytes, code: int, has: bytes
) -> None:
    answer = answer_of(served[0], asked, served[1])
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % code)
    assert b"Content-Length: %d\r\n" % len(body) in head + b"\r\n"
    assert has in body


def test_the_server_answers_a_head_without_a_body(served: tuple[Server, tuple[str, int]]) -> None:
    answer = answer_of(served[0], b"HEAD /metrics HTTP/1.1\r\n\r\n", served[1])
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\n")


def test_the_server_rests_while_no_descriptor_is_free(
    served: tuple[Server, tuple[str, int]],
) -> None:
    server, where = served
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection(where):
        spare: list[int] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
        with suppress(OSError):
            while True:
                spare.append(os.dup(0))
        now = time.monotonic()
        try:
            server.turn(wait(server.descriptors(), now + 1), now)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for one in spare:
                os.close(one)
        assert server.descriptors() == []
        assert server.due() == pytest.approx(now + 1)
        server.turn(set(), now + 1)
        assert len(server.descriptors()) == 1


def test_the_server_leaves_those_that_say_nothing(served: tuple[Server, tuple[str, int]]) -> None:
    server, where = served
    silent = [socket.create_connection(where) for _ in range(40)]  # more than it keeps at once
    now = time.monotonic()
    for _ in range(50):
        server.turn(wait(server.descriptors(), time.monotonic() + 0.01), now)
    assert server.due() == pytest.approx(now + 5)
    for late in (6, 12):  # those that waited in the kernel, too
        for _ in range(50):
            server.turn(wait(server.descriptors(), time.monotonic() + 0.01), now + late)
    assert b" 200 OK" in answer_of(server, b"GET /metrics HTTP/1.1\r\n\r\n", where)
    for one in silent:
        one.close()


@pytest.mark.parametrize("where", ["", "x", "-1", "70000", "1.2.3.4:", ":1", "1:2:3"])
def test_a_wrong_address_is_refused(where: str) -> None:
    with pytest.raises(CommandError, match="--metrics"):
        listen(where)


def test_a_port_that_is_taken_is_refused() -> None:
    with listen("127.0.0.1:0") as first:
        port = first.getsockname()[1]
        assert url_of(first) == f"http://127.0.0.1:{port}/metrics"
        with pytest.raises(CommandError, match="Address already in use"):
            listen(str(port))
