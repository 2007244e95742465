"""Context parallelism in a training loop with accelerate: `context_parallel(accelerator, size)`."""

from ringattn.integrations.accelerate.context_parallel import ContextParallel, context_parallel

__all__ = ["ContextParallel", "context_parallel"]
