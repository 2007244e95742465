"""`model.generate` on the ranks of a ring."""

from ringattn.integrations.transformers.steps import run_step

__all__ = ["run_step"]
