"""Models, options and keywords of transformers that ring attention does not support: one table, read by `check_supported`.

To refuse another model or option, add a row. To support one, remove its row. Shapes and values of tensors are checked where they
are read (positions.py, masks.py, batch.py, attention.py).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from transformers import AttentionInterface, MaxTimeCriteria, PreTrainedModel

from ringattn.integrations.transformers.latents import latent_sizes

NAME = "ringattn"
"""Name of ring attention as an attention implementation."""

ATTENTION_LAYERS = frozenset(
    {"attention", "chunked_attention", "dense", "full_attention", "mlp", "moe", "sliding_attention", "sparse"}
)
"""Kinds of layers, as configs name them, in which tokens interact by attention or not at all."""

ROW_HEADS = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")
ROW_HEADS += ("SplinterForQuestionAnswering", "SplinterForPreTraining")
"""Ends of the names of models whose heads choose a row."""

IN_PLACE_HEADS = ("ForMaskedLM", "ForTokenClassification", "ForPreTraining")
"""Ends of the names of models whose heads predict something of each token in place: their labels are not shifted."""

NEXT_TOKEN_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of models whose losses shift labels, unless they get shift_labels."""

AVERAGES = frozenset({"BCEWithLogitsLoss", "CrossEntropyLoss", "MSELoss"})
"""Losses of torch that a forward makes itself, which average over the labels of a call."""

MASK_HEADS = ("BioGptForTokenClassification", "ElectraForPreTraining", "XLMRobertaXLForTokenClassification")
"""Models whose losses leave out labels by the attention mask, which is that of the whole sequence."""

POSITIONS_FROM_PADDING = "create_position_ids_from_input_ids"
"""Function by which RoBERTa and similar models number tokens from padding_idx + 1 on."""

ATTENTION_KEYWORDS = frozenset(
    "cache_position gather_outputs labels logits_to_keep max_length_k max_length_q num_items_in_batch output_hidden_states "
    "output_router_logits return_dict shift_labels skip_logits use_cache".split()
)
"""Keywords that reach attention because models pass on what they are given, and that do not change attention."""

IMAGE_KEYWORDS = frozenset(
    "image_grid_thw image_sizes mm_token_type_ids pixel_attention_mask pixel_values pixel_values_videos second_per_grid_ts "
    "video_grid_thw".split()
)
"""Entries of a batch that models with images read whole on every rank."""

RING_CACHE_KEYWORDS = frozenset(
    "attention_mask cache cache_position input_ids inputs_embeds logits_to_keep output_attentions output_hidden_states "
    "output_router_logits past_key_values position_ids return_dict use_cache".split()
)
"""Keywords of a model call with a RingCache."""

ROW_ADAPTERS = frozenset("ADALORA BOFT FOURIERFT HRA IA3 LN_TUNING LOHA LOKR LORA OFT VERA".split())
"""Adapters of PEFT that change the rows of a layer independently of each other, and add none."""

RECURRENT_LAYERS = frozenset({"hybrid", "linear_attention", "mamba"})
"""Kinds of layers with a recurrence, which `replace_recurrent_layers` may let work over sharded rows."""


class Unsupported(NamedTuple):
    """One row of the table."""

    purpose: str  # key for `check_supported`
    find: Callable[[Any], Any]  # returns the unsupported thing in the subject, for the message; None when there is none
    message: str  # `{got}` is what was found, `{subject}` where
    error: type[Exception] = NotImplementedError


def check_supported(subject: Any, purpose: str) -> None:
    """Raise when the table has a row for a purpose that finds something in the subject: a config, a layer, keywords or options."""
    for row in _BY_PURPOSE[purpose]:
        if (got := row.find(subject)) is not None:
            raise row.error(row.message.format(got=got, subject=subject))


def is_tower(part: nn.Module) -> bool:
    """Return whether a part of a model encodes images or sound, not the tokens that ranks share."""
    return getattr(getattr(part, "config", None), "base_config_key", "") in ("vision_config", "audio_config")


def first_learned_position(layer: nn.Module) -> int:
    """Return the position that the model of a layer gives its first token: padding_idx + 1 for RoBERTa and similar models."""
    config = getattr(layer, "config", None)
    padding = getattr(config, "pad_token_id", None)
    if torch.compiler.is_compiling() or padding is None or not _counts_from_padding(type(layer)):
        return 0
    return padding + 1 if getattr(config, "position_embedding_type", "absolute") == "absolute" else 0


