"""Rows of the table of models for diffusers."""

from tests.integrations.model_table import ModelRow

_EQUAL = "tests/integrations/diffusers/test_denoisers.py::test_output_and_all_gradients_equal_one_process"
_REFUSED = "tests/integrations/diffusers/test_refusals.py::test_a_feature_that_needs_whole_tokens_is_refused"
_NAMES = "tests/integrations/diffusers/test_refusals.py::test_diffusers_refuses_names_of_other_backends"
_SEED = "one seed on all ranks: `generator=`"

ROWS = [
    *(
        ModelRow(model, "enable_ring", _EQUAL, kind=kind, advice=advice)
        for model, kind, advice in (
            ("Flux", "flux", _SEED),
            ("Flux with ControlNet", "flux_controlnet", _SEED),
            (
                "Flux with a mask of padded text",
                "flux_mask",
                '`joint_attention_kwargs={"attention_mask": ...}`, `b 1 1 n`',
            ),
            ("Flux with LoRA", "flux_lora", "load adapters before `enable_ring`"),
            ("Flux with fewer text tokens than ranks", "flux_short_text", _SEED),
            ("Flux 2", "flux2", _SEED),
            ("ChronoEdit", "chronoedit", _SEED),
            ("LTX-Video", "ltx", _SEED),
            ("LTX-Video (a timestep per token)", "ltx_timesteps", _SEED),
            ("LTX-2, video and audio", "ltx2", _SEED),
            ("LTX-2.3 with spatio-temporal guidance and a timestep per token", "ltx2_3", _SEED),
            ("Helios", "helios", _SEED),
            ("Helios with history", "helios_history", _SEED),
            ("MiniMax-H3, video and audio", "minimax_h3", _SEED),
            ("Cosmos 3, video, sound and action", "cosmos3", _SEED),
            ("Wan", "wan", _SEED),
            ("Wan 2.2 (a timestep per token)", "wan_timesteps", "`enable_ring` for `transformer_2` too"),
            ("Wan, image to video", "wan_image", _SEED),
            ("Qwen-Image", "qwen_image", _SEED),
            ("Qwen-Image with padded text", "qwen_image_mask", "`encoder_hidden_states_mask`"),
            ("Qwen-Image-Edit", "qwen_image_edit", _SEED),
            ("HunyuanVideo", "hunyuan_video", _SEED),
            ("HunyuanVideo, image to video", "hunyuan_video_image", _SEED),
        )
    ),
    *(
        ModelRow(model, "enable_ring", _REFUSED, kind=kind, refusal=refusal, advice=advice)
        for model, kind, refusal, advice in (
            (
                "caches (`enable_cache`)",
                "cache",
                "the cache of a transformer must be off on a ring",
                "`disable_cache()`",
            ),
            ("IP adapters", "ip_adapter", "IP adapters must be off on a ring", "`pipe.unload_ip_adapter()`"),
            (
                "context and tensor parallelism of diffusers",
                "parallelism",
                "parallelism must be either diffusers' or a ring, got both",
                "leave out `enable_parallelism`",
            ),
            (
                "masks that differ between queries",
                "query_mask",
                r"attn_mask must be a mask of keys, \(batch, 1, 1, 14\)",
                "a mask of keys, `b 1 1 n`",
            ),
            (
                "gradient checkpointing of diffusers",
                "checkpoint",
                r"call transformer.enable_gradient_checkpointing\(ringattn",
                "`enable_gradient_checkpointing(checkpoint)`",
            ),
            (
                "Flux 2 with a cache of reference images",
                "flux2_cache",
                "kv_cache_mode must be None on a ring",
                "pass the images with each call: `Flux2Pipeline`",
            ),
            (
                "LTX-2 with a mask of pairs of video tokens",
                "ltx2_mask",
                "video_self_attention_mask must be None on a ring",
                "a conditioning attention strength of 1",
            ),
        )
    ),
    ModelRow(
        'all models, by `set_attention_backend("ringattn")`',
        "diffusers",
        _NAMES,
        kind="backend",
        refusal="`backend='ringattn'` must be one of the following",
        advice="`enable_ring`",
        upstream="diffusers.ModelMixin.set_attention_backend",
    ),
]
