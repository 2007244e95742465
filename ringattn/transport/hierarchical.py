"""What a ring of two levels needs of its transports: which ranks share a node, and a transport within a node.

Owns the grouping of ranks by host. Refuses to know plans, and how the transports below move bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringattn.plan.ring_plan import Nodes
from ringattn.transport.base import Message, Transport, Work


def group_by_host(hosts: Sequence[str]) -> Nodes:
    """Ranks that share a host share a node, in the order in which hosts appear.

    Args:
        hosts: Every rank's host.

    Raises:
        ValueError: Hosts have unequal numbers of ranks.

    Example:
        >>> group_by_host(["a", "a", "b", "b"])
        ((0, 1), (2, 3))
    """
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    sizes = {host: len(ranks) for host, ranks in nodes.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(
            f"nodes='auto' must find equally many ring ranks on every host, got {sizes}; pass nodes=1 for a ring of one level"
        )
    return tuple(tuple(ranks) for ranks in nodes.values())


class WithinNode(Transport):
    """A transport that serves one level of a ring of two: visits come one by one, never gathered.

    Args:
        transport: What moves bytes within the node.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def post(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Work:
        """See `Transport.post`."""
        return self._transport.post(sends, receives, what)

    def reserve(self, num_bytes: int, replies: int = 0) -> None:
        """See `Transport.reserve`."""
        self._transport.reserve(num_bytes, replies)
