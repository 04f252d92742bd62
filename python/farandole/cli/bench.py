"""Measures one collective between ranks, and verifies every result."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farandole import _launch
from farandole._launch import Share
from farandole._launch.results import result_of
from farandole.cli import (
    CommandError,
    _compare,
    _hosts,
    add_options,
    add_ranks,
    given,
    number_of,
    seconds_of,
)
from farandole.cli._near import check_known, refused
from farandole.cli._terminal import columns
from farandole.common._needs import how_to_get

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole._bench.comparing import Question
    from farandole._bench.ranks import Request

EPILOG = """\
examples:
  farandole bench all_reduce -np 2
  farandole bench all_reduce -np 4 --sizes 4,64K,16M --dtype bfloat16 --memory ours
  farandole bench all_reduce -np 2 --algorithm cico --iterations 100 --json rows.json
  farandole bench all_reduce -np 2 --device cuda --algorithm step
  farandole run -np 2 -- farandole bench all_gather    among ranks that are there already
  farandole bench all_reduce -np 2 --compare mpi,gloo --plot bench.png    beside other libraries
  farandole bench all_reduce -H a:1,b:1 --launcher netns --compare mpi,gloo,copy,floor
                                                       over the network between two namespaces

columns:
  time         of the slowest rank, from the call to its return in Python; min, median, p99
  algbw        GB/s: bytes / median time; bytes of the larger of input and output on one rank
  busbw        GB/s: algbw times what must leave each rank in any algorithm, as in nccl-tests:
               all_reduce 2(n-1)/n, broadcast and reduce 1, others (n-1)/n; send_recv, a
               ping-pong of neighbours, 2
  errors       elements of all results that differ from the exact one, or barriers that a rank left
               before the last had come; 0, or the exit code is 1
  memory       ours: farandole.allocate, mapped by all ranks; caller: numpy's own; device: that of a
               CUDA device, with --device cuda; there a call ends when its result is there
  copy         GB/s: bytes / time of a copy of so many from one place of rank 0's device to another
  add, cat     the same of PyTorch's own operation there, where it has the device: torch.add of two
               arrays of so many, or torch.cat of two halves for collectives that do not fold
  our time /   below 1 farandole is faster; 95 % bootstrap interval over rounds

peers of --compare, each from an environment that has it (--peer-python, default: this one):
  mpi          Open MPI, by mpi4py            mpich        MPICH, by mpi4py
  impi         Intel MPI, by mpi4py           mpich-mpir   the same, intra-node algorithm mpir
  gloo         torch.distributed
  copy         the array both ways at once over a bare TCP connection, without a result
  floor        an all_reduce of two ranks over one: the same bytes, and the fold
