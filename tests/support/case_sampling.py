"""Samples the cases of slow tests: a share of them runs each time, the others only with `python -m pytest -m slow`.

The tests of a marker in `RATES` run the same code in many cases (kernels in the emulator and the interpreter, launches compiled
offline, models, rings of several sizes). The sample is drawn by a seed and the name of a case, so it is the same every day and for
every worker. Where several releases of Triton or transformers are tested, each runs other cases.
"""

from __future__ import annotations

import hashlib
import sys
from collections import defaultdict

import pytest

SEED = 0
RATES = {"emulated": 0.19, "interpreted": 0.25, "compiled": 0.14, "models": 0.27, "rings": 0.5, "families": 0.08}
"""Share of the cases of a test that runs, by marker; at least one runs."""
RELEASES = {"triton": ("3.7", "3.6", "3.8"), "transformers": ("5", "4.57")}
"""Releases in the order in which they take the next cases of a sample."""


def turn_of(marker: str) -> int:
    """Return the place of the installed release among those that share the cases of a marker."""
    package = {"compiled": "triton", "models": "transformers"}.get(marker, "")
    release = getattr(sys.modules.get(package), "__version__", "")
    return next((i for i, one in enumerate(RELEASES.get(package, ())) if release.startswith(f"{one}.")), 0)


def drawn(cases: list[str], rate: float, turn: int) -> set[str]:
    """Return the cases that run; those of different turns have none in common.

    Example:
        >>> sorted(drawn(list("abcdef"), 0.3, 0)), sorted(drawn(list("abcdef"), 0.3, 1)), drawn(["a"], 0.3, 1)
    """
    order = sorted(cases, key=lambda case: hashlib.sha256(f"{SEED} {case}".encode()).digest())
    count = max(1, round(rate * len(cases)))
    return set(order[turn * count : (turn + 1) * count])


def thin(items: list[pytest.Item]) -> None:
    """Mark the cases slow that the sample leaves out.

    Args:
        items: All that was collected.
    """
    for marker, rate in RATES.items():
        tests: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            if item.get_closest_marker(marker) is not None:
                tests[item.nodeid.partition("[")[0]].append(item)
        for some in tests.values():
            kept = drawn([item.nodeid for item in some], rate, turn_of(marker))
            for item in some:
                if item.nodeid not in kept:
                    item.add_marker(pytest.mark.slow)
