"""Modules of kernels in plain torch have twins in Triton: how one is found.

Owns what counts as having no Triton: that the package itself is missing, and nothing else. Refuses to know what a twin computes,
and for which tensors it is asked.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any


@cache
def find_twin(name: str) -> Any:
    """The module of this name, which needs Triton, or None where Triton is not installed.

    It is imported when it is asked for first, so nobody who stays in plain torch imports Triton.

    Args:
        name: In full, "ringattn.kernels.merge_triton".

    Raises:
        ImportError: It cannot be imported for another reason: it, or the Triton that is installed, is broken.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        return None
