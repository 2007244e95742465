"""Names of what a rank does, as profilers show them.

Owns the question whether anybody looks: a name costs the host several microseconds, so it is given under a profiler only.
Refuses to know what is done.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

_UNSEEN = nullcontext()


def span(name: str, *words: object) -> AbstractContextManager[Any]:
    """The time inside, under a name, while a profiler runs.

    Args:
        name: A template of `str.format`.
        words: What is filled in.
    """
    return profiler.record_function(name.format(*words)) if profiler._is_profiler_enabled else _UNSEEN
