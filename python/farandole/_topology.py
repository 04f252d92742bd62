"""The processors of this host, by NUMA node and by core, as Linux shows them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

SYSTEM = Path("/sys/devices/system")


def nodes(system: Path = SYSTEM) -> Iterator[set[int]]:
    """The processors of each NUMA node; none where the kernel knows of none."""
    folders = (system / "node").glob("node[0-9]*")
    for folder in sorted(folders, key=lambda one: int(one.name[4:])):
        yield _listed((folder / "cpulist").read_text())


def cores(cpus: set[int], system: Path = SYSTEM) -> list[set[int]]:
    """By core, in order: its threads among `cpus`."""
    found: dict[int, set[int]] = {}
    for cpu in sorted(cpus):
        file = system / f"cpu/cpu{cpu}/topology/thread_siblings_list"
        threads = _listed(file.read_text()) if file.exists() else {cpu}
        found.setdefault(min(threads & cpus or {cpu}), set()).add(cpu)
    return list(found.values())


def _listed(text: str) -> set[int]:
    """'0-3,8' as numbers."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