@dataclass(frozen=True)
class GenerateCall:
    """The arguments of a call of `generate` with a RingCache, with `cached` tokens, on so many ranks."""

    model: PreTrainedModel
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    ranks: int
    cached: int

    def option(self, name: str) -> Any:
        """Return an option: given by keyword, by the generation config of the call, or by that of the model."""
        given = self.kwargs.get("generation_config", self.args[1] if len(self.args) > 1 else None)
        sources = (self.kwargs, vars(given) if given is not None else {}, vars(self.model.generation_config))
        return next((x for source in sources if (x := source.get(name)) is not None), None)

    @property
    def max_time(self) -> Any:
        """Seconds after which the call has to stop."""
        criteria = self.kwargs.get("stopping_criteria", self.args[3] if len(self.args) > 3 else None) or ()
        clocks = [one.max_time for one in criteria if isinstance(one, MaxTimeCriteria)]
        return clocks[0] if clocks else self.option("max_time")

    @property
    def ring_assistant(self) -> str | None:
        """The class of an assistant that attends around the ring."""
        assistant = self.kwargs.get("assistant_model")
        return (
            type(assistant).__name__
            if assistant is not None and assistant.config._attn_implementation == NAME
            else None
        )

    @property
    def new_sequences(self) -> int | None:
        """Length of whole sequences if they are given; None for new tokens alone, with a mask of all."""
        named = (self.kwargs.get(name) for name in ("inputs_embeds", "input_ids", "inputs"))
        whole = next((x for x in (*named, *self.args[:1]) if x is not None), None)
        mask = self.kwargs.get("attention_mask")
        return None if whole is None or (mask is not None and mask.shape[1] != whole.shape[1]) else whole.shape[1]


def _option(name: str, refused: Callable[[Any], bool] = bool) -> Callable[[Any], Any]:
    """Make a function that finds a refused value of a keyword or an attribute."""

    def find(subject: Any) -> Any:
        value = subject.get(name) if isinstance(subject, Mapping) else getattr(subject, name, None)
        return value if refused(value) else None

    return find


def _without(purpose: str, **messages: str) -> list[Unsupported]:
    """Make a row for each option that must be left out or false."""
    return [Unsupported(purpose, _option(name), message) for name, message in messages.items()]


def _unknown(known: frozenset[str]) -> Callable[[Mapping[str, Any]], str | None]:
    """Make a function that finds a keyword that is not known, unless it has no value."""

    def find(keywords: Mapping[str, Any]) -> str | None:
        for name, value in keywords.items():
            # generate of 5.x passes an empty dict when there are no images
            given = value is not None and value is not False and not (isinstance(value, dict) and not value)
            if given and name not in known:
                return name
        return None

    return find


def _other_layers(config: Any, known: frozenset[str] = ATTENTION_LAYERS) -> list[str] | None:
    # MobileBERT embeds tokens with their neighbours, ESM scales embeddings by the share of masked tokens
    flags = [name for name in ("trigram_input", "token_dropout") if getattr(config, name, False)]
    return sorted(set(getattr(config, "layer_types", None) or ()) - known) + flags or None


def _without_positions(layer: nn.Module) -> str | None:
    compiling = torch.compiler.is_compiling()
    return None if compiling or _takes_positions(type(layer)) else type(layer).__name__


def file_of(kind: type[nn.Module]) -> Mapping[str, Any]:
    """Return the names in the file of a kind of layer; empty when it was made by none."""
    return vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {}


def layers_that_attend(model: nn.Module) -> tuple[bool, bool]:
    """Return whether layers of a model ask for attention by its name, and whether any call ringattn themselves."""
    found = [_uses(type(part)) for part in model.modules() if not is_tower(part)]
    return any(by_name for by_name, _ in found), any(directly for _, directly in found)


@functools.cache
def _uses(kind: type[nn.Module]) -> tuple[bool, bool]:
    forward: Any = inspect.unwrap(kind.forward)
    known = getattr(forward, "__globals__", {})
    # layers of transformers ask in their forward, other code maybe in a function that it calls
    names = forward.__code__.co_names if forward.__module__.startswith("transformers.") else known
    used = [known[name] for name in names if name in known]
    by_name = any(isinstance(x, AttentionInterface) for x in used)
    return by_name, any(str(getattr(x, "__module__", "")).startswith("ringattn.") for x in used)


