"""Ring attention inside models of other libraries: one folder per library, which must be installed."""
