"""The page "Train with a long context in ten minutes" runs as a reader runs it, and prints the output shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import run_script
from tests.test_docs import blocks

PAGE = "train_in_ten_minutes.md"


def read(printed: str) -> tuple[str, list[float]]:
    """Return the line about tokens, and the losses."""
    lines = printed.splitlines()
    [tokens] = [line for line in lines if line.startswith("tokens ")]
    [losses] = [line for line in lines if line.startswith("losses: ")]
    return tokens, [float(loss) for loss in losses.split()[1:]]


def test_the_page_trains_on_two_ranks_as_it_shows(tmp_path: Path) -> None:
    [(title, code, shown)] = blocks(PAGE)
    assert shown is not None
    script = tmp_path / title.split('"')[1]
    script.write_text(code)
    tokens, losses = read(run_script(script))
    assert tokens == read(shown)[0]
    assert losses == pytest.approx(read(shown)[1], abs=0.05)
