"""A whole model in training: speed and memory of an 8B-shaped transformer against its context, beside torch's own attention.

Owns what is measured of a training step and the rows. Refuses to know how attention is computed, and how rows are shown.
Prints no speed of a model whose loss differs from ours.

Note [The same step]
    Everybody trains the same parameters on the same tokens of zigzag shards: FSDP2 over all ranks (parameters gathered in
    bf16, gradients reduced in fp32, AdamW on fp32 shards), blocks checkpointed, the loss of the vocabulary in pieces of
    rows, and SwiGLU too where a rank has many. Only the attention differs, and that "ring" keeps what attention returned
    (one operator, which selective checkpointing can name), while the others compute it again in the backward, as
    checkpointing of whole blocks does. torch's context parallelism knows no grouped heads, so keys and values are repeated
    to the query heads inside its step, as models for it do.

Note [MFU]
    Model FLOPs of a step: 6 per parameter (the embedding's rows are looked up, not multiplied) and token, and
    12 * heads * head_dim per layer and visible pair: forward once, backward twice, nothing for what is computed again
    (Chowdhery et al. 2022, "PaLM", appendix B, with pairs instead of all keys). MFU is their part of the peak in the
    datasheet (`train/metrics.py`: 989 TFLOP/s for H100 and H200).
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ringattn
from ringattn.launch.bench.baselines import Refused
from ringattn.launch.bench.ring import GIB, outside_torch, verify
from ringattn.launch.bench.workloads import Problem
from ringattn.launch.check.attention import DTYPES
from ringattn.launch.runtime.distributed import Refusal
from ringattn.launch.runtime.session import Keep, Session, check_numbers
from ringattn.launch.train.metrics import mfu, peak_flops
from ringattn.launch.train.model import Block, ModelConfig, Transformer, recompute_

Attention = Literal["ring", "ring_recomputed", "torch_cp_allgather", "torch_cp_alltoall"]


@dataclass(frozen=True)
class Model:
    """All ranks: training steps of a Llama-shaped model by context, with our attention and with torch's.

    Attributes:
        lengths: Context in tokens: the whole sequence.
        layers: Blocks at each length; one number for all. 32 is the whole 8B model.
        attentions: Who computes attention: "ring"; "ring_recomputed", whose backward computes attention again like everything
            else in a block; or torch's context parallelism by its rotate method, likewise.
        dim: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Of q, k and v.
        mlp_dim: Hidden width of SwiGLU.
        vocab_size: Tokens in the vocabulary.
        dtype: Of gathered parameters and activations.
        steps: Steps that are timed, after one that is not; the median counts.
        mlp_rows: Of more rows than these per rank, so many go through SwiGLU at a time, and again in the backward.
        patience_s: A contender whose first step takes longer is not asked for more: that step counts.
        device: GPUs where there are any, or the CPU.
        out: Folder for the JSON and the plot.
        name: Of the files.
    """

    lengths: tuple[int, ...] = (131072, 262144, 524288, 1048576)
    layers: tuple[int, ...] = (32,)
    attentions: tuple[Attention, ...] = ("ring", "ring_recomputed", "torch_cp_allgather", "torch_cp_alltoall")
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    mlp_dim: int = 14336
    vocab_size: int = 128256
    dtype: Literal["bf16", "fp32"] = "bf16"
    steps: int = 2
    mlp_rows: int = 131072
    patience_s: float = 60.0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/bench")
    name: str = "model"

    def __post_init__(self) -> None:
        """Gives every length its layers, and refuses shapes that no model has."""
        if len(self.layers) not in (1, len(self.lengths)):
            raise ValueError(f"layers must be one number or one per length, got {self.layers} for {self.lengths}")
        check_numbers(self)
        self.config(self.layers[0])

    def config(self, layers: int) -> ModelConfig:
        """The shape of a model of so many blocks."""
        return ModelConfig(
            dim=self.dim,
            num_layers=layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            mlp_dim=self.mlp_dim,
            vocab_size=self.vocab_size,
            tie_embeddings=False,
        )


def model_flops(config: ModelConfig, num_parameters: int, tokens: int, pairs: int) -> int:
    """FLOPs that the model asks of a step (Note [MFU]).

    Args:
        config: Its shape.
        num_parameters: All of them.
        tokens: In the whole sequence.
        pairs: Visible (query, key) pairs of a layer.

    Example:
        >>> model_flops(ModelConfig(8, 1, 1, 1, 8, 8, vocab_size=4, tie_embeddings=False), 132, 10, 55)
        11280
    """
    looked_up = config.vocab_size * config.dim
    attention = 12 * config.num_heads * config.head_dim * pairs * config.num_layers
    return 6 * (num_parameters - looked_up) * tokens + attention


def open_model(args: Model, layers: int, session: Session) -> tuple[Transformer, torch.optim.Optimizer]:
    """A model of random weights that is sharded over all ranks, and its optimiser; no rank ever holds it whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.device("meta"):
        model = Transformer(args.config(layers))
    for block in model.blocks:
        cast(Block, block).mlp.rows = args.mlp_rows
    mesh = init_device_mesh(session.device.type, (session.world_size,), mesh_dim_names=("cp",))
    # inputs stay as they are: rotary tables are fp32, and FSDP would not round them alike when a block is computed again
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[args.dtype], reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=session.device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=session.device.type == "cuda")


