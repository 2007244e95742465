"""Shards over a torch process group: NCCL between GPUs, gloo between CPU processes.

Owns batched point-to-point transfers and their errors. Keeps the group's name, never the group: a live ProcessGroup at
interpreter exit aborts gloo processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ringattn.transport.base import Done, Parcel, Pending


def resolve_group(name: str) -> dist.ProcessGroup:
    """The living process group of that name, as `ProcessGroup.group_name` gives it."""
    return distributed_c10d._resolve_process_group(name)  # pyright: ignore


class _Works:
    """The works of one batch."""

    def __init__(self, works: list[dist.Work], peers: list[int], rank: int, what: str) -> None:
        self._works = works
        self._peers = peers
        self._rank = rank
        self._what = what

    def wait(self) -> None:
        for work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(
                    f"ring rank {self._rank}: {self._what}: the transfer with ring ranks {self._peers} failed or timed "
                    f"out; look for an earlier error on those ranks ({error})"
                ) from error


class ProcessGroupTransport:
    """One batched group of sends and receives per call.

    Args:
        group_name: Name of the process group.
        rank: This rank within the group.
    """

    def __init__(self, group_name: str, rank: int) -> None:
        self._group_name = group_name
        self._rank = rank

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel], what: str) -> Pending:
        """See `Transport.post`."""
        group = resolve_group(self._group_name)
        ops = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for peer, x in sends if x.numel()]
        ops += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for peer, x in receives if x.numel()]
        if not ops:
            return Done()
        peers = sorted({peer for peer, _ in (*sends, *receives)})
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise RuntimeError(f"ring rank {self._rank}: {what}: cannot reach ring ranks {peers} ({error})") from error
        return _Works(works, peers, self._rank, what)

    def reserve(self, num_bytes: int) -> None:
        """Sends leave from where they are: nothing is needed."""

    def gatherer(self) -> None:
        """Transfers are matched by both sides, group by group: nothing is fetched behind a peer's back."""
        return


class Agreement:
    """Lets the ranks of a group compare what they are about to do, through the group's key-value store.

    The store needs no device, no stream and no matching collective: a rank that refuses leaves its reason and raises
    at once, and the others find it when they come to compare.

    Args:
        group_name: Name of the process group.
        rank: This rank within the group.
        world_size: Ranks in the group.
        name: Prefix of the keys: the same on all ranks, different for each ring.
        timeout: How long to wait for the others.
    """

    def __init__(self, group_name: str, rank: int, world_size: int, name: str, timeout: timedelta) -> None:
        self._group_name = group_name
        self._rank = rank
        self._world_size = world_size
        self._name = name
        self._timeout = timeout
        self._round = 0

    def leave(self, text: str) -> None:
        """Leaves this rank's text for the current round and goes on to the next."""
        self._store().set(self._key(self._rank), text)
        self._round += 1

    def compare(self, text: str) -> list[str]:
        """Leaves this rank's text and returns the texts of all ranks, in rank order.

        Raises:
            RuntimeError: Some ranks did not come within the timeout; they are named.
        """
        store = self._store()
        keys = [self._key(peer) for peer in range(self._world_size)]
        store.set(keys[self._rank], text)
        try:
            store.wait(keys, self._timeout)
        except RuntimeError as error:
            missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
            raise RuntimeError(
                f"ring rank {self._rank}: ring ranks {missing} did not make this attention call within {self._timeout}; "
                f"all ranks of a ring must make the same calls in the same order"
            ) from error
        self._round += 1
        return [store.get(key).decode() for key in keys]

    def _key(self, peer: int) -> str:
        return f"ringattn/{self._name}/{self._round}/{peer}"

    def _store(self) -> Any:
        group = resolve_group(self._group_name)
        return distributed_c10d._get_process_group_store(group)
