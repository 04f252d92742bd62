"""Sets of ranks, under the name at which Horovod's programs import them."""

from __future__ import annotations

from farandole.common._process_set import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
