"""Import of modules that need Triton, which need not be installed."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any


@cache
def import_optional(name: str) -> Any:
    """Return a module that needs Triton, or None where Triton is not installed.

    The module is imported at the first call, so plain torch imports no Triton.

    Args:
        name: In full, "ringattn.kernels.merge_triton".
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        return None
