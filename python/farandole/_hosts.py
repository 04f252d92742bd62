"""Which ranks share a host, and how those of several hosts find each other."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from farandole import _core, _elastic, _listening, _mpi, _mpi_meeting, _place, _secret, _store
from farandole._core import Error, InvalidArgument, RendezvousError, VersionMismatch
from farandole._host_parts import host_of_each
from farandole._limits import setting
from farandole._mpi import Ranks
from farandole._store import KeyValueStore

_HINT_AFTER = 1.0  # seconds, in which ranks of one host come as a rule


@dataclass(frozen=True)
class Measured:
    """The world as its ranks found it; ``others`` and ``port`` are what the core takes."""

    others: _core.OtherHosts
    port: _core.MpiPort | None  # where data go over MPI
    job: str  # the same on all ranks
    tuning: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    line: _store.Line  # to say that this rank cannot connect to the others


@dataclass(frozen=True)
class Among:
    """Of a world of some of the ranks that were started: this one's number among all, how many were
    started, and which ones form the world, in the same words on each."""

    rank: int
    size: int
    ranks: str


def is_split() -> bool:
    """Whether a test divides this host (FARANDOLE_SPLIT_HOSTS)."""
    return bool(os.environ.get("FARANDOLE_SPLIT_HOSTS"))


def meet(
    rank: int, size: int, job: str, address: str, port: int, timeout: float | None,
    tuning: str, agree: str, store: KeyValueStore | None = None, ranks: Ranks | None = None,
    among: Among | None = None, named: str = "",
) -> Measured:  # fmt: skip
    """Tells all ranks who this one is and where it listens, and hears the same of all.

    Args:
        named: the job, as its ranks on all hosts call it; empty where this one does not know.
        address, port: of rank 0's host (MASTER_ADDR, MASTER_PORT).
        among: where only some of the job's ranks form the world.
        store: where they meet instead, if there is one already.
        ranks: those of a communicator, in which they meet instead.

    Raises:
        RendezvousError: ranks are missing, or do not agree about their world.
        VersionMismatch: they are of two versions.
        AuthError: there is no secret, or another one.
        InvalidArgument: the ranks share no memory, and FARANDOLE_TRANSPORT says that data go over
            shared memory.
    """
    until = time.monotonic() + (_start_timeout() if timeout is None else timeout)
    nobodys = secrets.token_bytes(_secret.BYTES)
    who = "" if among is None else among.ranks
    warnings = _warnings(rank)
    meeting = _store.Meeting(
        rank, size, address, port, nobodys, until, who, (), *warnings, _elastic.look
    )
    mine = _who(rank, size)
    try:
        with _mpi_meeting.meeting(ranks):
            secret, is_made_here = _secret.find(may_be_made=ranks is not None)
            meeting = replace(meeting, secret=secret)
            others = address if ranks is None else _way_to_others(ranks, until)
            listeners = _listening.listen(others, avoid=port)
            started = (rank, size) if among is None else (among.rank, among.size)
            mine |= _words(job, named, agree, listeners, _identity(*started))
            mine["knows"] = "none" if is_made_here else _secret.shown(secret)
    except Error as error:
        if ranks is None:
            _say_why(meeting, mine | {"failed": str(error)}, job, store)
        raise
    if rank == 0:
        mine["world"] = secrets.token_hex(8)
        mine["tuning"] = tuning
        mine["secret"] = secrets.token_hex(_secret.BYTES) if is_made_here else ""
    if ranks is not None:
        mine |= _mpi.threads()
        met = _mpi_meeting.exchange(ranks, mine, _objection, until)
    elif (store := store or _store.torchruns(meeting)) is not None:
        met = _store.exchange_in(store, _place_in_store(job), meeting, mine, _objection)
    elif not port:
        raise RendezvousError(
            f"{size} ranks may be on several hosts and MASTER_PORT is not set; set MASTER_ADDR to "
            "the host of rank 0 and MASTER_PORT to a free port there"
        )
    else:
        meeting = replace(meeting, at=_listening.receiving_at(address))
        met = _store.exchange(meeting, mine, _objection)
    if is_made_here:
        secret = bytes.fromhex(met.table[0]["secret"])
    return _measured(met, rank, secret, listeners, ranks)  # refused by all, if at all


def _say_why(
    meeting: _store.Meeting, failed: dict[str, Any], job: str, store: KeyValueStore | None
) -> None:
    """Tells the others, who need not wait for this rank; without the secret it only knocks."""
    until = min(meeting.until, time.monotonic() + _store.FAREWELL)
    with suppress(RuntimeError):  # they may not be there yet, or have failed, too
        meeting = replace(meeting, until=until)
        store = store or _store.torchruns(meeting)
        if store is not None:
            _store.exchange_in(store, _place_in_store(job), meeting, failed, _objection)
        elif meeting.port:
            at = _listening.receiving_at(meeting.address)
            _store.exchange(replace(meeting, at=at), failed, _objection)


def _place_in_store(job: str) -> str:
    return f"farandole/{job}"


def _warnings(rank: int) -> tuple[Callable[[str], None], float]:
    """How this rank warns, as the core does, and after how many seconds that others are missing."""

    def warn(text: str) -> None:
        if setting("FARANDOLE_LOG") != "error":
            print(f"farandole rank {rank}: warning: {text}", file=sys.stderr, flush=True)

    return warn, float(setting("FARANDOLE_WARN_AFTER"))


def _who(rank: int, size: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "size": size,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "version": _core.__version__,
        "python": _interpreter(),
    }


def _interpreter() -> str:
    return f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"


def _words(
    job: str, named: str, agree: str, listeners: list[socket.socket], identity: str
) -> dict[str, Any]:  # fmt: skip
    return {
        "identity": identity,
        "addresses": b"".join(_core.tcp_address(each.fileno()) for each in listeners).hex(),
        "wire": dict(_core.wire_format()),
        "split": os.environ.get("FARANDOLE_SPLIT_HOSTS", ""),
        "settings": _core.agreed_settings(),
        "agree": agree,
        "job": job,
        "named": named,
    }


def _objection(table: list[dict[str, Any]]) -> Error | None:
    first = table[0]
    for words in table:
        who = _store.name_of(words)
        if why := words.get("failed"):
            return RendezvousError(f"{who} cannot join: {why}")
        for both, kind in ((_of_the_build, VersionMismatch), (_of_the_job, RendezvousError)):
            for (what, theirs), (_, ours) in zip(both(words), both(first), strict=True):
                if theirs != ours and None not in (theirs, ours):
                    return kind(
                        f"{who} has {what} [{theirs}], rank {first['rank']} on {first['host']} has "
                        f"[{ours}]"
                    )
    return None


def _of_the_build(words: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What all ranks must have, one after the other: another version has no word for some."""
    yield "farandole", words["version"]
    yield "the Python", words.get("python")  # what one pickles, another may not read
    for what, value in words["wire"].items():
        yield f"the {what}", value


