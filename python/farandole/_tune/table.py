"""The table that rank 0 hands out when ranks meet: the one kept for this kind of host, if any.

No other rank reads a file. A file that is not believed causes a warning, and the usual choices.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from farandole import _core
from farandole._tune import kept
from farandole._tune.kept import Kept, NotBelieved


class Table(NamedTuple):
    """A tuning table, and where it came from."""

    text: str = ""  # as the native core takes it; empty: the defaults
    path: str | None = None  # the file that was read
    kept: Kept | None = None  # what it says
    why_not: str = ""  # why the file was not used
    warns: bool = False  # somebody should look at that

    @property
    def origin(self) -> str:
        """In words: 'defaults', or when it was measured and how."""
        return _core.tuning.origin(self.text)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits; equal where all choices are."""
        return _core.tuning.fingerprint(self.text)


def for_world(ranks: int) -> str:
    """The table that rank 0 hands out; warns once when a file is there and not believed."""
    table = find(ranks)
    if table.warns:
        import warnings

        warnings.warn(
            f"farandole makes its usual choices: {table.why_not}; "
            "run `farandole tune`, or set FARANDOLE_TUNING=off",
            RuntimeWarning,
            stacklevel=3,
        )
    return table.text


def find(ranks: int = 2) -> Table:
    """The table that ``FARANDOLE_TUNING`` asks for; the defaults where it cannot be had.

    Never raises for what a file holds: `why_not` then says why it is not used.
    """
    setting = os.environ.get("FARANDOLE_TUNING", "")
    if setting == "off":
        return Table()
    if setting not in ("", "auto", "kept"):
        return _named(setting)
    if ranks > kept.usable_cores():
        return Table(why_not=f"{ranks} ranks take turns on {kept.usable_cores()} cores")
    try:
        path = kept.path_here()
    except NotBelieved as error:
        return Table(why_not=str(error))
    try:
        return _read(path, any_kind=False)
    except FileNotFoundError:
        return Table()
    except (OSError, NotBelieved) as error:
        return Table(why_not=_in_words(path, error), warns=True)


def _named(path: str) -> Table:
    """A file that somebody asks for is used whatever host it is for, and however noisy it was."""
    try:
        return _read(path, any_kind=True)
    except (OSError, NotBelieved) as error:
        return Table(why_not=_in_words(path, error), warns=True)


def _read(path: str, *, any_kind: bool) -> Table:
    found = kept.read(path, any_kind=any_kind)
    text = text_of(found)
    if found.is_noisy and not any_kind:
        return Table(why_not=f"{path}: the host was busy (noise {100 * found.noise:.0f} %)")
    return Table(text, path, found)


def _in_words(path: str, error: Exception) -> str:
    return f"{path}: {error.strerror if isinstance(error, OSError) else error}"


def text_of(found: Kept) -> str:
    """The table as the native core takes it. ``NotBelieved`` if it does not."""
    origin = f"measured {found.measured} with {found.ranks} ranks"
    # MPI's numbers came later than the others, and are not measured with them.
    of_mpi = {name: s for name, s in _core.tuning.numbers().items() if name.startswith("mpi_")}
    try:
        return _core.tuning.text(of_mpi | found.seconds, origin)
    except _core.InvalidArgument as error:
        raise NotBelieved(str(error).splitlines()[0]) from None
