"""Bytes of one rank by what they are for: states of a model, activations, buffers of the ring, KV cache.

Note [Peak of a training step]
    Memory is fullest in the backward of some layer, in the loss, or when the gradients of embedding and head are reduced. In the
    backward of a layer a rank holds, beside states: its checkpoint and those of the layers before it (of layers whose checkpoints
    wait in host memory that of the layer at work and of the one before it, which is copied), and reduced gradients of the layers
    behind it; the parameters outside of layers and the gradient of the head in bf16 (one FSDP unit, gathered until the backward
    ends); the layer, and the next one that is gathered beside it; the fp32 gradients of the layer behind it, while they are
    reduced; and the activations of the layer, which is computed again (`_layer_bytes`). At the loss it holds no layer, but the
    gradient of the head, a chunk of logits and their gradient in bf16; without chunks all logits, in bf16 and fp32, and both
    gradients. All this is counted; no number is fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ringattn.plan.buffers import gather_bytes
from ringattn.plan.layouts import shard_len
from ringattn.sizing.attention_launch import Heads, split_bytes
from ringattn.sizing.profile import Profile
from ringattn.sizing.ring_time import RingCall, gathered
from ringattn.sizing.shapes import ModelShape

STREAMS = 4
"""Tensors of the model's width that the backward of an MLP holds: inputs of attention and MLP, before the norm of the latter, and
the gradient of the layer's output; beside them q, k and v."""
ROTARY = (2, 7)
"""Tensors of the width of the model, and of q, while q is turned in a second run: by tensors in fp32."""
MLP_TENSORS = 6
"""Tensors of the MLP's width in its backward: gate, up, their product, and gradients."""
LOSS_STREAMS = 3.0
"""Tensors of the model's width at the loss: last rows, before and after the norm, and their gradient."""
OUTBOX_ROWS = 3.5
"""Largest messages that a stepwise ring over the copy engine holds beside its buffers; two are its outboxes. Fitted."""
FIXED_BYTES = 6 * 2**20
"""Flags, semaphores and tables of a ring; fitted."""
SAVED_STREAMS = {"none": 8.0, "selective": 1.0, "full": 1.0}
"""Tensors of the model's width that a layer saves for the backward, beside the MLP's."""
SAVED_MLP = 4.0
"""Tensors of the MLP's width that a layer saves without recomputation."""
REPLICATED_ROWS = 8192
"""Most rows of a prefill that every rank computes with its slices of the weights."""


ON_DEVICE = 2
"""Layers whose checkpoints are on the device although they wait in host memory: the one at work and the one before it."""
CHUNK_ELEMENTS = 1 << 27
"""Logits at a time of a chunked loss; that of `ringattn.training.log_probs`."""
CHUNKED_LOGIT_BYTES = 4
"""Bytes of a logit of a chunk: bf16, and its gradient."""
WHOLE_LOGIT_BYTES = 12
"""Bytes of a logit where all exist, with their gradients."""


@dataclass(frozen=True)
class Savings:
    """Bounds of the activations of a step beside recomputation (`ringattn.training.save_memory_`).

    Attributes:
        offload: Layers whose checkpoints wait in host memory; "all", or "auto": the fewest with which a rank fits.
        mlp_rows: Rows of a rank that go through an MLP at a time.
        chunked_loss: The loss is computed without the logits of all rows.
    """

    offload: int | str = 0
    mlp_rows: int = 131072
    chunked_loss: bool = True

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if self.offload not in ("auto", "all") and (isinstance(self.offload, str) or self.offload < 0):
            raise ValueError(f'offload must be a number of layers, "all" or "auto", got {self.offload!r}; 0 is none')
        if self.mlp_rows < 1:
            raise ValueError(f"mlp_rows must be at least 1, got {self.mlp_rows}; give rows of a rank")

    def layers(self, shape: ModelShape) -> int:
        """Return the number of layers whose checkpoints wait in host memory; "auto" counts as none."""
        return {"auto": 0, "all": shape.layers}[self.offload] if isinstance(self.offload, str) else self.offload


NO_OFFLOAD = Savings()
"""MLPs of at most 131,072 rows at a time, and a loss by chunks."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by what they are for, at its peak.

    Attributes:
        weights: This rank's share in fp32 in training; in bf16 when serving, all of them or a slice and two gathered layers.
        gradients: Reduced gradients in fp32 that exist at the peak.
        optimizer: State of AdamW in fp32.
        activations: Tensors that layers save for their backward, and keys that a forward gathered.
        working: Tensors of the layer that is computed, or of the loss, and gathered parameters.
        ring: Buffers of the ring.
        kv_cache: Keys and values of all requests when serving.
        reserve: Memory that libraries take outside of tensors.
    """

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
        sizes = heads.batch, heads.kv_heads, heads.width, 2
        place = planned.gather_plan(0), planned.world_size // planned.nodes
        return float(FIXED_BYTES + gather_bytes(*sizes, *place, backward=backward, hierarchical=planned.nodes > 1))
    return stepwise_bytes(planned, backward=backward)


