"""Commands, which start processes or measure: bench, check, doctor, plan, serve and train, each run with `python -m`."""
