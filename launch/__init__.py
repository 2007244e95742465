"""Commands, which start processes or measure; other modules of this package are refused by `python -m`."""

import sys
from collections.abc import Sequence

COMMANDS = ("bench", "check", "doctor", "plan", "serve", "train")
"""Modules that are run with -m."""
INSIDE = ("serve.http.process",)
"""Modules that are run with -m by other commands only."""


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
    commands = ", ".join(f"{here}.{command}" for command in COMMANDS)
    raise SystemExit(f"the module that is run must be a command, got {here}{rest}; run one of {commands}")


_check_command(sys.argv, sys.orig_argv)
