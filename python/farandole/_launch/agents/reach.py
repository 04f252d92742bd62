"""The command that starts an agent on a host: always words, never a line for a shell of ours.

sshd joins its words into one line for the shell of the user there, so those are quoted.
"""

from __future__ import annotations

import math
import shlex
import sys

from farandole._launch.agents.address import is_address
from farandole._launch.hosts import is_here, name_of
from farandole._launch.job import Reach

# Like -m, but without the job's folder in sys.path: its files could be named like modules.
AGENT = (
    "import runpy, sys; sys.path[:] = filter(None, sys.path); "
    "runpy.run_module('farandole._launch.agents', run_name='__main__')"
)
_SSH_FAILED = 255  # and not what it started
_CONNECTING = 1 / 3  # of the time that a host has to get ready: so ssh itself says why, if it fails


def launcher_for(host: str, reach: Reach) -> str:
    """The launcher that is asked for; 'here' if that is ssh and the host is this machine."""
    return "here" if reach.launcher == "ssh" and is_here(host) else reach.launcher


def command_for(host: str, reach: Reach, timeout: float) -> list[str]:
    """The command that starts the agent. `host` has passed hosts.py's pattern."""
    launcher = launcher_for(host, reach)
    if launcher == "here":
        return [sys.executable, "-c", AGENT]
    agent = [reach.python, "-c", AGENT]
    if launcher == "local":
        return agent
    if launcher == "netns":
        return ["ip", "netns", "exec", host, *agent]
    limit = f"ConnectTimeout={max(1, math.ceil(timeout * _CONNECTING))}"
    return [*_ssh(host, reach, "-T", "-o", limit), shlex.join(agent)]


def _ssh(host: str, reach: Reach, *options: str) -> list[str]:
    words = ["ssh", "-o", "BatchMode=yes", *options]
    if reach.ssh_port is not None:
        words += ["-p", str(reach.ssh_port)]
    if reach.ssh_identity is not None:
        words += ["-i", str(reach.ssh_identity)]
    return [*words, "--", host.replace("[", "").replace("]", "")]


def address_of(host: str) -> str:
    """The host's address, if it was given as one; empty if as a name."""
    name = name_of(host)
    return name if is_address(name) else ""


def advice_for(host: str, reach: Reach, code: int | None, said: str) -> str:
    """Advice where the agent did not start, by its starter's exit code and output."""
    if "No module named" in said:
        return "install the same farandole for that Python, or name another with --remote-python"
    if reach.launcher == "netns" and f'exec of "{reach.python}"' not in said:
        return "'ip netns list' shows the names there are; entering one needs root"
    if code == _SSH_FAILED:
        return f"try: {shlex.join([*_ssh(host, reach), 'true'])}"
    if code in (126, 127) or "not found" in said or "No such file" in said:
        return f"is {reach.python} the Python there? --remote-python names another"
    return f"does {reach.python} work there?"
