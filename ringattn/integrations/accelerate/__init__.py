"""Context parallelism in processes that accelerate starts."""