def _of_the_job(words: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The same. None: this rank does not know."""
    yield "the secret of its job", words.get("knows")
    yield "the job", words["named"] or None
    yield "a world of", words["size"]
    yield "FARANDOLE_SPLIT_HOSTS", words["split"]
    for text in words["settings"].split(", "):
        name, _, value = text.partition("=")
        yield name, value
    yield "agree", words["agree"]


def _measured(
    met: _store.Met, rank: int, secret: bytes, listeners: list[socket.socket], of: Ranks | None
) -> Measured:
    table = met.table
    identities = [words["identity"] for words in table]
    hosts = list(dict.fromkeys(identities))  # numbered in the order of their lowest ranks
    names = _names([table[identities.index(identity)]["host"] for identity in hosts])
    here = [r for r, identity in enumerate(identities) if identity == identities[rank]]
    ranks = [
        (names[hosts.index(words["identity"])], words["pid"], bytes.fromhex(words["addresses"]))
        for words in table
    ]
    local_rank = here.index(rank)
    if len(hosts) > 1 and setting("FARANDOLE_TRANSPORT") == "shm":
        raise InvalidArgument(
            f"FARANDOLE_TRANSPORT=shm, and the ranks are on {len(hosts)} hosts, which share no "
            "memory; unset it, and data go over shared memory within hosts alone"
        )
    return Measured(
        _core.OtherHosts(ranks, secret, [each.detach() for each in listeners]),
        None if of is None else _port(of, table, len(hosts)),
        f"{table[0]['job']}:{table[0]['world']}",
        table[0]["tuning"],
        local_rank,
        len(here),
        hosts.index(identities[rank]),
        len(hosts),
        met.line,
    )


def _port(ranks: Ranks, table: list[dict[str, Any]], hosts: int) -> _core.MpiPort | None:
    """Over MPI go all data where that is demanded; else those between hosts, where it is possible.

    Raises:
        RendezvousError: it is demanded, and not possible.
    """
    chosen = setting("FARANDOLE_TRANSPORT")
    if chosen != "mpi" and (chosen != "auto" or hosts == 1):
        return None
    if (why_not := _mpi.why_not(table)) is None:
        return _mpi_meeting.open_port(ranks, int(table[0]["world"], 16))
    if chosen == "mpi":
        raise RendezvousError(f"data cannot go over MPI (FARANDOLE_TRANSPORT=mpi): {why_not}")
    if ranks.rank == 0:
        print(f"farandole: data between hosts go over TCP, not MPI: {why_not}", file=sys.stderr)
    return None


def _names(hosts: list[str]) -> list[str]:
    """One for each host: parts of one machine are numbered."""
    count = Counter(hosts)
    seen: Counter[str] = Counter()
    names = []
    for host in hosts:
        names.append(f"{host}#{seen[host]}" if count[host] > 1 else host)
        seen[host] += 1
    return names


# ---- who this is ----


def _identity(rank: int, size: int) -> str:
    """The same for ranks that can hand each other descriptors, and for no others."""
    parts = [boot_id()]
    parts += [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("user", "pid", "net")]
    parts.append(str(os.getuid()))
    if split := os.environ.get("FARANDOLE_SPLIT_HOSTS"):
        try:
            parts.append(str(host_of_each(split, size)[rank]))
        except ValueError as error:
            raise InvalidArgument(f"FARANDOLE_SPLIT_HOSTS={error}") from error
    return " ".join(parts)


def boot_id() -> str:
    """Of the kernel that runs here."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_timeout() -> float:
    return float(setting("FARANDOLE_START_TIMEOUT"))


# ---- where rank 0 is ----


class Hint:
    """A rank that was not told how many ranks its host has takes all to be here. It says so while
    it waits for them: at once where MASTER_ADDR is another host, else when they do not come."""

    def __init__(self, found: _place.Found, rank: int, size: int) -> None:
        address, _ = _place.master(os.environ)
        self._text = ""
        if found.launcher is None or _listening.is_loopback(address):
            return
        elsewhere = _is_elsewhere(address)
        self._text = (
            f"farandole: rank {rank} waits for {size} ranks on this host, since "
            f"{found.launcher.local_size.names[0]} is not set, but MASTER_ADDR={address} is "
            f"{'another' if elsewhere else 'a'} host{'' if elsewhere else ' that others may reach'}"
            "; if ranks are on several hosts, set it to the number of ranks on each"
        )
        self._when = time.monotonic() + (0 if elsewhere else _HINT_AFTER)
        self.look()

    def look(self) -> None:
        """Asked ten times a second."""
        if self._text and time.monotonic() >= self._when:
            print(self._text, file=sys.stderr, flush=True)
            self._text = ""


def _is_elsewhere(address: str) -> bool:
    """Whether an address is none of this host's, as far as it can be known."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError as error:
        return error.errno == errno.EADDRNOTAVAIL
    return False


def _way_to_others(ranks: Ranks, until: float) -> str:
    """A name on the other side of the network, for ranks that were given none."""
    if master := os.environ.get("MASTER_ADDR"):
        return master
    mine = _who(ranks.rank, ranks.size) | {"boot": boot_id()}
    met = _mpi_meeting.exchange(ranks, mine, lambda _: None, until)
    return next((w["host"] for w in met.table if w["boot"] != mine["boot"]), "127.0.0.1")
