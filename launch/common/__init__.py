"""Parts that commands share: ranks, sessions, clocks, rings by schedule, and files of models."""
