"""Rows of the table of models for trainers."""

from tests.integrations.model_table import ModelRow

_TRAINED = "tests/integrations/transformers/test_trainer_models.py::test_steps_equal_one_process"
_TUNED = "tests/integrations/trl/test_trl.py::test_steps_equal_one_process"
_REFUSED = "tests/integrations/trl/test_trl.py::test_what_is_refused_is_refused_on_every_rank"
_ROLLOUTS = "tests/integrations/trl/test_policy.py::test_steps_on_two_ranks_equal_one_process"
_PREFERENCES = "tests/integrations/trl/test_preferences.py::test_steps_on_two_ranks_equal_one_process"
_LORA = "`peft_config=LoraConfig(...)` or none"

ROWS = [
    *(
        ModelRow(model, "RingTrainer", _TRAINED, kind=kind)
        for model, kind in (
            ("Llama", "llama"),
            ("Qwen 3", "qwen3"),
            ("Mistral (sliding window)", "mistral"),
            ("Gemma 3 (text)", "gemma3"),
            ("GPT-OSS (sinks)", "gpt_oss"),
            ("Mixtral with the loss that balances its experts", "mixtral"),
            ("ModernBERT (masked language model)", "modernbert"),
        )
    ),
    ModelRow(
        "Llama with a head that chooses a row (classification)",
        "RingTrainer",
        "tests/integrations/transformers/test_trainer_models.py::test_heads_that_choose_rows_make_the_steps_of_one_process",
        kind="classifier",
        advice="`pooling=True`",
    ),
    *(
        ModelRow(model, stack, _TUNED, kind=kind, advice=advice)
        for model, stack, kind, advice in (
            ("Llama", "RingSFTTrainer", "llama", _LORA),
            ("Qwen 3", "RingSFTTrainer", "qwen3", _LORA),
            ("Mistral (sliding window)", "RingSFTTrainer", "mistral", _LORA),
            ("Gemma 3 (text)", "RingSFTTrainer", "gemma3", _LORA),
            ("GPT-OSS (sinks)", "RingSFTTrainer", "gpt_oss", "`router_aux_loss_coef=0.0`"),
            ("Llama", "RingDPOTrainer", "llama", _LORA),
            ("Gemma 3 (text)", "RingDPOTrainer", "gemma3", _LORA),
            ("Llama", "RingRewardTrainer", "llama", _LORA),
            ("Qwen 3", "RingRewardTrainer", "qwen3", _LORA),
        )
    ),
    ModelRow(
        "mixtures of experts with a loss that balances the experts",
        "RingSFTTrainer",
        _REFUSED,
        kind="router",
        refusal="router_aux_loss_coef must be 0.0 where ranks share a sequence",
        advice="`router_aux_loss_coef=0.0`, or `RingTrainer`",
    ),
    ModelRow(
        "prompt, prefix and P-tuning of PEFT",
        "RingSFTTrainer",
        _REFUSED,
        kind="prompt",
        refusal="adapters must not add tokens where ranks share a sequence",
        advice="LoRA, or another adapter of layers",
    ),
    ModelRow(
        "references that are computed before training",
        "RingDPOTrainer",
        _PREFERENCES,
        kind="reference",
        advice="`precompute_ref_log_probs=True`",
    ),
    *(
        ModelRow("Llama", stack, test, kind="llama", advice=_LORA)
        for stack, test in (
            ("RingGRPOTrainer", _ROLLOUTS),
            ("RingRLOOTrainer", _ROLLOUTS),
            ("RingKTOTrainer", _PREFERENCES),
            ("RingORPOTrainer", _PREFERENCES),
        )
    ),
    *(
        ModelRow(
            what,
            "RingGRPOTrainer",
            "tests/integrations/trl/test_policy.py::test_options_are_refused_on_every_rank",
            kind=kind,
            refusal=f"{kind} must be ",
            advice=advice,
        )
        for what, kind, advice in (
            ("vLLM beside or inside of the processes", "use_vllm", "leave it out, or ask a server in a `rollout_func`"),
            ("continuous batching", "use_transformers_continuous_batching", "leave it out"),
            ("a cache of transformers", "cache_implementation", "leave it out"),
            ("tools", "tools", "call them in a `rollout_func`"),
        )
    ),
]
