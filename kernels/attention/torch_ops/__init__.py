"""Kernels over torch's own attention operators: any GPU that torch tunes for, and CPUs."""
