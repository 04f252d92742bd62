"""Shows the ranks of your running jobs: steps a second, what each waits in and for whom, who is the
slowest. It reads what every rank shows in memory and talks to none, so it also shows ranks that
hang or are stopped, and jobs of any launcher. With `farandole run -H …` it shows all hosts' ranks
where that was started; else those of this host."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from farandole._live import pages
from farandole._live.pages import Status
from farandole._live.rates import Rate, rates
from farandole.cli import CommandError, add_options, number_of, seconds_of
from farandole.cli._terminal import columns, print_table

EPILOG = """\
examples:
  farandole top                      all of your jobs here, every two seconds; Ctrl-C ends it
  farandole top 3f2a                 the job whose name begins so
  farandole top --times 1            one table
  farandole top --times 1 --json     the same for programs

columns:
  steps/s     training steps, or the collectives where the hook counts no steps
  waits       share of the time that it waited for other ranks to begin a collective, and for data
  late        share of the time that all other ranks waited, and it did not
  MB/s        its input of collectives
  cores       that its process kept busy
"""

_OPTIONS = (
    ("job", "JOB", "the job's name, or how it begins (default: all of yours)", {"nargs": "?"}),
    ("--every", "SECONDS", "between two tables (default: 2)",
     {"reads": lambda option, text: seconds_of(option, text, zero=False), "default": 2.0}),
    ("--times", "N", "how many tables (default: until the job ends)", {"reads": number_of}),
    ("--json", "", "one JSON object a table"),
)  # fmt: skip

_LONG = 0.5  # seconds: shorter waits are part of any step
_CLEAR = "\x1b[H\x1b[2J"
_COLUMNS = ("rank", "host", "pid", "steps", "steps/s", "waits", "data", "late", "MB/s", "cores",
            "now")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, *_OPTIONS)


def handle(arguments: argparse.Namespace) -> int:
    before = _look(arguments.job)
    if not before:
        named = f" whose name begins with '{arguments.job}'" if arguments.job else ""
        raise CommandError(f"no job of yours{named} runs here", 1)
    shown = 0
    while arguments.times is None or shown < arguments.times:
        time.sleep(arguments.every)
        after = _look(arguments.job)
        if not after:
            print("the job has ended" if arguments.job else "all jobs have ended", file=sys.stderr)
            return 0
        _show(rates(before, after), as_json=arguments.json)
        before, shown = after, shown + 1
    return 0


def _look(job: str | None) -> list[Status]:
    return [status for status in pages.of_user() if status.job.startswith(job or "")]


def _show(seen: Sequence[Rate], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([rate.status._asdict() | _numbers(rate) for rate in seen]), flush=True)
        return
    if columns():
        print(_CLEAR, end="")
    jobs = dict.fromkeys(rate.status.job for rate in seen)
    for job in jobs:
        of_job = [rate for rate in seen if rate.status.job == job]
        some = of_job[0].status
        title = f"job {job}: {len(of_job)} of {some.size} ranks"
        print_table(title, _COLUMNS, [_row(rate) for rate in of_job])
    sys.stdout.flush()


def _numbers(rate: Rate) -> dict[str, float]:
    return {
        "steps_per_second": rate.steps,
        "operations_per_second": rate.operations,
        "bytes_per_second": rate.bytes,
        "share_for_ranks": rate.for_ranks,
        "share_for_data": rate.for_data,
        "share_late": rate.late,
        "processors": rate.processors,
    }


def _row(rate: Rate) -> Sequence[str]:
    status = rate.status
    counts_steps = status.steps > 0
    return (
        str(status.rank),
        status.host,
        str(status.pid),
        str(status.steps if counts_steps else status.operations),
        f"{rate.steps if counts_steps else rate.operations:.1f}",
        f"{rate.for_ranks:.0%}",
        f"{rate.for_data:.0%}",
        f"{rate.late:.0%}",
        f"{rate.bytes / 1e6:.1f}",
        f"{rate.processors:.1f}",
        _now(status),
    )


def _now(status: Status) -> str:
    """Says what it does."""
    if status.verdict:
        return f"failed: {status.verdict}"
    if status.state != "running":
        return status.state
    if status.present_wait < _LONG:
        return ""
    whom = f" for {_ranks(status.waits_for)}" if status.waits_for else " for data"
    what = f" in {status.waits_in}" if status.waits_in else ""
    return f"waits {status.present_wait:.1f} s{what}{whom}"


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
