"""Options for other hosts, and what they ask for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from farandole import _launch
from farandole._launch import Reach, Share
from farandole._tables import counted
from farandole.cli import MOST_PROCESSES, CommandError, add_options

_HOSTS = ("-H --hosts", "HOST:N,…", "hosts, and how many ranks each may have")
_LAUNCHER = (
    "--launcher", None,
    "how other hosts are reached: ssh (default), netns (hosts are network namespaces), local (all "
    "are this machine, to try it)", {"choices": _launch.LAUNCHERS},
)  # fmt: skip
_OPTIONS = (
    _LAUNCHER,
    ("--remote-python", "PATH",
     "the Python with farandole on other hosts (default: the same path as here)"),
    ("--insecure", "",
     "ranks of several hosts meet without a secret, and whoever reaches their ports can be one of "
     "them: for networks that you trust"),
    ("--seal", "",
     "all that ranks send each other between hosts is encrypted (FARANDOLE_WIRE=sealed)"),
    ("-x", "NAME[=VALUE]", "a variable for all ranks, also on other hosts",
     {"dest": "exports", "action": "append", "default": []}),
)  # fmt: skip


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """How `farandole run` reaches other hosts, and what they get."""
    add_options(parser, *_OPTIONS)


def add_places(parser: argparse._ActionsContainer) -> None:
    """Adds the options for hosts, and for how they are reached."""
    add_options(parser, _HOSTS, _LAUNCHER)


def add_hosts(parser: argparse._ActionsContainer) -> None:
    add_options(parser, _HOSTS)


def ranks_of(text: str | None, slots: Sequence[Share] | None) -> int | None:
    """The number of ranks by -np, or all slots; None where neither is given."""
    cores = len(os.sched_getaffinity(0))
    most = sum(share.ranks for share in slots) if slots is not None else None
    if text is None:
        return most
    try:
        ranks = int(text)
    except ValueError:
        raise CommandError(f"-np takes a number of ranks, not '{text}'") from None
    if ranks < 1:
        raise CommandError(f"-np must be at least 1, not {ranks}; {cores} cores are usable here")
    if most is None and ranks > MOST_PROCESSES:
        raise CommandError(f"-np is {ranks}; Linux has at most {MOST_PROCESSES} processes")
    if most is not None and ranks > most:
        only_here = all(_launch.is_here(share.host) for share in slots or ())
        who = "this host has" if only_here else "the hosts have"
        raise CommandError(f"-np is {ranks}, but {who} {counted(most, 'slot')}")
    return ranks


def shares(
    arguments: argparse.Namespace, ranks: int, slots: Sequence[Share] | None
) -> Sequence[Share]:
    """Each host's share, by agents; empty where all ranks are on this host, which needs none."""
    if slots is None:
        if arguments.launcher is not None:
            raise CommandError("--launcher says how hosts are reached: name them with -H")
        return ()
    found = _launch.shared_out(ranks, slots)
    by_ssh = arguments.launcher in (None, "ssh")
    if by_ssh and all(_launch.is_here(share.host) for share in found):
        return ()
    for host, _ in found:
        if by_ssh and _launch.is_everywhere(host):
            raise CommandError(
                f"host {host} means another machine on each host; write this one's own name"
            )
        if not by_ssh and "@" in host:
            raise CommandError(f"host {host}: only ssh knows users; leave 'user@' out")
    return found


def reach(arguments: argparse.Namespace, is_used: bool, name: str) -> Reach:
    given = {
        "--ssh-port": arguments.ssh_port,
        "--ssh-identity-file": arguments.ssh_identity_file,
        "--remote-python": arguments.remote_python,
        "--insecure": arguments.insecure or None,
        "--seal": arguments.seal or None,
    }
    idle = [option for option, value in given.items() if value is not None]
    if is_used:
        of_ssh = arguments.launcher in (None, "ssh")
        idle = [option for option in idle if option.startswith("--ssh") and not of_ssh]
    if idle:
        why = "no ssh is needed" if is_used else "all ranks are on this host"
        print(f"{name}: {', '.join(idle)} not used: {why}", file=sys.stderr)
    return Reach(
        launcher=arguments.launcher or "ssh",
        python=arguments.remote_python or sys.executable,
        ssh_port=arguments.ssh_port,
        ssh_identity=arguments.ssh_identity_file,
    )
