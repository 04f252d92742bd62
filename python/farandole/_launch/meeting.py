"""Where the ranks of a job meet: at an address of the first host, by which the others reach it."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from farandole._launch.agents.address import is_ours, of_interfaces
from farandole._launch.place import Place
from farandole._launch.ranks import Rendezvous, new_run_id


def where_to_meet(places: Sequence[Place], interface: str) -> Rendezvous:
    """`interface`: where this host's address is to be, if that is asked for.

    A place whose address is not known is on this host; what the others see of it is surest.
    """
    first = places[0]
    seen = (place.launchers_address for place in places)
    address = (
        first.address
        or next((one for one in seen if one and is_ours(one)), "")
        or of_interfaces(interface)
        or socket.gethostname()
    )
    return Rendezvous(address, first.port, new_run_id())
