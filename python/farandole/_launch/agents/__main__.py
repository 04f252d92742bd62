"""An agent's beginning, before there are ranks: its order, and whether it can be carried out.

    python -m farandole._launch.agents      started by ssh, ip netns exec, or the launcher itself

Like the launcher, an agent is two processes that watch each other (watchdog.py).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from farandole._launch.agents import address, frames
from farandole._launch.agents.agent import Agent
from farandole._launch.agents.frames import Decoder, FrameError
from farandole._launch.agents.order import Order, package, version
from farandole._launch.agents.secret import VARIABLE, SecretFile
from farandole._launch.here import Here
from farandole._launch.hosts import name_of
from farandole._launch.job import LaunchError
from farandole._launch.polling import READ, wait
from farandole._launch.ranks import check_command
from farandole._launch.signals import SignalPipe
from farandole._launch.watchdog import guarded

# From the start of this process to the whole order.
_ORDER_TIMEOUT = 60.0
_INSECURE = {VARIABLE: "", "FARANDOLE_INSECURE": "1"}


def main() -> int:
    """Runs the whole agent; returns its exit code, which only readers of logs need."""
    streams = _take_streams()
    try:
        content = _receive_order(streams[0])
        os.write(streams[1], content["marker"].encode())
        order = _understood(content)
        seen = _seen(order)
        inherited = _environment(order)
        os.environ.clear()
        os.environ.update(inherited)
        _enter(order.directory)
        check_command(order.command)
        return _carry_out(order, inherited, seen, streams)
    except FrameError as error:
        print(f"farandole agent: {error}", file=sys.stderr)
        return 2
    except LaunchError as error:
        os.write(streams[1], frames.message("refused", why=str(error), exit_code=error.exit_code))
        return error.exit_code


def _carry_out(
    order: Order, inherited: dict[str, str], seen: address.Seen, streams: tuple[int, int]
) -> int:
    added, remove = _secret(order)

    def run(lifeline: int, signals: SignalPipe) -> int:
        try:
            Agent(here, order.patience, streams, lifeline, signals, seen.launcher).run()
        finally:
            remove()  # also where the watchdog, which does it too, is gone
        return 0

    try:
        here = Here(
            order.command,
            order.counts,
            inherited,
            added=added,
            index=order.number,
            host=order.host,
            address=seen.host,
            binding=order.binding,
        )
        return guarded(run, "farandole agent", "agent")
    finally:
        remove()


def _secret(order: Order) -> tuple[dict[str, str], Callable[[], None]]:
    """The ranks' variables for the job's secret, and a function that removes the secret's file."""
    if not order.secret:
        return _INSECURE, lambda: None
    try:
        file = SecretFile(order.secret_name, order.secret)
        return {VARIABLE: str(file.path)}, file.remove
    except OSError as error:
        raise LaunchError(
            f"the job's secret cannot be written there: {error.filename}: {error.strerror}", 1
        ) from error


def _take_streams() -> tuple[int, int]:
    """Copies of stdin and stdout; what prints by mistake prints to stderr and tears no frame."""
    found = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return found


def _receive_order(fd: int) -> dict[str, Any]:
    """The first frame. The launcher sends nothing after it before the agent has answered."""
    deadline = time.monotonic() + _ORDER_TIMEOUT
    decoder = Decoder()
    while True:
        if not wait([(fd, READ)], deadline):
            raise FrameError(f"no order came within {_ORDER_TIMEOUT:g} s")
        data = os.read(fd, 1 << 16)
        if not data:
            raise FrameError("stdin ended before there was an order; 'farandole run' starts agents")
        for frame in decoder.feed(data):
            if frame.kind == "order":
                return frame.content
            raise FrameError("the first frame is no order; 'farandole run' starts agents")


def _understood(content: dict[str, Any]) -> Order:
    if content["version"] != version():
        raise LaunchError(
            f"farandole is {version()} there and {content['version']} here; install one version"
        )
    return Order.of(content)


def _seen(order: Order) -> address.Seen:
    """This host's address and the launcher's, as far as they are known here."""
    if order.launcher == "here":
        return address.Seen()
    if order.launcher == "ssh":
        written = name_of(order.host)
        seen = address.seen_by_sshd(os.environ) or address.Seen(host=written)
        has_it = address.is_address(written) and address.is_ours(written)
        return seen._replace(host=written) if has_it else seen  # else it is that of a router
    wanted = order.environment.get("FARANDOLE_IFACE", "")
    own = address.of_interfaces(wanted)
    if not own and order.launcher == "netns":
        which = f"FARANDOLE_IFACE={wanted}" if wanted else "no interface of that namespace"
        how = "is not up there with" if wanted else "is up and has"
        raise LaunchError(f"{which} {how} an address by which ranks of other hosts reach it", 1)
    return address.Seen(host=own or "127.0.0.1")  # pretended hosts of a machine without a network


def _environment(order: Order) -> dict[str, str]:
    """This host's environment, overridden by the variables of the order."""
    environment = {**os.environ, **order.environment}
    if path := order.environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(
            package() + entry[len(order.package) :]
            if entry.startswith(order.package + os.sep)
            else entry
            for entry in path.split(os.pathsep)
        )
    return environment


def _enter(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        raise LaunchError(
            f"the working directory {directory} cannot be entered there: {error.strerror}; "
            "create it, or start from a directory that all hosts have"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
