"""Prints a script that completes verbs, options and their values in bash, zsh or fish."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from farandole.cli import VERBS, CommandError

EPILOG = """\
examples:
  farandole completion bash > ~/.local/share/bash-completion/completions/farandole
  farandole completion zsh > ~/.zfunc/_farandole          where fpath has ~/.zfunc
  farandole completion fish > ~/.config/fish/completions/farandole.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="whose script it is")


def handle(arguments: argparse.Namespace) -> int:
    from farandole.common import _needs

    try:
        shtab: Any = _needs.shtab
    except ImportError as error:
        raise CommandError(str(error), 1) from error
    print(shtab.complete(whole_parser(shtab.FILE), arguments.shell))
    return 0


def whole_parser(file: Any) -> argparse.ArgumentParser:
    """All verbs in one; `file`: how shtab is told that an option takes one."""
    parser = argparse.ArgumentParser("farandole", allow_abbrev=False)
    parser.add_argument("-V", "--version", action="store_true", help="the version")
    verbs = parser.add_subparsers()
    for verb, summary in VERBS.items():
        added = verbs.add_parser(verb, help=summary, description=summary, allow_abbrev=False)
        importlib.import_module(f"farandole.cli.{verb}").add_arguments(added)
        for action in added._actions:
            if action.type is Path:
                action.complete = file  # type: ignore[attr-defined]
    return parser