@functools.cache
def _takes_positions(kind: type[nn.Module]) -> bool:
    """Return whether a model in the file of a kind of layer takes positions; True when the file has no model."""
    parts = [x for x in file_of(kind).values() if isinstance(x, type) and x.__module__ == kind.__module__]
    models = [part for part in parts if issubclass(part, PreTrainedModel)]
    return not models or any("position_ids" in inspect.signature(model.forward).parameters for model in models)


@functools.cache
def _counts_from_padding(kind: type[nn.Module]) -> bool:
    """Return whether the file of a kind of layer numbers tokens from padding_idx + 1 on."""
    parts = (x for x in file_of(kind).values() if isinstance(x, type) and x.__module__ == kind.__module__)
    return POSITIONS_FROM_PADDING in file_of(kind) or any(POSITIONS_FROM_PADDING in vars(part) for part in parts)


def _chooses_attention_class(model: PreTrainedModel) -> str | None:
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != NAME:
        return None
    tables = [x for name, x in file_of(type(model)).items() if name.endswith("_ATTENTION_CLASSES")]
    return type(model).__name__ if any(NAME not in x for x in tables) else None


def _numbers_rows(call: tuple[nn.Module, Mapping[str, Any]]) -> str | None:
    if torch.compiler.is_compiling():
        return None
    kinds = dict.fromkeys(type(part) for part in call[0].modules() if not is_tower(part))
    return next((kind.__name__ for kind in kinds if _uses(kind)[0] and not _takes_positions(kind)), None)


def _chooses_rows(call: tuple[nn.Module, Mapping[str, Any]]) -> str | None:
    name = type(call[0]).__name__
    return name if name.endswith(ROW_HEADS) and not call[1].get("gather_outputs") else None


def _masked_labels(call: tuple[nn.Module, Mapping[str, Any]]) -> str | None:
    name, given = type(call[0]).__name__, (call[1].get(x) is not None for x in ("labels", "attention_mask"))
    return name if name in MASK_HEADS and all(given) else None


def predicts_in_place(model: nn.Module) -> bool:
    """Return whether a model, or one that it wraps, has a head that predicts something of each token in place."""
    return any(_has_head(type(part), IN_PLACE_HEADS) for part in model.modules())


def _has_head(kind: type[nn.Module], ends: tuple[str, ...]) -> bool:
    return any(base.__name__.endswith(ends) for base in kind.__mro__)


def _labels_elsewhere(call: tuple[nn.Module, Mapping[str, Any]]) -> str | None:
    kind = type(call[0])
    shifted = call[1].get("shift_labels") is not None
    return kind.__name__ if shifted and _has_head(kind, IN_PLACE_HEADS) else None


def _labels_in_place(call: tuple[nn.Module, Mapping[str, Any]]) -> str | None:
    kind, given = type(call[0]), call[1]
    unshifted = given.get("labels") is not None and given.get("shift_labels") is None
    # the model shifts those of a whole sequence itself, unless a count was made of all of them
    whole = given["sharding"].world_size == 1 and given.get("num_items_in_batch") is None
    return kind.__name__ if unshifted and not whole and _has_head(kind, NEXT_TOKEN_HEADS) else None


def _averaged_labels(call: tuple[nn.Module, Mapping[str, Any]]) -> str | None:
    whole = call[1].get("labels") is None or call[1].get("gather_outputs") or torch.compiler.is_compiling()
    return None if whole or not _averages(type(call[0])) else type(call[0]).__name__


@functools.cache
def _averages(kind: type[nn.Module]) -> bool:
    code = inspect.unwrap(kind.forward).__code__
    return not AVERAGES.isdisjoint(code.co_names) and "num_items_in_batch" not in code.co_varnames


def _counted_sequences(call: tuple[nn.Module, Mapping[str, Any]]) -> Any:
    gathered = call[1].get("gather_outputs") and call[1].get("labels") is not None
    return call[1].get("num_items_in_batch") if gathered else None


def _unequal_layers(config: Any) -> list[tuple[int, int, int]] | None:
    # later releases of 5.x allow layers that differ
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    sizes = set(map(_key_sizes, layers))
    return sorted(sizes) if len(sizes) > 1 else None


