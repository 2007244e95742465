"""Tensor parallelism and compilation of a model before it decodes, the same in the server and in the bench."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ringattn.ring import Ring


@dataclass(frozen=True)
class Changed:
    """Numbers of compiled and of split modules, 0 for none, and messages about them."""

    fused: int
    split: int
    said: tuple[str, ...]


def change_model(model: Any, ring: Ring, *, fused: bool, split: bool) -> Changed:
    """Apply tensor parallelism to a model of transformers and compile it, for decode on GPUs; collective over the ring."""
    from ringattn.integrations import transformers

    said, compiled, parallel, began = list[str](), 0, 0, time.monotonic()
    if split and ring.world_size > 1:
        try:
            parallel = transformers.apply_tensor_parallel(model, ring)
            said.append(f"tensor parallelism: {parallel} modules in {time.monotonic() - began:.1f} s")
        except transformers.TensorParallelError as error:
            said.append(f"every rank reads all weights: {error}")
    began = time.monotonic()
    if fused:
        compiled = transformers.compile_for_decode(model, ring)
        how = f"{compiled} modules in {time.monotonic() - began:.1f} s" if compiled else "none, as a warning says"
        said.append(f"compiled for decode: {how}")
    return Changed(compiled, parallel, tuple(said))
