"""The page "Train with a long context in ten minutes" runs as a reader runs it, and prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_docs import blocks
from tests.test_examples import run_script

PAGE = "train_in_ten_minutes.md"


def run_page(folder: Path, ranks: int) -> tuple[list[str], list[float]]:
    [(title, code, _)] = blocks(PAGE)
    script = folder / title.split('"')[1]
    script.write_text(code)
    lines = run_script(script, ranks=ranks).splitlines()
    [losses] = [line for line in lines if line.startswith("losses: ")]
    return [line for line in lines if line.startswith("rank ")], [float(loss) for loss in losses.split()[1:]]


@pytest.mark.dist
def test_the_page_trains_on_two_ranks_as_it_shows(tmp_path: Path) -> None:
    [(_, _, shown)] = blocks(PAGE)
    assert shown is not None
    rows, losses = run_page(tmp_path, 2)
    assert sorted(rows) == re.findall(r"^rank .*$", shown, re.MULTILINE)
    assert losses == pytest.approx([float(loss) for loss in shown.split("losses: ")[1].split()], abs=0.05)
    assert run_page(tmp_path, 1)[1] == pytest.approx(losses, abs=0.011), "rounded to two digits"
