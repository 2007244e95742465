"""Seconds of a training step, of a prompt and of a token, by what takes them.

Note [Elementwise traffic]
    Norms, rotary embeddings, SwiGLU and residual sums are kernels that memory bounds. Their bytes per row are counted from the
    eager model of the training job (`launch/train/model.py`): a read or write of each operand. `COMPILED` is the share of them
    that a compiler leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringattn.sizing.memory import NO_OFFLOAD, Savings, checkpoint_bytes
from ringattn.sizing.profile import Profile
from ringattn.sizing.ring_time import RingCall, attention_time
from ringattn.sizing.shapes import ModelShape

FORWARD_BYTES = (20, 48, 10)
"""Bytes of elementwise kernels of a layer's forward, per row and column of the stream, of q and k, and of the MLP."""
BACKWARD_BYTES = (44, 60, 18)
"""The same of its backward."""
LOSS_BYTES = 18
"""Bytes per row and logit: two passes over logits in bf16, one of which writes their gradient, and sums of gradients of rows."""
OPTIMIZER_BYTES = 32
"""Bytes per parameter of AdamW in fp32, and of clipping."""
COMPILED = 0.4
"""Share of the traffic of a forward that a compiler leaves."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step on the slowest rank by what they are for.

    Attributes:
        matmul: Matrix products, repeated ones included.
        attention: Attention kernels as on one GPU with the same work.
        elementwise: Norms, rotary embeddings, activations and residuals.
        optimizer: The update.
        ring_exposed: Time of attention calls beyond their kernels.
        fsdp_exposed: All-gathers and reduce-scatters of FSDP, or all-gathers of sharded weights, that no layer hides.
        tp_exposed: All-reduces of tensor parallelism.
        offload_exposed: Copies of checkpoints to host memory and back that no layer hides.
    """

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    optimizer: float = 0.0
    ring_exposed: float = 0.0
    fsdp_exposed: float = 0.0
    tp_exposed: float = 0.0
    offload_exposed: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return sum(vars(self).values())


LayerCalls = Sequence[tuple[RingCall, int]]
"""Attention calls of a model with the number of layers of each: those with a sliding window have another mask."""


