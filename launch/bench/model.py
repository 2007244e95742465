"""Speed and memory of training steps of an 8B-shaped transformer by context, with our attention and with torch's.

All implementations train the same parameters on the same tokens of zigzag shards: FSDP2 over all ranks (parameters gathered in
bf16, gradients reduced in fp32, AdamW on fp32 shards), blocks checkpointed, the loss and SwiGLU in pieces of rows. Only attention
differs, and that "ring" saves its output (selective checkpointing of one operator) while the others compute it again in the
backward. torch's context parallelism has no grouped heads: keys and values are repeated to the query heads inside its step.
MFU is the part of the datasheet's peak (`train/metrics.py`: 989 TFLOP/s for H100 and H200) that `ModelShape.step_flops` makes.
With `--offload` checkpoints of blocks wait in host memory: `saved_gib` is what the forward leaves on the GPU, `host_gib` the pinned
memory, and the row "copies" how fast the copies are where nothing else runs.

`bench trainer` measures steps of `transformers.Trainer` on one GPU by context and attention, and the overhead of `RingTrainer`: a
Llama-shaped model of random weights in bf16, AdamW, blocks checkpointed, one sequence per step. A first step that differs from
that of the first implementation in loss or gradient norm has no speed. transformers is imported where it is used.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from ringattn.launch.bench.baselines import Unsupported, torch_context_parallel, torch_cp_attention
from ringattn.launch.bench.correctness import check_rings, step_difference
from ringattn.launch.bench.inference_model import ContextArgs, ModelArgs, draw_tokens, make_model
from ringattn.launch.bench.rows import Rows
from ringattn.launch.bench.workloads import PeakMemory, Problem, free_memory, mfu_percent
from ringattn.launch.check.attention import DTYPES
from ringattn.launch.common.distributed import Refusal
from ringattn.launch.common.session import Keep, Session
from ringattn.launch.common.timing import reason, time_together
from ringattn.launch.train.model import Block, Transformer
from ringattn.training import checkpoint_layers_, chunk_rows_
from ringattn.training.offload import CHUNK_BYTES, Offloader

Attention = Literal["ring", "ring_recomputed", "torch_cp_allgather", "torch_cp_alltoall"]
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 24}
"""Bytes of a copy to host memory whose rate is measured."""


@dataclass(frozen=True)
class ModelFlags(ContextArgs):
    """All ranks: training steps of a Llama-shaped model by context, with our attention and with torch's.

    Attributes:
        attentions: "ring"; "ring_recomputed", whose backward computes attention again like everything else in a block; or torch's
            context parallelism by its rotate method, which is also recomputed.
        steps: Steps that are timed, after one that is not; the median counts.
        mlp_rows: Rows per rank that go through SwiGLU at a time; each number is measured.
        offload: First blocks whose checkpoints wait in pinned host memory; each number is measured.
        max_step_s: A first step that takes longer is the only one, and counts.
        name: Of the JSON.
    """

    attentions: tuple[Attention, ...] = ("ring", "ring_recomputed", "torch_cp_allgather", "torch_cp_alltoall")
    steps: int = 2
    mlp_rows: tuple[int, ...] = (131072,)
    offload: tuple[int, ...] = (0,)
    max_step_s: float = 60.0
    name: str = "model"


def open_model(args: ModelFlags, layers: int, session: Session) -> tuple[Transformer, torch.optim.Optimizer]:
    """Make a model of random weights sharded over all ranks, and its optimizer; no rank ever holds it whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.device("meta"):
        model = Transformer(args.shape(layers))
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


class Variant(NamedTuple):
    """What computes attention, rows of a chunk of an MLP, and blocks whose checkpoints wait in host memory."""

    who: str
    mlp_rows: int
    offload: int


