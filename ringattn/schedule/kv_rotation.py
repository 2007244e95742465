"""What comes to a rank step by step, what it passes on, and how contributions go home: posts ahead of time, waits late.

Owns which rows are on their way at every step of a staged loop, over both levels of the ring, and the buffers they land
in. Refuses to know what the rows are and what is computed from them.

Note [Ring order]
    At step s rank r meets the rows of owner (r - s) % world_size, fetched from the owner directly: every pair of ranks
    is used once, nothing is forwarded, and rows that r cannot see stay where they are. The rows of step s + 1 are on
    their way while step s is computed; two receive buffers take turns.

Note [Slow link]
    In a double ring (Note [Double ring] in ring_plan.py) the guest of outer step o + 1 is on its way during all inner
    steps of outer step o, over a transport of its own, so that inner posts never queue behind the slow link. What a node
    adds up for a guest leaves as soon as its last inner contribution is in, and has until outer step o + 2 to arrive.
    Two buffers take turns for guests, and two for the sums.

Note [One message]
    What travels together travels as one contiguous buffer of bytes: the rows of each tensor in turn, contiguous, every
    one from a multiple of 16 bytes. Both ends compute the layout from the number of rows, so nothing is said about it on
    the way, and received parts are views. Tensors that lie in memory like this already are sent from where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringattn.kernels.interface import Score
from ringattn.plan.ring_plan import Plan, RankPlan, Rows
from ringattn.transport.base import Buffers, GradMessage, Message, RingContext, Work

Moving = Sequence[tuple[Tensor, int]]
"""What travels together: (tensor, its row dimension)."""

_ALIGNMENT = 16


def moving_tensors(moving: str, q: Tensor, k: Tensor, v: Tensor, score: Score, *rows: Tensor) -> Moving:
    """Return the tensors that move: keys (k, v, key_bias), or queries (q and the given `b s h dv` and `b h s` rows)."""
    if moving == "keys":
        bias = [] if score.key_bias is None else [(score.key_bias, 1)]
        return [(k.contiguous(), 1), (v.contiguous(), 1), *bias]
    return [(q.contiguous(), 1), *((x.contiguous(), 1 if x.dim() == 4 else 2) for x in rows)]


def reserve(plan: Plan, context: RingContext, moving: Moving, returned: Moving = ()) -> None:
    """Announces the largest messages of a call to the transports.

    Args:
        plan: The plan.
        context: This rank's place at the ring.
        moving: What travels.
        returned: What goes home.
    """
    for transport, rows in ((context.transport, plan.largest_send), (context.slow_transport, plan.largest_remote_send)):
        if rows:
            transport.reserve(message_bytes(moving, rows), message_bytes(returned, rows) if returned else 0)


class KVPrefetcher:
    """The moving side on its way round the ring, seen from one rank: for each step in turn, `arrive` and then `post`.

    Args:
        moving: What travels: this rank's own rows.
        plan: This rank's part of the plan.
        context: This rank's place at the ring.
        what: Names the direction in errors and traces.
    """

    def __init__(self, moving: Moving, plan: RankPlan, context: RingContext, what: str) -> None:
        self._plan = plan
        self._context = context
        self._what = what
        self._own = moving
        self._held = moving  # what inner sends are cut from: the own shard, or a guest
        self._near: Work | None = None
        self._far: Work | None = None
        self._coming: PackedMessage | None = None
        self._remote_shard: PackedMessage | None = None
        self._whole: Tensor | None = None
        self._cut: tuple[Rows, Tensor] | None = None

    def arrive(self, step: int) -> list[Tensor]:
        """Waits for what `step` needs and returns it; whatever else was posted with it is there too."""
        if self._near is not None:
            self._near.wait()
            self._near = None
        if step == 0:
            return [x for x, _ in self._own]
        if step >= self._context.world_size:
            return []
        if step % self._plan.local_size:
            return [] if self._coming is None else self._coming.parts
        if self._far is not None:
            self._far.wait()
            self._far = None
        parts = [] if self._remote_shard is None else self._remote_shard.parts
        self._held = [(part, dim) for part, (_, dim) in zip(parts, self._own, strict=False)]
        self._cut = None
        return parts

    def post(
        self, step: int, sends: Sequence[Message] = (), receives: Sequence[Message] = (), besides: str = ""
    ) -> None:
        """Starts bringing what comes after `step`, together with other parcels within the node.

        Args:
            step: What is computed next; the rest is on its way meanwhile.
            sends: Other parcels.
            receives: Likewise.
            besides: Names them in errors and traces.
        """
        plan, coming = self._plan, step + 1
        outer, inner = divmod(step, plan.local_size)
        if inner == 0 and outer + 1 < len(plan.remote_shards):
            self._cross(outer + 1)
        gives: list[Message] = []
        recvs: list[Message] = []
        self._coming = None
        if coming < self._context.world_size and coming % plan.local_size:
            send, ring_step = plan.sends[coming], plan.ring_steps[coming]
            if send is not None:
                gives = [(send.peer, self._message(send.rows))]
            if ring_step is not None:
                self._coming = self._room(ring_step.num_rows, f"receive {coming % 2}")
                recvs = [(ring_step.source, self._coming.message)]
        what = f"{self._what} for ring step {coming}{besides}"
        self._near = self._context.transport.post([*gives, *sends], [*recvs, *receives], what)

    def _cross(self, outer: int) -> None:
        """Sends this rank's rows to another node and receives the next guest."""
        step = outer * self._plan.local_size
        send, remote_shard = self._plan.sends[step], self._plan.remote_shards[outer]
        gives: list[Message] = []
        recvs: list[Message] = []
        if send is not None:
            gives = [(send.peer, self._export(send.rows))]
        self._remote_shard = None
        if remote_shard is not None:
            self._remote_shard = self._room(remote_shard.num_rows, f"guest {outer % 2}")
            recvs = [(remote_shard.owner, self._remote_shard.message)]
        what = f"{self._what} for ring step {step}, between nodes"
        self._far = self._context.slow_transport.post(gives, recvs, what)

    def _export(self, rows: Rows) -> Tensor:
        if self._is_whole(rows, self._own):
            return self._all()
        return self._packed(self._own, rows, "cross")

    def _message(self, rows: Rows) -> Tensor:
        """The rows of what is held, as they leave; packed once for all steps that send the same."""
        if self._is_whole(rows, self._held):
            if self._held is self._own:
                return self._all()
            message = in_place(self._held)
            assert message is not None, "a guest lies in memory as it came: as one message"
            return message
        if self._cut is None or self._cut[0] != rows:
            self._cut = rows, self._packed(self._held, rows, "send")
        return self._cut[1]

    def _all(self) -> Tensor:
        if self._whole is None:
            x, dim = self._own[0]
            self._whole = self._packed(self._own, ((0, x.shape[dim]),), "send all")
        return self._whole

    def _packed(self, moving: Moving, rows: Rows, name: str) -> Tensor:
        if len(rows) == 1:
            offset, length = rows[0]
            message = in_place([(x.narrow(dim, offset, length), dim) for x, dim in moving])
            if message is not None:
                return message
        bundle = make_message(moving, sum(length for _, length in rows), self._context.buffers, name)
        pack_(moving, rows, bundle)
        return bundle.message

    def _room(self, rows: int, name: str) -> PackedMessage:
        return make_message(self._own, rows, self._context.buffers, name)

    @staticmethod
    def _is_whole(rows: Rows, moving: Moving) -> bool:
        x, dim = moving[0]
        return rows == ((0, x.shape[dim]),)


