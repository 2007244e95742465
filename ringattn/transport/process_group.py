"""Transport over a torch process group: NCCL between GPUs, gloo between CPU processes.

Note [Few channels]
    NCCL moves bytes with SMs that the attention kernel then lacks, as many as its communicator has channels. A ring
    therefore has NCCL communicators of its own, limited to a few channels (`max_ctas` also limits sends and receives),
    on a stream of high priority, so that a transfer is not queued behind the kernel that it should run beside, and
    without thread block clusters, which would have to wait for neighbouring SMs. They are no process groups of torch:
    `dist.new_group` counts the groups of this process for a name, and members need not agree on that number.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from ringattn.transport.base import Done, Message, Transport, Work

# torch 2.13 renames the collective and warns of the old name
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""All-gather of equal tensors into one."""


def resolve_group(name: str, place: tuple[int, int] | None = None) -> dist.ProcessGroup:
    """Return the live process group of a name, in which this process has this (rank, size), else raise RuntimeError."""
    try:
        group = distributed_c10d._resolve_process_group(name)  # pyright: ignore
    except RuntimeError as error:
        raise RuntimeError(
            f"a ring must be used while its process group exists, got a call after group {name!r} was destroyed; call "
            "destroy_process_group() last, or make the Ring again after the next init_process_group()"
        ) from error
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


@dataclass(eq=False)
class _Works:
    """The works of one batch, and (target, host copy) of received tensors that belong on a GPU."""

    works: list[dist.Work]
    peers: list[int]
    rank: int
    what: str
    host_copies: Sequence[tuple[Tensor, Tensor]] = ()

    def wait(self) -> None:
        for work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(
                    f"ring rank {self.rank}: {self.what}: the transfer with ring ranks {self.peers} failed or timed "
                    f"out; look for an earlier error on those ranks ({error})"
                ) from error
        for x, host in self.host_copies:
            x.copy_(host)


_COMMUNICATORS: dict[str, dist.ProcessGroup] = {}
_MADE: Counter[str] = Counter()


def make_communicator(name: str, parent: dist.ProcessGroup, device: torch.device, max_ctas: int) -> None:
    """Make a named NCCL communicator of a group's ranks (Note [Few channels]); every rank must call it."""
    _MADE[name] += 1
    rank, size = dist.get_rank(parent), dist.get_world_size(parent)
    # a store keeps the keys of a communicator that has ended: each one needs a prefix of its own
    prefix = f"ringattn/nccl/{name}/{_MADE[name]}"
    try:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.max_ctas = max_ctas
        options.config.cga_cluster_size = 0
        options._timeout = parent._get_backend(device).options._timeout
        options.global_ranks_in_group = dist.get_process_group_ranks(parent)
        options.group_name = prefix  # pyright: ignore[reportAttributeAccessIssue]
        store = dist.PrefixStore(prefix, distributed_c10d._get_process_group_store(parent))  # pyright: ignore
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
        backend._set_sequence_number_for_group()
        group = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
        # NCCL wants its first operation on a communicator to be one that all ranks take part in
        group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.synchronize(device)
    except (RuntimeError, AttributeError) as error:
        raise RuntimeError(
            f"ring rank {rank}: NCCL must make a communicator of at most {max_ctas} thread blocks, got {error}; "
            f"pass another nccl_max_ctas to the Ring, or None for the group's own communicator"
        ) from error
    _COMMUNICATORS[name] = group


def end_communicator(name: str) -> None:
    """Shut down the communicator of that name, if there is one; every rank must call it."""
    group = _COMMUNICATORS.pop(name, None)
    if group is not None:
        group.shutdown()


@atexit.register
def _end_all() -> None:
    # orderly ends wait for the device
    if _ABORTING:
        return
    for name in sorted(_COMMUNICATORS):
        end_communicator(name)


_ABORTING: list[threading.Thread] = []


def abort_communicators(group_name: str, links: Sequence[str], device: torch.device) -> None:
    """Abort the collectives that a ring's NCCL kernels wait for, as torch's watchdog does for plain calls; returns at once.

    An abort raises a flag that the kernels poll, and then waits for graphs that were captured with the communicator: so it runs in
    threads that are not joined. Other backends time out by themselves.
    """
    if device.type != "cuda":
        return
    groups = [group for name in links if (group := _COMMUNICATORS.pop(name, None)) is not None]
    with contextlib.suppress(RuntimeError):
        groups.append(resolve_group(group_name))
    for group in groups:
        thread = threading.Thread(target=_abort, args=(group, device), daemon=True, name="ringattn abort")
        _ABORTING.append(thread)
        thread.start()


def _abort(group: dist.ProcessGroup, device: torch.device) -> None:
    # the failure has been raised already
    with contextlib.suppress(Exception):
        group._get_backend(device).abort()


_PARTS: dict[str, dist.ProcessGroup] = {}


