"""What flags of `python -m ringattn.launch.bench` measure in place of a whole command: one part of it, closely."""
