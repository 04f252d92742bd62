"""Worlds of several hosts: the same results and bits, over TCP between hosts and memory within."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_collectives import KINDS, check
from test_tcp import (
    addresses,
    again_and_again,
    by_name_in_any_order,
    check_sizes,
    check_types,
    groups_side_by_side,
    many_at_once,
    messages,
    sum_of_random_numbers,
)

import farandole as fd
import harness
from farandole import _core, _hosts, _interfaces, _listening, _secret
from harness import World, split

Spawn = Callable[..., World]
# Hosts of one, of equal and of uneven size, and ranks whose numbers alternate between hosts.
SPLITS = {"1,1": 2, "2,2": 4, "1,3": 4, "2,1,1": 4, "0:1:0": 3, "0:1:0:1": 4}


# ---- who is where ----


def places() -> tuple[int, int, int, int]:
    fd.init()
    fd.barrier()
    return fd.local_rank(), fd.local_size(), fd.cross_rank(), fd.cross_size()


def test_ranks_find_out_who_shares_a_host(spawn: Spawn) -> None:
    assert spawn(4, env=split("1,3")).run(places) == [
        (0, 1, 0, 2), (0, 3, 1, 2), (1, 3, 1, 2), (2, 3, 1, 2)
    ]  # fmt: skip
    assert spawn(3, env=split("0:1:0")).run(places) == [(0, 2, 0, 2), (0, 1, 1, 2), (1, 2, 0, 2)]
    assert spawn(2, env=split("2")).run(places) == [(0, 2, 0, 1), (1, 2, 0, 1)]


def openssl_here() -> set[str]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in maps if "libcrypto" in line}


def openssl_before_and_after() -> tuple[set[str], set[str]]:
    import hashlib

    hashlib.sha256()
    before = openssl_here()
    fd.init()
    fd.barrier()
    return before, openssl_here()


def test_the_core_takes_the_openssl_of_python(spawn: Spawn) -> None:
    for before, after in spawn(2, env=split("1,1")).run(openssl_before_and_after):
        assert after == before or not before  # of a Python that has its own in one piece


def without_hashlib() -> float:
    sys.modules["_hashlib"] = None  # type: ignore[assignment]
    fd.init()
    return float(fd.all_reduce(np.ones(1000))[-1])


def test_the_core_takes_the_openssl_of_the_host_where_python_has_none(spawn: Spawn) -> None:
    assert spawn(2, env=split("1,1")).run(without_hashlib) == [2.0, 2.0]


@pytest.mark.parametrize("secret", ["given", "made by the ranks"])
def test_without_openssl_all_ranks_say_what_to_install(tmp_path: Path, secret: str) -> None:
    """Neither Python nor this host has it: under its names there is another library."""
    other = next(line for line in Path("/proc/self/maps").read_text().split() if "/libm.so" in line)
    for name in ("libcrypto.so.3", "libcrypto.so.1.1"):
        shutil.copy(other, tmp_path / name)
    env = split("1,1")
    if secret != "given":
        env |= {"FARANDOLE_SECRET_FILE": None, "FARANDOLE_INSECURE": "1"}
    nursery = harness.Nursery(LD_LIBRARY_PATH=str(tmp_path))
    try:
        with World(2, nursery, env=env) as world:
            world.start(fd.init)
            for o in world.outcomes():
                assert o.error == "ResourceError", o.trace
                assert "OpenSSL's libcrypto is not found on this host" in o.text
                assert "install OpenSSL 1.1.1 or newer" in o.text
    finally:
        nursery.close()


def rank_1_has_none() -> None:
    if os.environ["RANK"] == "1":

        def lacking() -> None:
            raise fd.ResourceError("OpenSSL's libcrypto is not found on this host")

        _secret.show_libcrypto = lacking  # type: ignore[assignment]
    fd.init()


def test_one_host_without_openssl_tells_all_ranks(spawn: Spawn) -> None:
    env = split("1,1") | {"FARANDOLE_SECRET_FILE": None, "FARANDOLE_INSECURE": "1"}
    world = spawn(2, env=env | {"FARANDOLE_START_TIMEOUT": "20"})
    world.start(rank_1_has_none)
    for o in world.outcomes():
        assert "OpenSSL's libcrypto is not found on this host" in o.text, o.trace


def sum_of_ranks() -> tuple[int, float]:
    fd.init()
    return fd.cross_size(), float(fd.all_reduce(np.full(1000, fd.rank()))[-1])


def test_many_ranks_meet(spawn: Spawn) -> None:
    found = spawn(64, env=split(",".join(["8"] * 8))).run(sum_of_ranks)
    assert set(found) == {(8, 64 * 63 / 2)}


def test_shared_memory_alone_is_refused_over_hosts(spawn: Spawn) -> None:
    world = spawn(2, env=split("1,1") | {"FARANDOLE_TRANSPORT": "shm"})
    world.start(fd.init)
    for o in world.outcomes():
        assert o.error == "InvalidArgument", o.trace
        assert "FARANDOLE_TRANSPORT=shm" in o.verdict
        assert "2 hosts" in o.verdict


# ---- worlds of some ranks ----


def some_and_all(lists: list[list[int]]) -> tuple[int, int]:
    """Ranks join a world of some, twice, then one of all; hosts of the first."""
    started = int(os.environ["RANK"])
    mine = next(ranks for ranks in lists if started in ranks)
    for _ in range(2):
        fd.init(ranks=mine)
        assert (fd.rank(), fd.size()) == (mine.index(started), len(mine))
        everybody = fd.all_gather(np.array([started]))
        assert everybody.tolist() == mine
        total = fd.all_reduce(np.full(300_007, started, np.float32))
        assert (total == sum(mine)).all()
        found = fd.cross_size(), fd.local_size()
        fd.shutdown()
    fd.init()
    assert fd.size() == sum(map(len, lists))
    fd.barrier()
    return found


@pytest.mark.parametrize(
    ("parts", "lists", "found"),
    [
        ("2,2", [[0, 1], [2, 3]], [(1, 2)] * 4),
        ("2,2", [[3, 0], [1, 2]], [(2, 1)] * 4),
        ("1,2", [[2, 0, 1]], [(2, 1), (2, 2), (2, 2)]),
        ("1,2", [[0], [2, 1]], [(1, 1), (1, 2), (1, 2)]),
    ],
)
def test_some_ranks_form_a_world(
    spawn: Spawn, parts: str, lists: list[list[int]], found: list[tuple[int, int]]
) -> None:
    ranks = sum(map(len, lists))
    assert spawn(ranks, env=split(parts)).run(some_and_all, lists) == found


def test_some_ranks_form_a_world_where_the_launcher_tells_of_hosts(spawn: Spawn) -> None:
    env = {"FARANDOLE_SECRET_FILE": split("1,1")["FARANDOLE_SECRET_FILE"], "LOCAL_WORLD_SIZE": "2"}
    assert spawn(4, env=env).run(some_and_all, [[0, 3], [2, 1]]) == [(1, 2)] * 4


# ---- collectives ----


@pytest.mark.parametrize("parts", SPLITS)
def test_all_collectives_and_sizes(spawn: Spawn, parts: str) -> None:
    world = spawn(SPLITS[parts], env=split(parts))
    for in_place in (False, True):
        assert all(paths == {"eager", "schedule"} for paths in world.run(check_sizes, in_place))


@pytest.mark.parametrize("wire", ["checked", "sealed"])
@pytest.mark.parametrize("parts", ["1,1", "1,3", "0:1:0:1"])
def test_sealed_tensors_come_as_they_were_sent(spawn: Spawn, parts: str, wire: str) -> None:
    world = spawn(SPLITS[parts], env=split(parts) | {"FARANDOLE_WIRE": wire})
    assert all(paths == {"eager", "schedule"} for paths in world.run(check_sizes, True))
    world = spawn(SPLITS[parts], env=split(parts) | {"FARANDOLE_WIRE": wire})
    world.run(what_moves_data_at_once)


def what_moves_data_at_once() -> None:
    many_at_once()
    by_name_in_any_order()
    messages()


WORDS = b"nobody on the way reads this. "


def words_that_pass() -> bool:
    """Whether they are seen on the loopback, over which these hosts' bytes go."""
    fd.init()
    mine = np.frombuffer(WORDS * 10_000, np.uint8)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as network:
        # Room for what other tests send meanwhile (SO_RCVBUFFORCE).
        network.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)
        network.bind(("lo", 0))
        network.setblocking(False)
        gathered = fd.all_gather(mine)
        # What other tests send goes on: all of ours is before this.
        last = os.urandom(32)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(last, ("127.0.0.1", 9))
        seen = [b""]
        with contextlib.suppress(BlockingIOError):
            while last not in seen[-1]:
                seen.append(network.recv(1 << 17))
    assert gathered.tobytes() == mine.tobytes() * 2
    return WORDS in b"".join(seen)


