"""Shapes of the kernels on each kind of device: tile sizes, warps, pipeline depth. A measured choice is a changed number."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class PortableConfig:
    """The shape of one kernel launch.

    Attributes:
        tma: Load what streams through tensor descriptors, where strides and addresses allow it.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False


INTERPRETER = "interpreter"  # small tiles: many tiles and edges in a small test

# (kind of device, bytes per element, largest padded head_dim) -> fields of forward, keys (dk and dv), rows (dq)
_TABLE: dict[tuple[str, int, int], tuple[tuple[Any, ...], ...]] = {
    # 227 KiB of shared memory, wgmma
    ("sm90", 2, 64): ((128, 64, 4, 3, True), (64, 64, 4, 3, True), (64, 64, 4, 3, True)),
    ("sm90", 2, 128): ((128, 128, 8, 3, True), (64, 128, 8, 3, True), (128, 64, 8, 3)),
    ("sm90", 2, 256): ((128, 64, 8, 2), (32, 64, 8, 2), (64, 32, 4, 2)),
    ("sm90", 4, 64): ((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    ("sm90", 4, 128): ((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    ("sm90", 4, 256): ((32, 32, 4, 1), (16, 32, 4, 1), (32, 16, 4, 1)),
    # 227 KiB, tensor memory
    ("sm100", 2, 64): ((128, 64, 8, 3), (64, 128, 8, 2), (128, 64, 8, 2)),
    ("sm100", 2, 128): ((128, 64, 8, 2), (64, 128, 8, 2), (128, 64, 8, 2)),
    ("sm100", 2, 256): ((128, 64, 8, 2), (32, 64, 8, 2), (64, 32, 4, 2)),
    ("sm100", 4, 64): ((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    ("sm100", 4, 128): ((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    ("sm100", 4, 256): ((32, 32, 4, 1), (16, 32, 4, 1), (32, 16, 4, 1)),
    # 163 KiB
    ("sm80", 2, 64): ((128, 64, 4, 3), (64, 128, 8, 2), (128, 64, 8, 2)),
    ("sm80", 2, 128): ((128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2)),
    ("sm80", 2, 256): ((64, 32, 4, 2), (32, 64, 8, 1), (64, 32, 4, 1)),
    ("sm80", 4, 64): ((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    ("sm80", 4, 128): ((64, 32, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
    ("sm80", 4, 256): ((32, 32, 4, 1), (16, 32, 4, 1), (32, 16, 4, 1)),
    # 99 KiB: consumer and workstation parts of every generation since
    ("sm86", 2, 64): ((64, 64, 4, 2), (32, 64, 4, 2), (64, 32, 4, 2)),
    ("sm86", 2, 128): ((64, 32, 4, 2), (32, 64, 4, 2), (64, 32, 4, 2)),
    ("sm86", 2, 256): ((32, 32, 4, 1), (16, 32, 4, 1), (32, 16, 4, 1)),
    ("sm86", 4, 64): ((32, 32, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
    ("sm86", 4, 128): ((32, 32, 4, 1), (16, 32, 4, 1), (32, 16, 4, 1)),
    ("sm86", 4, 256): ((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    # 64 KiB of LDS
    ("amd", 2, 64): ((128, 64, 4, 1), (32, 64, 4, 1), (64, 32, 4, 1)),
    ("amd", 2, 128): ((128, 32, 4, 1), (32, 64, 4, 1), (64, 32, 4, 1)),
    ("amd", 2, 256): ((64, 32, 4, 1), (16, 32, 4, 1), (32, 16, 4, 1)),
    ("amd", 4, 64): ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    ("amd", 4, 128): ((32, 16, 4, 1), (16, 32, 4, 1), (32, 16, 4, 1)),
    ("amd", 4, 256): ((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
} | {
    (INTERPRETER, size, head_dim): ((32, 16, 1, 1), (16, 32, 1, 1), (32, 16, 1, 1))
    for size in (2, 4)
    for head_dim in (64, 128, 256)
}


def kind_of(device: torch.device) -> str:
    """The kind of device whose configurations serve a tensor's device."""
    if device.type == "cpu" or os.environ.get("TRITON_INTERPRET") == "1":
        return INTERPRETER
    if torch.version.hip is not None:
        return "amd"
    major, minor = torch.cuda.get_device_capability(device)
    if major == 9:
        return "sm90"
    if major == 10:
        return "sm100"
    if (major, minor) in ((8, 0), (8, 7)):
        return "sm80"
    return "sm86"


def choose(kind: str, itemsize: int, head_dim: int, dot_only: bool) -> dict[str, PortableConfig]:
    """Return the configurations of "forward", "keys" (dk and dv) and "rows" (dq).

    Args:
        kind: From `kind_of`.
        itemsize: Bytes per element of q, k and v.
    """
    found = [PortableConfig(*x) for x in _TABLE[kind, itemsize, next(b for b in (64, 128, 256) if head_dim <= b)]]
    if not dot_only and kind != INTERPRETER:
        found = [replace(x, block_n=min(x.block_n, 64), num_stages=min(x.num_stages, 2)) for x in found]
    return dict(zip(("forward", "keys", "rows"), found, strict=True))


def without_tma(config: PortableConfig) -> PortableConfig:
    """Forward configuration to use when a tensor cannot be described: pointers take registers, so narrower."""
    return replace(config, tma=False, block_n=min(config.block_n, 64))
