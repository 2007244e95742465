"""Workers are forked from a server that has imported transformers."""

from __future__ import annotations

from tests.integrations.preloaded import preload

preload()