def collective_s(num_bytes: float, ranks: int, profile: Profile, ranks_per_node: int) -> float:
    """Return the seconds of an all-gather or a reduce-scatter in which a rank receives `num_bytes` from others.

    Between nodes every GPU has its own network link, and the GPUs of a node pass on what they receive.
    """
    if ranks == 1 or not num_bytes:
        return 0.0
    nodes = -(-ranks // ranks_per_node)
    rate = profile.collective_gbps
    if nodes > 1:
        network = profile.network.gbps * ranks_per_node
        rate = min(rate, network) if ranks_per_node > 1 else network
    latency = profile.nccl.latency_us + (nodes - 1) * profile.network.latency_us
    return num_bytes / rate / 1e9 + latency / 1e6


def _bytes_per_row(shape: ModelShape, per_column: tuple[int, int, int]) -> int:
    stream, qk, mlp = per_column
    return stream * shape.dim + qk * shape.head_dim * (shape.heads + shape.kv_heads) + mlp * shape.mlp_width


def _exchange_s(shape: ModelShape, rows: int, tp: int, profile: Profile, gpus_per_node: int) -> float:
    """Return the seconds of the two all-reduces of a layer, each a reduce-scatter and an all-gather."""
    return 4 * collective_s(rows * shape.dim * 2 * (tp - 1) / tp, tp, profile, gpus_per_node)


def training_step(
    shape: ModelShape,
    rows: int,
    calls: LayerCalls,
    profile: Profile,
    *,
    shards: int,
    gpus_per_node: int,
    tp: int = 1,
    recompute: str = "selective",
    savings: Savings = NO_OFFLOAD,
    accumulate: int = 1,
) -> Seconds:
    """Return the seconds of a training step of a rank with `rows` tokens of each of `accumulate` sequences.

    Args:
        shards: Ranks over which FSDP shards parameters.
        gpus_per_node: GPUs that the copy engine and NVLink connect.
        tp: Ranks that share heads, the MLP and rows; they are neighbors within a node.
    """
    layers, again = shape.layers, 1 if recompute == "none" else 2
    # matrix products of a layer: forward, perhaps again, and twice in the backward
    flops = 2.0 * rows * layers * shape.active_layer_parameters / tp * (again + 2)
    if recompute == "none" and savings.mlp_rows < rows:
        flops += 2.0 * rows * layers * shape.mlp_parameters(shape.active_experts) / tp
    flops += 2.0 * rows * shape.vocab_size * shape.dim / tp * 4
    matmul = flops / profile.matmul_sustained_tflops / 1e12
    attention = exposed = 0.0
    for call, count in calls:
        # the host runs ahead of a step's device work
        for direction, times in (("forward", 2 if recompute == "full" else 1), ("backward", 1)):
            time = attention_time(call, profile, direction)
            kernel = time.kernel_ms * profile.sustained / profile.sustained_factor(time.kernel_ms)
            attention += count * times * kernel / 1e3
            exposed += count * times * max(0.0, time.device_ms - time.kernel_ms) / 1e3
    traffic = layers * (again * _bytes_per_row(shape, FORWARD_BYTES) + _bytes_per_row(shape, BACKWARD_BYTES))
    elementwise = rows * (traffic + LOSS_BYTES * shape.vocab_size) / tp / profile.memory_gbps / 1e9
    # ranks of a node that hold the same part of tensor-parallel weights
    per_node, others = max(1, gpus_per_node // tp), (shards - 1) / shards / tp
    gather, reduce, root = (
        collective_s(size * others, shards, profile, per_node)
        for size in (2 * shape.layer_parameters, 4 * shape.layer_parameters, 6 * shape.root_parameters)
    )
    forward_s = (matmul / (again + 2) + attention / 3) / layers
    backward_s = (matmul * (again + 1) / (again + 2) + attention * 2 / 3) / layers
    fsdp = layers * (max(0.0, gather - forward_s) + max(0.0, gather + reduce - backward_s))
    copy_s = checkpoint_bytes(shape, rows, recompute, tp) / profile.host_gbps / 1e9
    copies = savings.layers(shape) * (max(0.0, copy_s - forward_s) + max(0.0, copy_s - backward_s))
    return Seconds(
        matmul=accumulate * matmul,
        attention=accumulate * attention,
        elementwise=accumulate * elementwise,
        optimizer=shape.parameters / tp / shards * OPTIMIZER_BYTES / profile.memory_gbps / 1e9,
        ring_exposed=accumulate * exposed,
        # the gather and the reduction of what is outside of layers have nothing to hide behind
        fsdp_exposed=accumulate * fsdp + root,
        # in the forward, its repetition and the backward
        tp_exposed=accumulate * layers * (again + 1) * _exchange_s(shape, rows, tp, profile, gpus_per_node),
        offload_exposed=accumulate * copies,
    )


def prefill_s(
    shape: ModelShape,
    tokens: int,
    calls: LayerCalls,
    profile: Profile,
    *,
    compiled: bool = True,
    tp: int = 1,
    sharded: bool = False,
) -> Seconds:
    """Return the seconds from a prompt to its first token.

    Args:
        compiled: Elementwise kernels are joined.
        tp: Ranks of a node that share heads and weights; `calls` have the heads of one of them. Ours hold all weights: 1.
        sharded: Ranks hold slices of the weights, and gather each layer while the one before it computes.
    """
    rows, layers = -(-tokens // calls[0][0].world_size), shape.layers
    flops = 2.0 * rows * layers * shape.active_layer_parameters / tp
    times = [(attention_time(call, profile, "forward"), count) for call, count in calls]
    traffic = rows * layers * _bytes_per_row(shape, FORWARD_BYTES) * (COMPILED if compiled else 1) / tp
    matmul, attention = flops / profile.matmul_tflops / 1e12, sum(count * time.kernel_ms for time, count in times) / 1e3
    gather, call = 0.0, calls[0][0]
    if sharded:
        received = 2 * shape.layer_parameters * (call.world_size - 1) / call.world_size
        gather = collective_s(received, call.world_size, profile, call.world_size // call.planned.nodes)
    return Seconds(
        matmul=matmul,
        attention=attention,
        # the first layer has nothing to hide behind
        fsdp_exposed=gather + (layers - 1) * max(0.0, gather - (matmul + attention) / layers),
        elementwise=traffic / profile.memory_gbps / 1e9,
        ring_exposed=sum(count * max(0.0, time.device_ms - time.kernel_ms) for time, count in times) / 1e3,
        tp_exposed=layers * _exchange_s(shape, rows, tp, profile, tp),
    )


def token_ms(
    shape: ModelShape, context: int, batch: int, world_size: int, profile: Profile, *, sharded: bool = False
) -> float:
    """Return the milliseconds of a decode step; ranks share the cache, the MLPs and the head; sharded: all weights."""
    weights = shape.decode_weight_bytes(batch, world_size, sharded=sharded)
    bound = (weights + shape.kv_token_bytes * context * batch / world_size) / profile.memory_gbps / 1e6
    # an exchange after attention; with slices also one after the projections before it and one after that behind it
    exchanges = (world_size > 1) * (3 if sharded else 1)
    host_us = profile.host_us["decode_layer"] + exchanges * profile.host_us["decode_reduce"]
    host_us += batch * profile.host_us.get("decode_request", 0.0)
    return bound + shape.layers * host_us / 1e3