@pytest.mark.skipif(os.geteuid() != 0, reason="who is not root sees no packets")
@pytest.mark.parametrize(
    ("wire", "is_seen"), [("plain", True), ("checked", True), ("sealed", False)]
)
def test_who_sees_what_passes_reads_what_is_not_encrypted(
    spawn: Spawn, wire: str, is_seen: bool
) -> None:
    env = split("1,1") | {"FARANDOLE_WIRE": wire}
    assert spawn(2, env=env).run(words_that_pass) == [is_seen] * 2


@pytest.mark.parametrize("parts", ["1,1", "1,2"])
def test_all_types(spawn: Spawn, parts: str) -> None:
    spawn(3 if parts == "1,2" else 2, env=split(parts)).run(check_types)


@pytest.mark.parametrize("parts", SPLITS)
@pytest.mark.parametrize("count", [5, 300_007])
def test_the_same_bits_as_on_one_host(spawn: Spawn, parts: str, count: int) -> None:
    environments: list[dict[str, Any]] = [{}, split(parts)]
    sums = {
        total
        for env in environments
        for total in spawn(SPLITS[parts], env=env).run(sum_of_random_numbers, count, "canonical")
    }
    assert len(sums) == 1


def small_ones(limit: int) -> None:
    """Every collective whose data go with the ranks' agreement, up to its limit and not beyond."""
    fd.init()
    for kind in KINDS:
        for dtype in ("float32", "int8", "float16"):
            for in_place in (False, True):
                if not (in_place and kind == "all_to_all"):
                    check(kind, dtype, 17, in_place=in_place, root=1, algorithm="eager")
    fd.barrier()
    assert fd.world().last_path == "eager"
    most = np.ones(limit // fd.size(), np.int8)
    assert (fd.all_reduce(most, algorithm="eager") == fd.size()).all()
    with pytest.raises(fd.InvalidArgument, match=rf"up to {limit} bytes of all ranks' data"):
        fd.all_reduce(np.ones(most.size + 1, np.int8), algorithm="eager")
    with pytest.raises(fd.Mismatch):  # of one rank's data all come along, of another's none
        fd.all_reduce(np.ones(100_003 if fd.rank() == 0 else 3))
    assert (fd.all_reduce(np.ones(3)) == fd.size()).all()


@pytest.mark.parametrize("parts", ["1,1", "2,1", "2,2", "2,1,1,1"])
def test_small_data_go_with_the_agreement(spawn: Spawn, parts: str) -> None:
    ranks = {"1,1": 2, "2,1": 3, "2,2": 4}.get(parts, 5)
    spawn(ranks, env=split(parts)).run(small_ones, 256 << 10)


def sums_by(algorithm: str | None, level: str) -> list[bytes]:
    fd.init()
    random = np.random.default_rng(fd.rank())
    sums = []
    for count in (0, 1, 7, 1001, 300_007):
        mine = (random.standard_normal(count) * 10.0 ** random.integers(-6, 6, count)).astype("f4")
        sums.append(fd.all_reduce(mine, algorithm=algorithm, level=level).tobytes())
    return sums


@pytest.mark.parametrize("parts", ["2,2", "1,3", "2,1,1", "0:1:0:1"])
def test_levels_have_the_bits_of_one_host(spawn: Spawn, parts: str) -> None:
    flat = spawn(4).run(sums_by, None, "canonical")
    levels = spawn(4, env=split(parts)).run(sums_by, "hierarchical", "canonical")
    assert all(sums == flat[0] for sums in [*flat, *levels])


def test_scattered_hosts_may_be_folded_whole(spawn: Spawn) -> None:
    world = spawn(4, env=split("0:1:0:1"))
    canonical = world.run(sums_by, "hierarchical", "canonical")[0]
    (first, *others) = world.run(sums_by, "whole_host", "fast")
    assert all(sums == first for sums in others)
    assert first[-1] != canonical[-1], "the order shows"
    for ours, wanted in zip(first, canonical, strict=True):
        pair = (np.frombuffer(ours, "f4"), np.frombuffer(wanted, "f4"))
        np.testing.assert_allclose(*pair, rtol=1e-3, atol=4.0)


def levels_on_one_host() -> str:
    fd.init()
    with pytest.raises(fd.InvalidArgument) as refused:
        fd.all_reduce(np.ones(4), algorithm="hierarchical")
    return str(refused.value)


def test_levels_need_several_hosts(spawn: Spawn) -> None:
    for said in spawn(2).run(levels_on_one_host):
        assert "hierarchical" in said, said


def mean_of_halves() -> None:
    fd.init()
    x = np.full(1001, 2.0 * fd.rank(), np.float16)
    mean = fd.all_reduce(x, op="mean", prescale=0.5, postscale=4.0)
    assert (mean == np.float16(2.0 * (fd.size() - 1))).all(), mean[:3]


@pytest.mark.parametrize("parts", ["1,3", "2,2"])
def test_a_mean_divides_by_ranks_not_by_hosts(spawn: Spawn, parts: str) -> None:
    spawn(4, env=split(parts)).run(mean_of_halves)


@pytest.mark.parametrize("parts", ["1,1", "1,2", "2,2", "0:1:0:1"])
@pytest.mark.parametrize(
    "what", [many_at_once, groups_side_by_side, by_name_in_any_order, messages]
)
def test_what_else_moves_data(spawn: Spawn, what: Callable[[], None], parts: str) -> None:
    spawn({"1,1": 2, "1,2": 3}.get(parts, 4), env=split(parts)).run(what)


def groups_of_one_host() -> tuple[str, str]:
    """A group whose ranks share a host uses what that host has."""
    fd.init()
    here = fd.split(fd.cross_rank())
    across = fd.split(fd.local_rank())
    x = np.ones(100_003)
    assert (fd.all_reduce(x, group=here) == fd.local_size()).all()
    within = here.last_path
    assert (fd.all_reduce(x, group=across) == fd.cross_size()).all()
    return within, across.last_path


def test_a_group_within_a_host_goes_over_its_memory(spawn: Spawn) -> None:
    for within, across in spawn(4, env=split("2,2")).run(groups_of_one_host):
        assert within != "schedule"
        assert across == "schedule"


# ---- what is left behind ----


def test_worlds_leave_no_descriptor(spawn: Spawn) -> None:
    for counts in spawn(2, env=split("1,1")).run(again_and_again, 10):
        assert counts[0] == counts[-1], counts


def test_ranks_listen_at_all_addresses_of_the_interface_that_is_named(spawn: Spawn) -> None:
    wanted = {":" in address for address in _interfaces.addresses(["lo"], loopback=True)}
    for found in spawn(2, env=split("1,1") | {"FARANDOLE_IFACE": "lo"}).run(addresses):
        assert {len(address.partition(":")[0]) > 8 for address in found} == wanted
        assert len(found) == len(wanted), "one each, and never all that the host has"


def joins_behind_a_dead_address(who: int) -> float:
    """Rank `who` offers an address first at which nobody listens."""
    words = _hosts._words

    def and_a_dead_one(*about: Any) -> dict[str, Any]:
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            dead = _core.tcp_address(nobody.fileno())
        mine = words(*about)
        return mine | {"addresses": dead.hex() + mine["addresses"]}

    if os.environ["RANK"] == str(who):
        _hosts._words = and_a_dead_one
    fd.init()
    return float(fd.all_reduce(np.ones(100_003)).sum())


@pytest.mark.parametrize("who", [1, 2])
def test_a_rank_is_reached_at_the_next_address(spawn: Spawn, who: int) -> None:
    assert spawn(3, env=split("1,2")).run(joins_behind_a_dead_address, who) == [300_009.0] * 3


def joins_where_nobody_answers() -> float:
    """Rank 1 offers one address, which takes no connection and says nothing."""
    words = _hosts._words
    server = socket.create_server(("127.0.0.1", 0), backlog=0)
    fill = [socket.socket() for _ in range(3)]
    for each in fill:
        each.setblocking(False)
        each.connect_ex(server.getsockname())
    silent = _core.tcp_address(server.fileno()).hex()
    if os.environ["RANK"] == "1":
        _hosts._words = lambda *about: words(*about) | {"addresses": silent}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 200), hard))
    begun = time.monotonic()
    with pytest.raises(fd.Error) as found:
        fd.init()
    assert "rank 1" in str(found.value), found.value
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard, "for many ranks"
    return time.monotonic() - begun


