"""Selection of the kernel set that serves a call, with the reasons against the others.

Owns the table of kernel sets, fastest first, and the calls that each refuses. Imports a kernel set only when it is
selected, and probes nothing at import time.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ringattn.kernels.interface import KernelSet, RowMetadata

K = TypeVar("K")
R = TypeVar("R")

FEATURES = frozenset(
    (
        "softcap", "dropout", "sinks", "alibi", "key_bias", "bias", "per_batch_bounds", "terms", "block_pattern", "deterministic",
        "prefill",
    )
)  # fmt: skip
"""Options of a call beyond q . k and an interval; a kernel set may refuse some of them.

"prefill" is the forward of an inference batch, whose shapes change from call to call."""

Steps = Callable[[], Iterable[tuple[RowMetadata, RowMetadata]]]
"""Returns the (query side, key side) of each ring step of a call."""


@dataclass(frozen=True)
class SelectedKernels(Generic[K]):
    """The kernels that serve a call; `print(selected)` shows the reasons.

    Attributes:
        name: "hopper", "torch", "portable" or "eager".
        kernels: Their class or function.
        reason: Reason for these.
        rejected: (name, reason against it) of every faster one.
    """

    name: str
    kernels: K
    reason: str
    rejected: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "; ".join([f"{self.name}: {self.reason}", *(f"not {other}: {why}" for other, why in self.rejected)])


@dataclass(frozen=True)
class Candidate(Generic[R]):
    """A row of a table of kernels: their name, where they are ("module:class", or a module), and (serves, reason) for a request."""

    name: str
    place: str
    answer: Callable[[R], tuple[bool, str]]

    def load(self) -> Any:
        """Import the kernels."""
        module, _, name = self.place.partition(":")
        found = importlib.import_module(f"ringattn.kernels.{module}")
        return getattr(found, name) if name else found


def select(kind: str, table: tuple[Candidate[R], ...], request: R, impl: str, cast: str) -> SelectedKernels[Any]:
    """Return the first candidate that serves a request, or the one named `impl`; `cast` is the remedy if none does."""
    rejected: list[tuple[str, str]] = []
    for row in table:
        if impl not in ("auto", row.name):
            continue
        serves, why = row.answer(request)
        if serves:
            return SelectedKernels(row.name, row.load(), why, tuple(rejected))
        rejected.append((row.name, why))
    if impl == "auto":
        reasons = "; ".join(f"{name}: {why}" for name, why in rejected)
        raise NotImplementedError(f"no {kind} serves this call: {reasons}; {cast}")
    others = [row.name for row in table if row.name != impl and row.answer(request)[0]]
    remedy = f'use impl="{others[0]}" or "auto"' if others else cast
    raise NotImplementedError(f'impl="{impl}" cannot serve this call: {rejected[0][1]}; {remedy}')


def check_dims(least: int, multiple: int = 1, **dims: int) -> str | None:
    """Return the reason against head dims outside of `least` to 256; None: they are served."""
    for name, dim in dims.items():
        if not least <= dim <= 256 or dim % multiple:
            kind = f"a multiple of {multiple} " if multiple > 1 else ""
            return f"{name} must be {kind}between {least} and 256, got {dim}"
    return None


def check_triton_device(device: torch.device, *, explicit: bool) -> tuple[bool, str]:
    """Return whether portable Triton kernels run on a device, and the reason; on CPUs only where they are asked for."""
    if device.type != "cuda" and not (explicit and os.environ.get("TRITON_INTERPRET") == "1"):
        return False, f"device must be a CUDA or ROCm GPU (or TRITON_INTERPRET=1 be set), got {device}"
    if importlib.util.find_spec("triton") is None:
        return False, "triton must be installed, got none"
    if device.type != "cuda":
        return True, "the Triton interpreter was asked for"
    if torch.version.hip is not None:
        return True, "ROCm device"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return False, f"compute capability must be at least 8.0, got {major}.{minor}"
    return True, f"CUDA device of compute capability {major}.{minor}"


def check_hopper(device: torch.device) -> tuple[bool, str]:
    """Return whether the Gluon kernels run on a device, and the reason."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False, f"device must be a CUDA GPU of compute capability 9.0, got {device}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return False, f"compute capability must be 9.0, got {major}.{minor}"
    if importlib.util.find_spec("triton") is None:
        return False, "triton must be installed, got none"
    found = importlib.import_module("triton").__version__
    if found.rpartition(".")[0] not in HOPPER_TRITON:
        return False, f"triton must be {' or '.join(HOPPER_TRITON)}, on which these kernels were proven, got {found}"
    return True, f"compute capability 9.0 and triton {found}"


def check_dtype(dtype: torch.dtype, *names: str) -> str | None:
    """Return the reason against a dtype that is not among `names`; None: it is served."""
    got = str(dtype).removeprefix("torch.")
    return None if got in names else f"dtype must be {', '.join(names[:-1])} or {names[-1]}, got {got}"


