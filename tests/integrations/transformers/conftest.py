"""Workers of the tests with transformers are forked from a server that has imported it, which takes seconds."""

from __future__ import annotations

import multiprocessing

from tests.integrations.transformers.models import CONFIGS

_FAMILIES = {"gemma3_text": "gemma3", "llama4_text": "llama4"}
_models = {_FAMILIES.get(str(config["model_type"]), str(config["model_type"])) for config in CONFIGS.values()}

# the server of tests/support/pool.py: this process has one
multiprocessing.get_context("forkserver").set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "pytest",
        "ringattn.integrations.transformers.trainer",
        *(f"transformers.models.{name}.modeling_{name}" for name in sorted(_models)),
    ]
)
