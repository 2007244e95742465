"""The training job: `python -m ringattn.launch.train`."""
