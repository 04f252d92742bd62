"""Tuning tables and what follows from them."""

from collections.abc import Mapping
from typing import TypedDict

class _Candidate(TypedDict):
    backend: str
    name: str
    seconds: float | None
    refusal: str
    chosen: bool

class _DeviceWay(TypedDict):
    name: str
    seconds: float
    words: str
    refusal: str
    chosen: bool

class _Path(TypedDict):
    name: str
    collectives: list[str]
    most_bytes: int | None
    mapped: bool
    by_address: bool

def explain(
    collective: str,
    count: int,
    dtype: str = "float32",
    ranks: int = 2,
    shared: bool = False,
    foreign: bool = False,
    demanded: bool = False,
    level: str = "canonical",
    text: str = "",
    transport: str = "auto",
) -> list[_Candidate]: ...
def explain_devices(
    collective: str,
    bytes: int,
    ranks: int = 2,
    spin_bytes: int = 0,
    setting: str = "auto",
    dtype: str = "float32",
    level: str = "canonical",
    no_nccl: str = "",
    switched: bool = False,
    lanes: int = 0,
    piece_bytes: int = 0,
    staged_piece_bytes: int = 0,
    take_turns: bool = False,
) -> list[_DeviceWay]: ...
def fields() -> list[tuple[str, str]]: ...
def fingerprint(text: str = "") -> str: ...
def is_measured(text: str = "") -> bool: ...
def numbers(text: str = "") -> dict[str, float]: ...
def origin(text: str = "") -> str: ...
def paths() -> list[_Path]: ...
def traffic(path: str, collective: str, ranks: int) -> float: ...
def split(bytes: int) -> tuple[int, int]: ...
def text(seconds: Mapping[str, float], origin: str) -> str: ...
