"""Measures this host in seconds, with -H the links to others, with --mpi what MPI takes, so that
paths and planners are chosen by what they take here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from farandole import _launch
from farandole._launch import Share
from farandole.cli import CommandError, _hosts, add_options, add_ranks, number_of

if TYPE_CHECKING:
    from farandole._tune.fit import Fit, Sample
    from farandole._tune.kept import Kept

EPILOG = """\
examples:
  farandole tune
  farandole tune -H this-host,other-host       the links to other hosts, too: one rank on each
  mpiexec -n 8 farandole tune --mpi            MPI's own all-reduce, among the job's ranks and hosts
  farandole tune -np 4 --output tuning.txt     then: export FARANDOLE_TUNING=tuning.txt
  farandole info --why 4M                      what would be chosen now, and why

Run it while the host does nothing else: a table that was measured on a quieter host is kept, unless
--force is there. It is used on hosts of this kind (processor, cores, kernel, version of farandole)
by every job that starts afterwards; results keep their bits.
"""

_SECONDS = 4.0
_FIRST_USE_SECONDS = 1.2
_MUCH_QUIETER = 1.5  # noise is itself a noisy number


_OPTIONS = (
    ("--output", "FILE", "write here, not into the cache"),
    ("--dry-run", "", "measure and show, write nothing"),
    ("--force", "", "replace a table of less noise, too"),
)
_MORE = (
    ("--mpi", "",
     "as the ranks that mpiexec starts, on several hosts: measure what MPI's own all-reduce and "
     "messages over MPI take, and add it to this host's table"),
    # For `farandole run`, which measures paths alone, in a second, and however it turns out.
    ("--first-use", "", argparse.SUPPRESS),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks(parser, "measure with this many ranks (the usable cores, from 2 to 8)")
    add_options(parser, *_OPTIONS)
    _hosts.add_places(parser.add_argument_group("links to other hosts"))
    add_options(parser, *_MORE)


def handle(arguments: argparse.Namespace) -> int:
    from farandole._tune import fit, kept, starting
    from farandole.cli._terminal import columns

    if arguments.mpi:
        return _over_mpi(arguments)
    ranks = _ranks(arguments.ranks)
    hosts = _hosts_of(arguments)
    brief = arguments.first_use
    try:
        path = arguments.output or kept.path_here()
    except kept.NotBelieved as error:
        raise CommandError(f"{error}; say --output FILE") from None
    seconds = _FIRST_USE_SECONDS if brief else _SECONDS
    reach = _launch.Reach(launcher=arguments.launcher or "ssh")
    link = starting.measure_links(hosts, reach, seconds) if hosts else None
    samples = starting.measure(ranks, seconds, planners=not brief, terminal=columns())
    result = fit.fit(samples)
    if link is not None:
        result.seconds.update(network_round=link.network_round, network_byte=link.network_byte)
    print()
    _show(result, samples)
    found = kept.Kept(
        kind=kept.kind(),
        measured=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        ranks=ranks,
        noise=fit.noise(samples),
        tries=int(brief),
        errors=result.medians(),
        seconds=result.seconds,
    )
    print(f"noise {100 * found.noise:.1f} %")
    if link is not None:
        print(f"noise of links {100 * link.noise:.1f} %")
    if not arguments.dry_run:
        print(_keep(path, found, force=arguments.force, measured_links=link is not None))
    return 0


def _over_mpi(arguments: argparse.Namespace) -> int:
    """Runs as one of the ranks that measure. Rank 0 adds the numbers to the table that is there."""
    import farandole as fd
    from farandole import _core
    from farandole._tune import kept, over_mpi
    from farandole.cli._terminal import print_table

    for given, name in ((arguments.ranks, "-np"), (arguments.hosts, "-H")):
        if given is not None:
            raise CommandError(f"{name} does not go with --mpi: mpiexec has started the ranks")
    try:
        found = over_mpi.measure(_SECONDS)
    except (fd.RendezvousError, fd.InvalidArgument) as error:
        raise CommandError(str(error).splitlines()[0]) from None
    if fd.rank() != 0:
        return 0
    words = dict(_core.tuning.fields())
    rows = [(name, _nanoseconds(s), words[name]) for name, s in found.seconds.items()]
    title = f"measured over MPI, {fd.size()} ranks on {fd.cross_size()} hosts"
    print_table(title, ("number", "ns", "what"), rows)
    print(f"noise {100 * found.noise:.1f} %")
    if arguments.dry_run:
        return 0
    try:
        path = arguments.output or kept.path_here()
        before = _before(path) or _before(kept.path_here())
        if before is None:
            raise CommandError("nothing is written: run `farandole tune` on this host first")
        kept.write(path, before._replace(seconds=before.seconds | found.seconds))
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}", 1) from error
    except kept.NotBelieved as error:
        raise CommandError(f"nothing is written: {error}", 1) from error
    print(f"written: {path}, what goes over MPI alone")
    return 0


def _ranks(text: str | None) -> int:
    if os.environ.get("RANK"):
        raise CommandError("it starts ranks of its own; run it outside of a job")
    if text is None:
        return min(max(len(os.sched_getaffinity(0)), 2), 8)
    return number_of("-np", text, 2, 64)


def _hosts_of(arguments: argparse.Namespace) -> Sequence[Share]:
    """One rank on each of them; none where links are not to be measured."""
    if arguments.hosts is None:
        if arguments.launcher is not None:
            raise CommandError("--launcher says how hosts are reached: name them with -H")
        return ()
    names = [share.host for share in _launch.hosts_of(arguments.hosts, None) or ()]
    if len(names) < 2:
        raise CommandError(f"-H {arguments.hosts}: a link has two ends; name this host and others")
    if arguments.launcher in (None, "ssh"):
        if not _launch.is_here(names[0]):
            raise CommandError(f"-H {arguments.hosts}: the table is of this host; name it first")
    elif not (arguments.output or arguments.dry_run):
        raise CommandError(
            f"--launcher {arguments.launcher} measures no link to another machine; say where the "
            "table goes: --output FILE, or --dry-run"
        )
    return [_launch.Share(name, 1) for name in names]


def _keep(path: str, found: Kept, *, force: bool, measured_links: bool = False) -> str:
    """Writes the file, unless the one that is there is the better one; says what it did.

    What is known of links stays where they were not measured now, and is replaced where they were;
    what is known of MPI stays.
    """
    from farandole._tune import kept, table
    from farandole._tune.fit import LINKS, MPI

    try:
        table.text_of(found)  # what would not be believed is not written
        before = _before(path)
        found = found._replace(tries=found.tries + (before.tries if before else 0))
        newer = found if measured_links or before is None else before
        links = {name: newer.seconds[name] for name in LINKS}
        if before is not None:
            links |= {name: before.seconds[name] for name in MPI if name in before.seconds}
        found = found._replace(seconds=found.seconds | links)
        said = f"written: {path}"
        if before and not force and before.noise * _MUCH_QUIETER < found.noise:
            said = (
                f"not written: {path} was measured {before.measured} on a quieter host "
                f"(noise {100 * before.noise:.1f} %); --force replaces it"
            )
            if measured_links:
                said = f"written: {path}, the links alone; {said.partition(': ')[2]}"
            found = before._replace(tries=found.tries, seconds=before.seconds | links)
        kept.write(path, found)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}", 1) from error
    except kept.NotBelieved as error:
        raise CommandError(f"nothing is written: {error}", 1) from error
    return said


def _before(path: str) -> Kept | None:
    """The table that is there, if it is one."""
    from farandole._tune import kept, table

    try:
        before = kept.read(path)
        table.text_of(before)  # it has all numbers
        return before
    except (OSError, kept.NotBelieved):
        return None


def _show(result: Fit, samples: list[Sample]) -> None:
    from farandole import _core
    from farandole._tune.fit import MPI
    from farandole.cli._terminal import print_table

    defaults = _core.tuning.numbers()
    rows = [
        (name, _nanoseconds(result.seconds[name]), _nanoseconds(defaults[name]), doc)
        for name, doc in _core.tuning.fields()
        if name not in MPI
    ]
    print_table("measured", ("number", "ns", "default", "what"), rows)
    rows = [
        (
            family,
            str(len(errors)),
            f"{100 * result.medians()[family]:.0f} %",
            f"{100 * max(errors):.0f} %",
        )
        for family, errors in result.errors.items()
    ]
    title = f"predicted against {len(samples)} measured times, {samples[0].ranks} ranks"
    print_table(title, ("family", "times", "median error", "worst"), rows)


def _nanoseconds(seconds: float) -> str:
    return f"{1e9 * seconds:.3g}" if seconds < 1e-6 else f"{1e9 * seconds:.0f}"
