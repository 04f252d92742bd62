"""``farandole info --why SIZE --memory device``: which way a collective on arrays of CUDA devices
would go, and why."""

from __future__ import annotations

from typing import Any

# Limits of kernels that wait for others, on devices of 128 multiprocessors: csrc/cuda/plans.cpp.
_SPIN_BYTES = 64 * 4096
_LANES, _PIECE_BYTES = 32, 8 << 20


def answer(asked: dict[str, str], ranks: int, size: int) -> dict[str, Any]:
    """Question, choice and candidates, as plain values. Raises InvalidArgument for a question that
    makes no sense."""
    from farandole import _core
    from farandole._limits import setting

    chosen_by = setting("FARANDOLE_DEVICE_PATH")
    longest = size * (ranks if asked["collective"] in ("all_gather", "all_to_all") else 1)
    shared = asked["memory"] == "shared-device"
    spin_bytes = 0 if shared and chosen_by != "spin" else _SPIN_BYTES
    lanes = 0 if shared and chosen_by != "lanes" else _LANES
    rows = _core.tuning.explain_devices(
        asked["collective"], longest, ranks, spin_bytes, chosen_by,
        dtype=asked["dtype"], level=asked["level"], no_nccl=_why_no_nccl(asked),
        switched=_have_switch(), lanes=lanes, piece_bytes=_PIECE_BYTES,
        staged_piece_bytes=int(setting("FARANDOLE_STAGED_PIECE_BYTES")),
        take_turns=shared and ranks > 1,
    )  # fmt: skip
    return {
        "question": {**asked, "ranks": ranks, "bytes": size},
        "choice": next(row["name"] for row in rows if row["chosen"]),
        "forced": chosen_by if chosen_by != "auto" else None,
        "candidates": [{**row, "why": _verdict(dict(row))} for row in rows],
    }


def _why_no_nccl(asked: dict[str, str]) -> str:
    """As ranks of this host would say."""
    from farandole import _core, cuda

    if asked["memory"] == "shared-device" and asked["ranks"] != "1":
        return "NCCL takes one rank on a device, and these share one"
    try:
        cuda.nccl_library()
    except (_core.Error, ImportError) as error:
        return str(getattr(error, "verdict", error))
    return ""


def _have_switch() -> bool:
    """Whether a switch joins all devices of this host."""
    from farandole import _core, cuda

    try:
        return all(device.folds_by_switch for device in cuda.devices())
    except (_core.Error, ImportError):
        return False


def _verdict(row: dict[str, Any]) -> str:
    if row["refusal"]:
        return str(row["refusal"])
    return "chosen" if row["chosen"] else "predicted to take longer, or not asked for"


def show(facts: dict[str, Any]) -> None:
    from farandole._bench.statistics import format_microseconds, format_size
    from farandole.cli._terminal import print_table

    q = facts["question"]
    whose = "one device, without MPS" if q["memory"] == "shared-device" else "a device each"
    title = (
        f"{q['collective']} of {format_size(q['bytes'])} {q['dtype']}, {q['ranks']} ranks of this "
        f"host with {whose}: {facts['choice']}"
    )
    rows = [
        (
            row["name"],
            row["words"],
            format_microseconds(1e9 * row["seconds"]).rjust(9),
            row["why"],
        )
        for row in facts["candidates"]
    ]
    print_table(title, ("name", "what", "us", "why"), rows)
    print("times follow from what devices are said to do, turns from an H200; none measured here")
    if facts["forced"]:
        print(f"FARANDOLE_DEVICE_PATH={facts['forced']} chooses that one where it can run")
