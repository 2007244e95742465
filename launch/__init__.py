"""Everything that starts processes or measures.

Owns which of its modules are commands: Python would run any other one with -m, too, to no effect and with the exit code 0.
"""

import sys
from collections.abc import Sequence

COMMANDS = ("bench", "check", "doctor", "serve", "train")
"""Modules that are run with -m."""
INSIDE = ("serve.http.process",)
"""Likewise, by other commands only."""
PARTS = {
    "check.inference": "check --only inference",
    "check.fuzz": "check --fuzz",
    "check.stress": "check --soak",
    "check.fault_injection": "check faults",
}
"""What runs modules that a command has under another name."""
BENCHES = ("kernels", "ring", "model", "inference", "server")
"""Commands of `bench`, which are modules of their names."""


def _check_command(argv: Sequence[str], orig_argv: Sequence[str]) -> None:
    """Ends a process that runs a module of this package which is no command."""
    if argv[:1] != ["-m"] or len(orig_argv) <= len(argv):
        return
    flags, here, rest = orig_argv[-len(argv)].partition(__name__)  # flags: python -mNAME
    name = rest.removeprefix(".")
    if not here or (flags and not flags.startswith("-")) or name in (*COMMANDS, *INSIDE):
        return
    command, _, part = name.partition(".")
    said = PARTS.get(name, f"bench {part}" if command == "bench" and part in BENCHES else None)
    instead = f"{here}.{said}" if said else f"one of {', '.join(f'{here}.{command}' for command in COMMANDS)}"
    raise SystemExit(f"the module that is run must be a command, got {here}{rest}; run {instead}")


_check_command(sys.argv, sys.orig_argv)