@contextlib.contextmanager
def use_variant(model: Transformer, variant: Variant, session: Session) -> Iterator[Offloader | None]:
    """Let a variant compute the model inside the context; raise Unsupported if its attention cannot here."""
    who, mlps = variant.who, [cast(Block, block).mlp for block in model.blocks]
    for module in (*model.blocks, *mlps):
        module.__dict__.pop("forward", None)  # that of the last one
    chunk_rows_(mlps, variant.mlp_rows)
    host = checkpoint_layers_([*model.blocks], "selective" if who == "ring" else "full", offload=variant.offload)
    if who.startswith("ring"):
        yield host
        return
    if session.device.type != "cuda" or session.world_size == 1:
        raise Unsupported("runs among several GPUs only")

    def attend(q: Tensor, k: Tensor, v: Tensor, sharding: ringattn.Sharding, **mask: Any) -> Tensor:
        del sharding, mask  # supports causal over zigzag shards only
        group = q.shape[2] // k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return torch_cp_attention(who.removeprefix("torch_cp_"), q, k, v).transpose(1, 2)

    with torch_context_parallel(session), contextlib.ExitStack() as undo:
        for block in model.blocks:
            attention = cast(Block, block).attention
            attention.attend = attend
            undo.callback(setattr, attention, "attend", ringattn.ring_attention)
        yield host


@dataclass(frozen=True)
class Batch:
    """Rows of one sequence that this rank holds."""

    tokens: Tensor
    targets: Tensor
    sharding: ringattn.Sharding

    @staticmethod
    def draw(ring: ringattn.Ring, length: int, vocab_size: int, device: torch.device) -> Batch:
        """Draw random tokens, the same whole sequence on every rank."""
        whole = torch.randint(vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(length))
        sharding = ring.sharding(length, layout="zigzag", device=device)
        tokens, targets = (sharding.shard(x, dim=1).to(device) for x in (whole[:, :-1], whole[:, 1:]))
        return Batch(tokens, targets, sharding)

    def loss(self, model: Transformer) -> Tensor:
        """Return the loss that a rank differentiates: FSDP divides gradients by the ranks, so it is multiplied by them."""
        return model(self.tokens, self.sharding, self.targets) * (self.sharding.world_size / self.sharding.seq_len)


def disagreement(
    args: ModelFlags, variants: Sequence[Variant], model: Transformer, ring: ringattn.Ring, session: Session
) -> dict[Variant, str]:
    """Return the variants whose loss or gradients differ from ours at a short length, and how far."""
    batch = Batch.draw(ring, 1024 * session.world_size, args.vocab_size, session.device)
    found: dict[Variant, list[float]] = {}
    wrong: dict[Variant, str] = {}
    ours = Variant("ring", args.mlp_rows[0], 0)
    for variant in dict.fromkeys((ours, *variants)):
        try:
            with use_variant(model, variant, session):
                loss = batch.loss(model)
                loss.backward()
            square = sum((p.grad.to_local().double() ** 2).sum() for p in model.parameters() if p.grad is not None)  # pyright: ignore[reportAttributeAccessIssue]
            total, square = session.sum(torch.stack([loss.detach().double(), torch.as_tensor(square)])).tolist()
            found[variant] = [total / session.world_size, math.sqrt(square)]
        except Exception as error:
            if variant.who.startswith("ring"):
                raise
            wrong[variant] = str(error) if isinstance(error, Unsupported) else reason(error)
        model.zero_grad(set_to_none=True)
    differ = {variant: step_difference(step, found[ours], args.dtype) for variant, step in found.items()}
    return wrong | {variant: why for variant, why in differ.items() if why}


def bench_model(args: ModelFlags, session: Session, keep: Keep) -> list[dict[str, Any]] | None:
    """Return the rows of training steps, one per length and attention; None when the check is red."""
    if not dist.is_initialized():
        raise Refusal(
            "bench model must run in ranks of torchrun, over which FSDP2 shards, got a process by itself; "
            "start it with torchrun --nproc_per_node 1 -m ringattn.launch.bench model"
        )
    problem = Problem("causal", 4096, 1, args.heads, args.kv_heads, args.head_dim, args.dtype, 4096)
    if session.device.type == "cuda" and not check_rings([problem], ("zigzag",), session, "auto"):
        return None
    rows = Rows(session, keep, {"bench": "model", "world_size": session.world_size, **args.sizes})
    if any(args.offload):
        rows.add({"part": "copies", "who": "copies"} | measure_copies(session))
    for length, layers in args.contexts.items():
        ring = ringattn.Ring()
        model, optimizer = open_model(args, layers, session)
        variants = [Variant(*x) for x in itertools.product(args.attentions, args.mlp_rows, args.offload)]
        wrong = disagreement(args, variants, model, ring, session)
        for variant in variants:
            row: dict[str, Any] = {"seq_len": length, "layers": layers, **variant._asdict()}
            row["recompute"] = "selective" if variant.who == "ring" else "full"
            row["parameters"] = sum(p.numel() for p in model.parameters())
            if variant in wrong:
                row["refused"] = wrong[variant]
            else:
                with use_variant(model, variant, session) as host:
                    batch = Batch.draw(ring, length, args.vocab_size, session.device)
                    row |= _measure(args, model, optimizer, batch, session)
                    row["host_gib"] = 0.0 if host is None else host.host_bytes / 2**30
            rows.add(row)
        ring.close()
        del model, optimizer
        free_memory()
    return rows.rows