def test_a_rank_that_does_not_answer_is_named_in_seconds(spawn: Spawn) -> None:
    env = split("1,1") | {"FARANDOLE_START_TIMEOUT": "18"}
    world = spawn(2, env=env)
    world.start(joins_where_nobody_answers)
    outcome = world.outcomes()[0]
    assert outcome.error is None, outcome.trace
    assert outcome.value < 16


def resolved(ask: Callable[[str], list[str]], master: str, found: str | None) -> list[str]:
    """The result of `ask` for a name that resolves to the address `found`, or to none."""

    def resolve(*_: Any, **__: Any) -> Any:
        if found is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (found, 9))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolve)
        return ask(master)


def own_addresses(master: str, found: str | None) -> list[str]:
    return resolved(_listening.own_addresses, master, found)


def receiving_at(master: str, found: str | None) -> list[str]:
    return resolved(_listening.receiving_at, master, found)


def test_a_name_that_means_the_loopback_here_may_mean_this_host_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FARANDOLE_IFACE", raising=False)
    monkeypatch.setattr(_interfaces, "addresses", lambda _: iter(["10.1.2.3", "2001:db8::7"]))
    assert own_addresses("127.0.0.1", "127.0.0.1") == ["127.0.0.1"]
    assert own_addresses("localhost", "127.0.0.1") == ["127.0.0.1"]
    assert own_addresses("node-7", "127.0.1.1") == ["10.1.2.3", "2001:db8::7"]
    assert receiving_at("127.0.0.1", "127.0.0.1") == ["127.0.0.1"]
    assert receiving_at("node-8", "10.1.2.3") == ["10.1.2.3"]
    with pytest.raises(fd.RendezvousError, match=r"MASTER_ADDR=0\.0\.0\.0 is no address of a host"):
        receiving_at("0.0.0.0", "0.0.0.0")
    monkeypatch.setattr(_interfaces, "addresses", lambda _: iter(["10.1.2.3", "2001:db8::7"]))
    assert receiving_at("node-7", "127.0.1.1") == ["127.0.1.1", "10.1.2.3", "2001:db8::7"]
    monkeypatch.setenv("FARANDOLE_IFACE", "eth1")
    monkeypatch.setattr(_interfaces, "addresses", lambda names: iter([f"10.1.2.{len(names)}"]))
    assert receiving_at("node-7", "127.0.1.1") == ["127.0.1.1", "10.1.2.1"]
    monkeypatch.delenv("FARANDOLE_IFACE")
    monkeypatch.setattr(_interfaces, "addresses", lambda _: iter([]))
    assert own_addresses("node-7", "127.0.1.1")[0].startswith("127.")


def test_data_do_not_take_the_port_where_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chosen(socket.socket):
        ports = iter([0, 0])

        def getsockname(self) -> Any:
            return "", next(self.ports, 1)

    monkeypatch.setattr(socket, "socket", Chosen)
    listener = _listening._listener_at("127.0.0.1", 0)
    assert listener.fileno() >= 0
    assert listener.getsockname()[1] == 1
    assert next(Chosen.ports, None) is None
    listener.close()


def test_a_name_may_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a pod which has not started yet."""
    monkeypatch.delenv("FARANDOLE_IFACE", raising=False)
    monkeypatch.setattr(_interfaces, "addresses", lambda _: iter(["10.1.2.3"]))
    assert own_addresses("train-0.train", None) == ["10.1.2.3"]
    monkeypatch.setattr(_interfaces, "addresses", lambda _: iter([]))
    with pytest.raises(fd.RendezvousError, match=r"no way to train-0\.train: Name or service"):
        own_addresses("train-0.train", None)


def test_ranks_listen_at_one_address(spawn: Spawn) -> None:
    for found in spawn(2, env=split("1,1")).run(addresses):
        assert [address.partition(":")[0] for address in found] == ["0100007F"]
