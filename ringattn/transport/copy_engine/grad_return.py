"""What a homecoming comes down to: the constant programs of one rank, built once per shape.

Owns whom a rank waits for before its kernel writes into their memory and before it reads its own, where each contribution
lies, and what it says together with the gather of the same backward. Refuses to know kernels, and when a program is enqueued
(copy_engine/transport.py).
"""

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
    """What a gather and a homecoming that begins with it say next to each other, at the price of one batch of words.

    Attributes:
        start: In place of both starts, where that of the gather stands.
        joining: In place of the gather's.
        receive: In place of the gather's join and of the homecoming's `receive`.
    """

    start: Program
    joining: Program
    receive: Program


@dataclass(eq=False)
class GradReturnPrograms:
    """The constant part of a homecoming; every program is for the caller's stream.

    Attributes:
        info: What the watch says of it.
        start: In front of the kernel: the homes of this rank's owners are free.
        receive: Behind it: what this rank has written is there, and it waits for what others write.
        close: Behind the sum: others may write again.
        beginning: What start says before the caller's stream goes on to the kernel.
        telling: What receive says first: what this rank has written is there.
        receiving: Then: it waits for what others write.
        ending: Then: the waits, and that it goes on.
        addresses: See `GradReturn`.
        local_grads: Likewise.
        regions: What came home, one per reader.
        bias: Addresses, own and regions of the bias of keys; None: it has no gradient.
        keep: Alive for as long as the programs.
    """

    info: ProgramInfo
    start: Program
    receive: Program
    close: Program
    beginning: Sequence[Op]
    telling: Sequence[Op]
    receiving: Sequence[Op]
    ending: Sequence[Op]
    addresses: Tensor
    local_grads: Tensor
    regions: list[Tensor]
    bias: tuple[Tensor, Tensor, list[Tensor]] | None
    keep: Any
    # what a gather pushes from and into goes with its programs, and not with these
    _combined: WeakKeyDictionary[GatherPrograms, CombinedPrograms] = field(default_factory=WeakKeyDictionary)

    def beside(self, gather: GatherPrograms, streams: Streams) -> CombinedPrograms:
        """What both say together.

        Args:
            gather: The gather that it begins with.
            streams: The way to the device.
        """
        found = self._combined.get(gather)
        if found is None and not self.receiving:
            # nobody comes home
            found = self._combined[gather] = CombinedPrograms(gather.start, gather.joining, gather.join)
        elif found is None:
            # one place stands for both joins: what the second one would read is lost if what the first one waits for is
            joining = [] if streams.capturing() else self.receiving
            found = self._combined[gather] = CombinedPrograms(
                start=streams.compile([*self.beginning, *gather.beginning]),
                joining=streams.compile(self.receiving),
                receive=streams.compile([*joining, *gather.ending, *self.telling, *self.ending]),
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
    """Builds them.

    Args:
        semaphores: Those of this rank.
        gather_plan: What its forward gathered.
        peer_buffer: Where contributions come home: as much for every peer.
        local_grads: Plain memory for this rank's own.
        shape: Batch elements, key heads, and the width of a key and its value.
        what: Names the call.
        biased: There is a gradient of a bias of keys.
    """
    me, compile_ = semaphores.rank, semaphores.streams.compile
    b, hk, width = shape
    whole, of_bias = (b, gather_plan.slot_rows, hk, width), (b, hk, gather_plan.slot_rows)
    behind = 4 * math.prod(whole)  # a bias of keys stands behind the sums
    # of the station, not of the call: the region of a pair never overlaps what another shape gave to another pair
    stride = peer_buffer.num_bytes // len(semaphores.peers)
    owners = [fetch.owner for fetch in gather_plan.recvs]
    sends = [send.peer for send in gather_plan.sends]
    info = ProgramInfo(what, tuple(dict.fromkeys((*owners, *sends))), gather_plan.first + 1)
    number = semaphores.watchdog.number(info)
    beginning: list[Op] = [semaphores.report_place(number, STARTING)]
    for owner in owners:
        beginning += wait_and_reset(peer_buffer.reusable(me, owner))
    start = [*beginning, *semaphores.enter_kernel(number)]
    telling, receiving = (
        signal([peer_buffer.ready(owner, me) for owner in owners]),
        [semaphores.report_place(number, RECEIVING)],
    )
    ending = list[Op]()
    for reader in sends:
        ending += wait_and_reset(peer_buffer.ready(me, reader))
    ending += [semaphores.proceed, *semaphores.exit_ring()]
    if not owners and not sends:
        beginning, start, telling, receiving, ending = [], [], [], [], []
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
        receive=compile_([*telling, *receiving, *ending]),
        close=compile_(signal([peer_buffer.reusable(reader, me) for reader in sends])),
        beginning=beginning,
        telling=telling,
        receiving=receiving,
        ending=ending,
        addresses=table[0],
        local_grads=view_bytes(local_grads, whole, torch.float32),
        regions=[peer_buffer.view(whole, torch.float32, place) for place in places],
        bias=bias,
        keep=(gather_plan, peer_buffer, local_grads),
    )
