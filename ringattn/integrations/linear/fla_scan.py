"""The scan of one rank's rows by the kernels of flash-linear-attention (package `fla`), where that is installed.

Only its public functions are called. The decay of a segment comes from the same launch as its outputs: values get d more columns of
zeros, and the state before a segment that continues gets the identity there. By linearity these columns of the last state are A,
and these columns of the outputs, times the state from before, are what that state adds.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.integrations.linear.local_scan import LocalScan
from ringattn.integrations.linear.segments import Chain


@functools.cache
def fla_kernels() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the chunked kernels for the gated delta rule and for a scalar decay; None where the package cannot be imported."""
    try:
        delta_rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        scalar_decay = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    except (ImportError, AttributeError, RuntimeError):  # RuntimeError: it finds no GPU driver
        return None
    return delta_rule, scalar_decay


def scan_rows_fla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, chain: Chain) -> LocalScan:
    """Return the scan of this rank's rows; arguments as of `scan_rows`, in bf16 or fp16 but for g."""
    kernels = fla_kernels()
    assert kernels is not None, "the caller has looked"
    b, s, _, d = k.shape
    heads, e = v.shape[2:]
    number = len(chain.segments)
    continues = torch.tensor([segment.continues for segment in chain.segments], device=v.device)
    opens = beta is not None and any(segment.continues for segment in chain.segments)
    state = v.new_zeros(b, number, heads, d, e + d * opens, dtype=torch.float32)
    if opens:
        state[..., e:] = continues[:, None, None, None] * torch.eye(d, device=v.device)
        v = torch.nn.functional.pad(v, (0, d))
    # batch elements and segments are sequences of one packed row
    starts = torch.tensor([segment.start for segment in chain.segments], device=v.device)
    cu_seqlens = torch.cat(
        [(torch.arange(b, device=v.device)[:, None] * s + starts).flatten(), starts.new_tensor([b * s])]
    )
    packed = {"q": q, "k": k, "v": v, "g": g.float()} | ({} if beta is None else {"beta": beta})
    packed = {name: x.flatten(0, 1)[None].contiguous() for name, x in packed.items()}
    if beta is None and k.shape[2] != heads:
        packed |= {name: packed[name].repeat_interleave(heads // k.shape[2], 2) for name in "qk"}
    out, last = kernels[beta is None](
        **packed, scale=1.0, initial_state=state.flatten(0, 1), output_final_state=True, cu_seqlens=cu_seqlens
    )
    out, last = out[0].unflatten(0, (b, s)), last.unflatten(0, (b, number))
    total = None if beta is not None else [g[:, x.start : x.start + x.length].float().cumsum(1) for x in chain.segments]
    decays, states = list[Tensor](), list[Tensor]()
    for run in chain.runs:
        first, stop = run.segments
        states.append(last[:, stop - 1, ..., :e])
        if not run.passes:
            decays.append(last.new_zeros(b, heads, *((1, 1) if total is not None else (d, d))))
        else:
            decays.append(last[:, first, ..., e:] if total is None else total[first][:, -1].exp()[..., None, None])

    def finish(incoming: Sequence[Tensor]) -> Tensor:
        pieces, row = list[Tensor](), 0
        for run, before in zip(chain.runs, incoming, strict=True):
            segment = chain.segments[run.segments[0]]
            if not segment.continues:
                continue
            rows = slice(segment.start, segment.start + segment.length)
            if total is None:
                reads = out[:, rows, :, e:]
            else:
                decay = total[run.segments[0]].exp()[..., None]
                reads = decay * q[:, rows].repeat_interleave(heads // q.shape[2], 2)
            seen = torch.einsum("bshd,bhde->bshe", reads.float(), before)
            pieces += [out[:, row : rows.start, :, :e], (out[:, rows, :, :e] + seen).to(out.dtype)]
            row = rows.stop
        return torch.cat([*pieces, out[:, row:, :, :e]], 1)

    return LocalScan(decays, states, finish)
