"""The name that somebody probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from farandole._words import CommandError


def did_you_mean(written: str, known: Iterable[str]) -> str:
    """'; did you mean NAME?', or nothing."""
    near = difflib.get_close_matches(written, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def check_known(option: str, written: str, known: Sequence[str]) -> None:
    """Raises CommandError for a value that there is not."""
    if written not in known:
        near = did_you_mean(written, known)
        raise CommandError(f"{option} {written} is unknown; there are {', '.join(known)}{near}")


# Options of other launchers, by the names of ours.
_ELSEWHERE = {
    "-np": "--np --nproc --nprocs --nproc-per-node --ntasks --num-processes --num-workers",
    "-H": "--host --nodelist --nnodes --nodes --npernode --num-machines",
    "-x": "--env --export -genv",
    "--output-dir": "--log-dir --tee --redirects --output",
    "--restarts": "--max-restarts",
    "--bind": "--bind-to --map-by --cpu-bind --numa-binding",
    "--timeout": "--time --time-limit",
    "OMP_NUM_THREADS": "--cpus-per-task --num-cpu-threads-per-process",
}
_OURS = {theirs: ours for ours, names in _ELSEWHERE.items() for theirs in names.split()}


def of_launchers(option: str) -> str:
    """Our word for an option of torchrun, mpirun, srun or accelerate; or nothing."""
    ours = _OURS.get(option.partition("=")[0].replace("_", "-"))
    if ours is None:
        return ""
    return f"; here that is {ours}" if ours.startswith("-") else f"; set {ours} instead"


def of_arguments(message: str, options: Iterable[str]) -> str:
    """The suggestion for argparse's message about an unknown option or choice."""
    found = re.search(r"unrecognized arguments: (\S+)", message)
    if found and (ours := of_launchers(found[1])) and "-np" in options:
        return ours
    if found := re.search(r"unrecognized arguments: .*?(--[\w-]+)", message):
        return did_you_mean(found[1], (option for option in options if option.startswith("--")))
    if found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
        return did_you_mean(found[1], re.findall(r"[\w-]+", found[2]))
    return ""


def refused(why: Exception | str) -> CommandError:
    """The core's verdict, which is the first line: evidence and advice would repeat the options."""
    verdict = str(why.args[0] if isinstance(why, Exception) else why).splitlines()[0]
    return CommandError(verdict + _of_verdict(verdict))


def _of_verdict(verdict: str) -> str:
    """The suggestion about an unknown collective or algorithm."""
    if "did you mean" in verdict:
        return ""
    from farandole import _core

    planners = _core.schedule.planners()
    if found := re.search(r"there is no collective '(.*?)'", verdict):
        return did_you_mean(found[1], {row["collective"] for row in planners})
    if found := re.search(r"algorithm '(.*?)' does not exist for (\w+)", verdict):
        names = [row["name"] for row in planners if row["collective"] == found[2]]
        names += [p["name"] for p in _core.tuning.paths() if found[2] in p["collectives"]]
        return did_you_mean(found[1], names)
    return ""
