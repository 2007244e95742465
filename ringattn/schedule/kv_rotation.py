"""Rotation of K/V in the stepwise schedule: prefetch of the next shard, and return of gradients to their owners.

At step s rank r computes with the rows of owner (r - s) % world_size, received from the owner directly: every pair
of ranks communicates once, nothing is forwarded, and rows that r cannot see are not sent. The rows of step s + 1 are
in flight while step s is computed; two receive buffers alternate. Where a process hosts several ranks, one of them
receives the rows of an owner elsewhere for all of them (`share_moves`), in a buffer that lasts until the last one has read it.
In a double ring (Note [Double ring] in ring_plan.py) the remote shard of node step o + 1 is in flight during all
inner steps of node step o, over a transport of its own, so that inner posts never queue behind the slow link. The
gradient sums of a node for a remote shard leave after its last inner contribution, and arrive by node step o + 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringattn.kernels.interface import Score
from ringattn.plan.ring_plan import RankPlan, RingPlan, RingStep, Rows
from ringattn.schedule.latents import Latents
from ringattn.transport.base import Buffers, GradMessage, Message, RingContext, Work

Moving = Sequence[tuple[Tensor, int]]
"""Tensors that move together: (tensor, its row dimension)."""

_ALIGNMENT = 16
"""Bytes at a multiple of which each tensor of a message begins."""


def moving_tensors(
    moving: str, q: Tensor, k: Tensor, v: Tensor, score: Score, *rows: Tensor, latents: Latents | None = None
) -> Moving:
    """Return the tensors that move: keys (k and v or latent rows, key_bias), or queries (q and `b s h dv` and `b h s` rows)."""
    if moving == "keys":
        keys = (k, v) if latents is None else (latents.rows,)
        return [(x.contiguous(), 1) for x in (*keys, *(() if score.key_bias is None else (score.key_bias,)))]
    return [(q.contiguous(), 1), *((x.contiguous(), 1 if x.dim() == 4 else 2) for x in rows)]


def reserve(plan: RingPlan, context: RingContext, moving: Moving, returned: Moving = ()) -> None:
    """Reserve transport memory for the largest messages of a call."""
    for transport, rows in ((context.transport, plan.largest_send), (context.slow_transport, plan.largest_remote_send)):
        if rows:
            transport.reserve(message_bytes(moving, rows), message_bytes(returned, rows) if returned else 0)


class KVPrefetcher:
    """Prefetch of the moving tensors (those of this rank), seen from one rank: for each step in turn `wait_for`, then `post`."""

    def __init__(self, moving: Moving, plan: RankPlan, context: RingContext, what: str) -> None:
        self._plan = plan
        self._context = context
        self._what = what
        self._own = moving
        self._held = moving  # the shard that inner steps send: the own one, or a remote one
        self._work: Work | None = None
        self._remote_work: Work | None = None
        self._next: PackedMessage | None = None
        self._remote_shard: PackedMessage | None = None
        self._whole: Tensor | None = None
        self._cut: tuple[Rows, Tensor] | None = None

    def wait_for(self, step: int) -> list[Tensor]:
        """Wait for the tensors of `step` and return them; all that was posted with them has arrived too."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if step == 0:
            return [x for x, _ in self._own]
        if step >= self._context.world_size:
            return []
        if step % self._plan.local_size:
            return self._rows_of(step)
        if self._remote_work is not None:
            self._remote_work.wait()
            self._remote_work = None
        parts = [] if self._remote_shard is None else self._remote_shard.parts
        self._held = [(part, dim) for part, (_, dim) in zip(parts, self._own, strict=False)]
        self._cut = None
        return parts

    def post(
        self, step: int, sends: Sequence[Message] = (), receives: Sequence[Message] = (), besides: str = ""
    ) -> None:
        """Start the transfers for the step after `step`, together with other messages within the node, named by `besides`."""
        plan, coming = self._plan, step + 1
        node_step, inner_step = divmod(step, plan.local_size)
        if inner_step == 0 and node_step + 1 < len(plan.remote_shards):
            self._post_between_nodes(node_step + 1)
        sends, receives, self._next = [*sends], [*receives], None
        if coming < self._context.world_size and coming % plan.local_size:
            send, ring_step = plan.sends[coming], plan.ring_steps[coming]
            if send is not None:
                sends.insert(0, (send.peer, self._message(send.rows)))
            if ring_step is not None:
                receives = [*self._receive(coming, ring_step), *receives]
        what = f"{self._what} for ring step {coming}{besides}"
        self._work = self._context.transport.post(sends, receives, what)

    def _receive(self, coming: int, ring_step: RingStep) -> list[Message]:
        """Return the receive of the rows of a step; none where another rank of this process has them from another process."""
        context, crossing = self._context, ring_step.crossing
        if crossing is None:
            self._next = self._make(ring_step.num_rows, f"receive {coming % 2}")
        elif crossing.peer == context.rank:
            # the last rank of the process reads it hosted - 1 steps later
            self._next = self._make(crossing.num_rows, f"shared {coming % (context.hosted + 1)}")
            context.shared[ring_step.source] = self._next
        else:
            self._next = context.shared[ring_step.source]
            return []
        return [(ring_step.source, self._next.message)]

    def _rows_of(self, step: int) -> list[Tensor]:
        """Return the rows of a step, which have arrived: those of this rank, where ranks share a message."""
        ring_step = self._plan.ring_steps[step]
        if ring_step is None or self._next is None:
            return []
        shared = [(x, dim) for x, (_, dim) in zip(self._next.parts, self._own, strict=True)]
        if ring_step.crossing is None or self._is_whole(ring_step.rows, shared):
            return self._next.parts
        mine = self._make(ring_step.num_rows, f"receive {step % 2}")
        pack_(shared, ring_step.rows, mine)
        return mine.parts

    def _post_between_nodes(self, node_step: int) -> None:
        """Send this rank's rows to another node and receive the next remote shard."""
        step = node_step * self._plan.local_size
        send, remote_shard = self._plan.sends[step], self._plan.remote_shards[node_step]
        sends, receives = list[Message](), list[Message]()
        if send is not None:
            whole = self._is_whole(send.rows, self._own)
            sends = [(send.peer, self._all() if whole else self._packed(self._own, send.rows, "between nodes"))]
        self._remote_shard = None
        if remote_shard is not None:
            self._remote_shard = self._make(remote_shard.num_rows, f"remote shard {node_step % 2}")
            receives = [(remote_shard.owner, self._remote_shard.message)]
        what = f"{self._what} for ring step {step}, between nodes"
        self._remote_work = self._context.slow_transport.post(sends, receives, what)

    def _message(self, rows: Rows) -> Tensor:
        """Return the given rows of the shard that this rank holds, packed once for all steps that send the same."""
        if self._is_whole(rows, self._held):
            if self._held is self._own:
                return self._all()
            message = view_as_message(self._held)
            assert message is not None, "a remote shard lies in memory as it was received: as one message"
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
            message = view_as_message([(x.narrow(dim, offset, length), dim) for x, dim in moving])
            if message is not None:
                return message
        packed = make_message(moving, sum(length for _, length in rows), self._context.buffers, name)
        pack_(moving, rows, packed)
        return packed.message

    def _make(self, rows: int, name: str) -> PackedMessage:
        return make_message(self._own, rows, self._context.buffers, name)

    @staticmethod
    def _is_whole(rows: Rows, moving: Moving) -> bool:
        x, dim = moving[0]
        return rows == ((0, x.shape[dim]),)


