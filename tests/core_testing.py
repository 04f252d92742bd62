"""The parts of the core that only tests reach: `_core_testing`, a module that no wheel has.

    from core_testing import testing

It is compiled beside the installed core (CMakeLists.txt); what has changed is compiled here.
"""

from __future__ import annotations

import sys

import harness

if not harness.is_rank():
    harness.build("core_testing")
sys.path.append(str(harness.TREE / "testing"))

import _core_testing as testing

__all__ = ["testing"]
