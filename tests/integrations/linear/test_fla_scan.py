"""The scan through the kernels of flash-linear-attention equals the plain torch one; here with a stand-in for those kernels."""

from __future__ import annotations

import re

import pytest
import torch
import triton
from torch import Tensor

from ringattn.integrations.linear import fla_scan
from ringattn.integrations.linear.fla_scan import fla_refusal, scan_rows_fla
from ringattn.integrations.linear.local_scan import scan_rows
from tests.support.linear_scan import CASES, scan_errors


def packed_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """Row by row, with the arguments of fla 0.6.0: one packed row of several sequences, each with a state of its own."""
    assert output_final_state
    assert q.shape[0] == 1, "packed sequences have one row"
    if beta is not None:  # only this kernel shares key heads
        q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
    assert q.shape[2] == v.shape[2]
    rows, states = list[Tensor](), list[Tensor]()
    edges = cu_seqlens.tolist()
    if initial_state is None:
        initial_state = v.new_zeros(len(edges) - 1, v.shape[2], k.shape[3], v.shape[3])
    for state, first, stop in zip(initial_state, edges[:-1], edges[1:], strict=True):
        for t in range(first, stop):
            state = g[0, t, :, None, None].exp() * state
            new = v[0, t]
            if beta is not None:
                new = beta[0, t, :, None] * (new - torch.einsum("hde,hd->he", state, k[0, t]))
            state = state + k[0, t, :, :, None] * new[:, None]
            rows.append(scale * torch.einsum("hde,hd->he", state, q[0, t]))
        states.append(state)
    return torch.stack(rows)[None], torch.stack(states)


@pytest.mark.parametrize(
    ("d", "e", "dtype", "capability", "version", "match"),
    [
        (128, 128, torch.bfloat16, (9, 0), "3.7.1", None),
        (128, 128, torch.float16, (8, 0), "3.6.0", None),
        (128, 128, torch.bfloat16, (9, 0), "3.3.1", None),
        (128, 128, torch.bfloat16, (9, 0), "3.6.0", "have Triton 3.7.1 on Hopper GPUs, got 3.6.0; upgrade Triton"),
        (258, 128, torch.bfloat16, (8, 0), "3.7.1", "get even widths, of keys at most 256, got keys of 258"),
        (64, 63, torch.bfloat16, (8, 0), "3.7.1", "get even widths, .* and values of 63"),
        (64, 64, torch.float32, (8, 0), "3.7.1", "get fp16 or bf16 on a GPU, got torch.float32 on cuda"),
    ],
)
def test_limits_of_fla_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    d: int,
    e: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    version: str,
    match: str | None,
) -> None:
    monkeypatch.setattr(fla_scan, "fla_kernels", lambda: (packed_rule, packed_rule))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(triton, "__version__", version)
    found = fla_refusal(d, e, dtype, torch.device("cuda", 0))
    assert found is None if match is None else re.search(match, found or "")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_the_plain_torch_scan(
    monkeypatch: pytest.MonkeyPatch, case: tuple[int, str, int, int, tuple[int, ...] | None], gated: bool
) -> None:
    monkeypatch.setattr(fla_scan, "fla_kernels", lambda: (packed_rule, packed_rule))
    plain = scan_errors(scan_rows, case, gated, "cpu", torch.float32)
    for name, error in scan_errors(scan_rows_fla, case, gated, "cpu", torch.float32).items():
        # twice the error of the plain scan in single precision, plus one rounding
        assert error <= 2 * plain[name] + torch.finfo(torch.float32).eps, (name, error, plain[name])
