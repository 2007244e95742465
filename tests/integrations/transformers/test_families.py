"""The tables of families say what a ring does: equal to one process, or refused; nothing differs in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from tests.integrations.transformers.families import (
    CALLS,
    DIFFERS,
    EQUAL,
    FAMILIES,
    LATENT_FAMILIES,
    MODES,
    NOT_TRIED,
    compare,
    judge,
    judge_generation,
)
from tests.support.pool import Pools

FOUND = json.loads((Path(__file__).parents[3] / "docs" / "results" / "families.json").read_text())
TABLE: dict[str, dict[str, str]] = FOUND["families"]
LATENT: dict[str, dict[str, str]] = FOUND["latent"]
TRIED = [kind for kind in FAMILIES if not TABLE.get(kind, {}).get("plain", NOT_TRIED).startswith(NOT_TRIED)]


def kind_of(verdict: str) -> str:
    return verdict.partition(":")[0]


@pytest.mark.families
@pytest.mark.parametrize("kind", TRIED)
def test_a_family_on_two_ranks_does_what_the_table_says(pool: Pools, kind: str) -> None:
    for mode in MODES:
        for verdict in pool(2).run(judge, kind, mode):
            assert not verdict.startswith(DIFFERS)
            if transformers.__version__ == FOUND["transformers"]:
                assert kind_of(verdict) == kind_of(TABLE[kind][mode]), verdict


@pytest.mark.families
@pytest.mark.skipif(transformers.__version__ != FOUND["transformers"], reason="the table is of another release")
@pytest.mark.parametrize("kind", LATENT_FAMILIES)
def test_a_family_of_latents_learns_and_generates_as_the_table_says(pool: Pools, kind: str) -> None:
    found = {f"{ranks} ranks": pool(ranks).run(judge, kind, "plain") for ranks in (1, 2, 3)}
    found |= {call: pool(2).run(judge_generation, kind, call) for call in CALLS}
    for name, verdicts in found.items():
        assert {kind_of(verdict) for verdict in verdicts} == {kind_of(LATENT[kind][name])}, verdicts


def test_no_line_of_a_table_differs_without_an_error() -> None:
    lines = [*TABLE.items(), *LATENT.items()]
    assert [kind for kind, verdicts in lines for x in verdicts.values() if x.startswith(DIFFERS)] == []
    assert set(LATENT["deepseek_v3"].values()) == set(LATENT["glm4_moe_lite"].values()) == {EQUAL}
    equal = [kind for kind, verdicts in TABLE.items() if set(verdicts.values()) == {EQUAL}]
    assert len(equal) > 90
    assert {"llama", "qwen3_moe", "gemma3_text", "gpt_oss", "qwen3_next"} <= set(equal)


@pytest.mark.skipif(transformers.__version__ != FOUND["transformers"], reason="the table is of another release")
def test_every_causal_family_has_a_line() -> None:
    assert set(FAMILIES) == set(TABLE)
    assert set(LATENT_FAMILIES) == set(LATENT)


def test_another_loss_or_gradient_is_seen() -> None:
    import torch

    one = (torch.tensor(4.0), {"w": torch.ones(3)})
    assert compare(one, one) == EQUAL
    assert compare((torch.tensor(4.0001), one[1]), one).startswith(DIFFERS)
    assert compare((one[0], {"w": torch.tensor([1.0, 1.0, 1.001])}), one).startswith(DIFFERS)
    assert compare((one[0], {"w": torch.full((3,), float("nan"))}), one).startswith(DIFFERS)
