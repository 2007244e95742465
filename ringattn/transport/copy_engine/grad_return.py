"""The constant programs of a return of gradients on one rank, built once per shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ringattn.plan.ring_plan import GatherPlan
from ringattn.transport.copy_engine.kv_gather import GatherPrograms
from ringattn.transport.copy_engine.peer_buffers import PeerBuffer, signal, view_bytes, wait_and_reset
from ringattn.transport.copy_engine.semaphores import Semaphores
from ringattn.transport.copy_engine.streams import Op, Program, Streams
from ringattn.transport.copy_engine.watchdog import RECEIVING, STARTING, ProgramInfo


@dataclass(frozen=True)
class CombinedPrograms:
    """A gather and the return of gradients that begins with it: `start`, `joining`, `join` and `receive`, in one batch each."""

    start: Program
    joining: Program
    receive: Program


@dataclass(eq=False)
class GradReturnPrograms:
    """The constant part of a return of gradients; every program is for the caller's stream.

    Attributes:
        start: In front of the kernel: waits until the regions at this rank's owners may be written.
        receive: Behind it: signals that this rank's contributions are written, and waits for those of others; its operations
            are `signal_ops`, `place_ops` and `wait_ops`.
        close: Behind the sum: signals that others may write again.
        regions: The contributions to this rank's rows, one per reader.
        bias: Addresses, local gradients and regions of key_bias; None: it has no gradient.
    """

    info: ProgramInfo
    start: Program
    receive: Program
    close: Program
    start_ops: Sequence[Op]
    signal_ops: Sequence[Op]
    place_ops: Sequence[Op]
    wait_ops: Sequence[Op]
    addresses: Tensor
    local_grads: Tensor
    regions: list[Tensor]
    bias: tuple[Tensor, Tensor, list[Tensor]] | None
    keep: Any
    # weak: the buffers of a gather live as long as its programs, not as long as these
    _combined: WeakKeyDictionary[GatherPrograms, CombinedPrograms] = field(default_factory=WeakKeyDictionary)

    def beside(self, gather: GatherPrograms, streams: Streams) -> CombinedPrograms:
        """Return the combined programs of this and of the gather that it begins with."""
        found = self._combined.get(gather)
        if found is None and not self.place_ops:
            # no rank returns gradients here
            found = self._combined[gather] = CombinedPrograms(gather.start, gather.joining, gather.join)
        elif found is None:
            # one place stands for both joins: if the rows of the first one are lost, so are those of the second
            joining = [] if streams.capturing() else self.place_ops
            found = self._combined[gather] = CombinedPrograms(
                start=streams.compile([*self.start_ops, *gather.start_ops]),
                joining=streams.compile(self.place_ops),
                receive=streams.compile([*joining, *gather.join_ops, *self.signal_ops, *self.wait_ops]),
            )
        return found


def grad_return_programs(
    semaphores: Semaphores,
    gather_plan: GatherPlan,
    peer_buffer: PeerBuffer,
    local_grads: Tensor,
    shape: tuple[int, int, int],
    what: str,
    *,
    biased: bool,
) -> GradReturnPrograms:
    """Build the programs; shape is (batch, key heads, width of a key and its value), biased: key_bias has a gradient."""
    me, compile_ = semaphores.rank, semaphores.streams.compile
    b, hk, width = shape
    whole, of_bias = (b, gather_plan.slot_rows, hk, width), (b, hk, gather_plan.slot_rows)
    behind = 4 * math.prod(whole)  # the gradient of key_bias is behind those of k and v
    # by the buffer, not by the call: the region of a pair never overlaps that of another pair at another shape
    stride = peer_buffer.num_bytes // len(semaphores.peers)
    owners = [fetch.owner for fetch in gather_plan.recvs]
    sends = [send.peer for send in gather_plan.sends]
    info = ProgramInfo(what, tuple(dict.fromkeys((*owners, *sends))), gather_plan.first + 1)
    number = semaphores.watchdog.number(info)
    start_ops: list[Op] = [semaphores.report_place(number, STARTING)]
    for owner in owners:
        start_ops += wait_and_reset(peer_buffer.reusable(me, owner))
    start = [*start_ops, *semaphores.enter_kernel(number)]
    signal_ops, place_ops = (
        signal([peer_buffer.ready(owner, me) for owner in owners]),
        [semaphores.report_place(number, RECEIVING)],
    )
    wait_ops = list[Op]()
    for reader in sends:
        wait_ops += wait_and_reset(peer_buffer.ready(me, reader))
    wait_ops += [semaphores.proceed, *semaphores.exit_ring()]
    if not owners and not sends:
        start_ops, start, signal_ops, place_ops, wait_ops = [], [], [], [], []
    addresses = [local_grads.data_ptr()]
    addresses += [peer_buffer.rows(fetch.owner) + (fetch.step - 1) * stride for fetch in gather_plan.recvs]
    table = torch.tensor([addresses, [x + behind for x in addresses]], dtype=torch.int64, device="cpu").to(
        local_grads.device
    )
    places = [(send.step - 1) * stride for send in gather_plan.sends]
    bias = None
    if biased:
        parts = [peer_buffer.view(of_bias, torch.float32, place + behind) for place in places]
        bias = table[1], view_bytes(local_grads[behind:], of_bias, torch.float32), parts
    return GradReturnPrograms(
        info,
        start=compile_(start),
        receive=compile_([*signal_ops, *place_ops, *wait_ops]),
        close=compile_(signal([peer_buffer.reusable(reader, me) for reader in sends])),
        start_ops=start_ops,
        signal_ops=signal_ops,
        place_ops=place_ops,
        wait_ops=wait_ops,
        addresses=table[0],
        local_grads=view_bytes(local_grads, whole, torch.float32),
        regions=[peer_buffer.view(whole, torch.float32, place) for place in places],
        bias=bias,
        keep=(gather_plan, peer_buffer, local_grads),
    )
