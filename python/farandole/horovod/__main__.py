"""``python -m farandole.horovod train.py`` runs a program for Horovod as a rank of any launcher.

Python begins anew, in the same process, with what follows as its command line: a file, ``-m``
with a module or ``-c`` with a command. ``import horovod`` means farandole there, and in all Pythons
that it starts.
"""

from __future__ import annotations

import os
import subprocess
import sys

from farandole.horovod import as_environment

_USAGE = "usage: python -m farandole.horovod (train.py | -m module | -c command) [argument …]"


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if words else sys.stderr)
        sys.exit(0 if words else 2)
    os.environ.update(as_environment())
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    os.execv(sys.executable, [sys.executable, *flags, *words])


if __name__ == "__main__":
    main()
