"""Import of modules that need Triton, which need not be installed.

Owns what counts as having no Triton: that the package itself is missing, and nothing else. Refuses to know what a module
computes, and for which tensors it is asked.
"""

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

    Raises:
        ImportError: It cannot be imported for another reason: it, or the Triton that is installed, is broken.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        return None
