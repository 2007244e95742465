"""Bytes per second of the online softmax, beside torch.softmax and a device copy.

Counted for every implementation as 2 reads and 1 write of each element forward, 4 reads and 1 write backward: the traffic of a
kernel with O(block) state. A kernel that keeps a row on chip moves less, so short rows can be faster than the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ringattn.launch.common.session import Session
from ringattn.launch.common.timing import time_calls
from ringattn.numerics.error_budget import Budget
from ringattn.numerics.softmax import online_logsumexp, online_softmax

LENGTHS = (1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 15, 1 << 17, 1 << 18, 1 << 20)
ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 12}
TRAFFIC = {"copy": 2, "ours": 3, "torch": 3, "lse": 1, "ours_backward": 5, "torch_backward": 5}
"""Reads and writes of each element."""


def softmax_rows(session: Session, rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield a row per dtype and row length: GB/s and shares of a copy of the same tensor, or the wrong answers."""
    elements = ELEMENTS[session.device.type]
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for n in LENGTHS:
            if n > elements:
                continue
            generator = torch.Generator(session.device).manual_seed(0)
            shape = (max(elements // n, 2), n)
            x = torch.randn(shape, device=session.device, dtype=dtype, generator=generator) * 4
            x[1] = float("-inf")
            row = {
                "group": "softmax",
                "part": "softmax",
                "who": "online_softmax",
                "ours": True,
                "dtype": name,
                "n": n,
                "m": shape[0],
            }
            wrong = check_softmax(x)
            yield row | (
                {"refused": f"wrong answer: {'; '.join(wrong)}"} if wrong else _measure(x, session, rounds, seconds)
            )


def check_softmax(x: Tensor) -> list[str]:
    """Return what is wrong with softmax, log-sum-exp and their gradients of `x`, whose second row is -inf.

    Some rows against fp64 inside the error budget; the whole output, where an element might not have been written, against torch.
    """
    rows = sorted({0, 2 % len(x), len(x) // 3, len(x) // 2, len(x) - 1} - {1})
    generator = torch.Generator(x.device).manual_seed(1)
    dy = torch.randn(x.shape, device=x.device, dtype=x.dtype, generator=generator)

    def evaluate(
        x: Tensor, dy: Tensor, softmax: Callable[..., Tensor], logsumexp: Callable[..., Tensor]
    ) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y, lse = softmax(leaf, -1), logsumexp(leaf, -1)
        return [
            *(y.detach(), lse.detach(), torch.autograd.grad(y, leaf, dy)[0]),
            torch.autograd.grad(lse, leaf, torch.ones_like(lse))[0],
        ]

    found = evaluate(x, dy, online_softmax, online_logsumexp)
    exact = evaluate(x[rows].double(), dy[rows].double(), torch.softmax, torch.logsumexp)
    low = evaluate(x[rows], dy[rows], torch.softmax, torch.logsumexp)
    wrong = []
    for name, value, a, b in zip(("y", "lse", "dx of y", "dx of lse"), found, exact, low, strict=True):
        ratio = Budget.of(a, b).ratio(value[rows], a)
        if not ratio <= 1:
            wrong.append(f"{name} {ratio:.3g} x its budget")
    whole = torch.softmax(x, -1)
    whole[1] = 0
    gap = (found[0] - whole).abs().max().item()
    # two sums of a million terms in different orders
    if not gap <= max(64 * torch.finfo(torch.float32).eps, torch.finfo(x.dtype).eps):
        wrong.append(f"y is {gap:.2e} from torch.softmax somewhere")
    if found[1][1].item() != float("-inf"):
        wrong.append("lse of a row of -inf must be -inf")
    return wrong


def _measure(x: Tensor, session: Session, rounds: int, seconds: float) -> dict[str, float]:
    y = online_softmax(x)
    dy, target = torch.randn_like(x), torch.empty_like(x)
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(x),
        "ours": lambda: online_softmax(x),
        "torch": lambda: torch.softmax(x, -1),
        "lse": lambda: online_logsumexp(x),
        "ours_backward": lambda: torch.ops.ringattn.online_softmax_backward(dy, y, 1, None, "auto"),
        "torch_backward": lambda: torch.ops.aten._softmax_backward_data(dy, y, -1, x.dtype),
    }
    times = time_calls(calls, session, rounds, "calls", seconds)
    ms = {name: found.calls_ms for name, found in times.items() if found.calls_ms is not None}
    gbps = {name: TRAFFIC[name] * x.numel() * x.element_size() / 1e6 / value for name, value in ms.items()}
    return {
        **{f"{name}_ms": value for name, value in ms.items()},
        **{f"{name}_gbps": value for name, value in gbps.items()},
        "share_of_copy": gbps["ours"] / gbps["copy"],
        "torch_share_of_copy": gbps["torch"] / gbps["copy"],
        "backward_share_of_copy": gbps["ours_backward"] / gbps["copy"],
        "torch_backward_share_of_copy": gbps["torch_backward"] / gbps["copy"],
    }
