"""Benchmarks: `python -m ringattn.launch.bench`."""