def inner_model(model: Any) -> PreTrainedModel:
    """Return the model of transformers that a compiled model or a model with adapters calls; raises for other wrappers."""
    while not isinstance(model, PreTrainedModel):
        compiled = isinstance(model, OptimizedModule)
        adapters = {} if compiled else getattr(model, "peft_config", {})
        tokens = "alora_invocation_tokens"  # of adapters that choose tokens
        others = [
            x for x in adapters.values() if x.peft_type not in ROW_ADAPTERS or getattr(x, tokens, None) is not None
        ]
        if others or not (compiled or hasattr(model, "get_base_model")):
            raise NotImplementedError(
                "model must be one of transformers, or that in torch.compile(model) or in a PeftModel whose adapters change rows "
                f"independently (LoRA and similar), got {type(model).__name__} "
                f"{[type(one).__name__ for one in others] or ''}; pass the model inside, or merge adapters with merge_and_unload()"
            )
        inner: Any = model._orig_mod if compiled else model.get_base_model()
        model = inner
    return model


def cache_sizes(model: PreTrainedModel) -> dict[str, Any]:
    """Return the sizes of `PagedKVCache` for a model; raises for models that one cache cannot serve."""
    config = model.config.get_text_config(decoder=True)
    check_supported(config, "model")
    check_supported(config, "cached model")
    latent = latent_sizes(model)
    if latent is not None:
        return {"layers": config.num_hidden_layers, "latent": latent}
    layer = config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config
    kv_heads, head_dim, v_head_dim = _key_sizes(layer)
    return {"layers": config.num_hidden_layers, "kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim}


def _key_sizes(config: Any) -> tuple[int, int, int]:
    """Return the key/value heads of a layer, and the head dims of keys and values, from its config."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "qk_rope_head_dim", None) and getattr(config, "qk_nope_head_dim", None):
        # latent attention that passes keys of all heads to attention
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    return kv_heads, head_dim, getattr(config, "v_head_dim", None) or head_dim


def _prompt_learning(trainer: Any) -> str | None:
    adapters = getattr(trainer.model, "peft_config", None) or {}
    return next((type(x).__name__ for x in adapters.values() if getattr(x, "is_prompt_learning", False)), None)


def _cached_already(call: GenerateCall) -> int | None:
    length = call.new_sequences
    return length if call.cached and length is not None and length <= call.cached else None


_WITHOUT_POSITIONS = (
    "a model must take position_ids where ranks share a sequence or a cache stores its keys, got one with {got}, which numbers the "
    "rows of each call by itself; run this model on one process, with attn_implementation='sdpa' to generate"
)

TABLE = (
    # a config, where ranks share a sequence or use a RingCache
    Unsupported(
        "model",
        _other_layers,
        "tokens must interact in attention only where ranks share a sequence or use a RingCache, got {got} layers in the "
        "config of {subject.model_type}; run this model on one process, without a RingCache. To train gated delta rule or Mamba-2, "
        "call ringattn.integrations.transformers.replace_recurrent_layers(model) first",
    ),
    # the ring of a call with a sharding or a step
    Unsupported(
        "ring",
        lambda ring: ring.virtual_size if ring.virtual_size > ring.world_size else None,
        "a model of transformers must be called on a ring with one virtual rank per process, got virtual_size={got}; its rows "
        "would not be in the order of the sequence. Use virtual_size in a model of your own, or start {got} processes",
    ),
    # a model and the keywords of its call with a sharding, on any number of ranks
    Unsupported(
        "labelled call",
        _labels_elsewhere,
        "shift_labels must be False for {got}, whose head predicts each token in place, got labels that are shifted; pass "
        "shift_labels=False to shard_batch, RingCollator or context_parallel",
        ValueError,
    ),
    Unsupported(
        "labelled call",
        _labels_in_place,
        "shift_labels must be True for {got}, whose loss shifts the labels that it gets, got labels of a shard that are not "
        "shifted; leave shift_labels=False out, or take the loss from its logits",
        ValueError,
    ),
    # before those of its labels, as this model is not served without them either
    Unsupported("sharded call", _numbers_rows, _WITHOUT_POSITIONS),
    Unsupported(
        "sharded call",
        _chooses_rows,
        "a model whose head chooses a row must get whole tokens where ranks share a sequence, got {got} with the rows of a rank; "
        "pass pooling=True to shard_batch or RingCollator",
        ValueError,
    ),
    Unsupported(
        "sharded call",
        _masked_labels,
        "labels must be left out with an attention_mask where ranks share a sequence, got both for {got}, whose loss takes "
        "the mask for that of these rows; compute the loss from its logits",
    ),
    Unsupported(
        "sharded call",
        _averaged_labels,
        "the loss must be divided by num_items_in_batch where ranks share a sequence, got that of {got}, which is averaged over "
        "the labels of each rank; leave labels out of the call, and take the sum over the labels from its logits",
    ),
    Unsupported(
        "sharded call",
        _counted_sequences,
        "num_items_in_batch must be left out of a call with one label per sequence, got {got}: the loss is a mean over sequences, "
        "which a Trainer would multiply by the ranks; set model.accepts_loss_kwargs = False before the Trainer is made",
        ValueError,
    ),
    Unsupported(
        "sharded call",
        lambda call: _option("logits_to_keep", lambda keep: isinstance(keep, Tensor) or bool(keep))(call[1]),
        "logits_to_keep must be left out where ranks share a sequence, got {got}, which would count the rows of each rank; choose "
        "rows of the logits with take_rows",
        ValueError,
    ),
    # a config, where a RingCache is used
    Unsupported(
        "cached model",
        _unequal_layers,
        "all layers must have as many key heads, of the same width, for one cache, got {got} (heads, width of keys, of "
        "values) in the config of {subject.model_type}; use attn_implementation='sdpa' on one process",
    ),
    # a config, where ranks share a sequence and recurrent layers were replaced
    Unsupported(
        "recurrent model",
        lambda config: _other_layers(config, ATTENTION_LAYERS | RECURRENT_LAYERS),
        "tokens must interact in attention, gated delta rule or Mamba-2 only where ranks share a sequence, got {got} layers in the "
        "config of {subject.model_type}; run this model on one process",
    ),
    # an attention layer whose rows are sharded, or whose keys a cache stores
    Unsupported(
        "layer",
        _without_positions,
        _WITHOUT_POSITIONS,
    ),
    # an attention layer that does not pass its positions to attention
    Unsupported(
        "unchecked positions",
        lambda layer: first_learned_position(layer) or None,
        "a model that counts positions from {got} (padding_idx + 1) must pass them to its attention, to be checked, got one "
        "with {subject.__class__.__name__}, which does not; run this model on one process",
    ),
    # the keywords that reach attention
    Unsupported(
        "attention",
        _option("output_attentions"),
        "output_attentions must be False: ring attention never has the weights; use attn_implementation='eager'",
    ),
    Unsupported(
        "attention",
        _unknown(ATTENTION_KEYWORDS | {"output_attentions"}),
        "{got} must be left out: ring attention does not support it; use attn_implementation='eager' for this model",
    ),
    # the same, of a call with a sharding
    *_without(
        "sharded attention",
        use_cache="use_cache must be False when there is a sharding, whose keys are not stored; pass use_cache=False, as "
        "shard_batch does. To generate, use RingCache",
    ),
    # the keywords of a model call with a RingCache
    *(
        Unsupported(
            "RingCache call",
            _option(name, lambda value: value is False),
            f"{name} must be True in a call with a RingCache, got False; leave {remedy} out",
        )
        for name, remedy in (("use_cache", "the cache"), ("return_dict", "it"))
    ),
    *_without(
        "RingCache call",
        output_hidden_states="output_hidden_states must be False in a call with a RingCache, whose ranks have different rows; use "
        "attn_implementation='sdpa' on one process",
    ),
    Unsupported(
        "RingCache call",
        _unknown(RING_CACHE_KEYWORDS | IMAGE_KEYWORDS),
        "{got} must be left out of a call with a RingCache, which cannot share it between ranks",
    ),
    # a call of generate with a RingCache
    Unsupported(
        "generate",
        lambda call: call.max_time if call.ranks > 1 else None,
        "max_time must be left out among {subject.ranks} ranks, which would stop at different tokens by their clocks, "
        "got {got}; pass max_new_tokens",
    ),
    Unsupported(
        "generate",
        lambda call: None if (scale := call.option("guidance_scale")) in (None, 1) else scale,
        "guidance_scale must be left out with a RingCache, got {got}: its second cache would be one of "
        "transformers; generate on one process with attn_implementation='sdpa'",
    ),
    Unsupported(
        "generate",
        lambda call: call.ring_assistant if call.ranks > 1 else None,
        "assistant_model must not attend with ringattn among {subject.ranks} ranks, which each run it on whole sequences, got a "
        "{got}; call assistant_model.set_attn_implementation('sdpa')",
        ValueError,
    ),
    Unsupported(
        "generate",
        lambda call: call.option("assistant_early_exit"),
        "assistant_early_exit must be left out with a RingCache, got {got}; pass a smaller model as assistant_model, or "
        "prompt_lookup_num_tokens",
    ),
    Unsupported(
        "generate",
        _cached_already,
        "sequences must be longer than the {subject.cached} tokens that the cache has, got {got}; give them whole, or call "
        "reset() before other prompts and after a call of generate that failed",
        ValueError,
    ),
    # the entries of a batch
    *_without(
        "batch",
        use_cache="use_cache must be False: decoding over a sharded cache is not supported yet; leave it out of the batch",
    ),
    # a model that is being made
    Unsupported(
        "new model",
        _chooses_attention_class,
        "a model must attend through transformers' attention interface, got {got}, which chooses among attention classes of its "
        "own; run this model on one process, with attn_implementation='sdpa'",
    ),
    # a RingTrainer
    Unsupported(
        "trainer",
        lambda trainer: None if trainer.args.average_tokens_across_devices else False,
        "average_tokens_across_devices must be True, got {got}: ranks of a ring see different numbers of labels",
        ValueError,
    ),
    Unsupported(
        "trainer",
        # TRL sets a text before transformers 5.19, which says that losses are scaled
        lambda trainer: type(x).__name__ if callable(x := trainer.compute_loss_func) else None,
        "compute_loss_func must be left out, got a {got}: it would see this rank's rows, with labels that are shifted already; "
        "subclass the trainer and override compute_loss, whose inputs are whole",
    ),
    # a RingTrainer whose ring has several ranks
    *_without(
        "shared trainer",
        aux_loss_enabled="router_aux_loss_coef must be 0.0 where ranks share a sequence: TRL would add the loss that balances "
        "experts on each rank by its own; pass router_aux_loss_coef=0.0 in the arguments, or train with RingTrainer",
    ),
    Unsupported(
        "shared trainer",
        _prompt_learning,
        "adapters must not add tokens where ranks share a sequence, got {got}, whose virtual tokens every rank would put before "
        "its rows; use LoraConfig, or another adapter of layers",
    ),
    # its TrainingArguments
    Unsupported(
        "shared training",
        _option("train_sampling_strategy", lambda value: value == "batch_rebalance"),  # of 5.x
        "train_sampling_strategy must be 'random', 'sequential' or 'group_by_length' where ranks share a sequence, got "
        "{got!r}, which gives each rank samples of its own; use another one",
    ),
    Unsupported(
        "shared training",
        lambda args: None if args.deepspeed_plugin is None else "DeepSpeed",
        "ranks that share a sequence must be sharded by FSDP or by DDP, got {got}, which is not tested with a ring; pass fsdp in "
        "the arguments, or a config of accelerate with FSDP",
    ),
    *_without(
        "shared training",
        use_vllm="use_vllm must be False where ranks share a sequence, got {got}: its engines and clients are one per process; "
        "leave it out to generate on the ring, or pass a rollout_func that asks a server",
        use_transformers_continuous_batching="use_transformers_continuous_batching must be False where ranks share a sequence, "
        "got {got}: its cache is that of one process; leave it out to generate on the ring",
        cache_implementation="cache_implementation must be None where ranks share a sequence, got {got!r}: they generate over a "
        "RingCache; leave it out",
        predict_with_generate="predict_with_generate must be False where ranks share a sequence, got {got}: each rank would "
        "generate alone; leave it out, and call model.generate with a RingCache after training",
        generate_during_eval="generate_during_eval must be False where ranks share a sequence, got {got}: each rank would "
        "generate alone; leave it out",
        **{
            name: f"{name} must be False where ranks share a sequence, got {{got}}: predictions of a ring would be gathered from "
            "each of its ranks; leave it out"
            for name in ("eval_use_gather_object", "use_legacy_prediction_loop")
        },
    ),
)
"""Refusals; the comments say what the subjects of a purpose are."""

_BY_PURPOSE = {row.purpose: [other for other in TABLE if other.purpose == row.purpose] for row in TABLE}