@dataclass
class GradReturner:
    """Return of gradient contributions to the owners of the rows.

    In each step: `add`, `messages`, `post_between_nodes`, `contribution`. Contributions of a step leave with the post of the next
    step and are added at the one after, so two more steps follow the last, and `finish`. Sums are made in the order of steps on
    every rank. Step 0 writes own_grads, of this rank's own rows.
    """

    own_grads: Moving
    plan: RankPlan
    context: RingContext
    _written: PackedMessage | None = None
    _received: Sequence[Tensor] = ()

    def __post_init__(self) -> None:
        self._node_sums = NodeGradSums(self.own_grads, self.plan, self.context, self.context.buffers)

    def contribution(self, step: int) -> list[Tensor]:
        """Return the tensors that the kernels of `step` write."""
        ring_step = self.plan.ring_steps[step]
        assert ring_step is not None, "an empty ring step has no contribution"
        node_step, inner_step = divmod(step, self.plan.local_size)
        if inner_step == 0:
            return self._node_sums.grads(node_step)
        self._written = self._make(ring_step.num_rows, f"contribution {step % 2}")
        return self._written.parts

    def add(self, step: int) -> None:
        """Add the contributions that have arrived when `step` begins."""
        plan = self.plan
        node_step, inner_step = divmod(step, plan.local_size)
        if self._received:
            send = plan.sends[step - 2]
            assert send is not None, "gradients are returned for rows that were sent"
            self._add(self._received, send.rows, (step - 2) // plan.local_size)
            self._received = ()
        if inner_step:
            return
        if node_step == self._node_sums.sent_step + 2:
            self.finish()
        held = node_step < len(plan.remote_shards) and plan.remote_shards[node_step] is not None
        if held and plan.ring_steps[step] is None:
            for x in self._node_sums.grads(node_step):
                x.zero_()

    def messages(self, step: int) -> tuple[Sequence[Message], Sequence[Message]]:
        """Return the sends and receives within the node while `step` is computed: contributions of the step before."""
        last = step - 1
        sends, receives = list[Message](), list[Message]()
        if not 0 < last < self.context.world_size or last % self.plan.local_size == 0:
            return sends, receives
        ring_step, send = self.plan.ring_steps[last], self.plan.sends[last]
        if ring_step is not None:
            assert self._written is not None, "a step writes its contribution before the next step is posted"
            sends = [GradMessage(ring_step.source, self._written.message)]
        if send is not None:
            returned = self._make(send.num_rows, "returned")
            self._received = returned.parts
            receives = [GradMessage(send.peer, returned.message)]
        return sends, receives

    def post_between_nodes(self, step: int) -> None:
        """Send the complete sums of a node step over the slow link; called after the post of `step`."""
        size = self.plan.local_size
        node_step, rest = divmod(step - (size > 1), size)
        if not rest and 0 < node_step - 1 < len(self.plan.remote_shards):
            self._node_sums.post(node_step - 1)

    def finish(self) -> None:
        """Wait for the sums that are in flight between nodes, if any are, and add them."""
        self._node_sums.finish()

    def _add(self, parts: Sequence[Tensor], rows: Rows, node_step: int) -> None:
        """Add to the own gradients at node step 0, else to the sums for a remote shard."""
        for x, part, (_, dim) in zip(self._node_sums.grads(node_step), parts, self.own_grads, strict=True):
            add_rows_(x, dim, rows, part)

    def _make(self, rows: int, name: str) -> PackedMessage:
        return make_message(self.own_grads, rows, self.context.buffers, name)


@dataclass
class NodeGradSums:
    """The gradient sums of a node for its remote shards: for each node step `grads`, `post`; at the end `finish`.

    The sums of a step are in flight while a later one is computed, and are added by the owner in the order of steps.
    """

    own_grads: Moving
    plan: RankPlan
    context: RingContext
    buffers: Buffers
    sent_step: int = 0  # the node step whose sums are in flight; 0: none
    _sums: dict[int, PackedMessage] = field(default_factory=dict)
    _received: Sequence[Tensor] = ()
    _work: Work | None = None
    _moves: bool = False

    @property
    def in_flight(self) -> bool:
        """Whether sums are in flight between nodes, to this rank or from it."""
        return self._work is not None and self._moves

    def grads(self, node_step: int) -> list[Tensor]:
        """Return the gradients of a node step that the sum over the node's ranks is written to."""
        if node_step == 0:
            return [x for x, _ in self.own_grads]
        if node_step not in self._sums:
            self._sums[node_step] = self._make(self.plan.held(node_step).num_rows, f"sums {node_step % 2}")
        return self._sums[node_step].parts

    def post(self, node_step: int) -> None:
        """Send the sums of a node step to their owners, once the sums before have arrived; step 0 has no transfer."""
        if node_step == 0:
            return
        self.finish()
        remote_shard, send = self.plan.remote_shards[node_step], self.plan.sends[node_step * self.plan.local_size]
        sends, receives = list[Message](), list[Message]()
        if remote_shard is not None:
            sends = [GradMessage(remote_shard.owner, self._sums[node_step].message)]
        if send is not None:
            returned = self._make(send.num_rows, "returned between nodes")
            self._received = returned.parts
            receives = [GradMessage(send.peer, returned.message)]
        self._moves = bool(sends or receives)
        what = f"backward, gradients of ring step {node_step * self.plan.local_size}, between nodes"
        self._work, self.sent_step = self.context.slow_transport.post(sends, receives, what), node_step

    def finish(self) -> None:
        """Wait for the sums that are in flight, if any are, and add them."""
        if self._work is None:
            return
        self._work.wait()
        send = self.plan.sends[self.sent_step * self.plan.local_size]
        if send is not None:
            for (x, dim), part in zip(self.own_grads, self._received, strict=True):
                add_rows_(x, dim, send.rows, part)
        self._sums.pop(self.sent_step, None)
        self._work, self._received, self.sent_step = None, (), 0

    def _make(self, rows: int, name: str) -> PackedMessage:
        return make_message(self.own_grads, rows, self.buffers, name)


@dataclass(frozen=True)
class PackedMessage:
    """Tensors packed into one contiguous message of bytes: `parts` are views of `message`, one per tensor."""

    message: Tensor
    parts: list[Tensor]


def make_message(moving: Moving, rows: int, buffers: Buffers, name: str) -> PackedMessage:
    """Return an uninitialised message with `rows` rows of each tensor, in the named buffer."""
    shapes = [_sized(x, dim, rows) for x, dim in moving]
    offsets, size = _layout(moving, shapes)
    message = buffers.take(name, (size,), torch.uint8, moving[0][0].device)
    parts = [
        message[offset : offset + math.prod(shape) * x.element_size()].view(x.dtype).view(shape)
        for (x, _), shape, offset in zip(moving, shapes, offsets, strict=True)
    ]
    return PackedMessage(message, parts)


def message_bytes(moving: Moving, rows: int) -> int:
    """Return the bytes of a message with `rows` rows of each tensor."""
    return _layout(moving, [_sized(x, dim, rows) for x, dim in moving])[1]


def view_as_message(moving: Moving) -> Tensor | None:
    """Return the message that the tensors already form in memory; None where they do not lie like one."""
    offsets, size = _layout(moving, [list(x.shape) for x, _ in moving])
    first = moving[0][0]
    storage = first.untyped_storage()
    begin = first.storage_offset() * first.element_size()
    for (x, _), offset in zip(moving, offsets, strict=True):
        at = x.storage_offset() * x.element_size()
        if not x.is_contiguous() or x.untyped_storage().data_ptr() != storage.data_ptr() or at != begin + offset:
            return None
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage, begin, (size,), (1,))


