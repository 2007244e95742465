"""How fast it is on this machine: `python -m ringattn.launch.bench`."""
