"""The group "log_probs" of `bench kernels`: log-probabilities of given tokens and their backward, beside plain torch.

Rows of 4,096 columns meet a head of 151,936 tokens (Qwen 3), in bf16. `ringattn.training.token_log_probs` makes logits chunk by
chunk; "torch" makes all of them, in fp32 for log_softmax, as models do, and "torch_pieces" as many as we at a time, in checkpoints
of torch. `peak_gib` is beyond the inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringattn.launch.bench.workloads import free_memory
from ringattn.launch.common.session import Session
from ringattn.launch.common.timing import time_calls
from ringattn.numerics.error_budget import Budget
from ringattn.training import token_log_probs
from ringattn.training.log_probs import CHUNK_ELEMENTS

SIZES = {"cuda": (4096, 151936, (131072, 32768, 8192)), "cpu": (16, 61, (20,))}
"""Columns, tokens of the vocabulary, rows."""
CHECKED = 64


def dense_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probabilities by the logits of all rows."""
    logits = (hidden @ weight.T).float()
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def pieces_of_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probabilities by the logits of some rows at a time, which the backward computes again."""
    pairs = zip(*(x.split(max(1, CHUNK_ELEMENTS // len(weight))) for x in (hidden, targets)), strict=True)
    return torch.cat([checkpoint(dense_log_probs, rows, weight, to, use_reentrant=False) for rows, to in pairs])


WAYS = {"ringattn": token_log_probs, "torch": dense_log_probs, "torch_pieces": pieces_of_log_probs}


def log_probs_rows(session: Session, rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield a row per length and way: milliseconds of forward and backward and the peak of memory, or the reason against it."""
    dim, vocab, lengths = SIZES[session.device.type]
    generator, device = torch.Generator(session.device).manual_seed(0), session.device
    weight = (torch.randn(vocab, dim, device=device, generator=generator) / dim**0.5).bfloat16().requires_grad_()
    for n in lengths:
        hidden = torch.randn(n, dim, device=device, generator=generator).bfloat16().requires_grad_()
        targets = torch.randint(vocab, (n,), device=device, generator=generator)
        few, some = hidden[:CHECKED].detach(), targets[:CHECKED]
        exact = (few.double() @ weight.detach().double().T).log_softmax(-1).gather(-1, some[:, None])[:, 0]
        for who, way in WAYS.items():
            row = {
                "group": "log_probs", "part": "log_probs", "who": who, "ours": who == "ringattn", "n": n,
                "vocab": vocab,
            }  # fmt: skip
            ratio = Budget.of(exact, dense_log_probs(few, weight.detach(), some), torch.bfloat16).ratio(
                way(few, weight, some), exact
            )
            if ratio > 1:
                yield row | {"refused": f"wrong answer: {ratio:.3g} x its budget"}
                continue

            both = functools.partial(_differentiate, way, hidden, weight, targets)
            yield row | {"ratio": ratio} | _measure(both, session, rounds, seconds)
            free_memory()


def _differentiate(way: Callable[..., Tensor], hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(way(hidden, weight, targets).sum(), (hidden, weight))


def _measure(both: Callable[[], Any], session: Session, rounds: int, seconds: float) -> dict[str, Any]:
    peak = None
    try:
        if session.device.type == "cuda":
            before = torch.cuda.memory_allocated(session.device)
            torch.cuda.reset_peak_memory_stats(session.device)
            both()
            peak = (torch.cuda.max_memory_allocated(session.device) - before) / 2**30
        found = time_calls({"both": both}, session, rounds, "calls", seconds)["both"]
    except torch.OutOfMemoryError:
        return {"refused": "does not fit in the memory of the GPU"}
    return {"both_ms": found.best_ms, "peak_gib": peak} if found.refused is None else {"refused": found.refused}
