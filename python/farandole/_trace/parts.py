"""Reading a part: which runs a directory holds, and the events of the newest one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from farandole import _json
from farandole._trace import clocks
from farandole._trace.clocks import Clock
from farandole._words import CommandError

Span = tuple[float, float]  # begin, end


class TraceError(CommandError):
    """Why a directory cannot be read as a trace."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 1)


@dataclass(frozen=True)
class Header:
    """The first line of a part."""

    path: Path
    run: str
    rank: int
    size: int
    events: int
    lost: int
    complete_since: float  # whatever ended later is there
    host: str = ""
    clock: Clock | None = None  # None: its times are by rank 0's clock, as far as is known

    def to_rank_0(self, time: float) -> float:
        """The same moment by rank 0's clock."""
        return time if self.clock is None else self.clock.to_rank_0(time)


@dataclass(frozen=True)
class Operation:
    """One rank's share of an operation. `stream` and `sequence` are the same on all ranks."""

    rank: int
    stream: str
    sequence: int
    name: str
    collective: str
    path: str
    bytes: int
    launched: float
    begin: float  # when its turn came in its stream
    end: float
    failed: bool


@dataclass(frozen=True)
class OnDevice:
    """An operation in a device's streams, by the device's clock."""

    stream: str
    sequence: int
    ready: float  # its arrays
    begin: float
    end: float


@dataclass
class Part:
    """The events of one rank, by what they say."""

    header: Header
    operations: list[Operation] = field(default_factory=list)
    on_devices: list[OnDevice] = field(default_factory=list)
    steps: list[Span] = field(default_factory=list)
    step_streams: set[str] = field(default_factory=set)  # where gradients are reduced
    running: dict[tuple[str, int], list[Span]] = field(default_factory=dict)  # data moved
    waits: dict[int, list[Span]] = field(default_factory=dict)  # of any kind, by thread
    final_waits: dict[int, list[Span]] = field(default_factory=dict)
    parked: list[Span] = field(default_factory=list)
    spans: dict[str, list[Span]] = field(default_factory=dict)  # the program's own, by name


@dataclass
class Run:
    """The parts of the newest run in a directory, by rank."""

    directory: Path
    parts: list[Part]
    missing: list[int]
    stale: list[Path]  # parts of older runs

    @property
    def clocks_within(self) -> dict[str, float]:
        """By host: how far its clock, lined up with rank 0's, may be off; in microseconds."""
        return clocks_within([part.header for part in self.parts])

    @property
    def clocks_unknown(self) -> list[str]:
        """Hosts whose times cannot be compared with rank 0's."""
        return clocks_unknown([part.header for part in self.parts])


def headers(directory: Path) -> list[Header]:
    """The headers of all parts in the directory, the newest part first."""
    try:
        found = [p for p in directory.iterdir() if re.fullmatch(r"rank-\d+\.jsonl", p.name)]
    except FileNotFoundError:
        raise TraceError(f"there is no directory {directory}") from None
    except OSError as error:
        raise TraceError(f"{directory} cannot be read: {error.strerror}") from error
    found.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return [_header(path) for path in found]


def _header(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            says = _json.read(file.readline())["args"]
        return Header(
            path,
            str(says["run"]),
            int(says["rank"]),
            int(says["size"]),
            int(says["events"]),
            int(says["lost"]),
            float(says["complete_since"]),
            str(says.get("host", "")),
            clocks.read(path, str(says["run"])),
        )
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        raise TraceError(f"{path} is not part of a trace") from None


def newest(directory: Path) -> tuple[list[Header], list[int], list[Path]]:
    """The newest run's parts by rank, the ranks that left none, and the parts of older runs."""
    found = headers(directory)
    if not found:
        raise TraceError(
            f"{directory} holds no trace (rank-N.jsonl); "
            f"run the job with FARANDOLE_TRACE={directory}"
        )
    mine = sorted((h for h in found if h.run == found[0].run), key=lambda h: h.rank)
    missing = sorted(set(range(mine[0].size)) - {h.rank for h in mine})
    known = {h.host: h.clock for h in mine if h.clock is not None}
    mine = [replace(h, clock=h.clock or known.get(h.host)) for h in mine]
    return mine, missing, sorted(h.path for h in found if h.run != found[0].run)


def clocks_within(mine: Sequence[Header]) -> dict[str, float]:
    """By host with a clock of its own: how far that may be off, in microseconds."""
    return {h.host: h.clock.within for h in mine if h.clock is not None}


def clocks_unknown(mine: Sequence[Header]) -> list[str]:
    """Hosts that do not have rank 0's clock, and left no readings of their own."""
    loose = {h.host for h in mine if h.clock is None}
    of_rank_0 = {h.host for h in mine if h.rank == 0}
    if not of_rank_0 and len(loose) == 1:  # a host without readings is rank 0's own
        return []
    return sorted(loose - of_rank_0)


def runs_in(directory: Path) -> list[Path]:
    """The directory itself; or its two subdirectories that hold traces where it holds none."""
    if headers(directory):
        return [directory]
    found = sorted(p for p in directory.iterdir() if p.is_dir() and headers(p))
    if len(found) > 2 or len(found) == 1:
        names = ", ".join(map(str, found))
        raise TraceError(f"{directory} holds no trace, but these do: {names}")
    return found or [directory]


def load(directory: Path) -> Run:
    """Reads the newest run in a directory. Events that some rank has lost are left out."""
    mine, missing, stale = newest(directory)
    since = max(h.to_rank_0(h.complete_since) if h.complete_since else 0.0 for h in mine)
    return Run(directory, [_read(h, since) for h in mine], missing, stale)


def _read(header: Header, since: float) -> Part:
    part = Part(header)
    for event in _events(header.path):
        if event["ph"] != "X":
            continue
        begin = float(event["ts"])
        end = header.to_rank_0(begin + float(event["dur"]))
        if end <= since:
            continue
        _sort_in(part, event, (header.to_rank_0(begin), end))
    return part


def _events(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                raise TraceError(f"{path}, line {number} is not an event") from None
            if not isinstance(event, dict):
                raise TraceError(f"{path}, line {number} is not an event")
            yield event


def _sort_in(part: Part, event: dict[str, Any], span: Span) -> None:
    kind, says = event["cat"], event.get("args", {})
    if kind == "operation":
        part.operations.append(
            Operation(
                rank=part.header.rank,
                stream=says["stream"],
                sequence=says["sequence"],
                name=event["name"],
                collective=says["collective"],
                path=says["path"],
                bytes=says["bytes"],
                launched=part.header.to_rank_0(float(says["launched"])),
                begin=span[0],
                end=span[1],
                failed=says.get("failed", False),
            )
        )
    elif kind == "device":
        ready = part.header.to_rank_0(float(says["ready"]))
        part.on_devices.append(OnDevice(says["stream"], says["sequence"], ready, *span))
    elif kind == "phase":
        if event["name"] == "running":
            part.running.setdefault((says["stream"], says["sequence"]), []).append(span)
    elif kind == "step":
        part.steps.append(span)
        part.step_streams.add(says["stream"])
    elif kind in ("wait", "final_wait"):
        part.waits.setdefault(event["tid"], []).append(span)
        if kind == "final_wait":
            part.final_waits.setdefault(event["tid"], []).append(span)
    elif kind == "parked":
        part.parked.append(span)
    elif kind == "user":
        part.spans.setdefault(event["name"], []).append(span)
