"""Workers of the tests with diffusers are forked from a server that has imported it, which takes seconds."""

from __future__ import annotations

import multiprocessing

# the server of tests/support/pool.py: this process has one
multiprocessing.get_context("forkserver").set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "pytest",
        "ringattn.integrations.diffusers",
        *(
            f"diffusers.models.transformers.transformer_{name}"
            for name in (
                *("chronoedit", "cosmos3", "flux", "flux2", "helios", "hunyuan_video"),
                *("ltx", "ltx2", "minimax_h3", "qwenimage", "wan"),
            )
        ),
    ]
)
