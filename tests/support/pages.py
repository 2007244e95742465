"""Scripts of the pages, as modules."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


@cache
def load(name: str) -> Any:
    """Return a script of docs/, which is no package, as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
