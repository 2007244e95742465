"""How shards move: the protocol and its implementations."""
