"""Modules that workers of tests with transformers are forked with, from a server that has imported them, which takes seconds."""

from __future__ import annotations

import multiprocessing

from tests.integrations.transformers.models import CONFIGS

_FAMILIES = {"gemma3_text": "gemma3", "llama4_text": "llama4"}
_MODELS = {_FAMILIES.get(str(config["model_type"]), str(config["model_type"])) for config in CONFIGS.values()}


def preload(*more: str) -> None:
    """Let the server of tests/support/pool.py import these; the last call counts: this process has one server."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [
            "torch",
            "torch.distributed",
            "pytest",
            "ringattn.integrations.transformers.trainer",
            *(f"transformers.models.{name}.modeling_{name}" for name in sorted(_MODELS)),
            *more,
        ]
    )
