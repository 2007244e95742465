"""All pairs of bytes, as decode kernels make numbers of them.

Owns a kernel of one step of `kernels.decode.decode_triton`, run by its interpreted and its compiled tests.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ringattn.kernels.decode.decode_triton import _pairs, _unit
from ringattn.kernels.decode.dispatch import FP8


@triton.jit
def _convert(x, low, high, HOW: tl.constexpr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    a, b = _pairs(tl.load(x + at), HOW)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(low + at, a.to(tl.float32) * _unit(HOW))
    tl.store(high + at, b.to(tl.float32) * _unit(HOW))


def assert_bytes_are_numbers(device: torch.device, how: str) -> None:
    """Fails unless each of the 65,536 pairs is the two float8_e4m3fn numbers that torch says, to the bit."""
    pairs = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    right = pairs.view(FP8).float().view(-1, 2)
    low, high = (torch.full((2**16,), 7.0, device=device) for _ in range(2))
    kernel: Any = _convert
    kernel[(64,)](pairs.to(device), low, high, HOW=how)
    for found, wanted in ((low.cpu(), right[:, 0]), (high.cpu(), right[:, 1])):
        # scales carry NaN; bytes do of latents alone, where the kernel looks for them
        number = ~wanted.isnan()
        assert torch.equal(found[number].view(torch.int32), wanted[number].view(torch.int32))
