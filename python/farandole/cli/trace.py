"""Puts the parts of a trace together into DIR/trace.json, which https://ui.perfetto.dev and
chrome://tracing open, and tells where the time went. With a second directory the two runs are
shown side by side; so are the two of a directory that holds nothing but two of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from farandole.cli import CommandError

EPILOG = """\
examples:
  farandole trace out                              after a run with FARANDOLE_TRACE=out
  farandole trace with-overlap without-overlap     two runs side by side
  farandole trace out --json > summary.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help="what FARANDOLE_TRACE named")
    parser.add_argument("other", metavar="DIR2", type=Path, nargs="?", help="another run's")
    parser.add_argument("--json", action="store_true", help="the summary as JSON, in microseconds")


def handle(arguments: argparse.Namespace) -> int:
    from farandole import _trace

    directories = [arguments.directory]
    try:
        if arguments.other is not None:
            directories.append(arguments.other)
        else:
            directories = _trace.runs_in(arguments.directory)
        merged = [_trace.merge(directory) for directory in directories]
        found = [_trace.summary(directory) for directory in directories]
    except _trace.TraceError as error:
        raise CommandError(str(error), exit_code=1) from error
    if arguments.json:
        print(_trace.to_json(found))
        return 0
    print(_trace.render(found[0]) if len(found) == 1 else _trace.compare(*found))
    for path in merged:
        print(f"open {path} in https://ui.perfetto.dev")
    return 0
