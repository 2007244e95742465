"""Kernels that read or write memory of other ranks, and sums of what other ranks wrote."""
