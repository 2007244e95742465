"""Reduction of partial results across ranks, as decode needs it."""
