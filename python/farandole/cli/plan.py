"""Shows the schedule that an algorithm makes for a collective: who sends which slice to whom, when,
and what is folded. Nothing is started; a schedule is a value. With --draw it becomes a picture."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from farandole._host_parts import host_of_each
from farandole.cli import CommandError, add_options
from farandole.cli._near import refused

EPILOG = """\
examples:
  farandole plan all_reduce --algorithm ring                      every rank's steps
  farandole plan all_reduce --algorithm binomial --ranks 6 --rank 5
  farandole plan broadcast --ranks 8 --count 1000000              whatever the model picks
  farandole plan all_reduce --algorithm binomial --ranks 8 --draw binomial.svg
  farandole plan all_reduce --ranks 4 --hosts 2,2                 two ranks on each of two hosts
  farandole plan gather --ranks 3 --counts 3,0,5 --root 2         shares that differ
"""


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(count) for count in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers, such as 3,0,5"
        ) from None


_OPTIONS = (
    ("collective", None,
     "all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather, scatter, all_to_all or "
     "barrier"),
    ("--algorithm", None,
     "the planner's name: ring, binomial, … (default: what the cost model picks)"),
    ("--ranks", None, "size of the group (default: 4)", {"type": int, "default": 4}),
    ("--count", None, "elements (default: 1024)", {"type": int, "default": 1024}),
    ("--counts", "N,N,…",
     "elements of each rank's share where they differ, as 3,0,5; for all_to_all those of each "
     "block, by sender and then by receiver", {"type": _counts, "default": ()}),
    ("--hosts", "N,N,…",
     "how many ranks each host has, as 2,2, or the host of each rank, as 0:1:0:1 (default: all "
     "share one)", {"default": ""}),
    ("--lanes", None, "independent lanes (default: 1)", {"type": int, "default": 1}),
    ("--segments", None, "pieces a chunk is pipelined in (default: 1)",
     {"type": int, "default": 1}),
    ("--root", None, "root of a rooted one (default: 0)", {"type": int, "default": 0}),
    ("--rank", None, "show this rank alone (default: all)", {"type": int}),
    ("--draw", "FILE", "draw all ranks to FILE.svg or FILE.png instead", {"type": Path}),
    ("--lane", None, "with --draw, the lane to draw (default: 0)", {"type": int}),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, *_OPTIONS)


def handle(arguments: argparse.Namespace) -> int:
    try:
        plan = importlib.import_module("farandole._plan")
    except ImportError as error:
        raise CommandError(f"the native core cannot be loaded: {error}") from error
    given = dict(vars(arguments))
    file, lane = given.pop("draw"), given.pop("lane")
    if lane is not None and file is None:
        raise CommandError("--lane chooses the lane that --draw FILE draws")
    try:
        hosts = given.pop("hosts")
        given["host_of"] = host_of_each(hosts, given["ranks"]) if hosts else ()
        if file is None:
            rank = given.pop("rank")
            print(plan.render(plan.Shape(**given), rank=rank))
        else:
            _draw(file, lane or 0, given)
    except (ValueError, KeyError) as error:
        raise refused(error) from error
    return 0


def _draw(file: Path, lane: int, given: dict[str, Any]) -> None:
    from farandole import _draw
    from farandole._draw.schedule import draw_plan
    from farandole._plan_size import Shape

    if given.pop("rank") is not None:
        raise CommandError("--draw shows all ranks; leave out --rank")
    _draw.check_name(file)
    _draw.save(draw_plan(Shape(**given), lane=lane), file)
    print(f"drew {file}")
