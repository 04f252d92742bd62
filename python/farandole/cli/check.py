"""Checks hosts and the links between them before a job runs there: latency and bandwidth of every
pair, segments that are sent again, clocks, memory, cores, versions, and the bits of a sum on each
host. The exit code is 1 where something is out of line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from farandole import _json, _launch
from farandole.cli import CommandError, _hosts, add_options

if TYPE_CHECKING:
    from farandole._check.measure import Found

EPILOG = """\
examples:
  farandole check -H a,b,c
  farandole check --hostfile hosts --json
  farandole run --preflight -H a:4,b:4 -- python train.py      the job runs if all is well

A pair takes about a second; pairs of different hosts are measured side by side.
"""

_OPTIONS = (
    ("--hostfile", "FILE", "lines of 'HOST slots=N'", {"type": Path}),
    ("-p --ssh-port", "PORT", "the port of ssh on other hosts", {"type": int}),
    ("-i --ssh-identity-file", "FILE", "the key that ssh uses", {"type": Path}),
    ("--json", "", "the measurements and complaints as JSON"),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _hosts.add_hosts(parser)
    add_options(parser, *_OPTIONS)
    _hosts.add_arguments(parser)


def handle(arguments: argparse.Namespace) -> int:
    slots = _launch.hosts_of(arguments.hosts, arguments.hostfile)
    if slots is None:
        raise CommandError("name the hosts: farandole check -H a,b")
    hosts = [share.host for share in slots]
    if len(hosts) < 2:
        raise CommandError("a check takes two hosts or more")
    return check(hosts, arguments, as_json=arguments.json)


def check(
    hosts: Sequence[str],
    arguments: argparse.Namespace,
    settings: Mapping[str, str] = MappingProxyType({}),
    *,
    as_json: bool = False,
) -> int:
    """Prints what was found of the hosts; returns the exit code. `arguments`: how they are reached,
    and what ranks get there; `settings`: further variables of theirs."""
    from farandole._check.judge import complaints

    found = _measured(hosts, arguments, settings)
    wrong = list(complaints(found))
    if as_json:
        print(json.dumps(found.rows() | {"complaints": wrong}))
    else:
        _show(found)
        print("\n".join(wrong) if wrong else "nothing is out of line")
    return 1 if wrong else 0


# The Python of other hosts, or of this one, whichever is there.
_START = (
    'if [ -x "$0" ]; then exec "$0" -m farandole._check; else exec "$1" -m farandole._check; fi'
)


def _measured(
    hosts: Sequence[str], arguments: argparse.Namespace, settings: Mapping[str, str]
) -> Found:
    """By a job of one rank on each host, whose first rank prints the result."""
    from farandole._check.measure import Found, Host, Link
    from farandole._launch.processes import die_with_parent

    here = os.getpid()
    run = [sys.executable, "-m", "farandole", "run", "--no-prefix"]
    run += ["-H", ",".join(f"{host}:1" for host in hosts), *_words(arguments, settings), "--"]
    there = arguments.remote_python or sys.executable
    done = subprocess.run(
        [*run, "sh", "-c", _START, there, sys.executable],
        env=os.environ | {"FARANDOLE_TUNING": "off", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=lambda: die_with_parent(here),
    )
    if done.returncode != 0:
        raise CommandError("the hosts could not be checked", done.returncode)
    rows = _json.read(done.stdout.splitlines()[-1])
    named = [
        Host(**row)._replace(name=host) for row, host in zip(rows["hosts"], hosts, strict=True)
    ]
    return Found(named, [Link(**row) for row in rows["links"]])


def _words(arguments: argparse.Namespace, settings: Mapping[str, str]) -> list[str]:
    """The options of `farandole run` by which it reaches the hosts alike."""
    valued = {
        "--launcher": arguments.launcher,
        "-p": arguments.ssh_port,
        "-i": arguments.ssh_identity_file,
        "--remote-python": arguments.remote_python,
        "--start-timeout": settings.get("FARANDOLE_START_TIMEOUT"),
    }
    words = [word for name, value in valued.items() if value for word in (name, str(value))]
    words += [name for name in ("--insecure", "--seal") if getattr(arguments, name[2:])]
    exports = [*arguments.exports, *(f"{name}={value}" for name, value in settings.items())]
    return words + [word for export in exports for word in ("-x", export)]


def _show(found: Found) -> None:
    from farandole.cli._terminal import print_table

    print_table(
        "hosts",
        ("host", "cores", "folds by", "python", "numpy", "memory GB/s", "clock"),
        [
            (h.name, str(h.cores), h.instructions, h.python, h.numpy, f"{h.memory / 1e9:.1f}",
             f"{h.clock * 1e3:+.1f} ms (within {h.clock_error * 1e3:.1f})")
            for h in found.hosts
        ],
    )  # fmt: skip
    names = [host.name for host in found.hosts]
    print_table(
        "links",
        ("between", "and", "latency us", "there MB/s", "back MB/s", "sent again"),
        [
            (names[link.first], names[link.second], f"{link.latency * 1e6:.1f}",
             f"{link.there / 1e6:.0f}", f"{link.back / 1e6:.0f}", f"{link.resent:.2%}")
            for link in found.links
        ],
    )  # fmt: skip
