"""Seconds of a training step, of a prompt and of a token, by what takes them.

Note [Elementwise traffic]
    Norms, rotary embeddings, SwiGLU and residual sums are kernels that memory bounds. Their bytes per row are counted from the
    eager model of the training job (`launch/train/model.py`): a read or write of each operand. `COMPILED` is the share of them
    that a compiler leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringattn.planning.profile import Profile
from ringattn.planning.ring_time import RingCall, attention_time
from ringattn.planning.shapes import ModelShape

FORWARD_BYTES = {"dim": 20, "qk": 48, "mlp": 10}
"""Bytes of elementwise kernels of a layer's forward, per row and column of the stream, of q and k, and of the MLP."""
BACKWARD_BYTES = {"dim": 44, "qk": 60, "mlp": 18}
"""The same of its backward."""
LOSS_BYTES = 52
"""Bytes per row and logit: two passes over the logits in fp32, one of which makes their gradient."""
OPTIMIZER_BYTES = 32
"""Bytes per parameter of AdamW in fp32, and of clipping."""
COMPILED = 0.4
"""Share of the traffic of a forward that a compiler leaves."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step on the slowest rank by what they are for."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    optimizer: float = 0.0
    ring_exposed: float = 0.0
    fsdp_exposed: float = 0.0
    tp_exposed: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return sum(vars(self).values())

    @property
    def exposed_share(self) -> float:
        """Share of the step in which communication is not hidden."""
        return (self.ring_exposed + self.fsdp_exposed + self.tp_exposed) / self.total if self.total else 0.0


def collective_s(num_bytes: float, ranks: int, profile: Profile, gpus_per_node: int) -> float:
    """Return the seconds of an all-gather or a reduce-scatter in which a rank receives `num_bytes` from others.

    Between nodes every GPU has its own network link, and the GPUs of a node pass on what they receive.
    """
    if ranks == 1 or not num_bytes:
        return 0.0
    local, steps = min(ranks, gpus_per_node), 1
    rate = profile.collective_gbps
    if ranks > gpus_per_node:
        rate = min(rate, profile.network.gbps * local)
        steps = -(-ranks // gpus_per_node)
    latency = profile.nccl.latency_us + (steps - 1) * profile.network.latency_us
    return num_bytes / rate / 1e9 + latency / 1e6


def training_step(
    shape: ModelShape,
    rows: int,
    call: RingCall,
    profile: Profile,
    *,
    shards: int,
    gpus_per_node: int,
    tp: int = 1,
    recompute: str = "selective",
    accumulate: int = 1,
    stream_bytes: int = 2,
    window_call: RingCall | None = None,
) -> Seconds:
    """Return the seconds of a training step of a rank with `rows` tokens of each of `accumulate` sequences.

    Args:
        call: Attention of a layer; window_call: of layers with a sliding window.
        shards: Ranks over which FSDP shards parameters.
        gpus_per_node: GPUs that the copy engine and NVLink connect.
        stream_bytes: Bytes of an element of the residual stream.
    """
    layers, again = shape.layers, 1 if recompute == "none" else 2
    # matrix products of a layer: forward, perhaps again, and twice in the backward
    flops = 2.0 * rows * layers * shape.active_layer_parameters / tp * (again + 2)
    flops += 2.0 * rows * shape.vocab_size * shape.dim / tp * 4
    matmul = flops / profile.matmul_sustained_tflops / 1e12
    attention = exposed = 0.0
    windowed = shape.window_layers if window_call is not None else 0
    for one, count in ((call, layers - windowed), (window_call, windowed)):
        if one is None or not count:
            continue
        forward, backward = (attention_time(one, profile, direction) for direction in ("forward", "backward"))
        forwards = 2 if recompute == "full" else 1
        # the host runs ahead of a step's device work
        for time, times in ((forward, forwards), (backward, 1)):
            kernel = time.kernel_ms * profile.sustained / profile.sustained_factor(time.kernel_ms)
            attention += count * times * kernel / 1e3
            exposed += count * times * max(0.0, time.device_ms - time.kernel_ms) / 1e3
    qk = shape.head_dim * (shape.heads + shape.kv_heads)
    width = shape.mlp_dim * (shape.active_experts + shape.shared_experts)
    traffic = 0.0
    for share, of in ((again, FORWARD_BYTES), (1, BACKWARD_BYTES)):
        traffic += share * (of["dim"] * shape.dim * stream_bytes / 2 + of["qk"] * qk + of["mlp"] * width)
    elementwise = rows * (layers * traffic + LOSS_BYTES * shape.vocab_size) / tp / profile.memory_gbps / 1e9
    states = shape.parameters / tp / shards
    fsdp = tensor = 0.0
    if shards > 1:
        part = shape.layer_parameters / tp * (shards - 1) / shards
        gather = collective_s(2 * part, shards, profile, gpus_per_node)
        reduce = collective_s(4 * part, shards, profile, gpus_per_node)
        forward_s = (matmul / (again + 2) + attention / 3) / layers
        backward_s = (matmul * (again + 1) / (again + 2) + attention * 2 / 3) / layers
        fsdp = layers * (max(0.0, gather - forward_s) + max(0.0, gather + reduce - backward_s))
        # the first gather and the last reduction have nothing to hide behind
        root = shape.root_parameters / tp * (shards - 1) / shards
        fsdp += collective_s(6 * root, shards, profile, gpus_per_node) / accumulate
    if tp > 1:
        # two all-reduces, as a reduce-scatter and an all-gather each, in the forward, its repetition and the backward
        part = rows * shape.dim * 2 * (tp - 1) / tp
        tensor = layers * (again + 1) * 4 * collective_s(part, tp, profile, gpus_per_node)
    return Seconds(
        matmul=accumulate * matmul,
        attention=accumulate * attention,
        elementwise=accumulate * elementwise,
        optimizer=states * OPTIMIZER_BYTES / profile.memory_gbps / 1e9,
        ring_exposed=accumulate * exposed,
        fsdp_exposed=accumulate * fsdp,
        tp_exposed=accumulate * tensor,
    )


def prefill_s(
    shape: ModelShape,
    tokens: int,
    call: RingCall,
    profile: Profile,
    *,
    compiled: bool = True,
    tp: int = 1,
    gpus_per_node: int = 8,
) -> Seconds:
    """Return the seconds from a prompt to its first token.

    Args:
        call: Attention of a layer.
        compiled: Elementwise kernels are joined.
        tp: Ranks that share heads and weights; `call` has the heads of one of them. Ours hold all weights: 1.
        gpus_per_node: GPUs that NVLink connects.
    """
    rows = -(-tokens // call.world_size)
    flops = 2.0 * rows * shape.layers * shape.active_layer_parameters / tp
    time = attention_time(call, profile, "forward")
    qk = shape.head_dim * (shape.heads + shape.kv_heads)
    width = shape.mlp_dim * (shape.active_experts + shape.shared_experts)
    traffic = FORWARD_BYTES["dim"] * shape.dim + FORWARD_BYTES["qk"] * qk + FORWARD_BYTES["mlp"] * width
    # two all-reduces, as a reduce-scatter and an all-gather each
    exchange = collective_s(rows * shape.dim * 2 * (tp - 1) / tp, tp, profile, gpus_per_node) if tp > 1 else 0.0
    return Seconds(
        matmul=flops / profile.matmul_tflops / 1e12,
        attention=shape.layers * time.kernel_ms / 1e3,
        elementwise=rows * shape.layers * traffic * (COMPILED if compiled else 1) / tp / profile.memory_gbps / 1e9,
        ring_exposed=shape.layers * max(0.0, time.device_ms - time.kernel_ms) / 1e3,
        tp_exposed=4 * shape.layers * exchange,
    )


def token_ms(
    shape: ModelShape, context: int, batch: int, world_size: int, profile: Profile, *, split: bool = True
) -> float:
    """Return the milliseconds of a decode step over a cache that is sharded over all ranks.

    Args:
        split: The MLPs and the head are tensor parallel over the ranks.
    """
    shared = (
        shape.layers * shape.mlp_parameters(shape.active_experts + shape.shared_experts) + shape.vocab_size * shape.dim
    )
    read = shape.layers * shape.attention_parameters + shared / (world_size if split else 1)
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * context * batch / world_size
    bound = 2 * (read + kv) / profile.memory_gbps / 1e6
    hops = world_size > 1
    return bound + shape.layers * (profile.host_us["decode_layer"] + hops * profile.host_us["decode_reduce"]) / 1e3
