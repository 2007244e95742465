"""Bytes of one rank by what they are for: states of a model, activations, buffers of the ring, KV cache.

Note [Peak of a training step]
    Memory is fullest when the backward begins, or when it ends and all gradients are there. When it begins, all layers have their
    saved activations, and the last one is computed again. Then a rank holds, beside states: the input of every layer and, with
    selective recomputation, what attention returned; the parameters outside of layers and the gradient of the head in bf16 (one
    FSDP unit, gathered until the backward ends); two gathered layers, the gradient of one in bf16 and its fp32 copy to reduce; and
    the activations of one layer: six tensors of the MLP's width (gate, up, their product and gradients) and `STREAMS` of the
    model's (inputs, norms and gradients).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ringattn.kernels.interface import PAD_ROWS
from ringattn.plan.buffers import gather_bytes
from ringattn.plan.layouts import shard_len
from ringattn.plan.ring_plan import make_gather_plan, make_plan
from ringattn.planning.attention_launch import Heads, split_bytes
from ringattn.planning.profile import Profile
from ringattn.planning.ring_time import RingCall, gathered
from ringattn.planning.shapes import ModelShape

STREAMS = 5.4
"""Tensors of the model's width that the backward of a layer holds; fitted to the peaks of two training steps."""
MLP_TENSORS = 6
"""Tensors of the MLP's width that it holds."""
OUTBOX_ROWS = 3.5
"""Largest messages that a stepwise ring over the copy engine holds beside its buffers; two are its outboxes. Fitted."""
FIXED_BYTES = 6 * 2**20
"""Flags, semaphores and tables of a ring; fitted."""
RECOMPUTATIONS = ("none", "selective", "full")
SAVED_STREAMS = {"none": 8.0, "selective": 1.0, "full": 1.0}
"""Tensors of the model's width that a layer saves for the backward, beside the MLP's."""
SAVED_MLP = {"none": 4.0, "selective": 0.0, "full": 0.0}
"""Tensors of the MLP's width that a layer saves for the backward."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by what they are for."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    working: float = 0.0
    ring: float = 0.0
    kv_cache: float = 0.0
    reserve: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all of it."""
        return sum(vars(self).values())

    def gib(self) -> dict[str, float]:
        """Return the parts in GiB."""
        return {name: value / 2**30 for name, value in vars(self).items()}


def ring_bytes(call: RingCall, *, backward: bool) -> float:
    """Return the bytes of the buffers that a ring keeps between calls."""
    if call.world_size == 1:
        return 0.0
    planned, heads = call.planned, call.heads
    if call.schedule == "fused":
        gather = make_gather_plan(planned.plan, 0, PAD_ROWS, 0, planned.node_ranks)
        members = planned.world_size // planned.nodes
        return float(
            FIXED_BYTES
            + gather_bytes(
                heads.batch,
                heads.kv_heads,
                heads.width,
                2,
                gather,
                members,
                backward=backward,
                hierarchical=planned.nodes > 1,
            )
        )
    return stepwise_bytes(planned, backward=backward)


def stepwise_bytes(call: RingCall, *, backward: bool) -> float:
    """Return the bytes of a stepwise ring: carried partials, packed and received rows, contributions, and outboxes."""
    heads, plan = call.heads, call.plan
    s = max(shard_len(shard) for shard in call.shards)
    key, key_grad = heads.kv_bytes(), heads.kv_bytes(4)
    forward_row = key
    carried = s * heads.batch * heads.heads * 4 * (heads.v_width + 2)
    row, back = key, key_grad
    if backward:
        query = heads.batch * heads.heads * (2 * (heads.head_dim + heads.v_width) + 8)
        query_grad = heads.batch * heads.heads * heads.head_dim * 4
        if query + query_grad < key + key_grad:
            row, back = query, query_grad
            plan = make_plan(call.shards, call.shards, call.mask, "queries", call.node_ranks)
    sent = max(plan.largest_send, plan.largest_remote_send)
    cuts = any(
        send is not None and send.num_rows < shard_len(call.shards[part.rank])
        for part in plan.ranks
        for send in part.sends
    )
    buffers = s * max(row, forward_row) + (sent * row / 2 if cuts else 0) + 2 * sent * max(row, forward_row)
    if backward:
        buffers += 3 * sent * back
    if call.schedule == "stepwise":
        # messages of a forward stay where the backward moves the other side
        buffers += OUTBOX_ROWS * sent * (row if row == forward_row else row + forward_row)
        buffers += 2 * sent * back if backward else 0
    return float(FIXED_BYTES + carried + buffers)


