"""Partial results of attention, and their merge."""
