"""Reads what `FARANDOLE_TRACE` wrote: puts the ranks' parts together, and sums up where time went.

    parts.py    what a rank wrote; the newest run in a directory
    salvage.py  the parts of ranks that could not write them
    clocks.py   the clocks of several hosts as one
    merging.py  its parts as one file for Perfetto and Chrome
    figures.py  where the time went, as numbers
    waiting.py  the times in which ranks waited for another one
    timeline.py a trace of a part of a run
    text.py     the same as tables and JSON

A part is `rank-N.jsonl`: one event of Chrome's trace format a line, the first of which says which
run and rank it is of. Times are microseconds of the host's steady clock, which its ranks share; of
other hosts than rank 0's they are turned into those of its clock when parts are read or merged.
Needs numpy never, and the native core where a rank was killed.
"""

from __future__ import annotations

from farandole._trace.figures import overlap_share, summary, union
from farandole._trace.merging import MERGED, announce, gather, merge, merge_if_complete, salvage
from farandole._trace.parts import TraceError, load, runs_in
from farandole._trace.salvage import recover
from farandole._trace.text import compare, render, to_json

__all__ = [
    "MERGED",
    "TraceError",
    "announce",
    "compare",
    "gather",
    "load",
    "merge",
    "merge_if_complete",
    "overlap_share",
    "recover",
    "render",
    "runs_in",
    "salvage",
    "summary",
    "to_json",
    "union",
]
