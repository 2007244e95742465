"""What becomes of a model before it decodes, the same in the server and in the bench: fused and split, as far as it can be.

Owns the order of both, that one goes on without the other, and the words about it. Refuses to know how parts are changed
(`ringattn.integrations.transformers`), and whether a model is asked for it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ringattn.ring import Ring


@dataclass(frozen=True)
class Changed:
    """How it went.

    Attributes:
        fused: Parts that were compiled or joined; 0: none.
        split: Parts of which each rank reads a slice; 0: none.
        said: That in words, a line for each that was tried.
    """

    fused: int
    split: int
    said: tuple[str, ...]


def change_model(model: Any, ring: Ring, *, fused: bool, split: bool) -> Changed:
    """Compiles, joins and splits what can be of a model, for inference on GPUs; every rank calls it alike.

    Args:
        model: Of transformers; on its device.
        ring: All ranks.
        fused: Whether it is to be fused.
        split: Whether it is to be split, where there are several ranks.
    """
    from ringattn.integrations import transformers

    said, parts, slices, began = list[str](), 0, 0, time.monotonic()
    if fused:
        try:
            parts = transformers.fuse(model, ring)
            said.append(f"around attention: {parts} parts compiled or joined in {time.monotonic() - began:.1f} s")
        except transformers.CannotFuse as error:
            said.append(f"what is around attention stays as it was: {error}")
    began = time.monotonic()
    if split and ring.world_size > 1:
        try:
            slices = transformers.split(model, ring, backend="inductor" if parts else None)
            said.append(f"slices: each rank reads its own of {slices} parts, tried in {time.monotonic() - began:.1f} s")
        except transformers.CannotSplit as error:
            said.append(f"every rank reads all weights: {error}")
    return Changed(parts, slices, tuple(said))
