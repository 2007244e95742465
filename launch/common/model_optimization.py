"""Tensor parallelism and compilation of a model before it decodes, the same in the server and in the bench."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from ringattn.ring import Ring


class Optimized(NamedTuple):
    """Numbers of compiled and of split modules, 0 for none, and messages about them."""

    fused: int
    split: int
    messages: list[str]


def optimize_model(model: Any, ring: Ring, *, fused: bool, split: bool) -> Optimized:
    """Apply tensor parallelism to a model of transformers and compile it, for decode on GPUs; collective over the ring."""
    from ringattn.integrations import transformers

    messages, num_fused, num_split, began = list[str](), 0, 0, time.monotonic()
    if split and ring.world_size > 1:
        try:
            num_split = transformers.apply_tensor_parallel(model, ring)
            messages.append(f"tensor parallelism: {num_split} modules in {time.monotonic() - began:.1f} s")
        except transformers.TensorParallelError as error:
            messages.append(f"every rank reads all weights: {error}")
    began = time.monotonic()
    if fused:
        num_fused = transformers.compile_for_decode(model, ring)
        how = f"{num_fused} modules in {time.monotonic() - began:.1f} s" if num_fused else "none, see the warning"
        messages.append(f"compiled for decode: {how}")
    return Optimized(num_fused, num_split, messages)
