"""Whether answers are right on this machine: `python -m ringattn.launch.check`."""
