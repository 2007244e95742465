"""The page about loops of one's own: its program goes on with other ranks, and prints the losses of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import run_script
from tests.test_docs import blocks


def losses(printed: str) -> list[float]:
    return [float(line.rpartition(": ")[2]) for line in printed.splitlines() if line.startswith("step ")]


@pytest.mark.dist
def test_the_loop_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    code = next(code for title, code, _ in blocks("loops.md") if title)
    script = tmp_path / "loop.py"
    script.write_text(code)
    alone = losses(run_script(script, str(tmp_path / "alone"), "1", "4", ranks=1))
    first = losses(run_script(script, str(tmp_path / "run"), "2", "2", ranks=2))
    then = losses(run_script(script, str(tmp_path / "run"), "2", "2", ranks=4))
    assert first + then == pytest.approx(alone, abs=2e-4)
    page = (Path(__file__).parents[3] / "docs/loops.md").read_text()
    assert losses(page) == pytest.approx(alone, abs=0.02)
