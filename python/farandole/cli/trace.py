"""Puts the parts of a trace together into DIR/trace.json, which https://ui.perfetto.dev and
chrome://tracing open, and tells where the time went. With a second directory, or one that holds
just two runs, it shows the two side by side. --draw makes a picture of one training step: every
rank's program, and its buckets below it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from farandole.cli import CommandError, add_options

EPILOG = """\
examples:
  farandole trace out                              after a run with FARANDOLE_TRACE=out
  farandole trace with-overlap without-overlap     two runs side by side
  farandole trace out --draw step.svg              a training step as a picture
  farandole trace out --add out-of-b               with the parts that host b wrote
  farandole trace out --json > summary.json
"""


_OPTIONS = (
    ("directory", "DIR", "what FARANDOLE_TRACE named", {"type": Path}),
    ("other", "DIR2", "another run's", {"type": Path, "nargs": "?"}),
    ("--add", "DIR",
     "a directory with parts of the same run that another host wrote: they are put into the first "
     "one", {"type": Path, "action": "append", "default": []}),
    ("--json", "", "the summary as JSON, in microseconds"),
    ("--draw", "FILE", "draw a step to FILE.svg or FILE.png instead", {"type": Path}),
    ("--step", None, "with --draw, the step's number from 0 (default: a typical one)",
     {"type": int}),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, *_OPTIONS)


def handle(arguments: argparse.Namespace) -> int:
    from farandole import _trace

    directories = [arguments.directory]
    if arguments.step is not None and arguments.draw is None:
        raise CommandError("--step chooses the step that --draw FILE draws")
    if arguments.draw is not None and arguments.json:
        raise CommandError("--draw and --json exclude each other")
    _trace.recover(arguments.directory, living=True)
    _trace.gather(arguments.directory, arguments.add)
    if arguments.other is not None:
        directories.append(arguments.other)
    else:
        directories = _trace.runs_in(arguments.directory)
    if arguments.draw is not None:
        return _draw(directories, arguments.step, arguments.draw)
    for directory in {*directories} - {arguments.directory}:
        _trace.recover(directory, living=True)
    merged = [_trace.merge(directory) for directory in directories]
    found = [_trace.summary(directory) for directory in directories]
    if arguments.json:
        print(_trace.to_json(found))
        return 0
    print(_trace.render(found[0]) if len(found) == 1 else _trace.compare(*found))
    for path in merged:
        print(f"open {path} in https://ui.perfetto.dev")
    return 0


def _draw(directories: Sequence[Path], step: int | None, file: Path) -> int:
    from farandole import _draw, _trace
    from farandole._draw.timeline import draw_step

    if len(directories) > 1:
        raise CommandError("--draw shows one run; name one directory")
    _draw.check_name(file)
    _draw.save(draw_step(_trace.load(directories[0]), step), file)
    print(f"drew {file}")
    return 0