def attention_peak(call: RingCall, *, slots: int = 1, profile: Profile | None = None) -> float:
    """Return the peak bytes of one forward and backward of a call by itself: inputs, outputs, gradients, buffers.

    Args:
        slots: Send buffers of a fused ring; rings of before 0.9 had two.
        profile: Counts partial results of tiles that are split among its programs; None: none are.
    """
    heads = call.heads
    s = max(shard_len(shard) for shard in call.planned.shards)
    q = s * heads.batch * heads.heads * heads.head_dim * 2
    o = s * heads.batch * heads.heads * heads.v_width * 2
    lse = s * heads.batch * heads.heads * 4
    kv = s * heads.kv_bytes()
    ring = ring_bytes(call, backward=True)
    if call.saved and call.world_size > 1:
        ring += make_gather_plan(call.planned.plan, 0, PAD_ROWS).remote_rows * heads.kv_bytes()
    if call.schedule == "fused" or call.world_size == 1:
        # dk and dv are made when the fp32 sums of dq are gone, which are twice as large or more
        parts = 0.0
        if profile is not None:
            parts = split_bytes(*gathered(call.planned, 0), heads, profile)
        return q + 2 * o + kv + lse + ring + (slots - 1) * kv + 3 * lse + q + max(2 * q, kv) + parts
    return q + 2 * o + kv + lse + ring + lse + 2 * q + 2 * kv + q + kv


def training_memory(
    shape: ModelShape,
    tokens: int,
    call: RingCall,
    *,
    shards: int,
    tp: int = 1,
    recompute: str = "selective",
    mlp_rows: int = 131072,
    has_moments: bool = True,
    reserve: float = 0.0,
    replicated: bool = False,
    stream_bytes: int = 2,
    slots: int = 1,
    save_gathered: bool = False,
) -> Memory:
    """Return the memory of a rank at the peak of a training step (Note [Peak of a training step]).

    Args:
        tokens: Rows of this rank.
        call: The attention call of one layer.
        shards: Ranks over which FSDP shards states.
        tp: Ranks that share heads, the MLP and, between them, rows of the residual stream.
        mlp_rows: Rows that go through the MLP at a time.
        has_moments: The optimizer has made its two moments: from the second step on.
        replicated: Every rank holds all parameters in fp32, and computes in bf16 by autocast.
        stream_bytes: Bytes of an element of the residual stream.
    """
    per_rank = shape.parameters / tp / (1 if replicated else shards)
    stream = tokens * shape.dim * stream_bytes / tp
    heads = tokens * shape.heads * shape.head_dim * 2 / tp
    saved = SAVED_STREAMS[recompute] * stream
    if recompute != "full":
        saved += heads + tokens * shape.heads * 4 / tp
    if recompute == "none":
        qkv = tokens * shape.head_dim * (shape.heads + 2 * shape.kv_heads) * 2 / tp
        saved += qkv + SAVED_MLP["none"] * tokens * shape.mlp_dim * shape.active_experts * 2 / tp
    gathered_rows = 0.0
    if save_gathered and call.world_size > 1:
        gathered_rows = shape.layers * call.mask.kv_len * call.heads.kv_bytes()
    layer = shape.layer_parameters / tp
    gathers = 0.0 if replicated or shards == 1 else 1.0
    units = (2 * shape.root_parameters / tp + shape.vocab_size * shape.dim * 2 / tp + layer * (2 * 2 + 2 + 4)) * gathers
    width = shape.mlp_dim * (shape.active_experts + shape.shared_experts)
    working = MLP_TENSORS * min(tokens, mlp_rows) * width * 2 / tp + STREAMS * stream
    begins = Memory(
        weights=4 * per_rank,
        gradients=4 * per_rank if replicated else 4 * per_rank / shape.layers,
        optimizer=8 * per_rank * has_moments,
        activations=shape.layers * saved + gathered_rows,
        working=working + units,
        ring=ring_bytes(call, backward=True) + (slots - 1) * tokens * call.heads.kv_bytes(),
        reserve=reserve,
    )
    ends = replace(begins, gradients=4 * per_rank, activations=begins.activations / shape.layers)
    return max(begins, ends, key=lambda memory: memory.total)


def serving_memory(
    shape: ModelShape, tokens: int, batch: int, world_size: int, chunk: int, call: RingCall, *, reserve: float = 0.0
) -> Memory:
    """Return the memory of a serving rank: all weights in bf16, its part of the KV cache, and a chunk of prompt rows.

    Args:
        tokens: Context of a request.
        batch: Requests.
        chunk: Rows of the prompt that go through the model at once, of all ranks.
    """
    rows = min(chunk, tokens) / world_size
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * 2
    # a chunk's residual stream, q, and two tensors of the MLP's width
    working = rows * 2 * (3 * shape.dim + 2 * shape.heads * shape.head_dim + 3 * shape.mlp_dim * shape.active_experts)
    return Memory(
        weights=2 * shape.parameters,
        working=working,
        ring=ring_bytes(call, backward=False),
        kv_cache=batch * tokens * kv / world_size,
        reserve=reserve,
    )


def heads_of(shape: ModelShape, tp: int = 1, batch: int = 1) -> Heads:
    """Return the heads that a rank computes."""
    return Heads(batch, shape.heads // tp, max(1, shape.kv_heads // tp), shape.head_dim)
