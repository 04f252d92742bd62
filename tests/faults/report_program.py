"""A rank of report.py: reduces until rank `culprit` does `how`, and prints when that was done and
what it was told: "@fault NANOSECONDS", "@told NANOSECONDS ERROR"."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np

import farandole as fd


def say(word: str, text: str = "") -> None:
    os.write(1, f"@{word} {time.monotonic_ns()} {text}\n".encode())


def be_stopped(seconds: float | None) -> None:
    if seconds is not None and os.fork() == 0:
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def leave_a_child_and_die() -> None:
    if os.fork() == 0:
        time.sleep(3)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def use_up_descriptors() -> None:
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1  # noqa: PTH208
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with suppress(OSError):
        while True:
            os.open("/dev/null", os.O_RDONLY)


def raise_an_error() -> None:
    raise ValueError("bad sample 4711")


def cut_the_cable() -> None:
    device = next(each for each in os.listdir("/sys/class/net") if each != "lo")  # noqa: PTH208
    subprocess.run(["ip", "link", "set", device, "down"], check=True)


FAULTS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "stop": lambda: be_stopped(None),
    "short stop": lambda: be_stopped(3),
    "stuck": lambda: time.sleep(1000),
    "raise": raise_an_error,
    "sys.exit(7)": lambda: sys.exit(7),
    "sys.exit(0)": lambda: sys.exit(0),
    "os._exit(0)": lambda: os._exit(0),
    "count": lambda: fd.all_reduce(np.ones(4, np.float32)),
    "child": leave_a_child_and_die,
    "descriptors": use_up_descriptors,
    "cable": cut_the_cable,
}


def begin(how: str, guilty: bool) -> None:
    if how == "absent" and guilty:
        say("fault")
        sys.exit(0)
    if how == "setting" and guilty:
        os.environ["FARANDOLE_LEVEL"] = "fast"
    if how == "setting":
        say("fault")
    fd.init()


def work(how: str, guilty: bool) -> None:
    for step in range(300):
        if step == 200 and guilty:
            say("fault")
            FAULTS[how]()
        if step == 200 and how == "descriptors":
            fd.all_reduce(np.ones(100_000), group=fd.split(0))
        fd.all_reduce(np.ones(1000 if step % 2 else 100_000, np.float32))


def main() -> None:
    how, guilty = sys.argv[1], os.environ["RANK"] == sys.argv[2]
    try:
        begin(how, guilty)
        work(how, guilty)
    except fd.Error as error:
        say("told", f"{type(error).__name__}: {error.verdict}")
        raise
    say("done")


if __name__ == "__main__":
    main()