def stepwise_bytes(call: RingCall, *, backward: bool) -> float:
    """Return the bytes of a stepwise ring: carried partials, packed and received rows, contributions, and outboxes."""
    heads = call.heads
    plan, _, row, back = call.moved(backward=backward)
    forward_row = heads.kv_bytes()
    s = max(shard_len(shard) for shard in call.shards)
    carried = s * heads.batch * heads.heads * 4 * (heads.head_dim + 2)
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


def attention_peak(call: RingCall, profile: Profile) -> float:
    """Return the peak bytes of one forward and backward of a call by itself: inputs, outputs, gradients, buffers."""
    heads = call.heads
    s = max(shard_len(shard) for shard in call.planned.shards)
    q = s * heads.batch * heads.heads * heads.head_dim * 2
    lse = s * heads.batch * heads.heads * 4
    kv = s * heads.kv_bytes()
    ring = ring_bytes(call, backward=True)
    if call.saved and call.world_size > 1:
        ring += call.planned.gather_plan(0).remote_rows * heads.kv_bytes()
    if call.schedule == "fused" or call.world_size == 1:
        # dk and dv are made when the fp32 sums of dq are gone, which are twice as large or more
        parts = split_bytes(*gathered(call.planned, 0), heads, profile)
        return 4 * q + kv + 4 * lse + ring + max(2 * q, kv) + parts
    return 6 * q + 4 * kv + 2 * lse + ring


def checkpoint_bytes(shape: ModelShape, tokens: int, recompute: str, tp: int = 1) -> float:
    """Return the bytes that a layer saves for its backward, beside gathered keys."""
    saved = SAVED_STREAMS[recompute] * tokens * shape.dim * 2 / tp
    if recompute != "full":
        saved += tokens * shape.heads * (shape.head_dim * 2 + 4) / tp
    if recompute == "none":
        qkv = tokens * shape.head_dim * (shape.heads + 2 * shape.kv_heads) * 2 / tp
        saved += qkv + SAVED_MLP * tokens * shape.mlp_width * 2 / tp
    return saved


def training_memory(
    shape: ModelShape,
    tokens: int,
    call: RingCall,
    *,
    shards: int,
    tp: int = 1,
    recompute: str = "selective",
    savings: Savings = Savings(),
    reserve: float = 0.0,
) -> Memory:
    """Return the memory of a rank at the peak of a training step (Note [Peak of a training step]).

    Args:
        tokens: Rows of this rank.
        call: The attention call of one layer.
        shards: Ranks over which FSDP shards states.
        tp: Ranks that share heads, the MLP and, between them, rows of the residual stream.
        savings: Offload, chunks of MLPs and of the loss.
        reserve: Bytes that libraries take outside of tensors.
    """
    per_rank, stream = shape.parameters / tp / shards, tokens * shape.dim * 2 / tp
    layer, root, head = (n / tp for n in (shape.layer_parameters, shape.root_parameters, shape.vocab_size * shape.dim))
    moved = min(savings.layers(shape), shape.layers)
    states = {"weights": 4 * per_rank, "optimizer": 8 * per_rank, "reserve": reserve}
    states["ring"] = ring_bytes(call, backward=True)
    saved, keys = checkpoint_bytes(shape, tokens, recompute, tp), 0.0
    if call.saved and call.world_size > 1:
        keys = call.gather_plan(0).most_remote_rows * call.heads.kv_bytes()

    def held(index: int) -> float:
        """Return what layers up to this one have saved; with full recomputation the keys of the layer at work alone."""
        checkpoints = max(index + 1 - moved, min(index + 1, ON_DEVICE))
        return checkpoints * saved + keys * (1 if recompute == "full" else index + 1)

    def backward(index: int) -> Memory:
        """Return the memory in the backward of a layer."""
        done, gathered = shape.layers - 1 - index, 2 if shards > 1 and index else 1
        units = 2 * root + 2 * head + (2 * gathered + 4 * (done > 0)) * layer
        working = units + _layer_bytes(shape, tokens, tp, recompute, savings)
        return Memory(gradients=4 * layer * done / shards, activations=held(index), working=working, **states)

    logits = WHOLE_LOGIT_BYTES * tokens * shape.vocab_size / tp
    if savings.chunked_loss:
        # and fp32 sums of gradients of a block's rows
        rows = min(tokens, math.isqrt(8 * CHUNK_ELEMENTS))
        logits = CHUNKED_LOGIT_BYTES * min(CHUNK_ELEMENTS, tokens * shape.vocab_size) / tp
        logits += 2 * head + 6 * rows * shape.dim / tp
    last = shape.layers - 1
    loss = Memory(activations=held(last), working=2 * root + logits + LOSS_STREAMS * stream, **states)
    # gradients of embedding and head in bf16 and fp32, then the latter and their sum
    ends = Memory(gradients=4 * per_rank, working=max(4 * root, 6 * root - 4 * root / shards), **states)
    # what a layer adds and leaves is the same for all between the first two and the last two
    layers = {max(0, last - 1), last, 0, min(1, last)}
    return max(loss, ends, *map(backward, layers), key=lambda memory: memory.total)


