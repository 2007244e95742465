"""Grouping of ranks by host, and the transport within a node of a hierarchical ring."""

from __future__ import annotations

from collections.abc import Sequence

from ringattn.plan.ring_plan import Nodes
from ringattn.transport.base import Message, Transport, Work


def group_by_host(hosts: Sequence[str]) -> Nodes:
    """Return the nodes of a ring: ranks of one host share a node, in the order in which hosts appear.

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
    """A transport within a node that has no gather: a stepwise schedule uses it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def post(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Work:
        """See `Transport.post`."""
        return self._transport.post(sends, receives, what)

    def reserve(self, num_bytes: int, grad_bytes: int = 0) -> None:
        """See `Transport.reserve`."""
        self._transport.reserve(num_bytes, grad_bytes)
