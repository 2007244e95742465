"""Workers are forked from a server that has imported transformers and TRL."""

from tests.integrations import preloaded  # noqa: F401