def _layer_bytes(shape: ModelShape, tokens: int, tp: int, recompute: str, savings: Savings) -> float:
    """Return the activations of a layer in its backward at their peak, beside its checkpoint, and its gradients."""
    stream, rows = tokens * shape.dim * 2 / tp, min(tokens, savings.mlp_rows)
    q, kv = (tokens * heads * shape.head_dim * 2 / tp for heads in (shape.heads, 2 * shape.kv_heads))
    weights = shape.mlp_parameters(shape.experts) / tp
    # the gradient of one of three matrices
    mlp = STREAMS * stream + q + kv + MLP_TENSORS * rows * shape.mlp_width * 2 / tp + 2 * weights / 3
    if rows < tokens:
        # gradients of all rows, results of a chunk, sums of gradients of weights in fp32
        mlp += stream + rows * shape.dim * 2 / tp + 4 * weights
    # what attention returned is there again, and tables of rotary embedding
    returned = tokens * shape.heads * (shape.head_dim * 2 + 4) / tp if recompute == "full" else 0.0
    return max(mlp + returned, ROTARY[0] * stream + ROTARY[1] * q) + 4 * tokens * shape.head_dim


def host_bytes(shape: ModelShape, tokens: int, recompute: str, savings: Savings, tp: int = 1) -> float:
    """Return the bytes of pinned host memory of a rank."""
    return min(savings.layers(shape), shape.layers) * checkpoint_bytes(shape, tokens, recompute, tp)


def layers_to_offload(over: float, saved: float, layers: int) -> int:
    """Return the fewest layers whose checkpoints of `saved` bytes must leave a device that is `over` bytes too small.

    Example:
        >>> layers_to_offload(2.5, 1.0, 10), layers_to_offload(-1.0, 1.0, 10)
        (3, 0)
    """
    return max(0, min(layers, math.ceil(over / saved)))


def serving_memory(
    shape: ModelShape,
    tokens: int,
    batch: int,
    chunk: int,
    call: RingCall,
    *,
    sharded: bool = False,
    reserve: float = 0.0,
) -> Memory:
    """Return the memory of a serving rank: weights in bf16, its part of the KV cache, and a chunk of prompt rows.

    Args:
        tokens: Context of a request.
        batch: Requests.
        chunk: Rows of the prompt that go through the model at once, of all ranks.
        call: The attention call of one layer.
        sharded: A rank stores a slice of the weights, and the two layers that it gathers, instead of all.
        reserve: Bytes that libraries take outside of tensors.
    """
    held = shape.parameters
    if sharded:
        held = shape.parameters / call.world_size + 2 * shape.layer_parameters
    rows = min(chunk, tokens) / call.world_size
    # a chunk's residual stream, q, and two tensors of the MLP's width
    stream = 3 * shape.dim + 2 * shape.heads * shape.head_dim
    working = rows * 2 * (stream + 3 * shape.mlp_width)
    if sharded:
        # all rows of a short prompt, and two fp32 addends of theirs
        few = min(rows * call.world_size, REPLICATED_ROWS)
        working = max(working, few * (2 * stream + 6 * shape.mlp_width / call.world_size + 8 * shape.dim))
    return Memory(
        weights=2 * held,
        working=working,
        ring=ring_bytes(call, backward=False),
        kv_cache=batch * tokens * shape.kv_token_bytes / call.world_size,
        reserve=reserve,
    )


def heads_of(shape: ModelShape, tp: int = 1, batch: int = 1) -> Heads:
    """Return the heads that a rank computes."""
    return Heads(batch, shape.heads // tp, max(1, shape.kv_heads // tp), shape.head_dim)
