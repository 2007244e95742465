"""Rows of the table of models for trainers."""

from tests.integrations.model_table import ModelRow

_TRAINED = "tests/integrations/transformers/test_trainer_models.py::test_ten_steps_equal_one_process"

ROWS = [
    *(
        ModelRow(model, "RingTrainer", _TRAINED, kind=kind)
        for model, kind in (
            ("Llama", "llama"),
            ("Qwen 3", "qwen3"),
            ("Mistral (sliding window)", "mistral"),
            ("Gemma 3 (text)", "gemma3"),
            ("GPT-OSS (sinks)", "gpt_oss"),
        )
    ),
]