def pack_(moving: Moving, rows: Rows, packed: PackedMessage) -> None:
    """Copy the row ranges of each tensor into a message of as many rows."""
    lengths = [length for _, length in rows]
    for (x, dim), part in zip(moving, packed.parts, strict=True):
        for source, target in zip(slices(x, dim, rows), part.split(lengths, dim), strict=True):
            target.copy_(source)


def add_rows_(x: Tensor, dim: int, rows: Rows, packed: Tensor) -> None:
    """Do x[rows] += packed along dim."""
    lengths = [length for _, length in rows]
    for target, part in zip(slices(x, dim, rows), packed.split(lengths, dim), strict=True):
        target.add_(part)


def slices(x: Tensor, dim: int, rows: Rows) -> list[Tensor]:
    """Return views of the row ranges along dim."""
    return [x.narrow(dim, offset, length) for offset, length in rows]


def _sized(x: Tensor, dim: int, rows: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = rows
    return shape


def _layout(moving: Moving, shapes: list[list[int]]) -> tuple[list[int], int]:
    """Return the byte offset of each tensor in the message, and the size of the message; both ends compute the same."""
    offsets, end = [], 0
    for (x, _), shape in zip(moving, shapes, strict=True):
        offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = offsets[-1] + math.prod(shape) * x.element_size()
    return offsets, end
