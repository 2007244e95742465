"""The order of communication and compute of one call."""
