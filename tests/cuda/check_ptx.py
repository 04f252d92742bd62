"""Looks for faults in the kernels' PTX that no run on a host can show.

    check_ptx.py build/farandole_cuda.ptx

Scopes narrower than the system's, the non-coherent cache, contracted or flushed arithmetic, and
accesses to peers' memory that went past the accessors of csrc/cuda/kernels/device.h.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# What an instruction must not have, and why.
FORBIDDEN = {
    r"\bld\.(global\.)?nc\b|\bld\.global\.nc": "reads through the cache that nobody invalidates",
    r"\b(ld|st|atom|red|fence|membar)\b[\w.]*\.(gpu|cta|cluster|gl)\b": "does not reach other devices",
    r"\b(ld|st)\b[\w.]*\.volatile\b": "has no stated scope",
    r"\bfma\.(rn|rz|rm|rp)[\w.]*\.f(32|64)\b": "rounds once where two roundings are promised",
    r"\.ftz\b": "flushes subnormals",
    r"\.approx\b": "is not rounded correctly",
}
# Kernels that reach peers' memory move bulk data by the accessors alone; these have "relaxed.sys".
# One-shot also reads and writes arrays of its own device.
REACHES_PEERS = re.compile(r"farandole_(two_shot|deliver)")
PLAIN_BULK = re.compile(r"\b(ld|st)(\.global)?\.v[24]\b")
ENTRY = re.compile(r"\.entry (\w+)\(([^)]*)\)", re.DOTALL)


def entries(ptx: str) -> dict[str, tuple[str, str]]:
    """Parameters and body of every kernel."""
    found = list(ENTRY.finditer(ptx))
    ends = [match.start() for match in found[1:]] + [len(ptx)]
    return {m[1]: (m[2], ptx[m.end() : end]) for m, end in zip(found, ends, strict=True)}


def faults(ptx: str) -> list[str]:
    """One line each; empty for what is as it should be."""
    lines = [
        f"line {number}: {line.strip()!r} {why}"
        for number, line in enumerate(ptx.splitlines(), 1)
        for pattern, why in FORBIDDEN.items()
        if re.search(pattern, line.partition("//")[0])
    ]
    for name, (parameters, body) in entries(ptx).items():
        if parameters.count(".param") != 1:
            lines.append(f"{name} has {parameters.count('.param')} parameters, not one")
        if REACHES_PEERS.match(name):
            lines += [
                f"{name}: {line.strip()!r} goes past load_peer and store_peer"
                for line in body.splitlines()
                if PLAIN_BULK.search(line)
            ]
            if name != "farandole_deliver" and ".relaxed.sys.global.v4" not in body:
                lines.append(f"{name} has no access of 16 bytes")
        if re.match("farandole_(two_shot|one_shot|deliver|await)", name):
            lines += [
                f"{name} never {what}"
                for what, word in {"acquires": "ld.acquire.sys"}.items()
                if word not in body
            ]
        if re.match("farandole_(two_shot|one_shot|deliver|arrive)", name):
            if "st.release.sys" not in body:
                lines.append(f"{name} never releases")
    if not entries(ptx):
        lines.append("no kernel")
    return lines


if __name__ == "__main__":
    found = faults(Path(sys.argv[1]).read_text())
    print("\n".join(found) or "no faults")
    sys.exit(bool(found))
