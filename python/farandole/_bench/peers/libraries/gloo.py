"""gloo, through torch.distributed."""

from __future__ import annotations

import os
import socket
import warnings
from functools import partial
from typing import Any

from farandole._bench import placement
from farandole._bench.layouts import COLLECTIVES, ROOT, Buffers
from farandole._bench.peers.libraries import Member, Unable, launched


def join() -> Member:
    rank, ranks = launched()
    placement.pin(rank, ranks)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    name_interface()
    warnings.filterwarnings("ignore", module="torch")
    dist.init_process_group("gloo")

    def make(ask: dict[str, Any]) -> Buffers:
        case = _GlooCase(dist, torch, ask, rank, ranks)
        try:
            case.prepare(0)
            case.call()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            what = f"{ask['collective']} of {ask['dtype']}"
            raise Unable(f"gloo refuses {what}: {str(error).partition(chr(10))[0]}") from error
        return case

    return Member(rank, ranks, f"torch {torch.__version__}", make)


def name_interface() -> None:
    """Tells gloo by which interface it reaches another host: it would go by this one's name."""
    from farandole._launch.agents.address import is_loopback, of_interfaces

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 1))  # sends nothing
        mine = probe.getsockname()[0]
    if is_loopback(mine):
        return
    for _, name in socket.if_nameindex():
        if of_interfaces(name) == mine:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


class _GlooCase(Buffers):
    def __init__(self, dist: Any, torch: Any, ask: dict[str, Any], rank: int, ranks: int) -> None:
        super().__init__(COLLECTIVES[ask["collective"]], ask["bytes"], ask["dtype"], rank, ranks)

        def tensor(array: Any) -> Any:
            if array is None:
                return None
            if ask["dtype"] == "bfloat16":
                return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
            return torch.from_numpy(array)

        if ask["collective"] == "reduce":  # in place: the root's result is in its input's memory
            self.output = self.input if rank == ROOT else None
        source, result = tensor(self.input), tensor(self.output)
        known = {"input": source, "output": result, "root": ROOT}
        known |= {"inputs": _parts(source, ranks), "outputs": _parts(result, ranks)}
        method, *arguments = _CALLS[ask["collective"]]
        call = getattr(dist, method)
        self.call = partial(call, *(known[name] for name in arguments))


def _parts(tensor: Any, ranks: int) -> Any:
    return None if tensor is None else list(tensor.chunk(ranks))


_CALLS = {  # function and what it takes
    "all_reduce": ("all_reduce", "output"),
    "broadcast": ("broadcast", "output", "root"),
    "all_gather": ("all_gather_into_tensor", "output", "input"),
    "reduce_scatter": ("reduce_scatter_tensor", "output", "input"),
    "reduce": ("reduce", "input", "root"),
    "gather": ("gather", "input", "outputs", "root"),
    "scatter": ("scatter", "output", "inputs", "root"),
    "all_to_all": ("all_to_all_single", "output", "input"),
}
