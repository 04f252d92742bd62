"""The ranks' output, on its way to the user: prefixes, screens and files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from farandole._launch.agents.address import is_address
from farandole._launch.hosts import name_of
from farandole._launch.job import Copies, Job, LaunchError, Share
from farandole._launch.output import Stream
from farandole._launch.place import Pipes, Rank
from farandole._launch.polling import READ, WRITE, earliest, wait
from farandole._launch.screen import Screen, open_screens

# One colour per rank, in turn; red is left to errors.
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92)


class Display:
    """The streams of all ranks, and the launcher's own lines."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._out, self._err = open_screens()
        self._copies = Files(job.copies, job.ranks)
        self._labels = labels(job.ranks, job.hosts)
        self._streams: dict[int, tuple[Stream, Stream]] = {}  # by rank
        self._order: list[Stream] = []

    def add(self, rank: Rank, pipes: Pipes) -> None:
        """From now on the rank's output is shown; its pipes are ours."""
        copies = self._copies_of(rank)
        out, err = (
            Stream(
                pipes[i],
                self._prefix(rank, colour=self._job.colours[i]),
                screen,
                copies[i],
                quiet=rank.number > 0 and not self._job.all_output,
            )
            for i, screen in enumerate((self._out, self._err))
        )
        self._streams[rank.number] = out, err
        self._order += [out, err]

    def _copies_of(self, rank: Rank) -> _Pair:
        try:
            return self._copies.of(rank.number)
        except LaunchError as error:  # of one that came later
            self.say(f"{error}; nothing is written there")
            return None, None

    def say(self, line: str) -> None:
        self._err.say(f"farandole: {line}")

    # -- turns --------------------------------------------------------------------------------

    def descriptors(self) -> list[tuple[int, int]]:
        reading = [(stream.fd, READ) for stream in self._order if stream.readable]
        return reading + [(screen.fd, WRITE) for screen in self._screens() if screen.pending]

    def due(self) -> float | None:
        return earliest(stream.due() for stream in self._order if stream.readable)

    def turn(self, ready: set[int], now: float) -> None:
        for stream in self._order:
            if not stream.readable:
                continue
            if stream.fd in ready:
                stream.read(now)
            elif (due := stream.due()) is not None and due <= now:
                stream.show_part(now)  # silent: there was nothing to read
            self._look_after(stream)
        for screen in self._screens():
            screen.flush()
        if self._out.trouble:  # who does not read stderr has nowhere to be told of that one
            self.say(f"stdout: {self._out.trouble}; nothing more is shown")
            self._out.trouble = ""

    def _look_after(self, stream: Stream) -> None:
        if stream.trouble:
            option = self._job.copies.option if self._job.copies else ""
            self.say(f"{option}: {stream.trouble}; a file ends here")
            stream.trouble = ""
        if stream.unwanted:
            stream.close()

    # -- the end ------------------------------------------------------------------------------

    def show_the_rest(self, drain: Callable[[], None]) -> None:
        """No writer is left: reads every pipe to its end, or to where it is dry. `drain`: waits
        until the screens have room."""
        for stream in self._order:
            while not stream.at_end and wait([(stream.fd, READ)], 0.0):
                stream.read(time.monotonic())
                self._look_after(stream)
                if not stream.readable and not stream.at_end:
                    drain()
            stream.close()

    def show_hidden_bars(self, rank: int) -> None:
        for stream in self._streams.get(rank, ()):
            stream.show_hidden_bar()

    @property
    def pending(self) -> bool:
        return self._out.pending or self._err.pending

    def take_bars_of(self, number: int) -> None:
        """Shows the bars of an elastic job's worker, which has rank 0 from now on."""
        for stream in self._streams.get(number, ()):
            stream.quiet = False

    def drop(self) -> None:
        for screen in self._screens():
            screen.drop()

    def _screens(self) -> list[Screen]:
        return [self._out] if self._out is self._err else [self._out, self._err]

    def _prefix(self, rank: Rank, *, colour: bool) -> bytes:
        if not self._job.prefix:
            return b""
        text = f"[{self._label(rank)}]"
        space = " " * (max(map(len, self._labels)) + 3 - len(text))  # text starts in one column
        if colour:
            text = f"\x1b[{_COLOURS[rank.number % len(_COLOURS)]}m{text}\x1b[0m"
        return (text + space).encode()

    def _label(self, rank: Rank) -> str:
        if self._job.elastic is None:
            return self._labels[rank.number]
        return f"{rank.number} {name_of(rank.host)}" if rank.host else str(rank.number)


def labels(ranks: int, hosts: Sequence[Share]) -> list[str]:
    """'2' for each rank; '2 b' where there are several hosts. Domains are left out where no two
    hosts differ in these alone."""
    if not hosts:
        return [str(rank) for rank in range(ranks)]
    names = [name_of(share.host) for share in hosts]
    short = [name if is_address(name) else name.partition(".")[0] for name in names]
    names = short if len(set(short)) == len(names) else names
    of_ranks = [name for name, (_, count) in zip(names, hosts, strict=True) for _ in range(count)]
    return [f"{rank} {name}" for rank, name in enumerate(of_ranks)]


# ---- copies ----

_Pair = tuple[int | None, int | None]  # a rank's, of its stdout and of its stderr


class Files:
    """The files that get copies of ranks' output. Those of a job's first ranks are opened at once:
    errors are reported before the ranks start."""

    def __init__(self, copies: Copies | None, ranks: int) -> None:
        self._copies = copies
        self._width = len(str(ranks - 1))
        self._open = {rank: self._pair(rank) for rank in range(ranks)}

    def of(self, rank: int) -> _Pair:
        """Raises LaunchError where they cannot be opened."""
        return self._open.pop(rank, None) or self._pair(rank)

    def _pair(self, rank: int) -> _Pair:
        copies = self._copies
        if copies is None:
            return None, None
        try:
            copies.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return _open(copies, 0, rank, self._width), _open(copies, 1, rank, self._width)
        except FileExistsError as error:
            raise LaunchError(f"{copies.option}: {error.filename} is there already") from error
        except OSError as error:
            raise LaunchError(f"{copies.option}: {error.filename}: {error.strerror}") from error


def _open(copies: Copies, which: int, rank: int, width: int) -> int:
    """Refuses to overwrite unless that was asked for: the last run's logs may be wanted."""
    path = copies.directory / copies.names[which].format(rank=rank, width=width)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if_there = os.O_TRUNC if copies.overwrite else os.O_EXCL
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | if_there, 0o600)
