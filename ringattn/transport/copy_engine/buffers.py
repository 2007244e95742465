"""Memory of one rank for its ring, which only grows, and the programs that were made for it.

Programs, views and tables of addresses follow from shapes and plans. They are made at the first call, and a later call finds them
by one look into a table. Growing buffers empty the table, so its entries always fit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringattn.kernels.interface import ReadyFlags
from ringattn.kernels.kv.pack import Cleared
from ringattn.plan.ring_plan import GatherPlan
from ringattn.transport.copy_engine.grad_return import GradReturnPrograms, grad_return_programs
from ringattn.transport.copy_engine.graph_cache import GraphCache
from ringattn.transport.copy_engine.kv_gather import Bias, GatherMemory, GatherPrograms, gather_programs, pad_rows
from ringattn.transport.copy_engine.peer_buffers import (
    MOST_GROUPS,
    PAYLOAD_ALIGNMENT,
    PeerBuffer,
    RemoteKVBuffer,
    padded,
    view_bytes,
)
from ringattn.transport.copy_engine.semaphores import Semaphores
from ringattn.transport.copy_engine.streams import Program, Streams
from ringattn.transport.copy_engine.symmetric_memory import Memory, aligned
from ringattn.transport.copy_engine.watchdog import DEVICE_INTS, ERROR, GATE, HOST_INTS, PROCEED, Watchdog

T = TypeVar("T")
S = TypeVar("S", bound=PeerBuffer)

MAX_PROGRAMS = 256
"""Most constant programs of a ring."""
SAVE_PROGRAMS = 256
"""Most addresses of saved rows for which one gather has programs."""
PAYLOADS = 16
"""Tensors of one kind in a post whose padding is reserved."""
PLAIN, GRADS = KINDS = range(2)
"""Kinds of messages; each has outboxes of its own."""
BOX_NAMES = ("outboxes", "outboxes of gradients")


@dataclass(eq=False)
class ZeroCopyKV:
    """A slot `b rows hk (d + dv)` that the caller fills, or that receives rows of another node; k and v are this rank's rows in it.

    Attributes:
        infos: Keys of the entries made for it (`RankBuffers.keep`).
    """

    slot: Tensor
    k: Tensor
    v: Tensor
    infos: set[Any] = field(default_factory=set)


outside_inference_mode = torch.inference_mode(False)
"""Decorator of functions that make tensors which outlive a call: later calls must be able to write and to save them."""


class RankBuffers:
    """The buffers and programs of a rank; base class of the transport.

    members are the ranks that reach each other's memory, in the order of the regions' addresses: all, or those of a node.
    timeout is seconds without progress after which the ring fails.
    """

    @outside_inference_mode
    def __init__(
        self, rank: int, members: Sequence[int], name: str, streams: Streams, memory: Memory, timeout: float
    ) -> None:
        self._rank = rank
        self._members = tuple(members)
        self._name = name
        self.streams = streams
        self._memory = memory
        self._timeout = timeout
        # the watchdog times out first and names the ranks; at twice its timeout kernels end by themselves
        self._timeout_ns = int(2 * timeout * 1e9)
        self._host = memory.pinned_ints(HOST_INTS)
        self._control = memory.region(aligned(4 * DEVICE_INTS), "words")
        control = self._control.local[: 4 * DEVICE_INTS].view(torch.int32)
        control[[GATE, PROCEED]] = 1
        self._error = control[ERROR : ERROR + 1]
        memory.barrier("words begin")
        place = self._members.index(rank)
        device = tuple(self._control.addresses[place] + 4 * i for i in range(DEVICE_INTS))
        self.watchdog = Watchdog(rank, name, self._host, device, streams, timeout)
        others = [address for other, address in enumerate(self._control.addresses) if other != place]
        self.watchdog.recovery.gates.update(address + 4 * GATE for address in others)
        self.watchdog.recovery.errors.update(address + 4 * ERROR for address in others)
        self.semaphores = Semaphores(rank, self._members, device, self._host.data_ptr(), streams, self.watchdog)
        self._nothing = torch.empty(0, dtype=torch.uint8, device=memory.device)
        self._row_ranges: OrderedDict[tuple[tuple[int, int], ...], Tensor] = OrderedDict()
        self._programs: OrderedDict[Any, Any] = OrderedDict()
        self._captured = False
        self._reset()

    def _reset(self) -> None:
        """Drop all buffers and programs."""
        self._programs.clear()
        self._graphs = GraphCache()
        self._remote_buffers: list[RemoteKVBuffer] = []
        self._grad_buffers: list[PeerBuffer] = []
        self._boxes: tuple[list[PeerBuffer], ...] = tuple([] for _ in KINDS)
        self._reserved = [0 for _ in KINDS]
        self._zero_copy: dict[tuple[str, tuple[Any, ...]], ZeroCopyKV] = {}
        self._zero_copy_at: dict[int, ZeroCopyKV] = {}  # by the address of their memory
        self._slot = self._flags = self._local_grads = self._nothing
        self._shard_buffers = [self._nothing, self._nothing]
        self._raised: dict[int, Tensor] = {}  # by head groups: flags of rows that are there
        self._remote_layout: object = None  # of the gather whose padding rows are zero
        here = self.watchdog.recovery
        semaphores = here.reusable, here.ready, here.turn, here.grad_return
        for known in (*semaphores, here.flags, here.raised, here.local_grads, here.received, here.kept):
            known.clear()

    def find(self, key: Any) -> Any:
        """Return the entry of a key that an earlier call has made; None: there is none."""
        found = self._programs.get(key)
        if found is not None:
            self._programs.move_to_end(key)
        return found

    def keep(self, key: Any, made: T) -> T:
        """Store an entry and return it."""
        self._programs[key] = made
        if len(self._programs) > MAX_PROGRAMS:
            _, old = self._programs.popitem(last=False)
            self._retire(old)
        return made

    def _forget_programs(self) -> None:
        self._retire(list(self._programs.values()))
        self._programs.clear()
        self._graphs.clear()

    def _retire(self, old: Any) -> None:
        """Keep an object that a captured graph may use (Note [Old memory] of symmetric_memory.py)."""
        if self._captured:
            self.watchdog.recovery.kept.append(old)

    def _refuse_in_capture(self, what: str) -> None:
        if self.streams.capturing():
            raise RuntimeError(
                f"{what} must have its buffers before a capture begins, got a larger or new shape in a capture; "
                "make the same call once before capturing it"
            )

    def _peer_buffers(self) -> list[PeerBuffer]:
        """Return all memory that peers read or write."""
        return [*self._remote_buffers, *self._grad_buffers, *chain(*self._boxes)]

    @outside_inference_mode
    def _grow(
        self, kind: list[S], num_bytes: int, what: str, make: Callable[..., S] = PeerBuffer, turns: int = 2
    ) -> list[S]:
        """Return the buffers of a kind, of at least num_bytes, which is the same on all ranks, and so is growing."""
        if not kind or kind[0].num_bytes < num_bytes:
            self._refuse_in_capture(what)
            if kind:
                # work that still reads the old ones ends first, on all ranks
                self._memory.barrier(f"{what} grow")
                for peer_buffer in kind:
                    self._remove_addresses(peer_buffer)
            self._forget_programs()
            kind[:] = [make(self._memory, self._members, num_bytes, f"{what} {turn}") for turn in range(turns)]
            for peer_buffer in kind:
                self._add_addresses(peer_buffer)
        return kind

    def _add_addresses(self, peer_buffer: PeerBuffer) -> None:
        here, me, peers = self.watchdog.recovery, self._rank, self.semaphores.peers
        (here.turn if isinstance(peer_buffer, RemoteKVBuffer) else here.reusable).update(
            peer_buffer.reusable(me, peer) for peer in peers
        )
        ready = here.grad_return if peer_buffer in self._grad_buffers else here.ready
        ready.update(peer_buffer.ready(me, peer, g) for peer in peers for g in range(peer_buffer.groups))

    def _remove_addresses(self, peer_buffer: PeerBuffer) -> None:
        if self._captured:
            self._retire(peer_buffer)
            return
        here = self.watchdog.recovery
        for peer in self.semaphores.peers:
            for addresses in (here.reusable, here.turn):
                addresses.discard(peer_buffer.reusable(self._rank, peer))
            for addresses in (here.ready, here.grad_return):
                addresses.difference_update(peer_buffer.ready(self._rank, peer, g) for g in range(peer_buffer.groups))

    @outside_inference_mode
    def _local(self, old: Tensor, num_bytes: int, known: set[tuple[int, int]] | None, unit: int) -> Tensor:
        """Return a plain buffer of at least num_bytes; the old one where it is large enough."""
        if old.numel() >= num_bytes:
            return old
        self._refuse_in_capture("a buffer")
        if old.numel():
            self.streams.synchronize()
            self._forget_programs()
            if self._captured:
                self._retire(old)
            elif known is not None:
                known.discard((old.data_ptr(), old.numel() // unit))
        new = torch.empty(aligned(num_bytes), dtype=torch.uint8, device=self._memory.device)
        if known is not None:
            known.add((new.data_ptr(), new.numel() // unit))
        return new

    def _make_remote_buffer(self, num_bytes: int) -> RemoteKVBuffer:
        before = self._remote_buffers[:]
        (remote,) = self._grow(
            self._remote_buffers, num_bytes, "remote KV", functools.partial(RemoteKVBuffer, self._rank), turns=1
        )
        if remote not in before:
            self._remote_layout = None
        return remote

    def _make_boxes(self, kind: int, num_bytes: int) -> None:
        self._grow(self._boxes[kind], aligned(num_bytes + PAYLOADS * PAYLOAD_ALIGNMENT), BOX_NAMES[kind])
        self._reserved[kind] = num_bytes

    def _make_slot(self, num_bytes: int) -> Tensor:
        self._slot = self._local(self._slot, num_bytes, None, 1)
        return self._slot

    def _make_shard_buffer(self, turn: int, num_bytes: int) -> Tensor:
        before = self._shard_buffers[turn]
        flat = self._shard_buffers[turn] = self._local(before, num_bytes, None, 1)
        if flat is not before:
            self._zero_copy_at.pop(before.untyped_storage().data_ptr(), None)
        return flat

    def _make_flags(self, groups: int) -> Tensor:
        """Return `groups world_size` flags of rows that are in flight."""
        count = groups * len(self._members)
        self._flags = self._local(self._flags, 4 * count, self.watchdog.recovery.flags, 4)
        return self._flags.view(torch.int32)[:count].view(groups, len(self._members))

    @outside_inference_mode
    def _make_raised(self, groups: int) -> Tensor:
        """Return `groups world_size` flags of rows that have arrived."""
        self._refuse_in_capture("save_gathered_kv")
        self.watchdog.check()
        flags = torch.ones(groups, len(self._members), dtype=torch.int32, device=self._memory.device)
        self.watchdog.recovery.raised.add((flags.data_ptr(), flags.numel()))
        self._raised[groups] = flags
        return flags

    def _make_cleared(
        self, flags: Tensor, remote: Tensor, row_ranges: tuple[tuple[int, int], ...]
    ) -> tuple[Cleared, Cleared]:
        """Return the memory that packing clears, without and with ranges of the remote buffer."""
        there = self._row_ranges.get(row_ranges)
        if there is None:
            self._refuse_in_capture("padding rows")
            there = torch.tensor(row_ranges, dtype=torch.int32, pin_memory=flags.is_cuda, device="cpu").to(
                flags.device, non_blocking=True
            )
            self._row_ranges[row_ranges] = there
            if len(self._row_ranges) > MAX_PROGRAMS:
                self._retire(self._row_ranges.popitem(last=False)[1])
        else:
            self._row_ranges.move_to_end(row_ranges)
        longest = max(end - start for start, end in row_ranges)
        without = Cleared(flags, self._error, remote, there, longest, stretches=False)
        return without, dataclasses.replace(without, stretches=True)

    def _make_saved(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._memory.device)

    @outside_inference_mode
    def _make_zero_copy(self, key: tuple[str, tuple[Any, ...]], mine: int) -> ZeroCopyKV:
        name, (shape, d, dtype) = key
        self._refuse_in_capture(f"kv_buffer {name!r}")
        self._graphs.clear()  # their addresses were other tensors, or a slot that is released
        for old in [other for other in self._zero_copy if other[0] == name]:
            self.streams.synchronize()
            gone = self._zero_copy.pop(old)
            del self._zero_copy_at[gone.slot.untyped_storage().data_ptr()]
            self._retire((gone, [self._programs.pop(key, None) for key in gone.infos]))
        slot = torch.empty(shape, dtype=dtype, device=self._memory.device)
        zero_copy = self._zero_copy[key] = ZeroCopyKV(slot, slot[:, :mine, :, :d], slot[:, :mine, :, d:])
        self._zero_copy_at[slot.untyped_storage().data_ptr()] = zero_copy
        return zero_copy

    def _find_zero_copy(self, k: Tensor, v: Tensor) -> ZeroCopyKV | None:
        zero_copy = self._zero_copy_at.get(k.untyped_storage().data_ptr())
        return zero_copy if zero_copy is not None and _same(k, zero_copy.k) and _same(v, zero_copy.v) else None

    @outside_inference_mode
    def _prepare_gather(
        self,
        k: Tensor,
        v: Tensor,
        gather_plan: GatherPlan,
        groups: int,
        zero_copy: ZeroCopyKV | None,
        what: str,
        of_bias: torch.dtype | None,
        *,
        keep: bool,
    ) -> GatherPrograms:
        b, t, hk, d = k.shape
        width = d + v.shape[-1]
        if hk % groups or groups > MOST_GROUPS:
            raise ValueError(f"groups must divide the {hk} key heads, and be at most {MOST_GROUPS}, got {groups}")
        row, slot_rows = hk * width * k.element_size(), gather_plan.slot_rows
        # a bias stands behind the rows; what peers write is as large on all ranks, so that growing is collective
        size = 0 if of_bias is None else of_bias.itemsize
        slot_bytes = b * slot_rows * row
        most = gather_plan.most_remote_rows
        most_bytes = b * most * row
        if size:
            most_bytes = padded(most_bytes) + b * (slot_rows + most) * size
        peer_buffer = self._make_remote_buffer(most_bytes)
        remote, bias, of_slot = peer_buffer.view((b, gather_plan.remote_rows, hk, width), k.dtype), None, None
        if zero_copy is not None:
            slot = zero_copy.slot
        else:
            behind = padded(slot_bytes) if size else slot_bytes
            flat = self._make_slot(behind + b * slot_rows * size)
            slot = view_bytes(flat, (b, slot_rows, hk, width), k.dtype)
            of_slot = None if of_bias is None else view_bytes(flat[behind:], (b, slot_rows), of_bias)
        if of_slot is not None and of_bias is not None:
            of_all = (b, t + gather_plan.remote_rows)
            if gather_plan.recvs:
                table = peer_buffer.view(of_all, of_bias, padded(remote.numel() * remote.element_size()))
            else:  # peers may write to the remote buffer: it is not this call's turn to read it
                table = torch.empty(of_all, dtype=of_bias, device=self._memory.device)
            bias = Bias(slot=of_slot, table=table, local=t)
        flags = self._make_flags(groups)
        packed = slot[:, :t] if zero_copy is None and gather_plan.sends else None
        cleared = None
        if packed is not None and gather_plan.recvs:
            cleared = self._make_cleared(flags, remote, tuple(pad_rows(gather_plan.remote_rows, gather_plan.recvs)))
        here = GatherMemory(
            peer_buffer,
            remote=remote,
            dim=d,
            slot=slot,
            packed=packed,
            bias=bias,
            ready_flags=ReadyFlags(flags, self._error, self._timeout_ns),
            cleared=cleared,
            keep=(gather_plan, zero_copy),
        )
        return gather_programs(self.semaphores, here, gather_plan, what, keep=keep)

    def _save_program(self, plan: GatherPrograms, address: int) -> Program | None:
        """Return the program of the flag stream for rows that are saved at an address."""
        if plan.save_ops is None:
            return None
        aimed = plan.save_programs
        found = aimed.get(address)
        if found is None:
            found = aimed[address] = self.streams.compile(plan.save_ops(address))
            if len(aimed) > SAVE_PROGRAMS:
                _, old = aimed.popitem(last=False)
                self._retire(old)
        else:
            aimed.move_to_end(address)
        return found

    @outside_inference_mode
    def _prepare_shard_buffer(
        self, turn: int, shape: tuple[int, ...], rows: int, d: int, dtype: torch.dtype
    ) -> ZeroCopyKV:
        slot = view_bytes(self._make_shard_buffer(turn, math.prod(shape) * dtype.itemsize), shape, dtype)
        return ZeroCopyKV(slot, slot[:, :rows, :, :d], slot[:, :rows, :, d:])

    @outside_inference_mode
    def _prepare_grad_return(
        self, gather_plan: GatherPlan, shape: tuple[int, int, int], what: str, *, biased: bool
    ) -> tuple[GradReturnPrograms, GradReturnPrograms]:
        b, hk, width = shape
        size = b * gather_plan.slot_rows * hk * (width + biased) * 4
        grad_buffers = self._grow(self._grad_buffers, len(self.semaphores.peers) * aligned(size), "gradients")
        self._local_grads = self._local(self._local_grads, size, self.watchdog.recovery.local_grads, 1)
        self._refuse_in_capture("a return of gradients")
        # both at once: a capture may begin at either
        first, second = (
            grad_return_programs(
                self.semaphores, gather_plan, peer_buffer, self._local_grads, shape, what, biased=biased
            )
            for peer_buffer in grad_buffers
        )
        return first, second


def _same(x: Tensor, y: Tensor) -> bool:
    # an empty tensor has no address, but it has a storage
    mine, others = ((z.untyped_storage().data_ptr(), z.storage_offset(), z.shape, z.stride(), z.dtype) for z in (x, y))
    return mine == others
