"""Process groups by name: found at each use, never kept (Note [Names] of ring.py)."""

from __future__ import annotations

import os
import weakref

import torch.distributed as dist
from torch.distributed import distributed_c10d  # pyright: ignore[reportPrivateImportUsage]


def resolve_group(name: str, place: tuple[int, int] | None = None) -> dist.ProcessGroup:
    """Return the live process group of that name, as `ProcessGroup.group_name` gives it.

    Args:
        name: The name, which may come again when groups were destroyed and made again.
        place: This process's rank in it, and its size; None: any.

    Raises:
        RuntimeError: There is none, or it is another one, or one of the process that this one was forked from.
    """
    group = distributed_c10d._resolve_process_group(name)  # pyright: ignore
    if _DISOWNED and group in _DISOWNED:
        raise RuntimeError(
            "a ring must be used by the process that made its group, got a call in a process that was forked from it, which "
            "has no connections; make the call in the parent, or start the process by spawn and make a group there"
        )
    if place is not None and place != (group.rank(), group.size()):
        raise RuntimeError(
            f"a ring must be used in the process group that it was made in, as rank {place[0]} of {place[1]}, got another one of "
            f"that name, in which this process is rank {group.rank()} of {group.size()}; make the Ring again after the group"
        )
    return group


_DISOWNED: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups of the process that this one was forked from, to which their connections belong."""


def _disown_groups() -> None:
    if dist.is_available() and dist.is_initialized():
        _DISOWNED.update(distributed_c10d._world.pg_map)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_disown_groups)


_PARTS: dict[str, dist.ProcessGroup] = {}


def name_part(name: str, parent: str, rank: int, size: int) -> None:
    """Name some ranks of a group, so that torch's symmetric memory finds them; each of them calls it.

    The name belongs to a group without a backend: its members, and a store. A second call with the same name has no effect.

    Args:
        name: The same on these ranks, and of no other ranks of this process's groups.
        parent: Name of the group, whose store serves.
        rank: This process's place among these ranks.
        size: Their number.
    """
    if name in _PARTS:
        return
    from torch._C import _distributed_c10d as c10d
    from torch.distributed import _symmetric_memory as symmetric

    store = dist.PrefixStore(name, distributed_c10d._get_process_group_store(resolve_group(parent)))  # pyright: ignore
    part = _PARTS[name] = dist.ProcessGroup(store, rank, size)
    # versions of torch read different ones of these
    c10d._register_process_group(name, part)  # pyright: ignore[reportArgumentType]
    c10d._SymmetricMemory.set_group_info(name, rank, size, store)
    getattr(symmetric, "_group_name_to_store", {})[name] = store
