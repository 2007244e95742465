"""The page "Serve a long context in ten minutes" runs as a reader runs it, and prints what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.serve.test_server import Process
from tests.test_docs import blocks, run
from tests.test_examples import run_script

pytestmark = pytest.mark.dist
CLIENT, GENERATE = blocks("serve_in_ten_minutes.md")


def test_the_client_of_the_page_prints_what_it_shows() -> None:
    _, code, shown = CLIENT
    process = Process("--model", "tiny")
    try:
        url = process.wait_until_ready()
        printed = run(code.replace("http://127.0.0.1:8000", url), "client.py", {"__name__": "__main__"})
    finally:
        process.close()
    assert printed == shown


def test_generate_of_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    _, code, shown = GENERATE
    script = tmp_path / "generate.py"
    script.write_text(code)
    assert run_script(script) == shown
