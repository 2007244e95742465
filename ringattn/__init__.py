"""Exact attention over sequences that no single device can hold."""
