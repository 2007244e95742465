"""The table of families says what a ring of two ranks does: equal to one process, or refused; nothing differs in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from tests.integrations.transformers.families import DIFFERS, EQUAL, FAMILIES, MODES, NOT_TRIED, compare, judge
from tests.support.pool import Pools

FOUND = json.loads((Path(__file__).parents[3] / "docs" / "results" / "families.json").read_text())
TABLE: dict[str, dict[str, str]] = FOUND["families"]
TRIED = [kind for kind in FAMILIES if not TABLE.get(kind, {}).get("plain", NOT_TRIED).startswith(NOT_TRIED)]


def kind_of(verdict: str) -> str:
    return verdict.partition(":")[0]


@pytest.mark.dist
@pytest.mark.families
@pytest.mark.parametrize("kind", TRIED)
def test_a_family_on_two_ranks_does_what_the_table_says(pool: Pools, kind: str) -> None:
    for mode in MODES:
        for verdict in pool(2).run(judge, kind, mode):
            assert not verdict.startswith(DIFFERS)
            if transformers.__version__ == FOUND["transformers"]:
                assert kind_of(verdict) == kind_of(TABLE[kind][mode]), verdict


def test_no_line_of_the_table_differs_without_an_error() -> None:
    assert [kind for kind, verdicts in TABLE.items() for x in verdicts.values() if x.startswith(DIFFERS)] == []
    equal = [kind for kind, verdicts in TABLE.items() if set(verdicts.values()) == {EQUAL}]
    assert len(equal) > 90
    assert {"llama", "qwen3_moe", "gemma3_text", "gpt_oss", "qwen3_next"} <= set(equal)


@pytest.mark.skipif(transformers.__version__ != FOUND["transformers"], reason="the table is of another release")
def test_every_causal_family_has_a_line() -> None:
    assert set(FAMILIES) == set(TABLE)


def test_another_loss_or_gradient_is_seen() -> None:
    import torch

    one = (torch.tensor(4.0), {"w": torch.ones(3)})
    assert compare(one, one) == EQUAL
    assert compare((torch.tensor(4.0001), one[1]), one).startswith(DIFFERS)
    assert compare((one[0], {"w": torch.tensor([1.0, 1.0, 1.001])}), one).startswith(DIFFERS)
    assert compare((one[0], {"w": torch.full((3,), float("nan"))}), one).startswith(DIFFERS)
