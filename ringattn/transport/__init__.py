"""Transports that move shards between ranks, and their base class."""
