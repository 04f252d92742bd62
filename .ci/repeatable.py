"""Whether a wheel says nothing of where and when it was built: .ci/repeatable.py WHEEL [OTHER]

Then two builds of a commit are equal, bit for bit. All entries have one time, SOURCE_DATE_EPOCH's
if that is set, and the modes 644 and 755. No library names a folder of this machine, or today's
date. With OTHER, a second build of the same commit, each entry that differs is named.
"""

from __future__ import annotations

import os
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

EVERYWHERE = {Path("/"), Path("/usr")}
FOLDERS = {Path.cwd(), Path.home(), Path(sys.prefix), Path(sys.base_prefix)} - EVERYWHERE
DATES = ("%b %e %Y", "%Y-%m-%d", "%Y/%m/%d")  # the first is __DATE__'s


def traces(wheel: zipfile.ZipFile) -> Iterator[str]:
    entries = wheel.infolist()
    times = {entry.date_time for entry in entries}
    if epoch := os.environ.get("SOURCE_DATE_EPOCH"):
        times.add(time.gmtime(int(epoch) // 2 * 2)[:6])  # an archive's clock has even seconds
    if len(times) > 1:
        yield f"entries are of {len(times)} times: {sorted(times)[:4]}"
    if modes := {oct(entry.external_attr >> 16 & 0o777) for entry in entries} - {"0o644", "0o755"}:
        yield f"entries have the modes {', '.join(sorted(modes))}"
    words = [f"{folder}/" for folder in FOLDERS] + [time.strftime(form) for form in DATES]
    for entry in entries:
        if entry.filename.endswith((".so", ".fatbin")):
            image = wheel.read(entry)
            yield from (f"{entry.filename} has {w!r}" for w in words if w.encode() in image)


def differences(one: zipfile.ZipFile, other: zipfile.ZipFile) -> Iterator[str]:
    names = {*one.namelist()} | {*other.namelist()}
    both = {*one.namelist()} & {*other.namelist()}
    yield from (f"{name} is in one of the wheels" for name in sorted(names - both))
    if names == both and one.namelist() != other.namelist():
        yield "the entries are in another order"
    for name in sorted(both):
        about = [wheel.getinfo(name) for wheel in (one, other)]
        if len({(entry.external_attr, entry.date_time) for entry in about}) > 1:
            yield f"{name} has another mode or time"
        ours, theirs = one.read(name), other.read(name)
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
            yield f"{name} differs from byte {at} on: {ours[at:][:40]!r}, {theirs[at:][:40]!r}"


def main(wheel: str, *others: str) -> int:
    with zipfile.ZipFile(wheel) as archive:
        found = list(traces(archive))
        for other in others:
            with zipfile.ZipFile(other) as second:
                found += differences(archive, second)
    if not found and any(Path(wheel).read_bytes() != Path(other).read_bytes() for other in others):
        found.append("all entries are equal, and the archives differ")
    equal = ", and two builds are equal" if others else ""
    print("\n".join(found) or f"{Path(wheel).name}: no folder and no time of its own{equal}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
