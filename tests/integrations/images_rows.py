"""Rows of the table of models for models with images."""

from tests.integrations.model_table import ModelRow

_FILE = "tests/integrations/transformers/test_images.py"
_LEARN = f"{_FILE}::test_images_on_a_ring_give_the_gradients_of_one_process"
_GENERATE = f"{_FILE}::test_generation_after_images_equals_one_process"
_NAMES = {"qwen2_vl": "Qwen2-VL", "qwen2_5_vl": "Qwen2.5-VL", "qwen3_vl": "Qwen3-VL", "llava": "LLaVA"}
_FIVE = "with transformers 5"

ROWS = [
    *(
        ModelRow(f"{name} with images", stack, test, kind=kind, advice=_FIVE if kind == "qwen3_vl" else "nothing")
        for kind, name in _NAMES.items()
        for stack, test in (("shard_batch", _LEARN), ("RingCache", _GENERATE))
    ),
    ModelRow("Gemma 3 with images", "shard_batch", _LEARN, kind="gemma3", advice=_FIVE),
    ModelRow(
        "Gemma 3 with images",
        "RingCache",
        f"{_FILE}::test_a_cache_refuses_tokens_of_an_image_that_see_each_other",
        kind="gemma3",
        refusal="got spans of tokens that see each other",
        advice="generate from text alone, or on one process",
    ),
]
