"""The name of a transport or a reducer, and the reason for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """A transport, or a reducer of partials, and the reason for it.

    Attributes:
        name: Of transports "none", "process_group" or "copy_engine", "undecided" before the first call; of reducers "alone",
            "group", "one_shot" or "simulated".
        why: One clause.
    """

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"
