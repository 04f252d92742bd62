"""How ranks are divided among hosts, written as text."""

from __future__ import annotations


def host_of_each(text: str, ranks: int | None = None) -> list[int]:
    """The host of each rank, by number.

    Args:
        text: how many ranks each host has, in their order, as in ``"2,1"``, or the host of each
            rank, as in ``"0:1:0"``.
        ranks: how many there have to be; None: as many as the text says.

    Raises:
        ValueError: the text is neither, or is for another number of ranks.

    >>> host_of_each("2,1", 3), host_of_each("0:1:0", 3)
    ([0, 0, 1], [0, 1, 0])
    """
    try:
        if ":" in text:
            hosts = [int(host) for host in text.split(":")]
        else:
            counts = [int(count) for count in text.split(",")]
            hosts = [host for host, count in enumerate(counts) for _ in range(count)]
    except ValueError:
        hosts = []
    if not hosts or ranks not in (None, len(hosts)):
        these = "ranks" if ranks is None else f"{ranks} ranks"
        raise ValueError(
            f"{text} does not divide {these} among hosts: pass how many each host has, as 2,1, or "
            "the host of each rank, as 0:1:0"
        )
    return hosts
