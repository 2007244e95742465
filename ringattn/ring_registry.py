"""The rings that are alive, by name.

Owns a table of weak references (Note [Names] in ring.py). Refuses to know what a ring is.
"""

from __future__ import annotations

import weakref
from typing import Any

RINGS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def add_ring(ring: Any) -> None:
    """Lets the ring be found by its name for as long as something holds it."""
    RINGS[ring.name] = ring


def find_ring(name: str) -> Any:
    """The living `Ring` of that name.

    Raises:
        RuntimeError: Nothing holds it any more.
    """
    ring = RINGS.get(name)
    if ring is None:
        raise RuntimeError(
            f"the ring {name!r} is gone; keep the Ring or its Sharding alive as long as its results are used"
        )
    return ring


def living_ring(name: str | None) -> Any | None:
    """The living `Ring` of that name, or None where this process has none."""
    return None if name is None else RINGS.get(name)
