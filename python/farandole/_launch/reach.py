"""The command that starts an agent on a host: always words, never a line for a shell of ours.

sshd joins its words into one line for the shell of the user there, so those are quoted.
"""

from __future__ import annotations

import math
import shlex

from farandole._launch.job import Reach

_MODULE = "farandole._launch.agent"
LAUNCHERS = ("ssh", "netns", "local")


def command_for(host: str, reach: Reach, timeout: float, *, is_here: bool) -> list[str]:
    """`host` has passed hosts.py's pattern; `is_here`: it is this machine."""
    agent = [reach.python, "-m", _MODULE]
    if reach.launcher == "netns":
        return ["ip", "netns", "exec", host, *agent]
    if reach.launcher == "local" or is_here:
        return agent
    words = ["ssh", "-T", "-o", "BatchMode=yes"]
    words += ["-o", f"ConnectTimeout={max(1, math.ceil(timeout))}"]
    if reach.ssh_port is not None:
        words += ["-p", str(reach.ssh_port)]
    if reach.ssh_identity is not None:
        words += ["-i", str(reach.ssh_identity)]
    return [*words, "--", host.replace("[", "").replace("]", ""), shlex.join(agent)]


def advice_for(host: str, reach: Reach, code: int | None, said: str) -> str:
    """What to do where the agent did not start: by how its starter ended and what it said."""
    if "No module named" in said:
        return "install the same farandole for that Python, or name another with --remote-python"
    if code in (126, 127) or "not found" in said or "No such file" in said:
        if reach.launcher == "netns":
            return "'ip netns list' shows the names there are"
        return f"is {reach.python} the Python there? --remote-python names another"
    if reach.launcher == "netns":
        return "'ip netns list' shows the names there are; entering one needs root"
    if reach.launcher == "ssh":
        return f"try: ssh -o BatchMode=yes {host} true"
    return f"try: {reach.python} -m {_MODULE}"
