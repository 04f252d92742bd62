"""The name of the ``torch.distributed`` backend, for PyTorch to find by itself.

PyTorch calls ``register`` at the end of its own import, in every program: it costs nothing but the
name, and what is heavy or may fail waits until a process group is made.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    import torch.distributed as dist

    # A stripped build has none. A program that has imported the backend has registered it.
    if dist.is_available() and "FARANDOLE" not in dist.Backend._plugins:
        dist.Backend.register_backend("farandole", _make, devices=["cpu", "cuda"])


def _make(*arguments: Any) -> Any:
    from farandole.torch.distributed import FarandoleProcessGroup

    return FarandoleProcessGroup(*arguments)