@dataclass(frozen=True)
class _Request:
    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    features: frozenset[str]
    impl: str
    steps: Steps | None


HOPPER_TRITON = ("3.6", "3.7", "3.8")
"""Triton versions on which the tests compile the Hopper kernels; the emulator runs them on 3.7, GPUs ran them with 3.6 and 3.8.

Gluon is young: another version may compile them to something else, so it is refused until the tests have passed there."""


def _hopper(request: _Request) -> tuple[bool, str]:
    why_not = check_dtype(request.dtype, "float16", "bfloat16") or check_dims(
        16, 8, head_dim=request.head_dim, v_head_dim=request.v_head_dim
    )
    if why_not is not None:
        return False, why_not
    for feature in ("bias", "dropout"):
        if feature in request.features:
            return False, f"{feature} is served by the portable kernels"
    return check_hopper(request.device)


def _torch(request: _Request) -> tuple[bool, str]:
    for feature in ("softcap", "dropout", "alibi", "key_bias", "bias", "block_pattern", "prefill"):
        if feature in request.features:
            return False, f"{feature} is no part of torch's attention operators"
    device = request.device
    if device.type != "cuda" and not (device.type == "cpu" and request.impl == "torch"):
        return False, f'device must be a CUDA or ROCm GPU, or a CPU with impl="torch", got {device}'
    dtypes = ("float16", "bfloat16") if device.type == "cuda" else ("float16", "bfloat16", "float32", "float64")
    if (why_not := check_dtype(request.dtype, *dtypes)) is not None:
        return False, why_not
    # imported here: a set that is not looked at is not imported
    from ringattn.kernels.attention.torch_ops.operators import available

    deterministic = "deterministic" in request.features
    backends, words = available(
        device, request.dtype, request.head_dim, request.v_head_dim, deterministic=deterministic
    )
    if not backends:
        return False, words
    if request.steps is not None:
        from ringattn.kernels.attention.torch_ops.api import refuse_steps

        if (why_not := refuse_steps(backends, request.steps())) is not None:
            return False, why_not
    return True, f"torch {torch.__version__} with {words}"


def _portable(request: _Request) -> tuple[bool, str]:
    why_not = check_dtype(request.dtype, "float16", "bfloat16", "float32") or check_dims(
        16, head_dim=request.head_dim, v_head_dim=request.v_head_dim
    )
    if why_not is not None:
        return False, why_not
    serves, why = check_triton_device(request.device, explicit=request.impl != "auto")
    if serves and request.device.type != "cuda" and request.dtype == torch.bfloat16:
        return False, "dtype must be float16 or float32 in the Triton interpreter, whose products of bfloat16 are wrong"
    return serves, why


def _eager(request: _Request) -> tuple[bool, str]:
    why_not = check_dtype(request.dtype, "float16", "bfloat16", "float32", "float64")
    return why_not is None, why_not or "plain torch serves any device, head_dim and feature"


_TABLE = (
    Candidate("hopper", "attention.hopper.api:HopperKernels", _hopper),
    Candidate("torch", "attention.torch_ops.api:TorchKernels", _torch),
    Candidate("portable", "attention.portable.api:PortableKernels", _portable),
    Candidate("eager", "attention.eager:EagerKernels", _eager),
)


IMPLS = ("auto", *(row.name for row in _TABLE))
"""Values of `impl`."""


def resolve_impl(impl: object) -> str:
    """Return the name of a kernel set, or "auto", as Python's own str."""
    if not isinstance(impl, str) or impl not in IMPLS:
        raise ValueError(f'impl must be "auto" or one of {", ".join(IMPLS[1:])}, got {impl!r}; use "auto"')
    return IMPLS[IMPLS.index(impl)]


def select_kernels(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    *,
    impl: str = "auto",
    features: Collection[str] = (),
    steps: Steps | None = None,
) -> SelectedKernels[type[KernelSet]]:
    """Return the fastest kernel set that serves a call, or the one that is asked for.

    Args:
        impl: "auto", or the name of a kernel set, which then serves or is refused, never replaced.
        features: Those of FEATURES that the call uses.
        steps: The ring steps of the call, called where a kernel set serves some masks and layouts only; None: any.

    Example:
        >>> print(select_kernels(torch.device("cpu"), torch.float64, 64, 64, impl="eager"))
        eager: plain torch serves any device, head_dim and feature
    """
    impl = resolve_impl(impl)
    unknown = sorted(set(features) - FEATURES)
    if unknown:
        raise ValueError(f"features must be among {', '.join(sorted(FEATURES))}, got {', '.join(unknown)}")
    request = _Request(device, dtype, head_dim, v_head_dim, frozenset(features), impl, steps)
    return select("kernel set", _TABLE, request, impl, "cast q, k and v to a supported dtype")
