"""Rows of the table of models for heads that choose a row, and for models that attend by themselves."""

from tests.integrations.model_table import ModelRow

_FILE = "tests/integrations/transformers/test_heads.py"
_CHOOSES = f"{_FILE}::test_classification_on_a_ring_equals_one_process"
_ALONE = f"{_FILE}::test_models_that_attend_by_themselves_are_refused_on_every_rank"
_POOLING = "pass `pooling=True`"
_FIVE = f"{_POOLING}; with transformers 5"
_HEAD = "{} with one output per sequence (classification, rewards)"

_NAMES = {
    "llama": ("Llama", _POOLING),
    "qwen3": ("Qwen 3", _POOLING),
    "gemma3_text": ("Gemma 3 (text)", _POOLING),
    "gpt2": ("GPT-2", _FIVE),
    "bert": ("BERT", _FIVE),
    "distilbert": ("DistilBERT", _FIVE),
    "modernbert": ("ModernBERT", _FIVE),
    "roberta": ("RoBERTa", f"{_FIVE} and `position_ids` from `padding_idx + 1`"),
}
_UNAWARE = {
    "deberta": "DeBERTa",
    "deberta-v2": "DeBERTa 2 and 3",
    "xlm": "XLM",
    "openai-gpt": "OpenAI GPT",
    "mamba": "Mamba",
}
_REFUSED = ("attends by itself", "tokens must interact in attention only")

ROWS = [
    *(
        ModelRow(_HEAD.format(name), "shard_batch", _CHOOSES, kind=kind, advice=advice)
        for kind, (name, advice) in _NAMES.items()
    ),
    *(
        ModelRow(
            name,
            "shard_batch",
            _ALONE,
            kind,
            f"{'|'.join(_REFUSED[: 1 + (kind == 'mamba')])}|unexpected keyword",
            "run it on one process",
        )
        for kind, name in _UNAWARE.items()
    ),
]
