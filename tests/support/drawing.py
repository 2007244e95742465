"""`docs/figures.py` as a module: pages are no package."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("figures", Path(__file__).parents[2] / "docs/figures.py")
assert _spec is not None
assert _spec.loader is not None
figures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(figures)
