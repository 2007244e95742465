"""Checks that tensors are plain: their numbers mean themselves, and no tangent follows them.

The types of other tensors are imported when one is seen: importing them costs as much as importing torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_ODD = -7046029254386353131
"""Odd factor without a pattern, 2^64 divided by the golden ratio: multiplying by it can be undone modulo 2^64."""

_COLUMNS = 4
"""Numbers of a row of floating point that the digest of a batch covers."""


def is_causal_bias(x: object) -> bool:
    """Return whether x is torch's `CausalBias`: a tensor of uninitialised memory whose type is a mask."""
    if type(x) is Tensor or not isinstance(x, Tensor):
        return False
    from torch.nn.attention.bias import CausalBias

    return isinstance(x, CausalBias)


def check_tensor(name: str, x: Any) -> None:
    """Raise TypeError, ValueError or NotImplementedError unless x is a plain tensor, of that name in messages.

    Parameters, and subclasses of Tensor that mean their numbers, are plain.
    """
    kind = type(x)
    if kind is not Tensor and kind is not torch.nn.Parameter:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {kind.__name__}; convert it first")
        _check_subclass(name, x)
    if x.is_nested:
        raise ValueError(f"{name} must be a dense tensor, got a nested one; pad it with to_padded_tensor")
    if x.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {x.layout}; pass {name}.to_dense()")
    if x.is_quantized:
        raise ValueError(f"{name} must be a dense tensor, got a quantized one; pass {name}.dequantize()")


def _check_subclass(name: str, x: Tensor) -> None:
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.masked import MaskedTensor

    # of the type: torch.compile does not see this method on an instance
    if hasattr(type(x), "to_local"):
        raise NotImplementedError(
            f"{name} must be a plain tensor, got a DTensor; wrap the call in "
            f"torch.distributed.tensor.experimental.local_map, or pass {name}.to_local()"
        )
    if is_causal_bias(x):
        raise NotImplementedError(
            f"{name} must be a plain tensor, got a CausalBias; scaled_dot_product_attention takes it as attn_mask, and "
            "ring_attention takes causal=True or window= instead"
        )
    if isinstance(x, MaskedTensor):
        raise NotImplementedError(f"{name} must be a plain tensor, got a MaskedTensor; pass {name}.to_tensor(value)")
    if isinstance(x, FakeTensor) and detect_fake_mode() is None:
        raise NotImplementedError(
            f"{name} must have numbers, got a FakeTensor outside of tracing; call inside of its FakeTensorMode"
        )


def is_readable(x: Tensor) -> bool:
    """Return whether the numbers of a plain tensor can be read now: not in a trace, under a FakeTensorMode or in a capture."""
    if torch.compiler.is_compiling() or x.is_meta or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    if type(x) is Tensor or type(x) is torch.nn.Parameter:
        return True
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(x, FakeTensor)


def digest_bits(x: Tensor) -> Tensor:
    """Return a digest of the bits of a tensor, int64 without a dim, on its device; the same on every device.

    A sum of mixed words of 8 bytes, modulo 2^64: no order of adding changes it, and tensors that differ in one word never share it.
    It takes three times the memory of x while it runs.
    """
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    # pad copies: the result begins at a multiple of 8 bytes
    words = torch.nn.functional.pad(x.as_strided((x.numel(),), (1,)).view(torch.uint8), (0, -x.nbytes % 8)).view(
        torch.int64
    )
    mixed = torch.arange(1, words.numel() + 1, device=x.device).mul_(_ODD).bitwise_xor_(words).mul_(_ODD)
    # high bits reach low ones by shifts alone: after one round, words that differ in their last byte would change the sum equally
    for _ in range(2):
        # a shift of int64 copies the sign
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(0xFFFFFFFF)).mul_(_ODD)
    return mixed.sum()


class BatchDigest:
    """Digest of the tensors of a batch, which the host reads without waiting for a GPU where it asks late enough.

    Of floating point tensors, as images and embeddings, it covers the first numbers of each row.

    Attributes:
        is_late: Whether the digest is on its way from a GPU, behind the work that was enqueued before it.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        parts = [digest_bits(x[..., :_COLUMNS] if x.is_floating_point() and x.dim() else x) for x in tensors]
        device = next((x.device for x in parts if x.is_cuda), torch.device("cpu"))
        whole = digest_bits(torch.stack([x.to(device, non_blocking=True) for x in parts]))
        self.is_late = device.type == "cuda"
        if self.is_late:
            self._host = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
            self._host.copy_(whole, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))
            return
        self._number = int(whole)

    def number(self) -> int:
        """Return the digest; a late one once it has arrived."""
        if not self.is_late:
            return self._number
        self._copied.synchronize()
        return int(self._host)

    def __reduce__(self) -> tuple[Any, ...]:
        # an event belongs to its process
        return _digest_of, (self.number(),)


def _digest_of(number: int) -> BatchDigest:
    digest = object.__new__(BatchDigest)
    digest.is_late, digest._number = False, number
    return digest


def has_tangent(*tensors: Tensor | None) -> bool:
    """Return whether forward-mode differentiation follows any of these; an operator would drop their tangents."""
    if forward_ad._current_level < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
