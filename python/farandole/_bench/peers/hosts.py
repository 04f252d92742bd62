"""Hosts of a comparison: how each library's launcher starts ranks there.

All hosts are on this machine, whose memory holds the flags by which the ranks of every peer meet: a
host is a network namespace (``netns``), or ranks of this one that talk over the loopback
(``local``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from farandole._bench.peers.finding import Found

# MPIs take a host for another one by its name, which a namespace of its own gives it.
_NAMED = 'hostname "$0" && exec "$@"'
# In the place of ssh: [options] HOST WORDS…, which a shell reads once more, as sshd's does.
_INSTEAD_OF_SSH = """\
#!/bin/sh
while :; do case $1 in -*) shift ;; *) break ;; esac; done
host=$1
shift
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0" && eval "$1"' "$host" "$*"
"""


class Hosts(NamedTuple):
    """Where ranks are, in rank order."""

    launcher: str  # netns or local, as `farandole run` names them
    ranks: Sequence[tuple[str, int]]  # of each host: its name, and how many

    def witnesses(self) -> Iterator[int]:
        """The ranks that see each network once: the lowest of each host."""
        first = 0
        for _, count in self.ranks:
            yield first
            if self.launcher == "local":
                return  # all hosts see the same one
            first += count

    def __str__(self) -> str:
        return ",".join(f"{host}:{count}" for host, count in self.ranks)


def command_over(found: Found, hosts: Hosts, folder: Path) -> list[str]:
    """The words that start ranks of the command after them; leaves a script in `folder`."""
    ranks = sum(count for _, count in hosts.ranks)
    if not found.peer.distribution:
        ours = ["-H", str(hosts), "--launcher", hosts.launcher]
        return [*found.launcher[:-1], *ours, *found.command(ranks)[len(found.launcher) - 1 :]]
    if hosts.launcher == "local":
        return found.command(ranks)
    script = folder / "instead-of-ssh"
    script.write_text(_INSTEAD_OF_SSH)
    script.chmod(0o700)
    first, _ = hosts.ranks[0]
    enter = ["ip", "netns", "exec", first, "unshare", "--uts", "sh", "-c", _NAMED, first]
    if found.peer.distribution == "openmpi":
        options = ["--host", str(hosts), "--prtemca", "plm_ssh_agent", str(script)]
    else:
        listed = folder / "hosts"
        listed.write_text("".join(f"{host}:{count}\n" for host, count in hosts.ranks))
        options = ["-machinefile", str(listed), "-launcher", "ssh", "-launcher-exec", str(script)]
    return [*enter, *found.command(ranks), *options]
