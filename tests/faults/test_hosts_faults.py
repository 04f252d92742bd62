"""Several hosts: all ranks report the same error, and each refuses bad input."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_deaths import IMPATIENT, all_die_inside, meet, one_dies

import farandole as fd
import harness
from farandole import _core, _meeting, _world
from farandole._core import wire_format
from farandole._meeting import members
from harness import Outcome, World, split

Spawn = Callable[..., World]
SIZES = {"1,1": 2, "1,2": 3, "2,2": 4}


def assert_one_verdict(outcomes: list[Outcome], error: str, rank: int) -> str:
    for o in outcomes:
        assert o.error == error, o.trace
        assert o.rank == rank
    verdicts = {o.verdict for o in outcomes}
    assert len(verdicts) == 1, verdicts
    return verdicts.pop()


# ---- deaths ----


@pytest.mark.parametrize("parts", SIZES)
@pytest.mark.parametrize("victim", ["first", "last"])
def test_all_hosts_name_the_killed_rank(spawn: Spawn, parts: str, victim: str) -> None:
    size = SIZES[parts]
    dead = 0 if victim == "first" else size - 1
    world = spawn(size, env=split(parts))
    world.start(one_dies, dead, 2, "all_reduce", 99_996, False)
    world.hear_all()
    world.signal(dead, signal.SIGKILL)
    survivors = [r for r in range(size) if r != dead]
    verdict = assert_one_verdict(world.outcomes(survivors), "PeerLost", dead)
    assert f"rank {dead} (pid {world.pids[dead]} on " in verdict
    has_neighbour = parts == "2,2" or (parts == "1,2" and victim == "last")
    assert (" was killed by SIGKILL during " if has_neighbour else " died during ") in verdict


@pytest.mark.parametrize("count", [3, 2_000_000])
def test_a_rank_killed_while_data_move_is_named(spawn: Spawn, count: int) -> None:
    world = spawn(3, env=split("1,2"))
    world.start(all_die_inside, 10**9, count)
    world.hear_all()
    world.signal(1, signal.SIGKILL)
    assert_one_verdict(world.outcomes([0, 2]), "PeerLost", 1)


def test_a_stopped_rank_that_is_alone_on_its_host_is_named(spawn: Spawn) -> None:
    world = spawn(3, env=IMPATIENT | split("2,1"))
    world.start(one_dies, 2, 2, "all_reduce", 5000, False)
    world.hear_all()
    world.signal(2, signal.SIGSTOP)
    assert_one_verdict(world.outcomes([0, 1]), "Stalled", 2)
    world.signal(2, signal.SIGKILL)


def waits_for(who: int, name: str | None, timeout: float, hears: bool = False) -> float:
    """`hears`: the rank that is late goes on until it hears the verdict. What it takes for the
    first operation may be there before that."""
    meet()
    if fd.rank() == who:
        assert harness.listen() == "go"
    x = np.full(3, fd.rank() + 1.0)
    result = _sum_of(x, name, timeout)
    return _sum_of(x, name, timeout) if hears and fd.rank() == who else result


def _sum_of(x: Any, name: str | None, timeout: float) -> float:
    if name is None:
        return float(fd.all_reduce(x, timeout=timeout)[0])
    _core.wait_by_number(
        _core.names_of(_world.world()).submit("all_reduce", name, [(x, x, x.shape)], result=x)
    )
    return float(x[0])


# Names wait for rank 0, which orders them, so only rank 0 and ranks that wait for it warn.
STOPPED = [(3, None), (0, None), (2, None), (3, "weights"), (0, "weights")]


@pytest.mark.parametrize(("who", "name"), STOPPED)
def test_a_stopped_rank_is_named_as_stopped_on_every_host(
    spawn: Spawn, who: int, name: str | None
) -> None:
    world = spawn(4, env=split("2,2") | {"FARANDOLE_TIMEOUT": "5"})
    world.start(waits_for, who, name, 5.0, True)
    world.hear_all()
    world.signal(who, signal.SIGSTOP)
    others = [r for r in range(4) if r != who]
    outcomes = world.outcomes(others)
    stopped = (
        rf"rank {who} \(pid {world.pids[who]} on [^)]*\) is stopped(, as ranks on its host see)?"
    )
    for o in outcomes:
        assert (o.error, o.rank, o.pid) == ("PeerHung", who, world.pids[who]), o.trace
        assert o.verdict.startswith(f"rank {who} is stopped: ")
        assert o.fields["values"] == {"missing": [who]}
        assert re.match(stopped, o.evidence), o.evidence
    assert len({o.text for o in outcomes}) == 1
    for r in others if name is None else [0] if who else others:
        line = next(line for line in world.output(r).splitlines() if " has waited " in line)
        assert "stopped" in line, line
        assert not any(f"rank {other} (pid" in line for other in others), line
    world.signal(who, signal.SIGCONT)
    world.say(who, "go")
    assert world.outcome(who).error == "PeerHung", "it hears the verdict of the others"


@pytest.mark.parametrize("who", [0, 3])
def test_a_stop_that_ends_before_the_deadline_is_no_error(spawn: Spawn, who: int) -> None:
    world = spawn(4, env=split("2,2"))
    world.start(waits_for, who, None, 60.0)
    world.hear_all()
    world.signal(who, signal.SIGSTOP)
    others = [r for r in range(4) if r != who]
    harness.wait_until(lambda: all("stopped" in world.output(r) for r in others), "the warnings")
    world.signal(who, signal.SIGCONT)
    world.say(who, "go")
    assert [o.value for o in world.outcomes()] == [10.0] * 4


def leaves(who: int) -> None:
    fd.init()
    fd.all_reduce(np.ones(3))
    if fd.rank() == who:
        fd.shutdown()
        return
    fd.all_reduce(np.ones(3))


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_leaves_is_named(spawn: Spawn, who: int) -> None:
    world = spawn(3, env=split("1,2"))
    world.start(leaves, who)
    outcomes = world.outcomes()
    assert outcomes[who].error is None
    assert_one_verdict([o for r, o in enumerate(outcomes) if r != who], "EarlyExit", who)


def last_words(times: int) -> None:
    """A rank that is done leaves, while others still receive data of the last operation."""
    for _ in range(times):
        fd.init()
        x = np.ones(200_003)
        assert (fd.broadcast(x, root=0) == 1).all()
        fd.shutdown()


def test_who_has_done_its_share_may_leave(spawn: Spawn) -> None:
    spawn(4, env=split("2,2")).run(last_words, 10)


# ---- bytes that no rank sends ----


def talks_nonsense(who: int) -> None:
    fd.init()
    if fd.rank() == who:
        for connection in control_connections():
            connection.send(b"\xff" * 64)
    for _ in range(2000):
        fd.all_reduce(np.ones(3))
        time.sleep(0.005)


def control_connections() -> list[socket.socket]:
    """This rank's TCP connections. Before the first operation they are all for control."""
    found = []
    for file in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            one = socket.socket(fileno=os.dup(int(file.name)))
            one.getpeername()
            if one.family != socket.AF_UNIX:
                found.append(one)
    return found


