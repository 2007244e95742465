"""Modules that workers of tests with transformers are forked with, from a server that has imported them, which takes seconds.

Each conftest.py of such tests imports this.
"""

from __future__ import annotations

import multiprocessing

from tests.integrations.transformers.models import CONFIGS

_FAMILIES = {"gemma3_text": "gemma3", "llama4_text": "llama4"}
_MODELS = {_FAMILIES.get(str(config["model_type"]), str(config["model_type"])) for config in CONFIGS.values()}

# the server of tests/support/pool.py: this process has one
multiprocessing.get_context("forkserver").set_forkserver_preload(
    [
        "torch",
        "torch._inductor.compile_fx",
        "torch.distributed",
        "pytest",
        "ringattn.integrations.transformers.trainer",
        "ringattn.integrations.trl",
        *(f"transformers.models.{name}.modeling_{name}" for name in sorted(_MODELS)),
    ]
)