class GradReturner:
    """Contributions on their way to the owners of the rows: in each step `add`, `parcels`, `cross`, `room`.

    Contributions of a step leave with the post of the next one and are added at the one after, so two more steps follow
    the last, and `finish`. Sums are made in the order of steps on every rank.

    Args:
        grad_return: Where contributions to this rank's own rows are added; step 0 writes it.
        plan: This rank's part of the plan.
        context: This rank's place at the ring.
        what: Names the direction in errors and traces.
    """

    def __init__(self, grad_return: Moving, plan: RankPlan, context: RingContext, what: str) -> None:
        self._home = grad_return
        self._plan = plan
        self._context = context
        self._what = what
        self._made: PackedMessage | None = None
        self._returning: list[Tensor] = []
        self._sums: dict[int, PackedMessage] = {}  # by outer step: what this node has for a guest
        self._far: Work | None = None
        self._landing: list[Tensor] = []
        self._crossing = 0  # the outer step whose sums are between nodes; 0: none

    def room(self, step: int) -> list[Tensor]:
        """Where the contribution of `step` is to be written."""
        ring_step = self._plan.ring_steps[step]
        assert ring_step is not None, "an empty visit contributes nothing"
        outer, inner = divmod(step, self._plan.local_size)
        if step == 0:
            return [x for x, _ in self._home]
        if inner == 0:
            return self._sums[outer].parts
        self._made = self._bundle(ring_step.num_rows, f"made {step % 2}")
        return self._made.parts

    def add(self, step: int) -> None:
        """Adds what has come back when `step` begins."""
        plan = self._plan
        outer, inner = divmod(step, plan.local_size)
        if self._returning:
            send = plan.sends[step - 2]
            assert send is not None, "only rows that were sent come back"
            self._add(self._returning, send.rows, (step - 2) // plan.local_size)
            self._returning = []
        if inner:
            return
        if self._crossing and outer == self._crossing + 2:
            self._land()
        remote_shard = plan.remote_shards[outer] if outer < len(plan.remote_shards) else None
        if remote_shard is not None:
            self._sums[outer] = self._bundle(remote_shard.num_rows, f"sum {outer % 2}")
            if plan.ring_steps[step] is None:
                self._sums[outer].message.zero_()

    def parcels(self, step: int) -> tuple[list[Message], list[Message]]:
        """What leaves and comes back within the node while `step` is computed: contributions of the step before."""
        last = step - 1
        sends: list[Message] = []
        receives: list[Message] = []
        if not 0 < last < self._context.world_size or last % self._plan.local_size == 0:
            return sends, receives
        ring_step, send = self._plan.ring_steps[last], self._plan.sends[last]
        if ring_step is not None:
            assert self._made is not None, "a visit writes its contribution before the next step is posted"
            sends = [GradMessage(ring_step.source, self._made.message)]
        if send is not None:
            bundle = self._bundle(send.num_rows, "returning")
            self._returning = bundle.parts
            receives = [GradMessage(send.peer, bundle.message)]
        return sends, receives

    def cross(self, step: int) -> None:
        """Sends the sums of an outer step over the slow link once they are complete; after the post of `step`."""
        size = self._plan.local_size
        outer, rest = divmod(step - (size > 1), size)
        outer -= 1
        if rest or not 0 < outer < len(self._plan.remote_shards):
            return
        remote_shard, send = self._plan.remote_shards[outer], self._plan.sends[outer * size]
        gives: list[Message] = []
        recvs: list[Message] = []
        self._crossing, self._landing = outer, []
        if remote_shard is not None:
            gives = [GradMessage(remote_shard.owner, self._sums[outer].message)]
        if send is not None:
            bundle = self._bundle(send.num_rows, "landing")
            self._landing = bundle.parts
            recvs = [GradMessage(send.peer, bundle.message)]
        what = f"{self._what} of ring step {outer * size}, between nodes"
        self._far = self._context.slow_transport.post(gives, recvs, what)

    def finish(self) -> None:
        """Adds the last that is on its way."""
        if self._crossing:
            self._land()

    def _land(self) -> None:
        assert self._far is not None, "what crosses was posted"
        self._far.wait()
        outer = self._crossing
        send = self._plan.sends[outer * self._plan.local_size]
        if send is not None:
            self._add(self._landing, send.rows, 0)
        self._sums.pop(outer, None)
        self._far, self._landing, self._crossing = None, [], 0

    def _add(self, parts: list[Tensor], rows: Rows, outer: int) -> None:
        """Into the home gradients at outer step 0, else into the sums for a guest."""
        into = [x for x, _ in self._home] if outer == 0 else self._sums[outer].parts
        for x, part, (_, dim) in zip(into, parts, self._home, strict=True):
            add_rows_(x, dim, rows, part)

    def _bundle(self, rows: int, name: str) -> PackedMessage:
        return make_message(self._home, rows, self._context.buffers, name)


@dataclass(frozen=True)
class PackedMessage:
    """Several tensors in one message.

    Attributes:
        message: The bytes.
        parts: Views of it, one per tensor.
    """

    message: Tensor
    parts: list[Tensor]


def make_message(moving: Moving, rows: int, buffers: Buffers, name: str) -> PackedMessage:
    """Uninitialised room for some rows of each tensor.

    Args:
        moving: Tensors of which shapes, dtypes and the device are taken.
        rows: How many rows of each.
        buffers: Where the bytes live.
        name: Which buffer.
    """
    shapes = [_sized(x, dim, rows) for x, dim in moving]
    offsets, size = _layout(moving, shapes)
    message = buffers.take(name, (size,), torch.uint8, moving[0][0].device)
    parts = [
        message[offset : offset + math.prod(shape) * x.element_size()].view(x.dtype).view(shape)
        for (x, _), shape, offset in zip(moving, shapes, offsets, strict=True)
    ]
    return PackedMessage(message, parts)


def message_bytes(moving: Moving, rows: int) -> int:
    """Bytes of a message with that many rows of each tensor."""
    return _layout(moving, [_sized(x, dim, rows) for x, dim in moving])[1]


def in_place(moving: Moving) -> Tensor | None:
    """The message that the whole tensors are already, as they lie in memory; None where they do not lie like one."""
    offsets, size = _layout(moving, [list(x.shape) for x, _ in moving])
    first = moving[0][0]
    storage = first.untyped_storage()
    begin = first.storage_offset() * first.element_size()
    for (x, _), offset in zip(moving, offsets, strict=True):
        at = x.storage_offset() * x.element_size()
        if not x.is_contiguous() or x.untyped_storage().data_ptr() != storage.data_ptr() or at != begin + offset:
            return None
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage, begin, (size,), (1,))


