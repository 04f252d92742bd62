"""Settings, and how much of the gradients goes together by them."""

from __future__ import annotations

from typing import NamedTuple

from farandole import _core
from farandole._core import InvalidArgument


def setting(name: str) -> str:
    """The value of a FARANDOLE_* variable, or its default."""
    return next(row["value"] for row in _core.settings() if row["name"] == name)


class Limits(NamedTuple):
    """How gradients are put together; the defaults come from the environment."""

    bucket_bytes: int
    first_bucket_bytes: int
    in_place_bytes: int

    @classmethod
    def of(
        cls,
        bucket_bytes: int | None,
        first_bucket_bytes: int | None,
        in_place_bytes: int | None = None,
    ) -> Limits:
        def choose(given: int | None, what: str) -> int:
            if given is not None and (not isinstance(given, int) or given < 0):
                raise InvalidArgument(f"{what} is {given!r}; a size is a whole number, at least 0")
            return int(setting("FARANDOLE_" + what.upper())) if given is None else given

        return cls(
            choose(bucket_bytes, "bucket_bytes"),
            choose(first_bucket_bytes, "first_bucket_bytes"),
            choose(in_place_bytes, "in_place_bytes"),
        )
