"""The page and the program about diffusers run and print what they say."""

from __future__ import annotations

import re

from ringattn.integrations.diffusers.denoisers import DENOISERS
from tests.support.scripts import ROOT, run_on_ranks
from tests.test_docs import blocks, run


def test_a_pipeline_on_two_ranks_generates_the_image_of_one_process() -> None:
    printed = run_on_ranks("diffusers_image")
    assert "36 x 28 image, 5 text and 63 image tokens, rows by rank: 35, 33" in printed
    assert re.search(r"largest difference to one process \S+ \(equal up to rounding\)", printed)


def test_code_on_the_page_prints_the_output_shown() -> None:
    space: dict[str, object] = {"__name__": "diffusers.md"}
    for number, (_, code, shown) in enumerate(blocks("diffusers.md")):
        assert run(code, f"diffusers.md[{number}]", space) == (shown or "")


def test_the_page_has_a_row_for_each_model() -> None:
    page = (ROOT / "docs/diffusers.md").read_text()
    assert set(re.findall(r"`(\w+Transformer(?:[23]DModel)?)`", page)) == set(DENOISERS)