@pytest.mark.parametrize("parts", ["1,1", "1,1,1"])
@pytest.mark.parametrize("who", [0, 1])
def test_nonsense_on_a_connection_is_named_and_kills_nobody(
    spawn: Spawn, parts: str, who: int
) -> None:
    size = len(parts.split(","))
    world = spawn(size, env=split(parts))
    world.start(talks_nonsense, who)
    verdict = assert_one_verdict(world.outcomes(), "LinkError", who)
    assert f"from rank {who} is malformed" in verdict


# ---- disagreement ----


def disagrees(who: int) -> str:
    fd.init()
    with pytest.raises(fd.Mismatch) as refused:
        fd.all_reduce(np.ones(10 + (fd.rank() == who)), name="weights")
    assert (fd.all_reduce(np.ones(10)) == fd.size()).all()  # the group lives on
    return refused.value.verdict


@pytest.mark.parametrize("parts", SIZES)
def test_a_mismatch_is_refused_in_the_same_words(spawn: Spawn, parts: str) -> None:
    size = SIZES[parts]
    for who in (0, size - 1):
        verdicts = set(spawn(size, env=split(parts)).run(disagrees, who))
        assert len(verdicts) == 1
        verdict = verdicts.pop()
        assert f"11 on rank {who}" in verdict
        assert "'weights'" in verdict