def pack_(moving: Moving, rows: Rows, bundle: PackedMessage) -> None:
    """Copies the row ranges of each tensor into a bundle of as many rows."""
    lengths = [length for _, length in rows]
    for (x, dim), part in zip(moving, bundle.parts, strict=True):
        for source, target in zip(slices(x, dim, rows), part.split(lengths, dim), strict=True):
            target.copy_(source)


def add_rows_(x: Tensor, dim: int, rows: Rows, packed: Tensor) -> None:
    """x[rows] += packed, along dim."""
    lengths = [length for _, length in rows]
    for target, part in zip(slices(x, dim, rows), packed.split(lengths, dim), strict=True):
        target.add_(part)


def slices(x: Tensor, dim: int, rows: Rows) -> list[Tensor]:
    """Views of the row ranges along dim."""
    return [x.narrow(dim, offset, length) for offset, length in rows]


def _sized(x: Tensor, dim: int, rows: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = rows
    return shape


def _layout(moving: Moving, shapes: list[list[int]]) -> tuple[list[int], int]:
    """Where each tensor begins in the message, and the size of the message, in bytes."""
    offsets, end = [], 0
    for (x, _), shape in zip(moving, shapes, strict=True):
        offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = offsets[-1] + math.prod(shape) * x.element_size()
    return offsets, end
