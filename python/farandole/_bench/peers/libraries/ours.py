"""farandole, under its own launcher or under an MPI's, over whose transport it then can run."""

from __future__ import annotations

from typing import Any

from farandole._bench import placement
from farandole._bench.layouts import COLLECTIVES, Buffers
from farandole._bench.peers.libraries import Member, Unable, launched


def join() -> Member:
    rank, ranks = launched()
    placement.pin(rank, ranks)
    import farandole as fd
    from farandole._bench.collectives import Case

    fd.init()

    def make(ask: dict[str, Any]) -> Buffers:
        row = COLLECTIVES.get(ask["collective"])
        if row is None:
            raise Unable(f"farandole {fd.__version__} has no {ask['collective']}")
        try:
            case = Case(row, ask["bytes"], ask["dtype"], ask["memory"], ask["options"])
            case.prepare(0)
            case.call()
        except fd.InvalidArgument as error:
            raise Unable(str(error).partition("\n")[0]) from error
        return case

    return Member(rank, ranks, fd.__version__, make, lambda: str(fd.world().last_path))