def disagrees_in_a_bundle() -> str:
    fd.init()
    arrays = [np.ones(3), np.ones(5 if fd.rank() == 0 else 6)]
    with pytest.raises(fd.Mismatch) as refused:
        fd.grouped_all_reduce(arrays, name="pair")
    return refused.value.verdict


def test_the_differing_array_of_a_bundle_is_named(spawn: Spawn) -> None:
    verdicts = set(spawn(3, env=split("1,2")).run(disagrees_in_a_bundle))
    assert len(verdicts) == 1
    assert "array 1" in verdicts.pop()


# ---- bad input ----


def refused_everywhere(world: World, error: str) -> list[str]:
    world.start(fd.init)
    outcomes = world.outcomes()
    for o in outcomes:
        assert o.error == error, o.trace
    return [o.text for o in outcomes]


def test_without_a_secret_nobody_meets(spawn: Spawn) -> None:
    texts = refused_everywhere(
        spawn(2, env=split("1,1") | {"FARANDOLE_SECRET_FILE": None}), "AuthError"
    )
    assert all("FARANDOLE_SECRET_FILE" in text for text in texts)


def test_ranks_may_meet_without_a_secret_where_that_is_allowed(spawn: Spawn) -> None:
    env = split("1,1") | {"FARANDOLE_SECRET_FILE": None, "FARANDOLE_INSECURE": "1"}
    world = spawn(2, env=env)
    world.run(disagrees, 1)
    warning = "warning: FARANDOLE_INSECURE=1: nobody has proved to be a rank of this job"
    assert world.output(0).count(warning) == 1
    assert warning not in world.output(1)


def secret_and_what_was_said() -> tuple[bytes, str]:
    said = []
    exchange = _meeting.exchange

    def heard(*arguments: Any) -> Any:
        said.append(exchange(*arguments))
        return said[-1]

    _meeting.exchange = heard
    fd.init()
    return _world.world().secret(), json.dumps([met.table for met in said])


def test_a_secret_that_ranks_make_themselves_is_not_said(spawn: Spawn) -> None:
    env = split("1,2") | {"FARANDOLE_SECRET_FILE": None, "FARANDOLE_INSECURE": "1"}
    known = set()
    for secret, said in spawn(3, env=env).run(secret_and_what_was_said):
        known.add(secret)
        assert "secrets" in said
        assert secret.hex() not in said
    assert len(known) == 1