def name_part(name: str, parent: str, rank: int, size: int) -> None:
    """Name some ranks of a group, so that torch's symmetric memory finds them; each of them calls it with its rank among them.

    The name belongs to a group without a backend: its members, and the store of the parent.
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


@dataclass(eq=False)
class _Marked:
    """A post whose rows may be read once the call marks that travel beside them are equal."""

    works: _Works
    marks: Tensor
    differ: Callable[[], NoReturn]
    post: Work

    def wait(self) -> None:
        self.works.wait()
        if len(set(self.marks.tolist())) > 1:
            self.differ()
        self.post.wait()


class ProcessGroupTransport(Transport):
    """Transport with one batched group of sends and receives per post.

    A group has one order of messages between two ranks, whoever sends them: messages of two rings in two threads, or of two calls
    after a rank has left one out, would be mistaken for each other. So with gloo the tag of a message is a hash of the ring, the
    number of the post and its purpose, and a receive of another message raises. NCCL has no tags: there a ring has
    communicators of its own, of at most max_ctas thread blocks (None: that of the group). Gloo reads and writes host memory only,
    so rows of GPUs are copied to the host and back.
    """

    def __init__(
        self, group_name: str, rank: int, world_size: int, name: str = "", max_ctas: int | None = None
    ) -> None:
        self._group_name = group_name
        self._rank = rank
        self._place = rank, world_size
        self._name = name
        self._max_ctas = max_ctas
        self._name_mark, self._posts = zlib.crc32(name.encode()), 0
        self._by_host = False
        self._is_gloo = False
        self._marks = self._call_mark = 0
        self._mark: tuple[list[dist.Work], Tensor, Callable[[], NoReturn]] | None = None

    def prepare(self, device: torch.device) -> None:
        """Make the communicator for tensors on a device; all ranks must call it before the first post."""
        group = resolve_group(self._group_name)
        # by name: with TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps gloo's class
        self._is_gloo = "cpu:gloo" in dist.get_backend_config(group)
        if device.type != "cuda" or self._name in _COMMUNICATORS:
            return
        is_nccl = dist.is_nccl_available() and isinstance(group._get_backend(device), dist.ProcessGroupNCCL)
        self._by_host = "cuda:gloo" in dist.get_backend_config(group)
        if is_nccl and self._max_ctas is not None:
            make_communicator(self._name, group, device, self._max_ctas)
        else:
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def close(self) -> None:
        """Shut down the communicator of `prepare`; every rank must call it."""
        end_communicator(self._name)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Work:  # noqa: D102
        pending = self._start(sends, receives, what)
        if self._mark is None:
            return pending
        (works, marks, differ), self._mark = self._mark, None
        peers = [peer for peer in range(self._place[1]) if peer != self._rank]

        def raise_difference() -> NoReturn:
            self._call_mark = 0  # equal on all ranks again
            differ()

        return _Marked(_Works(works, peers, self._rank, what), marks, raise_difference, pending)

    def sends_marks(self, device: torch.device) -> bool:
        """Return whether `send_mark` serves rows on a device: where gloo moves them."""
        return self._is_gloo and (self._by_host or device.type != "cuda")

    def send_mark(self, mark: int, differ: Callable[[], NoReturn]) -> None:
        """Send the 64-bit mark of a call to all ranks; the wait for the next post calls `differ` where marks differ."""
        self._marks += 1
        group = resolve_group(self._group_name, self._place)
        tag = zlib.crc32(b"mark", (self._name_mark + self._marks) % 2**32) % 2**31
        rank, size = self._place
        peers = [peer for peer in range(size) if peer != rank]
        marks = torch.full((size,), mark, dtype=torch.int64, device="cpu")
        try:
            works = [group.send([marks[rank : rank + 1]], peer, tag) for peer in peers]
            works += [group.recv([marks[peer : peer + 1]], peer, tag) for peer in peers]
        except RuntimeError as error:
            raise RuntimeError(f"ring rank {rank}: cannot reach ring ranks {peers} ({error})") from error
        self._mark, self._call_mark = (works, marks, differ), mark

    def _start(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Work:
        self._posts += 1  # empty ones count: all ranks make the same posts
        sends = [(peer, x) for peer, x in sends if x.numel()]
        receives = [(peer, x) for peer, x in receives if x.numel()]
        if not sends and not receives:
            return Done()
        peers = sorted({peer for peer, _ in (*sends, *receives)})
        host_copies = list[tuple[Tensor, Tensor]]()
        if self._by_host:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"ring rank {self._rank}: {what}: a ring that is captured into a CUDA graph must have a group of NCCL or the "
                    "copy engine, got gloo, which moves rows of GPUs through the host; call init_process_group('nccl')"
                )
            sends = [(peer, x.to("cpu", copy=True)) for peer, x in sends]
            host_copies = [(x, torch.empty(x.shape, dtype=x.dtype, device="cpu")) for _, x in receives]
            receives = [(peer, host) for (peer, _), (_, host) in zip(receives, host_copies, strict=True)]
        own = _COMMUNICATORS.get(self._name)
        try:
            works = self._batch(sends, receives, what) if own is None else _coalesce(own, sends, receives)
        except RuntimeError as error:
            raise RuntimeError(f"ring rank {self._rank}: {what}: cannot reach ring ranks {peers} ({error})") from error
        return _Works(works, peers, self._rank, what, host_copies)

    def _batch(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> list[dist.Work]:
        group = resolve_group(self._group_name, self._place)
        # the tag differs from that of other calls, whose sizes may differ
        mark = zlib.crc32(what.encode(), (self._name_mark + self._posts + self._call_mark) % 2**32) % 2**31
        ops = [dist.P2POp(dist.isend, x, group=group, group_peer=peer, tag=mark) for peer, x in sends]
        ops += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer, tag=mark) for peer, x in receives]
        return dist.batch_isend_irecv(ops)


def _coalesce(group: dist.ProcessGroup, sends: Sequence[Message], receives: Sequence[Message]) -> list[dist.Work]:
    """Do `dist.batch_isend_irecv` on a group that torch does not know of."""
    device = (sends or receives)[0][1].device
    group._start_coalescing(device)
    for peer, x in sends:
        group.send([x], peer, 0)
    for peer, x in receives:
        group.recv([x], peer, 0)
    return [group._end_coalescing(device)]
