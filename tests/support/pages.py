"""Scripts of the pages, as modules."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

DOCS = Path(__file__).parents[2] / "docs"


@cache
def load(name: str) -> Any:
    """Return a script of docs/, which is no package, as a module."""
    with patch.object(sys, "path", [str(DOCS), *sys.path]):
        return importlib.import_module(name)
