"""Checks hosts and the links between them before a job runs there: latency and bandwidth of every
pair, segments that are sent again, clocks, memory, cores, versions, and the bits of a sum on each
host. The exit code is 1 where something is out of line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
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
    ("--json", "", "the measurements and complaints as JSON"),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _hosts.add_places(parser)
    add_options(parser, *_OPTIONS)


def handle(arguments: argparse.Namespace) -> int:
    slots = _launch.hosts_of(arguments.hosts, arguments.hostfile)
    if slots is None:
        raise CommandError("name the hosts: farandole check -H a,b")
    reach = _launch.Reach(launcher=arguments.launcher or "ssh")
    return check([share.host for share in slots], reach, as_json=arguments.json)


def check(hosts: Sequence[str], reach: _launch.Reach, *, as_json: bool = False) -> int:
    """Prints what was found of the hosts; returns the exit code."""
    from farandole._check.judge import complaints

    if len(hosts) < 2:
        raise CommandError("a check takes two hosts or more")
    found = _measured(hosts, reach)
    wrong = list(complaints(found))
    if as_json:
        print(json.dumps(found.rows() | {"complaints": wrong}))
    else:
        _show(found)
        print("\n".join(wrong) if wrong else "nothing is out of line")
    return 1 if wrong else 0


def _measured(hosts: Sequence[str], reach: _launch.Reach) -> Found:
    """By a job of one rank on each host, whose first rank prints the result."""
    from farandole._check.measure import Found, Host, Link

    options = ["-H", ",".join(f"{host}:1" for host in hosts), "--launcher", reach.launcher,
               "--remote-python", reach.python]  # fmt: skip
    if reach.ssh_port is not None:
        options += ["-p", str(reach.ssh_port)]
    if reach.ssh_identity is not None:
        options += ["-i", str(reach.ssh_identity)]
    run = [sys.executable, "-m", "farandole", "run", "--no-prefix", *options]
    done = subprocess.run(
        [*run, "--", reach.python, "-m", "farandole._check"],
        env=os.environ | {"FARANDOLE_TUNING": "off", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise CommandError("the hosts could not be checked", done.returncode)
    rows = _json.read(done.stdout.splitlines()[-1])
    named = [
        Host(**row)._replace(name=host) for row, host in zip(rows["hosts"], hosts, strict=True)
    ]
    return Found(named, [Link(**row) for row in rows["links"]])


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
