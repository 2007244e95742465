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

from ringattn.plan.ring_plan import Collection
from ringattn.transport.copy_engine.kv_gather import GatherPrograms
from ringattn.transport.copy_engine.peer_buffers import Station, say, take, view_bytes
from ringattn.transport.copy_engine.semaphores import Words
from ringattn.transport.copy_engine.streams import Op, Program, Streams
from ringattn.transport.copy_engine.watchdog import RECEIVING, STARTING, Course


@dataclass(frozen=True)
class Together:
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
class HomePrograms:
    """The constant part of a homecoming; every program is for the caller's stream.

    Attributes:
        course: What the watch says of it.
        start: In front of the kernel: the homes of this rank's owners are free.
        receive: Behind it: what this rank has written is there, and it waits for what others write.
        close: Behind the sum: others may write again.
        beginning: What start says before the caller's stream goes on to the kernel.
        telling: What receive says first: what this rank has written is there.
        receiving: Then: it waits for what others write.
        ending: Then: the waits, and that it goes on.
        addresses: See `Homecoming`.
        own: Likewise.
        regions: What came home, one per reader.
        bias: Addresses, own and regions of the bias of keys; None: it has no gradient.
        keep: Alive for as long as the programs.
    """

    course: Course
    start: Program
    receive: Program
    close: Program
    beginning: Sequence[Op]
    telling: Sequence[Op]
    receiving: Sequence[Op]
    ending: Sequence[Op]
    addresses: Tensor
    own: Tensor
    regions: list[Tensor]
    bias: tuple[Tensor, Tensor, list[Tensor]] | None
    keep: Any
    # what a gather pushes from and into goes with its programs, and not with these
    _together: WeakKeyDictionary[GatherPrograms, Together] = field(default_factory=WeakKeyDictionary)

    def beside(self, gather: GatherPrograms, streams: Streams) -> Together:
        """What both say together.

        Args:
            gather: The gather that it begins with.
            streams: The way to the device.
        """
        found = self._together.get(gather)
        if found is None and not self.receiving:
            # nobody comes home
            found = self._together[gather] = Together(gather.start, gather.joining, gather.join)
        elif found is None:
            # one place stands for both joins: what the second one would read is lost if what the first one waits for is
            joining = [] if streams.capturing() else self.receiving
            found = self._together[gather] = Together(
                start=streams.compile([*self.beginning, *gather.beginning]),
                joining=streams.compile(self.receiving),
                receive=streams.compile([*joining, *gather.ending, *self.telling, *self.ending]),
            )
        return found


def home_programs(
    words: Words,
    collection: Collection,
    station: Station,
    own: Tensor,
    shape: tuple[int, int, int],
    what: str,
    *,
    biased: bool,
) -> HomePrograms:
    """Builds them.

    Args:
        words: Those of this rank.
        collection: What its forward gathered.
        station: Where contributions come home: as much for every peer.
        own: Plain memory for this rank's own.
        shape: Batch elements, key heads, and the width of a key and its value.
        what: Names the call.
        biased: There is a gradient of a bias of keys.
    """
    me, compile_ = words.rank, words.streams.compile
    b, hk, width = shape
    whole, of_bias = (b, collection.slot_rows, hk, width), (b, hk, collection.slot_rows)
    behind = 4 * math.prod(whole)  # a bias of keys stands behind the sums
    # of the station, not of the call: the region of a pair never overlaps what another shape gave to another pair
    stride = station.num_bytes // len(words.peers)
    owners = [fetch.owner for fetch in collection.fetches]
    readers = [send.peer for send in collection.readers]
    course = Course(what, tuple(dict.fromkeys((*owners, *readers))), collection.first + 1)
    number = words.watch.number(course)
    beginning: list[Op] = [words.report_place(number, STARTING)]
    for owner in owners:
        beginning += take(station.free(me, owner))
    start = [*beginning, *words.enter_kernel(number)]
    telling, receiving = say([station.full(owner, me) for owner in owners]), [words.report_place(number, RECEIVING)]
    ending = list[Op]()
    for reader in readers:
        ending += take(station.full(me, reader))
    ending += [words.proceed, *words.exit_ring()]
    if not owners and not readers:
        beginning, start, telling, receiving, ending = [], [], [], [], []
    addresses = [own.data_ptr()]
    addresses += [station.rows(fetch.owner) + (fetch.step - 1) * stride for fetch in collection.fetches]
    table = torch.tensor([addresses, [x + behind for x in addresses]], dtype=torch.int64, device="cpu").to(own.device)
    places = [(send.step - 1) * stride for send in collection.readers]
    bias = None
    if biased:
        parts = [station.view(of_bias, torch.float32, place + behind) for place in places]
        bias = table[1], view_bytes(own[behind:], of_bias, torch.float32), parts
    return HomePrograms(
        course,
        start=compile_(start),
        receive=compile_([*telling, *receiving, *ending]),
        close=compile_(say([station.free(reader, me) for reader in readers])),
        beginning=beginning,
        telling=telling,
        receiving=receiving,
        ending=ending,
        addresses=table[0],
        own=view_bytes(own, whole, torch.float32),
        regions=[station.view(whole, torch.float32, place) for place in places],
        bias=bias,
        keep=(collection, station, own),
    )