def measure_copies(session: Session) -> dict[str, Any]:
    """Return the 10^9 bytes per second of the copies of offload, out and back, of the slowest rank while all copy."""
    size = COPIED_BYTES[session.device.type]
    x = torch.zeros(size, dtype=torch.uint8, device=session.device)
    copier = Offloader().make_copier(x.device)
    pairs = list(zip(copier.allocate(size).split(CHUNK_BYTES), x.split(CHUNK_BYTES), strict=True))
    ways = {"out": pairs, "back": [(source, to) for to, source in pairs]}
    calls = {way: lambda pairs=pairs: copier.wait(copier.copy(pairs)) for way, pairs in ways.items()}
    times = time_together(calls, session, 5)
    return {"bytes": size} | {f"{way}_gbps": size / time_.eager_ms / 1e6 for way, time_ in times.items()}


def _measure(
    args: ModelFlags, model: Transformer, optimizer: torch.optim.Optimizer, batch: Batch, session: Session
) -> dict[str, Any]:
    if session.device.type == "cuda":
        torch.cuda.empty_cache()
    memory = PeakMemory(session)
    taken: list[float] = []
    losses: list[float] = []
    states = saved = None
    while len(taken) < 1 + args.steps and (not taken or taken[0] <= args.max_step_s):
        session.barrier()
        began = time.perf_counter()
        try:
            states = allocated_gib(session)
            loss = batch.loss(model)
            saved = allocated_gib(session)
            loss.backward()
            optimizer.step()
            session.barrier()
        except torch.OutOfMemoryError:
            # ranks hold equally much: when one is full they all are
            return {"refused": "out of memory"}
        finally:
            optimizer.zero_grad(set_to_none=True)
        taken.append(session.maximum([time.perf_counter() - began])[0])
        losses.append(float(session.sum(loss.detach())) / session.world_size)
    seconds = statistics.median(taken[1:] or taken)
    tokens, ranks = batch.sharding.seq_len, session.world_size
    flops = args.shape(len(model.blocks)).step_flops(tokens, tokens * (tokens + 1) // 2)
    return {
        "step_s": seconds,
        "steps_s": taken,
        "loss": losses[0],
        "losses": losses,
        "tokens_per_s_per_gpu": tokens / seconds / ranks,
        "model_tflops_per_gpu": flops / seconds / ranks / 1e12,
        "mfu_percent": mfu_percent(flops, seconds, session, DTYPES[args.dtype]),
        "peak_gib": memory.gib(),
        "states_gib": states,
        "saved_gib": None if saved is None or states is None else saved - states,
    }


def allocated_gib(session: Session) -> float | None:
    """Return what torch's allocator holds for tensors, enqueued work counted as done; None on a CPU."""
    return torch.cuda.memory_allocated(session.device) / 2**30 if session.device.type == "cuda" else None


Who = Literal["sdpa", "flash", "ringattn", "ring_trainer"]


@dataclass(frozen=True)
class TrainerFlags(ModelArgs):
    """One GPU: steps of transformers' Trainer by context and attention.

    Attributes:
        lengths: Tokens of a step: one sequence.
        who: "sdpa" (torch's choice of kernel) and "flash" (torch's flash kernel) with `Trainer`; "ringattn" with `Trainer`;
            "ring_trainer": ringattn with `RingTrainer` on a ring of one rank, whose overhead is over "ringattn".
        layers: Blocks.
        vocab_size: Tokens in the vocabulary; few, so that the logits of long sequences fit.
        steps: Most steps that are timed, after one that is not; the median counts.
        seconds: Time after which no further step begins, once one was timed.
        name: Of the JSON.
    """

    lengths: tuple[int, ...] = (4096, 16384, 65536, 131072)
    who: tuple[Who, ...] = ("sdpa", "flash", "ringattn", "ring_trainer")
    layers: int = 8
    vocab_size: int = 8192
    steps: int = 20
    seconds: float = 8.0
    name: str = "trainer"


def bench_trainer(args: TrainerFlags, session: Session, keep: Keep) -> list[dict[str, Any]]:
    """Return the rows of steps, one per length and implementation."""
    if session.world_size > 1:
        raise Refusal(
            f"bench trainer must run in one process, got {session.world_size} ranks; start it with "
            "python -m ringattn.launch.bench trainer"
        )
    rows = Rows(session, keep, {"bench": "trainer", "layers": args.layers, **args.sizes, "dtype": args.dtype})
    for length in args.lengths:
        known: dict[str, dict[str, Any]] = {}
        for who in args.who:
            row: dict[str, Any] = {"seq_len": length, "who": who, "ours": who.startswith("ring")}
            found = _measure_trainer(args, who, length, session)
            if "refused" not in found:
                first = next(iter(known.values()), found)
                here, there = ([one["loss"], one["grad_norm"]] for one in (found, first))
                if wrong := step_difference(here, there, args.dtype):
                    found = {"refused": wrong}
            if "refused" not in found:
                known[who] = found
                row["ratio"] = known["sdpa"]["step_s"] / found["step_s"] if "sdpa" in known else None
                if who == "ring_trainer" and "ringattn" in known:
                    row["overhead"] = found["step_s"] / known["ringattn"]["step_s"] - 1
            rows.add(row | found)
            free_memory()
    return rows.rows


def _measure_trainer(args: TrainerFlags, who: str, length: int, session: Session) -> dict[str, Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import Trainer as HFTrainer
    from transformers import TrainerCallback, TrainingArguments, default_data_collator

    from ringattn.integrations.transformers import RingCollator
    from ringattn.integrations.transformers.trainer import RingTrainer

    times: list[float] = []
    limit_s, on_cpu, is_ring = args.seconds, session.device.type == "cpu", who == "ring_trainer"

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:  # noqa: ARG002
            session.barrier()
            times.append(time.perf_counter())
            control.should_training_stop = len(times) > 1 and times[-1] - times[0] > limit_s
            return control

    shape = args.shape(args.layers)
    model: Any = make_model(shape, length, DTYPES[args.dtype], session.device).train().requires_grad_(True)
    if not who.startswith("ring"):
        model.set_attn_implementation("sdpa")
    tokens = draw_tokens(length, args.vocab_size, torch.device("cpu"), seed=length)
    collator: Any = RingCollator(default_data_collator, ringattn.Ring()) if is_ring else default_data_collator
    kernel = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if who == "flash" else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, kernel:
        options = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            max_steps=1 + args.steps,
            learning_rate=1e-4,
            optim="adamw_torch" if on_cpu else "adamw_torch_fused",
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=on_cpu,
        )
        data: Any = [{"input_ids": tokens, "labels": tokens}] * (1 + args.steps)
        trainer = (RingTrainer if is_ring else HFTrainer)(
            model, options, data_collator=collator, train_dataset=data, callbacks=[Clock()]
        )
        memory = PeakMemory(session)
        try:
            trainer.train()
        except RuntimeError as error:
            return {"refused": "out of memory" if isinstance(error, torch.OutOfMemoryError) else reason(error)}
    first = next(entry for entry in trainer.state.log_history if "loss" in entry)
    steps = [after - before for before, after in pairwise(times)]
    seconds = statistics.median(steps)
    flops = shape.step_flops(length, length * (length + 1) // 2)
    return {
        "step_s": seconds,
        "steps_s": steps,
        "steps": len(steps),
        "tokens_per_s": length / seconds,
        "mfu_percent": mfu_percent(flops, seconds, session, DTYPES[args.dtype]),
        "peak_gib": memory.gib(),
        "loss": float(first["loss"]),
        "grad_norm": float(first["grad_norm"]),
    }