@contextlib.contextmanager
def attending(model: Transformer, who: str, session: Session) -> Iterator[None]:
    """Inside, the model's attention is computed by `who`.

    Raises:
        Refused: It cannot be, here.
    """
    for block in model.blocks:
        block.__dict__.pop("forward", None)  # what the last one recomputed
    recompute_([*model.blocks], "selective" if who == "ring" else "full")
    if who.startswith("ring"):
        yield
        return
    if session.device.type != "cuda" or session.world_size == 1:
        raise Refused("runs among several GPUs only")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q: Tensor, k: Tensor, v: Tensor, sharding: ringattn.Sharding, **mask: Any) -> Tensor:
        del sharding, mask  # causal over zigzag shards is all it knows
        group = q.shape[2] // k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    set_rotate_method(who.removeprefix("torch_cp_"))
    mesh = init_device_mesh("cuda", (session.world_size,))
    # it wants a sequence to shard, though ours come sharded
    sequence = torch.zeros(1, 128 * session.world_size, device=session.device)
    attentions = [cast(Block, block).attention for block in model.blocks]
    with context_parallel(mesh, buffers=[sequence], buffer_seq_dims=[1]):
        try:
            for attention in attentions:
                attention.attend = attend
            yield
        finally:
            for attention in attentions:
                attention.attend = ringattn.ring_attention


@dataclass(frozen=True)
class Batch:
    """This rank's rows of one sequence."""

    tokens: Tensor
    targets: Tensor
    sharding: ringattn.Sharding

    @staticmethod
    def draw(ring: ringattn.Ring, length: int, vocab_size: int, device: torch.device) -> Batch:
        """Random tokens, the same whole sequence on every rank."""
        whole = torch.randint(vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(length))
        sharding = ring.sharding(length, layout="zigzag", device=device)
        tokens, targets = (sharding.shard(x, dim=1).to(device) for x in (whole[:, :-1], whole[:, 1:]))
        return Batch(tokens, targets, sharding)

    def loss(self, model: Transformer) -> Tensor:
        """What a rank differentiates: FSDP divides gradients by the ranks, which the loss makes up for."""
        return model(self.tokens, self.sharding, self.targets) * (self.sharding.world_size / self.sharding.seq_len)


def disagreement(args: Model, model: Transformer, ring: ringattn.Ring, session: Session) -> dict[str, str]:
    """Who computes another loss or gradient than our attention, at a short length, and how far off it is."""
    batch = Batch.draw(ring, 1024 * session.world_size, args.vocab_size, session.device)
    found: dict[str, list[float]] = {}
    wrong: dict[str, str] = {}
    for who in dict.fromkeys(("ring", *args.attentions)):
        try:
            with attending(model, who, session):
                loss = batch.loss(model)
                loss.backward()
        except Refused as refusal:
            wrong[who] = str(refusal)
            continue
        except Exception as error:
            if who.startswith("ring"):
                raise
            wrong[who] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            model.zero_grad(set_to_none=True)
            continue
        square = sum((p.grad.to_local().double() ** 2).sum() for p in model.parameters() if p.grad is not None)  # pyright: ignore[reportAttributeAccessIssue]
        model.zero_grad(set_to_none=True)
        total, square = session.sum(torch.stack([loss.detach().double(), torch.as_tensor(square)])).tolist()
        found[who] = [total / session.world_size, math.sqrt(square)]
    # two roundings of bf16 in the loss of one token average out over thousands of them
    allowed = 1e-3 if args.dtype == "bf16" else 1e-5
    for who, values in found.items():
        for name, here, ours in zip(("loss", "gradient norm"), values, found["ring"], strict=True):
            if not abs(here - ours) <= allowed * (10 if name != "loss" else 1) * abs(ours):
                wrong[who] = f"wrong {name}: {here:.6g}, ours {ours:.6g}"
    return wrong


