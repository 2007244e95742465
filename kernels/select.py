"""Which kernel set serves a call, and why not the others.

Owns the table of kernel sets, fastest first, and what each refuses. Knows nothing of ranks. Imports a kernel set only
when it is picked, and probes nothing at import time.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import cast

import torch

from ringattn.kernels.contract import KernelSet

FEATURES = frozenset({"softcap", "dropout", "sinks", "alibi", "key_bias", "bias", "per_batch_bounds", "deterministic"})
"""What a call may use beyond q . k and an interval; a kernel set may refuse some of them."""


def explain(name: str, reason: str, rejected: Collection[tuple[str, str]]) -> str:
    """A choice in words: what serves and why, then what was passed over and why not.

    Args:
        name: What serves.
        reason: Why.
        rejected: (name, why not) of the others.
    """
    return "; ".join([f"{name}: {reason}", *(f"not {other}: {why}" for other, why in rejected)])


@dataclass(frozen=True)
class Choice:
    """The kernel set that serves a call; `print(choice)` says what and why.

    Attributes:
        name: "hopper", "portable" or "eager".
        kernels: The module with forward, delta and backward.
        reason: Why this one.
        rejected: (name, why not) of every faster one that was passed over.
    """

    name: str
    kernels: KernelSet
    reason: str
    rejected: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return explain(self.name, self.reason, self.rejected)


@dataclass(frozen=True)
class _Request:
    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    features: frozenset[str]
    explicit: bool


@dataclass(frozen=True)
class _Row:
    """One kernel set: where it is, and what it answers to a request: (serves, why or why not)."""

    name: str
    module: str
    answer: Callable[[_Request], tuple[bool, str]]


HOPPER_TRITON = ("3.6", "3.7", "3.8")
"""Triton versions on which the tests compile the Hopper kernels; the emulator runs them on 3.7, GPUs ran them with 3.6 and 3.8.

Gluon is young: another version may compile them to something else, so it is refused until the tests have passed there."""


def _hopper(request: _Request) -> tuple[bool, str]:
    if request.dtype not in (torch.float16, torch.bfloat16):
        return False, f"dtype must be float16 or bfloat16, got {_short(request.dtype)}"
    for name, dim in (("head_dim", request.head_dim), ("v_head_dim", request.v_head_dim)):
        if not 16 <= dim <= 256 or dim % 8:
            return False, f"{name} must be a multiple of 8 between 16 and 256, got {dim}"
    for feature in ("bias", "dropout"):
        if feature in request.features:
            return False, f"{feature} is served by the portable kernels"
    if request.device.type != "cuda" or torch.version.hip is not None:
        return False, f"device must be a CUDA GPU of compute capability 9.0, got {request.device}"
    major, minor = torch.cuda.get_device_capability(request.device)
    if (major, minor) != (9, 0):
        return False, f"compute capability must be 9.0, got {major}.{minor}"
    if importlib.util.find_spec("triton") is None:
        return False, "triton must be installed, got none"
    found = importlib.import_module("triton").__version__
    if found.rpartition(".")[0] not in HOPPER_TRITON:
        return False, f"triton must be {' or '.join(HOPPER_TRITON)}, on which these kernels were proven, got {found}"
    return True, f"compute capability 9.0 and triton {found}"


def _portable(request: _Request) -> tuple[bool, str]:
    if request.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False, f"dtype must be float16, bfloat16 or float32, got {_short(request.dtype)}"
    for name, dim in (("head_dim", request.head_dim), ("v_head_dim", request.v_head_dim)):
        if not 16 <= dim <= 256:
            return False, f"{name} must be between 16 and 256, got {dim}"
    interpreted = request.explicit and os.environ.get("TRITON_INTERPRET") == "1"
    if request.device.type != "cuda" and not interpreted:
        return False, f"device must be a CUDA or ROCm GPU (or TRITON_INTERPRET=1 be set), got {request.device}"
    if request.device.type != "cuda" and request.dtype == torch.bfloat16:
        return False, "dtype must be float16 or float32 in the Triton interpreter, whose products of bfloat16 are wrong"
    if importlib.util.find_spec("triton") is None:
        return False, "triton must be installed, got none"
    if request.device.type != "cuda":
        return True, "the Triton interpreter was asked for"
    if torch.version.hip is not None:
        return True, "ROCm device"
    major, minor = torch.cuda.get_device_capability(request.device)
    if major < 8:
        return False, f"compute capability must be at least 8.0, got {major}.{minor}"
    return True, f"CUDA device of compute capability {major}.{minor}"


def _eager(request: _Request) -> tuple[bool, str]:
    if request.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return False, f"dtype must be float16, bfloat16, float32 or float64, got {_short(request.dtype)}"
    return True, "plain torch serves any device, head_dim and feature"


_TABLE = (
    _Row("hopper", "ringattn.kernels.hopper.api", _hopper),
    _Row("portable", "ringattn.kernels.portable.api", _portable),
    _Row("eager", "ringattn.kernels.eager", _eager),
)


IMPLS = ("auto", *(row.name for row in _TABLE))
"""What a call may ask for."""


def resolve_impl(impl: object) -> str:
    """The name of a kernel set, or "auto", as users give it.

    Raises:
        ValueError: It is neither.
    """
    if not isinstance(impl, str) or impl not in IMPLS:
        raise ValueError(f'impl must be "auto" or one of {", ".join(IMPLS[1:])}, got {impl!r}; use "auto"')
    return IMPLS[IMPLS.index(impl)]


def pick(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    *,
    impl: str = "auto",
    features: Collection[str] = (),
) -> Choice:
    """Picks the fastest kernel set that serves a call, or the one that is asked for.

    Args:
        device: Where q, k and v are.
        dtype: Of q, k and v.
        head_dim: Of q and k.
        v_head_dim: Of v.
        impl: "auto", or the name of a kernel set, which then serves or is refused, never replaced.
        features: Those of FEATURES that the call uses.

    Returns:
        The choice, with the reason and those passed over.

    Raises:
        ValueError: impl or a feature is unknown.
        NotImplementedError: The kernel set that is asked for cannot serve (the message names one that can), or none
            can.

    Example:
        >>> print(pick(torch.device("cpu"), torch.float64, 64, 64, impl="eager"))
        eager: plain torch serves any device, head_dim and feature
    """
    impl = resolve_impl(impl)
    unknown = sorted(set(features) - FEATURES)
    if unknown:
        raise ValueError(f"features must be among {', '.join(sorted(FEATURES))}, got {', '.join(unknown)}")
    request = _Request(device, dtype, head_dim, v_head_dim, frozenset(features), explicit=impl != "auto")
    rejected: list[tuple[str, str]] = []
    for row in _TABLE:
        if impl not in ("auto", row.name):
            continue
        serves, why = row.answer(request)
        if serves:
            return Choice(row.name, cast(KernelSet, importlib.import_module(row.module)), why, tuple(rejected))
        rejected.append((row.name, why))
    if impl == "auto":
        reasons = "; ".join(f"{name}: {why}" for name, why in rejected)
        raise NotImplementedError(f"no kernel set serves this call: {reasons}; cast q, k and v to a supported dtype")
    others = [row.name for row in _TABLE if row.name != impl and row.answer(request)[0]]
    remedy = f'use impl="{others[0]}" or "auto"' if others else "cast q, k and v to a supported dtype"
    raise NotImplementedError(f'impl="{impl}" cannot serve this call: {rejected[0][1]}; {remedy}')


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
