"""What commands share: ranks, sessions, clocks, rings by name, and files of models."""