"""

COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce", "gather",
    "scatter", "send_recv", "barrier",
)  # fmt: skip
_FOLDING = ("all_reduce", "reduce_scatter", "reduce")
_SIZES = "4,64,1K,16K,256K,1M,4M,16M,64M"
_MEMORY = ("ours", "caller")
_PICTURES = (".png", ".svg", ".pdf")

# The collectives that take an option. It is refused elsewhere rather than ignored.
_TAKERS = {
    "sizes": COLLECTIVES[:-1],
    "dtype": COLLECTIVES[:-1],
    "memory": COLLECTIVES[:-1],
    "device": COLLECTIVES[:-2],
    "algorithm": COLLECTIVES[:-2],
    "op": _FOLDING,
    "level": _FOLDING,
}


_FILE = {"type": Path}
_OPTIONS = (
    ("--sizes", None, f"bytes, with K, M, G for powers of 1024 ({_SIZES})"),
    ("--dtype", None, "element type (float32)"),
    ("--op", None, "sum, mean, min, max, product (sum)"),
    ("--algorithm", None, "force a path or planner (default: what fits best)"),
    ("--level", None, "of determinism", {"choices": ("canonical", "fast")}),
    ("--memory", None, "ours, caller or both (ours,caller)"),
    ("--device", None, "arrays on CUDA devices, which ranks take in turn", {"choices": ("cuda",)}),
)
_LENGTHS = (
    ("--iterations", "N", "timed calls per row", {"reads": number_of}),
    ("--seconds", "S", "about this long per row (0.25)",
     {"reads": partial(seconds_of, zero=False), "default": 0.25}),
)  # fmt: skip
_FILES = (
    ("--json", "FILE", "also write the rows as JSON", _FILE),
    ("--plot", "FILE", "draw time and bandwidth (png, svg or pdf)", _FILE),
)
_OTHERS = (
    ("--compare", "PEERS", f"of {', '.join(_compare.PEERS)}"),
    ("--peer-python", "PEER=PYTHON,…",
     "the Python of the environment that has a peer: no two MPIs fit into one"),
    ("--rounds", "N", "blocks of each peer and size (11)", {"reads": number_of}),
    ("--hot", "", "do not rewrite the input before each call"),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "farandole bench COLLECTIVE -np N [options]"
    parser.add_argument(
        "collective",
        choices=COLLECTIVES,
        metavar="COLLECTIVE",
        help="what is measured: " + ", ".join(COLLECTIVES),
    )
    add_ranks(
        parser, "start this many ranks; without it, this process is one of those already started"
    )
    add_options(parser, *_OPTIONS)
    add_options(parser.add_mutually_exclusive_group(), *_LENGTHS)
    add_options(parser, *_FILES)
    _hosts.add_places(parser.add_argument_group("over several hosts"))
    add_options(parser.add_argument_group("beside other libraries"), *_OTHERS)


def handle(arguments: argparse.Namespace) -> int:
    slots = _launch.hosts_of(arguments.hosts, None)
    ranks = _ranks(arguments, slots)
    _check_partners(arguments, ranks)
    hosts = _hosts.shares(arguments, ranks, slots) if ranks is not None else ()
    request = _request(arguments, is_one_machine=arguments.launcher not in (None, "ssh"))
    for option in ("json", "plot"):
        if getattr(arguments, option) is not None:
            _check_writable(option, getattr(arguments, option))
    rows = _measured(arguments, ranks, hosts, request)
    if rows is None:  # another rank tells it
        return 0
    if isinstance(rows, int):
        return rows
    if arguments.json is not None:
        arguments.json.write_text(as_json(rows))
    if arguments.plot is not None:
        _plot(rows, arguments.plot)
    return 0 if all(row["verified"] for row in rows) else 1


def _measured(
    arguments: argparse.Namespace, ranks: int | None, hosts: Sequence[Share], request: Request
) -> list[dict[str, Any]] | int | None:
    """The rows, which were shown already; an exit code; None on a rank that has none to tell."""
    if arguments.compare is not None:
        assert ranks is not None
        return _compare.run(
            arguments.compare.split(","),
            arguments.peer_python,
            _question(request, ranks, hosts, arguments),
            request.memory,
            request.options,
        )
    return _here(request) if ranks is None else _among(ranks, hosts, arguments.launcher, request)


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    from farandole._bench.plotting import draw

    draw(rows, path)
    print(f"\n{path} shows it")


def as_json(rows: list[dict[str, Any]]) -> str:
    """A list with a row per line, which also line tools can read."""
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


# -- what was asked -------------------------------------------------------------------------------


def _ranks(arguments: argparse.Namespace, slots: Sequence[Share] | None) -> int | None:
    own, text = os.environ.get("RANK"), arguments.ranks
    if own and (slots is not None or text is not None):
        option = "-np" if slots is None else "-H"
        raise CommandError(f"{option} starts ranks, but this process is one already (RANK={own})")
    if slots is not None:
        return _hosts.ranks_of(text, slots)
    if own:
        return None
    if text is None:
        cores = len(os.sched_getaffinity(0))
        raise CommandError(
            f"-np is missing; {cores} cores are usable here, so perhaps: "
            f"farandole bench {arguments.collective} -np {cores}"
        )
    return number_of("-np", text)


def _check_partners(arguments: argparse.Namespace, ranks: int | None) -> None:
    """Options that make sense only together, or never do."""
    if arguments.plot is not None and arguments.collective == "barrier":
        raise CommandError("--plot draws over sizes; a barrier has none")
    if arguments.compare is None:
        for option in ("peer_python", "rounds", "hot"):
            if getattr(arguments, option):
                raise CommandError(f"--{option.replace('_', '-')} needs --compare")
        return
    if ranks is None:
        raise CommandError("--compare starts the ranks of every peer: it needs -np")
    from farandole._bench.layouts import COMMON

    if arguments.collective not in COMMON or arguments.op not in (None, "sum"):
        raise CommandError(f"--compare knows sums (no other --op) and {', '.join(COMMON)}")
    if arguments.iterations is not None:
        raise CommandError("--compare takes --seconds and --rounds, not --iterations")


def _question(
    request: Request, ranks: int, shares: Sequence[Share], arguments: argparse.Namespace
) -> Question:
    from farandole._bench.comparing import Question
    from farandole._bench.peers.hosts import Hosts

    if shares and arguments.launcher in (None, "ssh"):
        raise CommandError(
            "--compare needs hosts on this machine (--launcher netns or local): ranks of all "
            "peers meet in its memory"
        )

    rounds = arguments.rounds or Question.rounds
    return Question(
        collective=request.collective,
        sizes=request.sizes,
        dtype=request.dtype,
        ranks=ranks,
        rounds=rounds,
        block_seconds=request.seconds / rounds,
        hot=arguments.hot,
        hosts=Hosts(arguments.launcher, tuple(shares)) if shares else None,
    )


def _request(arguments: argparse.Namespace, *, is_one_machine: bool) -> Request:
    kind = arguments.collective
    for option, takers in _TAKERS.items():
        if getattr(arguments, option) is not None and kind not in takers:
            raise CommandError(f"{kind} takes no --{option}")
    from farandole import _core
    from farandole._bench.ranks import Request

    dtype = arguments.dtype or "float32"
    check_known("--dtype", dtype, _core.dtypes)
    options = given(arguments, "op", "algorithm", "level")
    check_known("--op", options.get("op", "sum"), _core.reduce_ops)
    return Request(
        collective=kind,
        sizes=_sizes(arguments.sizes or _SIZES, dtype) if kind != "barrier" else (0,),
        dtype=dtype,
        memory=_memory_of(arguments),
        options=options,
        iterations=arguments.iterations,
        seconds=arguments.seconds,
        terminal=columns(),
        is_one_machine=is_one_machine,
    )


def _sizes(text: str, dtype: str) -> tuple[int, ...]:
    from farandole._bench import data
    from farandole._bench.statistics import parse_size

    try:
        sizes = tuple(parse_size(part) for part in text.split(","))
    except ValueError as error:
        raise CommandError(f"--sizes: {error}") from None
    item = data.storage(dtype).itemsize
    for size in sizes:
        if size < item or size % item:
            raise CommandError(f"--sizes: {size} bytes are not a number of {dtype} ({item} bytes)")
    return sizes


def _memory_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.device is None:
        return _memory(arguments.memory or ",".join(_MEMORY))
    for option in ("memory", "compare"):
        if getattr(arguments, option) is not None:
            raise CommandError(f"--device {arguments.device} takes no --{option}")
    from farandole import cuda

    if why := cuda.why_not():
        raise CommandError(f"--device {arguments.device}: {why}")
    return ("device",)


def _memory(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if not set(kinds) <= set(_MEMORY):
        raise CommandError(f"--memory takes ours, caller or both, not '{text}'")
    return kinds


def _check_writable(option: str, path: Path) -> None:
    """Before minutes of measuring, not after."""
    if option == "plot":
        if path.suffix not in _PICTURES:
            raise CommandError(f"--plot: {path} does not end in {', '.join(_PICTURES)}")
        if importlib.util.find_spec("matplotlib") is None:
            raise CommandError(f"--plot: {how_to_get('matplotlib')}")
    try:
        path.open("a").close()
    except OSError as error:
        raise CommandError(f"--{option}: {path}: {error.strerror}") from error


# -- measuring ------------------------------------------------------------------------------------


def _here(request: Request) -> list[dict[str, Any]] | int | None:
    import farandole as fd
    from farandole._bench.ranks import measure

    try:
        rows = measure(request)
    except fd.InvalidArgument as error:
        if fd.is_initialized() and fd.rank() != 0:
            return 2
        raise refused(error) from error
    return rows if fd.rank() == 0 else None


def _among(
    ranks: int, hosts: Sequence[Share], launcher: str | None, request: Request
) -> list[dict[str, Any]] | int:
    """Starts ranks; rank 0 shows the rows, and leaves them in a file."""
    reach = _launch.Reach(launcher=launcher or "ssh")
    if hosts and reach.launcher == "ssh" and not _launch.is_here(hosts[0].host):
        raise CommandError(
            f"rank 0, which has the rows, would be on host {hosts[0].host}: name this host first"
        )
    code, result = result_of(
        "farandole._bench",
        [json.dumps(asdict(request))],
        lambda command: _launch.Job(command, ranks, prefix=False, hosts=hosts, reach=reach),
    )
    if result and "mistake" in result:
        raise refused(result["mistake"])
    return code or list(result["rows"])
