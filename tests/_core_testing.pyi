"""The parts of farandole's core, for its own tests: folds by instruction set, many proofs, faults
on purpose."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import Buffer

from farandole._core import HyperParameters, _Native

class SimReport(metaclass=_Native):
    def __init__(self, *args: object, **kwargs: object) -> None: ...  # never called
    @property
    def seed(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def fate(self) -> str: ...
    @property
    def turns(self) -> int: ...
    @property
    def operations(self) -> int: ...
    @property
    def correct(self) -> int: ...
    @property
    def refused(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def verdict(self) -> str: ...
    @property
    def complaint(self) -> str: ...

class NegotiationReport(metaclass=_Native):
    def __init__(self, *args: object, **kwargs: object) -> None: ...  # never called
    @property
    def seed(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def ordered(self) -> int: ...
    @property
    def refused(self) -> int: ...
    @property
    def stood_in(self) -> int: ...
    @property
    def forgotten(self) -> int: ...
    @property
    def stale(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def complaint(self) -> str: ...

def simulate_negotiation(
    seed: int, ranks: int = 3, names: int = 6, times: int = 6, ids: int = 16384
) -> NegotiationReport: ...
def simulate(seed: int, steps: int = 30, ranks: int = 3) -> SimReport: ...
def limits() -> dict[str, int]: ...
def plan_buckets(
    parameters: Sequence[tuple[str, int, str] | tuple[str, int, str, int]],
    bucket_bytes: int,
    first_bucket_bytes: int,
    ready_order: list[int] | None = None,
) -> list[tuple[str, int, list[tuple[int, int, int]]]]: ...
def launch_point(
    parameters: Sequence[tuple[str, int, str] | tuple[str, int, str, int]],
    bucket_bytes: int,
    first_bucket_bytes: int,
    planned_order: list[int],
    ready_order: list[int],
) -> float: ...
def plan_fingerprint(
    parameters: Sequence[tuple[str, int, str] | tuple[str, int, str, int]],
    bucket_bytes: int,
    first_bucket_bytes: int,
) -> int: ...
def check(
    collective: str,
    count: int,
    ranks: Sequence[Sequence[Sequence[dict[str, Any]]]],
    scratch: int = 0,
    root: int = 0,
    in_place: bool = False,
    counts: Sequence[int] = [],
) -> tuple[str, str]: ...
def cast(out_dtype: str, buffer: Buffer, in_dtype: str, isa: str | None = None) -> bytes: ...
def flush_to_zero(on: bool) -> bool: ...
def fold(
    dtype: str,
    op: str,
    lower: Buffer,
    upper: Buffer,
    isa: str,
    *,
    out: str = "apart",
    misaligned: int = 0,
) -> bytes: ...
def fold_canonical(
    dtype: str,
    op: str,
    sources: Sequence[Buffer],
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    into: Sequence[int] = [],
) -> bytes: ...
def fold_step(
    dtype: str,
    op: str,
    arrived: Buffer,
    side: str,
    arrived_is_leaf: bool,
    held: Buffer,
    held_is_leaf: bool,
    finish: bool,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    size: int = 2,
) -> bytes: ...
def mutate(
    collective: str,
    name: str,
    size: int,
    count: int,
    mutation: str,
    lanes: int = 1,
    segments: int = 1,
    root: int = 0,
    host_of: Sequence[int] = [],
) -> tuple[int, list[str], list[str]]: ...
def mutations() -> list[str]: ...
def prove_all(
    collective: str,
    name: str,
    sizes: Sequence[int],
    counts: Sequence[int],
    lanes: Sequence[int],
    segments: Sequence[int],
    all_roots: bool = False,
    uneven: Sequence[Sequence[int]] = [],
    leaves: Sequence[Sequence[int]] = [],
    host_of: Sequence[Sequence[int]] = [],
) -> tuple[int, list[str]]: ...
def scale(
    dtype: str, buffer: Buffer, factor: float, divide: int = 1, isa: str | None = None
) -> bytes: ...
def store_step(
    dtype: str,
    op: str,
    arrived: Buffer,
    arrived_is_leaf: bool,
    finish: bool,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    size: int = 2,
) -> bytes: ...
def seconds_to_seal(bytes: int, messages: int) -> tuple[float, float]: ...
def update(
    optimizer: str,
    dtype: str,
    value: Buffer,
    gradient: Buffer,
    state: Sequence[Buffer],
    hyper: HyperParameters,
    step: int,
    factor: float = 1.0,
    *,
    isa: str,
) -> tuple[bytes, ...]: ...
def norm(kind: str, dtype: str, elements: Buffer) -> float: ...
def sum(
    dtype: str,
    lower: Buffer,
    upper: Buffer,
    isa: str,
    *,
    factor: float | None = None,
    outputs: int = 1,
    misaligned: int = 0,
) -> bytes: ...
