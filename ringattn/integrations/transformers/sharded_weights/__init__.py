"""Weights of a model that each rank of a ring stores a slice of: which, how they compute, and how they are loaded."""
