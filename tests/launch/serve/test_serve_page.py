"""The page "Serve a long context in ten minutes" runs as a reader runs it, and prints what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import run_script
from tests.test_docs import blocks

pytestmark = pytest.mark.dist
_, GENERATE = blocks("serve_in_ten_minutes.md")  # test_server.py runs the client


def test_generate_of_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    _, code, shown = GENERATE
    script = tmp_path / "generate.py"
    script.write_text(code)
    assert run_script(script) == shown
