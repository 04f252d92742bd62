"""The command line: ``farandole VERB …``.

A verb is a row of `VERBS` and a module of this package with two functions,
``add_arguments(parser)`` and ``handle(arguments) -> exit code``; the module's docstring is its
help. Only the chosen verb's module is imported, so that
``farandole run`` starts without numpy and the native core.
"""

from __future__ import annotations

import argparse
import errno
import functools
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from farandole._words import CommandError as CommandError  # for the verbs

VERBS = {
    "run": "start the ranks of a job",
    "check": "check hosts and their links before a job runs there",
    "info": "show this installation, this machine and every setting",
    "bench": "measure a collective between ranks",
    "tune": "measure this host, so that choices follow from it",
    "plan": "show the schedule an algorithm makes for a collective",
    "top": "show what the ranks of running jobs do",
    "trace": "merge a trace's parts and tell where the time went",
    "completion": "print what completes all of this in a shell",
}


MOST_PROCESSES = 1 << 22  # of Linux


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line and takes no abbreviations."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        from farandole.cli._near import of_arguments

        near = of_arguments(message, self._option_string_actions)
        raise CommandError(f"{message}{near} (see: {self.prog} --help)")


def seconds_of(option: str, text: str, *, zero: bool = True) -> float:
    """Raises CommandError where it is no number of seconds. `zero`: they may be 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9 or not (seconds or zero):  # also refuses nan
        raise CommandError(f"{option} takes a number of seconds, not '{text}'")
    return seconds


def number_of(option: str, text: str, least: int = 1, most: int | None = None) -> int:
    """Raises CommandError where it is no whole number between the two."""
    number = int(text) if re.fullmatch("[0-9]{1,18}", text) else -1
    if number < least or (most is not None and number > most):
        end = "on" if most is None else f"to {most}"
        raise CommandError(f"{option} takes a number from {least} {end}, not '{text}'")
    return number


def add_options(parser: argparse._ActionsContainer, *rows: tuple[Any, ...]) -> None:
    """Adds an option by each row: names, what its value is called ("": it takes none), help, and
    perhaps more for argparse; `reads` makes the value of the option's name and a text."""
    for names, takes, help, *rest in rows:
        more = dict(*rest)
        first, *others = names.split()
        if reads := more.pop("reads", None):
            more["type"] = functools.partial(reads, first)
        more |= {"action": "store_true"} if takes == "" else {"metavar": takes}
        parser.add_argument(first, *others, help=help, **more)


def given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The values of those options that were given."""
    found = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def add_ranks(parser: argparse.ArgumentParser, help: str) -> None:
    """Adds the option for the number of ranks, as text."""
    add_options(parser, ("-np --num-proc", "N", help, {"dest": "ranks"}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code (2 for a mistake on the command line)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"] and words[1:]:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        return guarded("farandole", lambda: _print(_overview(), 0 if words else 2))
    if words[0] in ("-V", "-v", "--version", "version"):
        return guarded("farandole", _print_version)
    verb = words.pop(0)
    if verb not in VERBS:
        return guarded("farandole", lambda: _refuse(verb))
    return guarded(f"farandole {verb}", lambda: _run_verb(verb, words))


def guarded(name: str, body: Callable[[], int]) -> int:
    """Runs a command called `name`; turns what may end it into exit codes."""
    if sys.stdout is None:  # it was closed when we were started
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for good
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Latin 1 has no letter for an ellipsis, ASCII none for µ.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = body()
        sys.stdout.flush()  # here, where a reader that has left is still handled
        return int(code)
    except CommandError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _write_nowhere()
        return 141
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _write_nowhere()
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except SystemExit as leaving:  # argparse after --help
        return leaving.code if isinstance(leaving.code, int) else 0


def _write_nowhere() -> None:
    """Keeps the interpreter's own flush quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def parser_of(verb: str) -> Parser:
    """Reads a verb's options; its help is the verb's page of the reference."""
    module = importlib.import_module(f"farandole.cli.{verb}")
    parser = Parser(f"farandole {verb}", module.__doc__ or "", getattr(module, "EPILOG", None))
    module.add_arguments(parser)
    return parser


def _run_verb(verb: str, words: Sequence[str]) -> int:
    arguments = parser_of(verb).parse_args(words)
    return int(importlib.import_module(f"farandole.cli.{verb}").handle(arguments))


def _print(text: str, code: int) -> int:
    print(text)
    return code


def _print_version() -> int:
    from farandole.cli import info

    return _print(f"farandole {info.version()}", 0)


def _overview() -> str:
    lines = [
        "usage: farandole VERB [options]",
        "",
        "All-reduce and tensor fusion for data-parallel training.",
        "",
        *(f"  {verb:<12}{summary}" for verb, summary in VERBS.items()),
        "",
        "  farandole VERB --help tells more about one; farandole --version tells the version.",
        "",
        "Start here:  farandole run -np 4 -- python train.py",
    ]
    return "\n".join(lines)


def _refuse(verb: str) -> NoReturn:
    import difflib

    near = difflib.get_close_matches(verb, VERBS, n=1)
    advice = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(VERBS)}"
    raise CommandError(f"there is no verb '{verb}'; {advice}")