def bench_model(args: Model, session: Session, keep: Keep) -> list[dict[str, Any]] | None:
    """Rows of training steps, one per length and attention; None when the check is red.

    Args:
        args: What.
        session: The ranks.
        keep: Who gets the rows.

    Raises:
        Refusal: There is no process group, over which FSDP2 could shard.
    """
    if not dist.is_initialized():
        raise Refusal(
            "bench model must run in ranks of torchrun, over which FSDP2 shards, got a process by itself; "
            "start it with torchrun --nproc_per_node 1 -m ringattn.launch.bench model"
        )
    problem = Problem("causal", 4096, 1, args.heads, args.kv_heads, args.head_dim, args.dtype, 4096)
    if session.device.type == "cuda" and not verify([problem], ("zigzag",), session, "auto"):
        return None
    rows: list[dict[str, Any]] = []
    depths = args.layers if len(args.layers) > 1 else args.layers * len(args.lengths)
    for length, layers in zip(args.lengths, depths, strict=True):
        ring = ringattn.Ring()
        model, optimizer = open_model(args, layers, session)
        wrong = disagreement(args, model, ring, session)
        for who in args.attentions:
            row = {"bench": "model", "world_size": session.world_size, "seq_len": length, "who": who, "layers": layers}
            row |= {
                name: getattr(args, name) for name in ("dim", "heads", "kv_heads", "head_dim", "mlp_dim", "vocab_size")
            }
            row["recompute"] = "selective" if who == "ring" else "full"
            row["parameters"] = sum(p.numel() for p in model.parameters())
            if who in wrong:
                row["refused"] = wrong[who]
            else:
                with attending(model, who, session):
                    row |= _measure(
                        args, model, optimizer, Batch.draw(ring, length, args.vocab_size, session.device), session
                    )
            rows.append(row)
            session.say(f"  {length} tokens, {layers} layers, {who}: {_said(row)}")
            keep(rows)
        ring.close()
        del model, optimizer
        gc.collect()
        if session.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _said(row: dict[str, Any]) -> str:
    if "refused" in row:
        return str(row["refused"])
    mfu = "" if row["mfu_percent"] is None else f", MFU {row['mfu_percent']:.1f}%"
    return f"{row['step_s']:.2f} s, {row['tokens_per_s_per_gpu']:.0f} tokens/s per GPU{mfu}, loss {row['loss']:.4f}"


def _measure(
    args: Model, model: Transformer, optimizer: torch.optim.Optimizer, batch: Batch, session: Session
) -> dict[str, Any]:
    cuda = session.device.type == "cuda"
    outside = outside_torch(session.device) if cuda else 0
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(session.device)
    taken: list[float] = []
    losses: list[float] = []
    while len(taken) < 1 + args.steps and (not taken or taken[0] <= args.patience_s):
        session.barrier()
        began, loss = time.perf_counter(), None
        try:
            loss = batch.loss(model)
            loss.backward()
            optimizer.step()
            session.barrier()
        except torch.OutOfMemoryError:
            loss = None
        optimizer.zero_grad(set_to_none=True)
        # ranks hold equally much: when one is full they all are
        if loss is None:
            return {"refused": "out of memory"}
        taken.append(session.maximum([time.perf_counter() - began])[0])
        losses.append(float(session.sum(loss.detach())) / session.world_size)
    seconds = statistics.median(taken[1:] or taken)
    tokens, ranks = batch.sharding.seq_len, session.world_size
    flops = model_flops(model.config, sum(p.numel() for p in model.parameters()), tokens, tokens * (tokens + 1) // 2)
    peak = peak_flops(torch.cuda.get_device_name(session.device) if cuda else "CPU", DTYPES[args.dtype])
    share = mfu(flops, seconds, ranks, peak)
    held = (
        torch.cuda.max_memory_allocated(session.device) + max(0, outside_torch(session.device) - outside) if cuda else 0
    )
    return {
        "step_s": seconds,
        "steps_s": taken,
        "loss": losses[0],
        "losses": losses,
        "tokens_per_s_per_gpu": tokens / seconds / ranks,
        "model_tflops_per_gpu": flops / seconds / ranks / 1e12,
        "mfu_percent": None if share is None else 100 * share,
        "peak_gib": session.maximum([held / GIB])[0] if cuda else None,
    }