def test_a_secret_that_others_may_read_is_refused(spawn: Spawn, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0" * 64)
    path.chmod(0o644)
    env = split("1,1") | {"FARANDOLE_SECRET_FILE": str(path)}
    texts = refused_everywhere(spawn(2, env=env), "AuthError")
    assert all("chmod 600" in text for text in texts)


def test_another_secret_is_refused_on_both_ends(spawn: Spawn, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("1" * 64)
    path.chmod(0o600)
    env = split("1,1") | {"FARANDOLE_START_TIMEOUT": "3"}
    world = spawn(2, env=env, each=[{}, {"FARANDOLE_SECRET_FILE": str(path)}])
    world.start(fd.init)
    first, second = world.outcomes()
    assert (first.error, second.error) == ("RendezvousError", "AuthError")
    assert "missing: 1; somebody at 127.0.0.1 did not know the job's secret" in first.text
    assert "FARANDOLE_SECRET_FILE" in second.text
    assert_a_stranger_is_named(world)


def assert_a_stranger_is_named(world: World) -> None:
    said = world.output(0)
    assert said.count("farandole rank 0: warning: somebody at 127.0.0.1 has knocked at ") == 1
    assert "without the job's secret" in said
    assert "missing: 1\n" in said


def test_a_rank_without_a_secret_knocks(spawn: Spawn) -> None:
    env = split("1,1") | {"FARANDOLE_START_TIMEOUT": "3"}
    world = spawn(2, env=env, each=[{}, {"FARANDOLE_SECRET_FILE": None}])
    world.start(fd.init)
    first, second = world.outcomes()
    assert (first.error, second.error) == ("RendezvousError", "AuthError")
    assert "knows no secret" in second.text
    assert_a_stranger_is_named(world)


# No rank waits this long: the test's own limit is shorter.
PATIENT: dict[str, str | None] = {"FARANDOLE_START_TIMEOUT": "3600"}


def test_ranks_of_two_jobs_are_told_at_once(spawn: Spawn) -> None:
    """They fail before the last rank has come, and so does that one when it comes."""
    each: list[dict[str, str | None]] = [{"FARANDOLE_RUN_ID": name} for name in ("b", "a", None)]
    world = spawn(3, env=split("1,1,1") | PATIENT, each=each)
    world.start(fd.init, ranks=[0, 1])
    texts = {world.outcome(1).text}
    world.start(fd.init, ranks=[2])
    texts |= {o.text for o in world.outcomes([0, 2])}
    host = socket.gethostname()
    assert len(texts) == 1
    first, second = (f"rank {r} (pid {world.pids[r]} on {host})" for r in (0, 1))
    assert texts.pop().startswith(f"{second} has the job [a], {first} has [b]")


def test_a_rank_that_does_not_know_its_jobs_name_may_join(spawn: Spawn) -> None:
    each: list[dict[str, str | None]] = [{}, {"FARANDOLE_RUN_ID": None}]
    spawn(2, env=split("1,1"), each=each).run(fd.init)


def test_a_job_that_the_program_names_is_compared(spawn: Spawn) -> None:
    world = spawn(2, env=split("1,1") | PATIENT)
    world.start(joins_a_job_of_its_own)
    for o in world.outcomes():
        assert o.error == "RendezvousError", o.trace
        assert "has the job [job 1], rank 0 (pid " in o.text


def joins_a_job_of_its_own() -> None:
    fd.init(job=f"job {os.environ['RANK']}")


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_cannot_join_tells_the_others(spawn: Spawn, who: int) -> None:
    each: list[dict[str, str | None]] = [{}, {}, {}]
    each[who] = {"FARANDOLE_IFACE": "nosuch0"}
    world = spawn(3, env=split("1,1,1") | PATIENT, each=each)
    world.start(fd.init)
    for rank, o in enumerate(world.outcomes()):
        assert o.error == ("InvalidArgument" if rank == who else "RendezvousError"), o.trace
        assert "FARANDOLE_IFACE=nosuch0 has no address here" in o.text
        if rank != who:
            assert o.text.startswith(f"rank {who} (pid {world.pids[who]} on ")


def test_another_split_is_refused(spawn: Spawn) -> None:
    each: list[dict[str, str | None]] = [{}, {"FARANDOLE_SPLIT_HOSTS": "2,1"}, {}]
    for text in refused_everywhere(spawn(3, env=split("1,2"), each=each), "RendezvousError"):
        assert "rank 1 (pid " in text
        assert "has FARANDOLE_SPLIT_HOSTS [2,1], rank 0 (pid " in text
        assert "has [1,2]" in text


def test_settings_that_differ_between_hosts_are_named(spawn: Spawn) -> None:
    each: list[dict[str, str | None]] = [{}, {"FARANDOLE_LEVEL": "fast"}]
    texts = refused_everywhere(spawn(2, env=split("1,1"), each=each), "RendezvousError")
    for text in texts:
        verdict = "ranks disagree on FARANDOLE_LEVEL: canonical on rank 0; fast on rank 1"
        assert text.splitlines()[0] == verdict


def other_messages(who: int, field: str) -> None:
    if os.environ["RANK"] == str(who):
        ours = [(name, "other" if name == field else value) for name, value in wire_format()]
        _core.wire_format = lambda: ours  # type: ignore[assignment]
    fd.init()


@pytest.mark.parametrize("field", ["protocol", "byte order", "message layouts"])
def test_messages_that_differ_are_refused_by_name_on_every_rank(spawn: Spawn, field: str) -> None:
    world = spawn(3, env=split("1,1,1"))
    world.start(other_messages, 2, field)
    outcomes = world.outcomes()
    texts = {o.text for o in outcomes}
    assert len(texts) == 1, texts
    (text,) = texts
    assert [o.error for o in outcomes] == ["VersionMismatch"] * 3
    assert f"has the {field} [other], rank 0 (pid " in text
    assert "rank 2 (pid " in text
    assert f"[{dict(wire_format())[field]}]" in text


def other_python(who: int) -> None:
    if os.environ["RANK"] == str(who):
        members._interpreter = lambda: "cpython 3.99"
    fd.init()


def test_hosts_with_different_pythons_are_refused_on_every_rank(spawn: Spawn) -> None:
    world = spawn(3, env=split("1,2") | PATIENT)
    world.start(other_python, 1)
    ours = f"cpython 3.{sys.version_info.minor}"
    for text in {o.text for o in world.outcomes()}:
        assert text.startswith(f"rank 1 (pid {world.pids[1]} on ")
        first = f"rank 0 (pid {world.pids[0]} on {socket.gethostname()})"
        assert f"has the Python [cpython 3.99], {first} has [{ours}]" in text


# ---- ranks that met, and cannot connect ----


def is_unreachable(who: int) -> None:
    """Rank `who` announces an address at which no process listens."""
    if os.environ["RANK"] == str(who):
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            address = _core.tcp_address(nobody.fileno())
        _core.tcp_address = lambda _: address  # type: ignore[assignment]
    fd.init()


def test_an_unreachable_rank_is_told_to_all(spawn: Spawn) -> None:
    """Rank 2 reaches both, and fails too."""
    world = spawn(3, env=split("1,1,1") | PATIENT)
    world.start(is_unreachable, 1)
    outcomes = world.outcomes()
    assert [o.error for o in outcomes] == ["LinkError"] * 3
    assert f"rank 1 is pid {world.pids[1]} on {socket.gethostname()}" in outcomes[0].text
    assert "Connection refused" in outcomes[0].text
    for o in outcomes[1:]:
        assert o.text.startswith(f"rank 0 (pid {world.pids[0]} on ")
        assert "could not meet the others: " in o.text
        assert "Connection refused" in o.text


def ends_after_it_has_met(who: int) -> None:
    if os.environ["RANK"] == str(who):
        _core.open_world = lambda *_: os._exit(9)  # type: ignore[assignment, misc]
    fd.init()


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_ends_while_others_connect_is_told(spawn: Spawn, who: int) -> None:
    world = spawn(3, env=split("1,1,1") | PATIENT)
    world.start(ends_after_it_has_met, who)
    for rank, o in enumerate(world.outcomes([r for r in range(3) if r != who])):
        assert o.error == "RendezvousError", (rank, o.trace)
        assert f"rank {who} (pid {world.pids[who]} on " in o.text


def fails_while_others_connect(who: int) -> None:
    if os.environ["RANK"] == str(who):
        _core.open_world = lambda *_: {}["of the program"]  # type: ignore[assignment, misc]
    fd.init()


@pytest.mark.parametrize("who", [0, 2])
def test_any_error_while_ranks_connect_is_told(spawn: Spawn, who: int) -> None:
    world = spawn(3, env=split("1,1,1") | PATIENT)
    world.start(fails_while_others_connect, who)
    for rank, o in enumerate(world.outcomes()):
        assert o.error == ("KeyError" if rank == who else "RendezvousError"), o.trace
        assert "KeyError('of the program')" in o.text or rank == who


def stands_still_after_it_has_met(who: int) -> None:
    if os.environ["RANK"] == str(who):
        _core.open_world = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[assignment, misc]
    fd.init()


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_rank_that_stands_still_while_others_connect_is_named(spawn: Spawn, who: int) -> None:
    world = spawn(3, env=split("1,1,1") | {"FARANDOLE_START_TIMEOUT": "3"})
    world.start(stands_still_after_it_has_met, who)
    for o in world.outcomes([r for r in range(3) if r != who]):
        assert o.error == "RendezvousError", o.trace
        # By its own deadline, or by that of a rank whose deadline came first.
        assert f"ranks on other hosts did not connect: {who}" in o.text


def test_a_missing_rank_is_named(spawn: Spawn) -> None:
    env = split("1,2") | {"FARANDOLE_START_TIMEOUT": "2"}
    world = spawn(3, env=env)
    world.start(fd.init, ranks=[0, 2])
    for o in world.outcomes([0, 2]):
        assert o.error == "RendezvousError", o.trace
        assert "missing: 1" in o.text


def join_some(ranks: list[int] | None) -> None:
    fd.init(ranks=ranks)


def test_a_missing_rank_of_a_world_of_some_is_named(spawn: Spawn) -> None:
    env = split("1,2") | {"FARANDOLE_START_TIMEOUT": "2"}
    world = spawn(3, env=env)
    world.start(join_some, [0, 1, 2], ranks=[0, 2])
    for o in world.outcomes([0, 2]):
        assert o.error == "RendezvousError", o.trace
        assert "missing: 1 of a world of ranks 0,1,2" in o.text


def waits_for_others() -> None:
    fd.init(ranks=[0, 1] if os.environ["RANK"] == "1" else None)


def test_ranks_that_join_different_worlds_are_told(spawn: Spawn) -> None:
    world = spawn(2, env=split("1,1") | {"FARANDOLE_START_TIMEOUT": "2"})
    world.start(waits_for_others)
    first, second = world.outcomes()
    assert first.error == second.error == "RendezvousError"
    # One of the two gathers the ranks and misses the other, which may take its place afterwards.
    assert any("1 of 2 ranks arrived" in o.text for o in (first, second))


def test_a_split_that_does_not_fit_is_refused(spawn: Spawn) -> None:
    texts = refused_everywhere(spawn(2, env=split("3,1")), "InvalidArgument")
    assert all("FARANDOLE_SPLIT_HOSTS=3,1" in text for text in texts)


def test_an_interface_that_is_not_there_is_refused(spawn: Spawn) -> None:
    env = split("1,1") | {"FARANDOLE_IFACE": "nosuch0"}
    texts = refused_everywhere(spawn(2, env=env), "InvalidArgument")
    assert all("FARANDOLE_IFACE=nosuch0" in text and "lo" in text for text in texts)


def child_of_a_rank() -> str:
    fd.init()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            fd.all_reduce(np.ones(3))
        except fd.ForkedEngine:
            os.write(writing, b"refused")
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    said = os.read(reading, 100).decode()
    assert (fd.all_reduce(np.ones(3)) == fd.size()).all()
    return said


def test_a_forked_child_is_refused_and_its_parent_goes_on(spawn: Spawn) -> None:
    assert spawn(2, env=split("1,1")).run(child_of_a_rank) == ["refused"] * 2
