"""The README says what the rows in docs/results say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_result_tables_of_the_readme_are_written_from_their_rows() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs/results.py"), "--check"], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 0, "run `python docs/results.py`"
