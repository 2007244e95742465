"""Speed and memory of steps of `transformers.Trainer` on one GPU by context and attention, and the overhead of `RingTrainer`.

A Llama-shaped model of random weights in bf16, AdamW, blocks checkpointed, one sequence per step. A first step that differs from
that of the first implementation in loss or gradient norm has no speed. transformers is imported where it is used.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch

import ringattn
from ringattn.launch.bench.correctness import step_difference
from ringattn.launch.bench.inference_model import ModelArgs, draw_tokens, make_model
from ringattn.launch.bench.rows import Rows
from ringattn.launch.bench.workloads import PeakMemory, free_memory, mfu_percent
from ringattn.launch.check.attention import DTYPES
from ringattn.launch.common.distributed import Refusal
from ringattn.launch.common.session import Keep, Session
from ringattn.launch.common.timing import reason

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
            found = _measure(args, who, length, session)
            here, there = (
                (one.get("loss"), one.get("grad_norm")) for one in (found, next(iter(known.values()), found))
            )
            if "refused" not in found and (wrong := step_difference(here, there, args.dtype)):
                found = {"refused": wrong}
            if "refused" not in found:
                known[who] = found
                row["ratio"] = known["sdpa"]["step_s"] / found["step_s"] if "sdpa" in known else None
                if who == "ring_trainer" and "ringattn" in known:
                    row["overhead"] = found["step_s"] / known["ringattn"]["step_s"] - 1
            rows.add(row | found)
            free_memory()
    return rows.rows


def _measure(args: TrainerFlags, who: str, length: int, session: Session) -> dict[str, Any]:
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
