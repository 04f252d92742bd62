"""horovodrun's command line over `farandole run`: takes every option that horovodrun has, and says
in one line which of them do nothing here, and why. `import horovod` is farandole in the ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from farandole.cli import Parser, _elastic, _hosts, add_ranks, guarded, run
from farandole.cli._horovod_flags import FLAGS, ignored_of

_NAME = "farandole-horovodrun"


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(_NAME, lambda: _main(words))


def _main(words: Sequence[str]) -> int:
    parser = Parser(_NAME, __doc__ or "")
    parser.usage = f"{_NAME} -np N [options] COMMAND [ARGUMENT …]"
    parser.add_argument("-v", "--version", action="store_true", help="show the version")
    parser.add_argument(
        "-cb", "--check-build", action="store_true", help="show what there is and what is not"
    )
    add_ranks(parser, "how many ranks")
    run.add_horovods(parser, FLAGS)
    _hosts.add_arguments(parser)
    _elastic.add_arguments(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(options=tuple(parser._option_string_actions))
    parser.set_defaults(**run.defaults() | {"horovod": True})
    found = parser.parse_args(words)
    if found.version or found.check_build:
        print(_check_build() if found.check_build else _version())
        return 0
    if ignored := ignored_of(found):
        print(f"{_NAME}: ignored: {', '.join(ignored)}", file=sys.stderr)
    return run.handle(found, _NAME)


def _version() -> str:
    from farandole.cli import info
    from farandole.horovod import VERSION

    return f"farandole {info.version()}, with the names of Horovod {VERSION}"


def _check_build() -> str:
    from farandole.common import util

    def tick(name: str, there: object) -> str:
        return f"    [{'X' if there else ' '}] {name}"

    return "\n".join(
        [
            _version() + ":",
            "",
            "Available Frameworks:",
            tick("TensorFlow", util.extension_available("tensorflow")),
            tick("PyTorch", util.extension_available("torch")),
            tick("MXNet", util.extension_available("mxnet")),
            "",
            "Available Controllers:",
            tick("farandole", True),
            tick("MPI", util.mpi_built()),
            tick("Gloo", util.gloo_built()),
            "",
            "Available Tensor Operations:",
            tick("farandole (shared memory; TCP between hosts)", True),
            tick("NCCL", util.nccl_built()),
            tick("DDL", util.ddl_built()),
            tick("CCL", util.ccl_built()),
            tick("MPI", util.mpi_built()),
            tick("Gloo", util.gloo_built()),
        ]
    )
