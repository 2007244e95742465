"""Attention of a few new tokens over a paged cache."""
