"""Where a collective stands: a line of the user's code, and a place in the program it is compiled
into. Alike on ranks that run one program, so that ranks that run programs in another order see it.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

# Frames of these are on the way to a collective, and the same for all programs.
_LIBRARIES = {"farandole", "jax", "jaxlib", "optax", "chex", "flax", "haiku", "equinox", "keras"}
_LONGEST = 190  # bytes of a name that ranks compare (Descriptor::name)


def line_of_caller() -> str:
    """'train.py:12 in step': the innermost frame of the user's that JAX is tracing; '' where JAX
    traces a function of ours alone. The caller of a program is no part of it."""
    frame: Any = sys._getframe(1)
    place, inside = "", False
    while frame is not None:
        library = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if not place and library not in _LIBRARIES:
            code = frame.f_code
            place = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        elif place and library == "jax":
            inside = True
            break
        frame = frame.f_back
    return place if inside else ""


def name_in(context: Any, label: str, line: str, ranks: str) -> str:
    """The name that ranks compare for a call without one, as XLA's module is made. Calls are
    numbered by process set, as a rank sees only those of its sets."""
    module = context.module_context
    numbers = module.cached_primitive_lowerings  # lives as long as the module is being made
    key = ("farandole", ranks)
    numbers[key] = number = numbers.get(key, 0) + 1
    program = str(module.module.operation.attributes["sym_name"].value)
    place = f"call {number} of {program}"
    return _cut(label, f" at {line}, {place}" if line else f" as {place}")


def _cut(label: str, place: str) -> str:
    """Names that are longer are compared by their beginnings alone."""
    whole = label + place
    if len(whole.encode()) <= _LONGEST:
        return whole
    digest = f" … #{zlib.crc32(whole.encode()):08x}"
    room = _LONGEST - len(digest.encode())
    kept = max(room - len(place.encode()), room // 3)
    cut = label.encode()[:kept].decode(errors="ignore") + place
    return cut.encode()[:room].decode(errors="ignore") + digest
