"""Registry of live rings by name, as weak references (Note [Names] in ring.py)."""

from __future__ import annotations

import weakref
from typing import Any

RINGS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def get_ring(name: str) -> Any:
    """Return the live `Ring` of that name, or raise RuntimeError."""
    ring = RINGS.get(name)
    if ring is None:
        raise RuntimeError(
            f"the ring {name!r} is gone; keep the Ring or its Sharding alive as long as its results are used"
        )
    return ring
