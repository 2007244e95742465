"""Steps of verl's engines on a ring are those of its own engine on one rank.

verl is no dependency, and no stage of the tests installs it. docs/verl.md has the command that runs these.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

pytest.importorskip("verl")

from tests.integrations.transformers.models import CONFIGS
from tests.support.scripts import run_script

JOB = Path(__file__).with_name("job.py")
# three query heads and one key head, which two ranks of Ulysses cannot share
SIZES = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 3}
SIZES |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 61, "tie_word_embeddings": False, "use_cache": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """Folders of a causal language model, and of a critic."""
    found = {}
    for value, auto in ((False, AutoModelForCausalLM), (True, AutoModelForTokenClassification)):
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen3", **SIZES, **({"num_labels": 1} if value else {}))
        folder = tmp_path_factory.mktemp("critic" if value else "policy")
        auto.from_config(config).save_pretrained(folder)
        found[value] = str(folder)
    return found


def steps(folder: str, kind: str, ranks: int, *words: str) -> list[dict[str, Any]]:
    """What each rank prints."""
    lines = [line for line in run_script(JOB, folder, kind, *words, ranks=ranks).splitlines() if line.startswith("{")]
    assert len(lines) == ranks
    return [json.loads(line) for line in lines]


@pytest.mark.models
@pytest.mark.dist
@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ((), 2),
        # buckets of 16 rows, and log-probabilities without logits
        (("use_fused_kernels=true", "pad_to_length=true", "pad_to_length_bucket=16"), 2),
        (("value=true",), 2),
    ],
    ids=["logits", "chunks", "critic"],
)
def test_steps_on_a_ring_are_those_of_one_rank(folders: dict[bool, str], words: tuple[str, ...], ranks: int) -> None:
    value = "value=true" in words
    (expected,) = steps(folders[value], "own", 1, *(("value=true",) if value else ()))
    assert len(expected["losses"]) == len(expected["norms"]) == 3
    for rank in steps(folders[value], "ring", ranks, f"ulysses_sequence_parallel_size={ranks}", *words):
        # verl reports the norm on the first rank of a sequence
        wanted = {name: x for name, x in expected.items() if name != "norms" or rank["norms"]}
        found = {name: x for name, x in rank.items() if x}
        assert found.keys() == wanted.keys()
        for name, numbers in wanted.items():
            assert found[name] == pytest.approx(numbers, rel=1e-4, abs=1e-5), name


def test_engines_are_those_of_nvidia_in_the_registry_of_verl() -> None:
    from verl.workers.engine.base import EngineRegistry  # pyright: ignore[reportMissingImports]

    from ringattn.integrations.verl import RingEngineWithLMHead, RingEngineWithValueHead

    for model_type, engine in (("language_model", RingEngineWithLMHead), ("value_model", RingEngineWithValueHead)):
        for backend in ("fsdp", "fsdp2"):
            assert EngineRegistry._engines[model_type][backend]["cuda", "nvidia"] is engine


def test_a_head_that_scales_its_logits_is_refused_for_chunks() -> None:
    from ringattn.integrations.verl.engine import _check_head

    config = AutoConfig.for_model(**{**CONFIGS["llama"], "model_type": "granite", "logits_scaling": 2.0})
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    with pytest.raises(NotImplementedError, match=r"^use_fused_kernels must be False .*logits_scaling"):
        _check_head(model)
