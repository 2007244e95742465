"""Registry of live rings by name, as weak references (Note [Names] in ring.py)."""

from __future__ import annotations

import weakref
from typing import Any

RINGS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def add_ring(ring: Any) -> None:
    """Register a ring under its name for as long as something holds it."""
    RINGS[ring.name] = ring


def find_ring(name: str | None) -> Any | None:
    """Return the live `Ring` of that name; None where this process has none."""
    return None if name is None else RINGS.get(name)


def get_ring(name: str) -> Any:
    """Return the live `Ring` of that name, or raise RuntimeError."""
    ring = RINGS.get(name)
    if ring is None:
        raise RuntimeError(
            f"the ring {name!r} is gone; keep the Ring or its Sharding alive as long as its results are used"
        )
    return ring
