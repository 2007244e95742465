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
from torch.torch_version import TorchVersion

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


def fla_refusal(d: int, e: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why fla cannot compute keys of width d and values of width e; None where it can."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return f"get fp16 or bf16 on a GPU, got {dtype} on {device.type}; use kernels='torch'"
    if fla_kernels() is None:
        return "have the package flash-linear-attention, got none; install it, or use kernels='torch'"
    # as of 0.6.0: its delta rule asserts the largest width, and the backward of its scalar decay even ones
    if d > 256 or d % 2 or e % 2:
        return f"get even widths, of keys at most 256, got keys of {d} and values of {e}; use kernels='torch'"
    version = TorchVersion(importlib.import_module("triton").__version__)
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9
    if hopper and "3.4" <= version < "3.7.1":
        # fla raises in the backward, as Triton miscompiles it: fla-org/flash-linear-attention issue 640
        return f"have Triton 3.7.1 on Hopper GPUs, got {version}; upgrade Triton, or use kernels='torch'"
    return None


@functools.lru_cache(maxsize=64)
def _sequences(starts: tuple[int, ...], rows: int, batch: int, device: torch.device) -> Tensor:
    """Return the cumulative lengths of all segments of all batch elements, packed into one row.

    The same tensor serves all layers: fla keeps what it derives from one, and so waits for the device once.
    """
    edges = [element * rows + start for element in range(batch) for start in starts]
    # results of a call outlive it: ordinary tensors even when made under inference mode
    with torch.inference_mode(False):
        return torch.tensor([*edges, batch * rows], device=device)


def scan_rows_fla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, chain: Chain) -> LocalScan:
    """Return the scan of this rank's rows; arguments as of `scan_rows`, in bf16 or fp16 but for g."""
    kernels = fla_kernels()
    assert kernels is not None, "the caller has looked"
    b, s, _, d = k.shape
    heads, e = v.shape[2:]
    number = len(chain.segments)
    continues = [i for i, segment in enumerate(chain.segments) if segment.continues]
    opens = beta is not None and bool(continues)
    state = None
    if opens:
        state = v.new_zeros(b, number, heads, d, e + d, dtype=torch.float32)
        for i in continues:
            state[:, i, ..., e:] = torch.eye(d, device=v.device)
        state, v = state.flatten(0, 1), torch.nn.functional.pad(v, (0, d))
    packed = {"q": q, "k": k, "v": v, "g": g.float()} | ({} if beta is None else {"beta": beta})
    packed = {name: x.flatten(0, 1)[None].contiguous() for name, x in packed.items()}
    if beta is None and k.shape[2] != heads:
        packed |= {name: packed[name].repeat_interleave(heads // k.shape[2], 2) for name in "qk"}
    cu_seqlens = _sequences(tuple(segment.start for segment in chain.segments), s, b, v.device)
    out, last = kernels[beta is None](
        **packed, scale=1.0, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens
    )
    out, last = out[0].unflatten(0, (b, s)), last.unflatten(0, (b, number))
    decays, states, reads = list[Tensor](), list[Tensor](), list[tuple[slice, Tensor] | None]()
    for run in chain.runs:
        first, stop = run.segments
        segment = chain.segments[first]
        states.append(last[:, stop - 1, ..., :e])
        decay = last.new_zeros(b, heads, *((1, 1) if beta is None else (d, d)))
        read = None
        if segment.continues:
            rows = slice(segment.start, segment.start + segment.length)
            if beta is None:
                total = g[:, rows].float().cumsum(1).exp()[..., None]  # b s h 1
                read = rows, total * q[:, rows].repeat_interleave(heads // q.shape[2], 2)
                end = total[:, -1, ..., None]
            else:
                read = rows, out[:, rows, :, e:].float()
                end = last[:, first, ..., e:]
            decay = end if run.passes else decay
        decays.append(decay)
        reads.append(read)

    def finish(incoming: Sequence[Tensor]) -> Tensor:
        pieces, row = list[Tensor](), 0
        for read, before in zip(reads, incoming, strict=True):
            if read is not None:
                rows, x = read
                seen = torch.einsum("bshd,bhde->bshe", x, before)
                pieces += [out[:, row : rows.start, :, :e], (out[:, rows, :, :e] + seen).to(out.dtype)]
                row = rows.stop
        return torch.cat([*pieces, out[:, row:, :, :e]], 1)

    return LocalScan(decays, states, finish)
