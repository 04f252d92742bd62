"""``python -m farandole``: the command line."""

from __future__ import annotations

import sys

from farandole.cli import main

sys.exit(main())
