"""Rows of the table of models with recurrent layers; see model_table.py."""

from __future__ import annotations

from tests.integrations.model_table import ModelRow

_TEST = "tests/integrations/transformers/test_recurrent_layers.py"
_REPLACE = "call `replace_recurrent_layers(model)` first"


def _works(model: str, kind: str) -> ModelRow:
    return ModelRow(
        model,
        "shard_batch",
        f"{_TEST}::test_ranks_equal_one_process",
        kind=kind,
        advice=f"{_REPLACE} ([how](linear.md))",
    )


ROWS = [
    _works("Qwen3-Next", "qwen3_next"),
    _works("Qwen 3.5 (text)", "qwen3_5_text"),
    _works("Qwen 3.5 MoE (text)", "qwen3_5_moe_text"),
    _works("Olmo Hybrid", "olmo_hybrid"),
    _works("Mamba-2", "mamba2"),
    _works("Bamba", "bamba"),
    _works("Zamba2", "zamba2"),
    _works("Falcon-H1", "falcon_h1"),
    _works("Nemotron-H", "nemotron_h"),
    _works("Granite 4 hybrid", "granitemoehybrid"),
    *(
        ModelRow(
            model,
            "shard_batch",
            f"{_TEST}::test_other_recurrent_layers_are_refused",
            kind=kind,
            refusal=refusal,
            advice="run this model on one process",
        )
        for model, kind, refusal in [
            ("Jamba (Mamba-1)", "jamba", "a model must have recurrent layers of a kind that ringattn knows"),
            ("LFM2 (short convolutions)", "lfm2", "a model must have recurrent layers of a kind that ringattn knows"),
            (
                "Falcon Mamba, Mamba (Mamba-1)",
                "mamba",
                "a model must have recurrent layers of a kind that ringattn knows",
            ),
        ]
    ),
]
