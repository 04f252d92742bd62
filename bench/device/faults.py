"""The effect on other ranks when a rank is killed or stopped, when its device has no memory left,
or when another kernel of its process has used a wrong address: python bench/device/faults.py

In each case all others get one verdict, which names the rank, within two seconds; their devices
come to rest, so no kernel spins and no stream waits; and their memory comes back. A line for each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import Differs, Skipped, last_words, ran

from farandole import _core, cuda

HERE = Path(__file__).resolve().parent
RANKS, VICTIM = 3, 1
SOON = 2.0  # seconds
PIECE, SLACK = 64 << 20, 64 << 20  # a bucket is two pieces; kernels stay on the device
LIMIT = 75  # seconds for the ranks of a case


@dataclass(frozen=True)
class Fault:
    """`kind`: of the verdict; empty: there is none. `hears`: the rank itself hears it, too."""

    case: str
    path: str
    kind: str
    hears: bool = False
    framework: str = ""
    ranks: int = RANKS


FAULTS = {
    "killed, others by steps": Fault("killed", "step", "PeerLost"),
    "killed, others by lanes": Fault("killed", "lanes", "PeerLost"),
    "killed, others by one kernel": Fault("killed, small", "spin", "PeerLost"),
    "killed, others by way of the host": Fault("killed", "staged", "PeerLost"),
    "killed, others in training": Fault(
        "killed in training", "", "PeerLost", framework="torch", ranks=2
    ),
    "stopped, others by steps": Fault("stopped", "step", "PeerHung", hears=True),
    "a kernel has used a wrong address": Fault("wrong address", "step", "DeviceError", hears=True),
    "no memory left on the device": Fault("no memory", "step", "", hears=True),
}


def why_not(fault: Fault, on_host: bool) -> str:
    if fault.framework and importlib.util.find_spec(fault.framework) is None:
        return f"there is no {fault.framework}"
    if on_host and fault.framework:
        return ""
    try:
        cuda.devices()
    except _core.Error as error:
        return str(error).splitlines()[0]
    return ""


def outcome(fault: Fault, on_host: bool) -> str:
    if why := why_not(fault, on_host):
        raise Skipped(why)
    command = [sys.executable, "-m", "farandole", "run", "--no-prefix", "--grace", str(LIMIT)]
    command += [
        "-np",
        str(fault.ranks),
        "--",
        sys.executable,
        str(HERE / "faulty_rank.py"),
        fault.case,
    ]
    told = {"FARANDOLE_DEVICE_BUCKET_BYTES": str(PIECE)}
    if fault.path:
        told["FARANDOLE_DEVICE_PATH"] = fault.path
    printed = ran(command + ["--device=cpu"] * on_host, LIMIT, **told)
    lines = [line for line in printed.splitlines() if line.startswith("saw ")]
    seen = {each["rank"]: each for each in (json.loads(line[4:]) for line in lines)}
    for rank in range(fault.ranks):
        if rank not in seen and (fault.hears or rank != VICTIM):
            raise RuntimeError(f"rank {rank} has not come to its end{last_words(printed)}")
    return judged(fault, seen)


def judged(fault: Fault, seen: dict[int, dict[str, Any]]) -> str:
    """The words of a case in which all ranks saw what they should; raises Differs."""
    for each in seen.values():
        if "skipped" in each:
            raise Skipped(each["skipped"])
    wrong = [f"rank {rank}: {each['wrong']}" for rank, each in seen.items() if "wrong" in each]
    verdicts = {each.get("verdict", "") for each in seen.values()}
    kinds = {each.get("kind", "") for each in seen.values()}
    if len(verdicts) > 1:
        wrong.append(f"{len(verdicts)} verdicts: {' | '.join(sorted(verdicts))}")
    if kinds != {fault.kind}:
        wrong.append(f"the verdict is a {' and a '.join(sorted(kinds))}, not a {fault.kind}")
    if fault.kind and f"rank {VICTIM}" not in "".join(verdicts):
        wrong.append(f"the verdict names no rank {VICTIM}: {' '.join(verdicts)}")
    wrong += [
        f"rank {rank} lacks {each['lacking'] >> 20} MiB of its device's memory"
        for rank, each in seen.items()
        if each.get("lacking", 0) > SLACK
    ]
    if not fault.kind:
        if wrong:
            raise Differs("; ".join(wrong))
        return f"results are right, by {seen[0]['path']}; memory came back"
    struck = next((each["struck"] for each in seen.values() if "struck" in each), None)
    if struck is None:
        saw = (f"rank {rank} saw {json.dumps(each)}" for rank, each in sorted(seen.items()))
        raise Differs("; ".join([*wrong, "it did not come to that fault", *saw]))
    for rank, each in seen.items():
        for what in ("heard", "rested"):
            after = each.get(what, struck) - struck
            if after > SOON and rank != VICTIM:
                wrong.append(f"rank {rank} has {what} after {after:.1f} s")
    if wrong:
        raise Differs("; ".join(wrong))
    late = max(each.get("rested", struck) for each in seen.values()) - struck
    return f"{fault.kind} on all, and devices at rest, within {late:.1f} s: {verdicts.pop()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="of PyTorch's")
    parser.add_argument("faults", nargs="*")
    given = parser.parse_args()
    well = True
    for name in given.faults or FAULTS:
        try:
            line = f"ok: {outcome(FAULTS[name], given.device == 'cpu')}"
        except Skipped as why:
            line = f"skipped: {why}"
        except Differs as error:
            line, well = f"differs: {error}", False
        except (RuntimeError, ValueError) as error:
            line, well = f"failed: {error}", False
        print(f"{name}: {line}", flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
