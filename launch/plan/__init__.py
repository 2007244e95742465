"""The planner as a command: `python -m ringattn.launch.plan`."""
