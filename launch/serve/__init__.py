"""The server: `python -m ringattn.launch.serve`."""
