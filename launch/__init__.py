"""Commands, which start processes or measure; other modules of this package are refused by `python -m`."""

import sys
from collections.abc import Sequence

COMMANDS = ("bench", "check", "doctor", "serve", "train")
"""Modules that are run with -m."""
INSIDE = ("serve.http.process",)
"""Modules that are run with -m by other commands only."""
PARTS = {
    "check.inference": "check --only inference",
    "check.fuzz": "check --fuzz",
    "check.stress": "check --soak",
    "check.fault_injection": "check faults",
}
"""Commands that run modules of another name."""
BENCHES = ("kernels", "ring", "model", "inference", "server")
"""Commands of `bench`, each a module of the same name."""


def _check_command(argv: Sequence[str], orig_argv: Sequence[str]) -> None:
    """Exit if `python -m` runs a module of this package that is no command, which would do nothing and return 0.

    While Python looks for the module, `sys.argv` begins with -m, and `sys.orig_argv` has the module's name.
    """
    if argv[:1] != ["-m"] or len(orig_argv) <= len(argv):
        return
    flags, here, rest = orig_argv[-len(argv)].partition(__name__)  # flags: python -mNAME
    name = rest.removeprefix(".")
    if not here or (flags and not flags.startswith("-")) or name in (*COMMANDS, *INSIDE):
        return
    command, _, part = name.partition(".")
    owner = PARTS.get(name, f"bench {part}" if command == "bench" and part in BENCHES else None)
    instead = f"{here}.{owner}" if owner else f"one of {', '.join(f'{here}.{command}' for command in COMMANDS)}"
    raise SystemExit(f"the module that is run must be a command, got {here}{rest}; run {instead}")


_check_command(sys.argv, sys.orig_argv)
