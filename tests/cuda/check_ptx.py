"""Looks for faults in the kernels' PTX that no run on a host can show.

    check_ptx.py build/farandole_cuda.ptx

Scopes narrower than the system's, the non-coherent cache, contracted or flushed arithmetic, and
accesses to peers' memory that went past the accessors of csrc/cuda/kernels/device.h.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# Patterns that no instruction may match, and why.
FORBIDDEN = {
    r"\bld\.(global\.)?nc\b": "reads through the cache that nobody invalidates",
    r"\b(ld|st|atom|red|fence|membar)\b[\w.]*\.(gpu|cta|cluster|gl)\b": "stays on the device",
    r"\b(ld|st)\b[\w.]*\.volatile\b": "has no stated scope",
    r"\bfma\.r\w[\w.]*\.f(32|64)\b": "rounds once where two roundings are promised",
    r"\.ftz\b": "flushes subnormals",
    r"\.approx\b": "is not rounded correctly",
}
# An instruction that each matching kernel must have.
NEEDED = {
    r"farandole_(one_shot|lanes|await|graph_pass)": "ld.acquire.sys.global",
    r"farandole_(one_shot|lanes|(graph_)?arrive)": "st.release.sys.global",
    r"farandole_graph_(begin|end)": "atom.acq_rel.sys.global.add",
    r"farandole_(fold|one_shot|lanes)": "ld.relaxed.sys.global.v4",
}
# These kernels move 16 bytes at a time by the accessors alone, which name their scope. One-shot
# also reads and writes arrays of its own device.
REACHES_PEERS = re.compile(r"farandole_(fold|lanes)")
PLAIN_BULK = re.compile(r"\b(ld|st)(\.global)?\.(v4\.[bfu]32|v2\.[bfu]64)\b")
ENTRY = re.compile(r"\.entry (\w+)\(([^)]*)\)", re.DOTALL)


def entries(ptx: str) -> dict[str, tuple[str, str]]:
    """Parameters and body of every kernel."""
    found = list(ENTRY.finditer(ptx))
    ends = [*(match.start() for match in found[1:]), len(ptx)][: len(found)]
    return {m[1]: (m[2], ptx[m.end() : end]) for m, end in zip(found, ends, strict=True)}


def faults_of_kernel(name: str, parameters: str, body: str) -> list[str]:
    count = parameters.count(".param")
    found = [] if count == 1 else [f"{name} has {count} parameters, not one"]
    found += [
        f"{name} has no {word}"
        for kernels, word in NEEDED.items()
        if re.match(kernels, name) and word not in body
    ]
    if REACHES_PEERS.match(name):
        found += [
            f"{name}: {line.strip()!r} goes past load_peer and store_peer"
            for line in body.splitlines()
            if PLAIN_BULK.search(line)
        ]
    return found


def faults(ptx: str) -> list[str]:
    """One line each; empty for what is as it should be."""
    found = [
        f"line {number}: {line.strip()!r} {why}"
        for number, line in enumerate(ptx.splitlines(), 1)
        for pattern, why in FORBIDDEN.items()
        if re.search(pattern, line.partition("//")[0])
    ]
    kernels = entries(ptx)
    for name, (parameters, body) in kernels.items():
        found += faults_of_kernel(name, parameters, body)
    return found if kernels else [*found, "there is no kernel"]


if __name__ == "__main__":
    lines = [line for file in sys.argv[1:] for line in faults(Path(file).read_text())]
    print("\n".join(lines) or "no faults")
    sys.exit(bool(lines))
