"""Unsupported models and options are refused, and the message names them."""

from __future__ import annotations

import ast
import copy
import inspect
import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from ringattn import Ring
from ringattn.inference import PagedKVCache
from ringattn.integrations.transformers import (
    RingCache,
    RingMask,
    attend,
    describe_mask,
    masks,
    register,
    run_step,
    shard_batch,
    support,
)
from ringattn.integrations.transformers.positions import max_learned_positions
from tests.integrations.transformers.models import CONFIGS, make, tokens
from tests.support.pool import Pools

FIVE = transformers.__version__.startswith("5.")


def call(module: Any = None, mask: Any = None, rows: int = 6, keys: int | None = None, **kwargs: Any) -> Tensor:
    q = torch.ones(2, 4, rows, 8)
    k = v = torch.ones(2, 2, keys or rows, 8)
    return attend(module or nn.Module(), q, k, v, mask, **kwargs)[0]


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"position_bias": torch.ones(1)}, "position_bias must"),
        ({"head_mask": torch.ones(1)}, "head_mask must"),
        ({"seq_idx": torch.ones(1)}, "seq_idx must"),
        ({"output_attentions": True}, "output_attentions must"),
        ({"mask": torch.zeros(2, 1, 6, 6)}, "mask of attention must"),
        ({"keys": 9}, "queries and keys must"),
        ({"mask": RingMask(overlay="blocks of images")}, "window or chunks, got blocks of images"),
        ({"mask": RingMask(causal=False), "is_causal": True}, "mask must"),
        ({"mask": RingMask(causal=True), "is_causal": False}, "mask must"),
        (
            {"module": SimpleNamespace(is_causal=True), "mask": RingMask(), "is_causal": False},
            "mask of SimpleNamespace must",
        ),
        ({"mask": RingMask(), "sliding_window": 3}, "sliding_window=3 must have a mask with a window"),
        ({"mask": RingMask(local_size=4, chunked=None)}, "must differ in the config, got 4 for both"),
        ({"cu_seq_lens_q": torch.tensor([0, 6])}, "cu_seq_lens_q and cu_seq_lens_k must"),
        ({"cu_seq_lens_q": torch.tensor([0, 5]), "cu_seq_lens_k": torch.tensor([0, 5])}, "cu_seq_lens must"),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]])}, "same in each of 2 batch elements"),
        (
            {"mask": RingMask(local_size=4, chunked=True), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},
            "chunked attention must go without packed documents",
        ),
        (
            {"mask": RingMask(torch.ones(2, 6) > 0, ((1, 6), (0, 6)), True, local_size=4, chunked=True)},
            "chunked attention must go without padding on the left",
        ),
        (
            {"mask": RingMask(torch.ones(2, 6) > 0, None, True, local_size=4, chunked=True)},
            "chunked attention must go without holes",
        ),
    ],
)
def test_unsupported_attention_is_refused(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises((NotImplementedError, ValueError), match=match):
        call(**kwargs)


def _sharding(length: int = 6) -> Any:
    return Ring().sharding(length)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"use_cache": True}, "use_cache must"),
        ({"cu_seq_lens_q": torch.tensor([0, 6])}, "cu_seq_lens must"),
        ({"mask": RingMask(torch.ones(2, 5) > 0, ((1, 5), (0, 5)), True)}, "attention_mask must"),
    ],
)
def test_calls_that_do_not_fit_a_sharding_are_refused(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises((NotImplementedError, ValueError), match=match):
        call(sharding=_sharding(), **kwargs)


def test_other_types_than_shardings_are_refused() -> None:
    with pytest.raises(ValueError, match="sharding must"):
        call(sharding="zigzag")


def test_chunks_of_packed_documents_are_refused_in_a_sharding() -> None:
    sharding = Ring().sharding(6, documents=(0, 3, 6))
    with pytest.raises(NotImplementedError, match="chunked attention must go without packed documents"):
        call(mask=RingMask(local_size=4, chunked=True), sharding=sharding)


def test_masks_of_pairs_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="attention_mask must"):
        describe_mask(1, attention_mask=torch.ones(1, 1, 6, 6))
    model = make("llama", "ringattn")
    with pytest.raises(NotImplementedError, match=r"from ringattn's mask function, got \(1, 1, 6, 6\)"):
        model(tokens(6), attention_mask=torch.zeros(1, 1, 6, 6))


# in 4.x these look neither at the name nor at its mask function
@pytest.mark.parametrize("kind", ["bloom", "mpt"] if FIVE else [])
def test_models_with_their_own_attention_are_refused(kind: str) -> None:
    register()
    sizes = {"hidden_size": 16, "d_model": 16, "n_heads": 2, "n_layers": 1, "vocab_size": 61}
    names = {"bloom": {"n_head": 2, "n_layer": 1}, "mpt": {}}
    config = AutoConfig.for_model(kind, **sizes | names[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ringattn")
    with pytest.raises(
        (AttributeError, NotImplementedError), match=r"unchanged, got one that .* use attn_implementation="
    ):
        model(tokens(6), use_cache=False)
    mask = copy.deepcopy(describe_mask(1))
    assert not hasattr(mask, "to")
    with pytest.raises(NotImplementedError, match="takes a part of it"):
        mask[:, :, :3]


def test_blocks_of_tokens_that_see_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.masking_utils import create_causal_mask

    model = make("llama", "ringattn")
    blocks = torch.tensor([0, 0, 1, 1, 1, 2])

    def same_block(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (blocks[q] == blocks[k]) & (blocks[q] == 1)

    embeds = torch.zeros(1, 6, 24)
    four = "cache_position" in inspect.signature(create_causal_mask).parameters
    names: dict[str, Any] = (
        {"input_embeds": embeds, "cache_position": torch.arange(6)} if four else {"inputs_embeds": embeds}
    )
    given = {"config": model.config, "attention_mask": None, "past_key_values": None, "or_mask_function": same_block}
    mask = create_causal_mask(**given, **names)
    with pytest.raises(NotImplementedError, match="got blocks of tokens that see each other over a causal mask"):
        call(SimpleNamespace(is_causal=True), mask)
    # nor where nothing can be read of them
    monkeypatch.setattr(masks, "_is_captured", lambda device: True)
    mask = create_causal_mask(**given, **names)
    with pytest.raises(NotImplementedError, match="got a mask of its own, which cannot be read while a CUDA graph is"):
        call(SimpleNamespace(is_causal=True), mask)


OF_OTHER_LAYERS: dict[str, dict[str, Any]] = {"qwen3_next": {"layer_types": ["linear_attention", "full_attention"]}}
# those of 4.x draw their masks themselves, or can not be asked to attend with ringattn
OF_OTHER_LAYERS |= (
    {}
    if not FIVE
    else {
        "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
        "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 8},
        "lfm2": {"layer_types": ["conv", "full_attention"]},
    }
)


def make_of_other_layers(kind: str) -> Any:
    settings = {**CONFIGS["llama"], **OF_OTHER_LAYERS[kind], "model_type": kind}
    if kind != "qwen3_next":
        del settings["head_dim"]
    register()
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation="ringattn")


def share_other_layers(kind: str) -> str:
    ring, ids = Ring(), tokens(12)
    try:
        make_of_other_layers(kind)(**shard_batch({"input_ids": ids, "labels": ids}, ring))
    except NotImplementedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", OF_OTHER_LAYERS)
def test_layers_that_mix_rows_without_attention_are_refused(pool: Pools, kind: str) -> None:
    for found in pool(2).run(share_other_layers, kind):
        assert "tokens must interact in attention only" in found
    model = make_of_other_layers(kind)
    with pytest.raises(NotImplementedError, match=f"layers in the config of {kind}"):
        RingCache(model, Ring(), max_tokens=40)
    # one process has all rows
    assert model(tokens(12), labels=tokens(12), use_cache=False).loss.isfinite()


_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
_XLM = {"emb_dim": 16, "n_layers": 1, "n_heads": 2, "n_langs": 1}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2}
_LINEAR = {"layer_types": ["linear_attention"] * 2}
ALONE: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_SMALL, **_LINEAR, "head_dim": 8, "num_key_value_heads": 2},
    "qwen3_5_text": {**_SMALL, **_LINEAR, "head_dim": 8, "num_key_value_heads": 2},
    "kimi_linear": {**_SMALL, **_LINEAR, "num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4},
    "jamba": {**_SMALL, "attn_layer_period": 8, "attn_layer_offset": 4, "num_experts": 2, "use_mamba_kernels": False},
    "lfm2": {**_SMALL, "layer_types": ["conv"] * 2, "num_key_value_heads": 2},
    "granitemoehybrid": {**_SMALL, **_LINEAR, **_MAMBA, "shared_intermediate_size": 16},
    "bamba": {**_SMALL, **_MAMBA, "attn_layer_indices": [], "num_key_value_heads": 2},
    "minimax": {**_SMALL, **_LINEAR, "head_dim": 8, "num_key_value_heads": 2, "num_local_experts": 2},
    "recurrent_gemma": {**_SMALL, "lru_width": 16, "num_key_value_heads": 1},
    "mamba": {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    "bailing_hybrid": {
        **_SMALL,
        **_LINEAR,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
    },
    "bloom": {"hidden_size": 16, "n_layer": 1, "n_head": 2},
    "xlnet": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16},
    "xlm": _XLM,
    "flaubert": _XLM,
    "cpmant": {"hidden_size": 16, "num_attention_heads": 2, "dim_head": 8, "dim_ff": 16, "num_hidden_layers": 1},
    "deberta": _SMALL,
    "deberta-v2": _SMALL,
    "funnel": {"d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 16}
    | {"block_sizes": [1, 1], "architectures": ["FunnelModel"]},
    "mra": _SMALL,
    "yoso": _SMALL,
    "big_bird": {**_SMALL, "attention_type": "original_full"},
    "longformer": {**_SMALL, "attention_window": 4},
    "fnet": {name: size for name, size in _SMALL.items() if name != "num_attention_heads"},
    "led": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    | {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "attention_window": 4},
}
"""Families without a layer that may attend with ringattn: hybrid models cut short, and models that attend by themselves."""


def share_alone(kind: str, given: bool) -> tuple[str, bool]:
    """Return the error of a model on the rows of a rank, and whether it ran before; with an attention mask if `given`."""
    register()
    config = AutoConfig.for_model(kind, vocab_size=61, pad_token_id=0, **ALONE[kind])
    model, ran = AutoModel.from_config(config, attn_implementation="ringattn"), []
    for part in model.modules():
        if isinstance(part, nn.Embedding):
            part.register_forward_hook(lambda *_: ran.append(True))
    batch = {"input_ids": tokens(12), **({"attention_mask": torch.ones(1, 12, dtype=torch.long)} if given else {})}
    try:
        model(**shard_batch(batch, Ring()))
    except (RuntimeError, NotImplementedError) as error:
        return str(error), bool(ran)
    return "", bool(ran)


@pytest.mark.models
@pytest.mark.skipif(not FIVE, reason="several of these are of 5.x")
@pytest.mark.parametrize("given", [True, False], ids=["mask", "plain"])
@pytest.mark.parametrize("kind", ALONE)
def test_families_that_cannot_attend_around_the_ring_are_refused_before_they_run(
    pool: Pools, kind: str, given: bool
) -> None:
    told = r"tokens must interact in attention only|must attend with ringattn, got \w+, which takes the name"
    for found, ran in pool(2).run(share_alone, kind, given):
        assert (re.match(f".*({told})", found) is not None, ran) == (True, False), found


@torch.no_grad()
def share_head(kind: str, given: dict[str, Any], pooling: bool) -> tuple[float, str]:
    """Return the distance of a head's logits from those of one process, and what was refused."""
    register()
    models = []
    for attention in ("eager", "ringattn"):
        config = getattr(transformers, kind).config_class(vocab_size=61, pad_token_id=0, **_SMALL)
        if kind.startswith("Splinter"):
            config.question_token_id = 60
        torch.manual_seed(0)
        models.append(getattr(transformers, kind)._from_config(config, attn_implementation=attention).eval())
    part = shard_batch(given, Ring(), shift_labels=False, pooling=pooling)
    try:
        found = models[1](**part)[0]
    except (NotImplementedError, ValueError) as error:
        return 0.0, str(error)
    expected = models[0](**given)[0]
    return float((found - expected)[:, :10].norm() / expected[:, :10].norm()), ""


@pytest.mark.skipif(not FIVE, reason="BERT of 4.x attends by itself")
def test_heads_that_read_the_attention_mask_are_refused_before_they_run(pool: Pools) -> None:
    ids = tokens(12).masked_fill(torch.arange(12) == 4, 60)
    batch = {"input_ids": ids, "attention_mask": torch.arange(12)[None].lt(10).long()}
    for _, refused in pool(2).run(share_head, "SplinterForQuestionAnswering", batch, False):
        assert "a model whose head chooses a row must get whole tokens" in refused
    for distance, refused in pool(2).run(share_head, "SplinterForQuestionAnswering", batch, True):
        assert (distance < 1e-5, refused) == (True, "")
    for _, refused in pool(2).run(share_head, "ElectraForPreTraining", {**batch, "labels": ids.gt(30).long()}, False):
        assert "labels must be left out with an attention_mask" in refused


def share_without_positions(kind: str, labelled: bool) -> str:
    register()
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16, "vocab_size": 61}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), attn_implementation="ringattn")
    ids = tokens(12)
    try:
        model(**shard_batch({"input_ids": ids, **({"labels": ids} if labelled else {})}, Ring()))
    except NotImplementedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("labelled", [False, True])
# those of 4.x do not swallow the keyword
@pytest.mark.parametrize("kind", ["bart", "blenderbot"] if FIVE else [])
def test_models_that_number_the_rows_of_a_rank_themselves_are_refused(pool: Pools, kind: str, labelled: bool) -> None:
    for found in pool(2).run(share_without_positions, kind, labelled):
        assert "a model must take position_ids where ranks share a sequence" in found


def make_roberta(attention: str) -> Any:
    register()
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = AutoConfig.for_model("roberta", **sizes, vocab_size=61, pad_token_id=1, max_position_embeddings=40)
    torch.manual_seed(0)
    return AutoModelForMaskedLM.from_config(config, attn_implementation=attention).eval()


@torch.no_grad()
def share_roberta(begin: int) -> tuple[float, str]:
    """Distance of the logits of a shard from those of one process, and what was refused, with positions from `begin` on."""
    ids = tokens(12).clamp(min=2)
    expected = make_roberta("eager")(input_ids=ids).logits
    given = {"position_ids": torch.arange(begin, begin + 12)[None]} if begin else {}
    part = shard_batch({"input_ids": ids, **given}, Ring())
    try:
        found = part["sharding"].unshard(make_roberta("ringattn")(**part).logits)
    except ValueError as error:
        return 0.0, str(error)
    return float((found - expected).norm() / expected.norm()), ""


@pytest.mark.skipif(not FIVE, reason="RoBERTa of 4.x attends by itself")
def test_positions_that_do_not_begin_where_the_model_counts_from_are_refused(pool: Pools) -> None:
    for distance, refused in pool(2).run(share_roberta, 2):
        assert (distance < 1e-5, refused) == (True, "")
    for begin in (0, 1):
        for _, refused in pool(2).run(share_roberta, begin):
            assert "position_ids must begin at 2 for this model" in refused


def share_mobilebert() -> str:
    register()
    sizes = {
        "hidden_size": 16,
        "embedding_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 61,
    }
    config = AutoConfig.for_model("mobilebert", **sizes, intermediate_size=16, intra_bottleneck_size=16)
    model = AutoModelForMaskedLM.from_config(config, attn_implementation="ringattn")
    try:
        model(**shard_batch({"input_ids": tokens(12)}, Ring()))
    except NotImplementedError as error:
        return str(error)
    return ""


@pytest.mark.skipif(not FIVE, reason="MobileBERT of 4.x attends by itself")
def test_tokens_that_are_embedded_with_their_neighbours_are_refused(pool: Pools) -> None:
    for found in pool(2).run(share_mobilebert):
        assert "got ['trigram_input'] layers in the config of mobilebert" in found


def share_stablelm(rank_alone: bool) -> list[str]:
    """Errors of a model whose layers pass no keywords on."""
    register()
    sizes = {name: size for name, size in CONFIGS["llama"].items() if name not in ("model_type", "head_dim")}
    config = AutoConfig.for_model("stablelm", **sizes)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="ringattn").eval()
    ring, ids, found = Ring(), tokens(12), []
    with RingCache(model, ring, max_tokens=40) as cache:
        calls = [{"input_ids": ids, "past_key_values": cache}]
        for given in calls if rank_alone else [*calls, shard_batch({"input_ids": ids}, ring)]:
            try:
                model(**given)
            except RuntimeError as error:
                found.append(str(error))
    return found


@pytest.mark.skipif(not FIVE, reason="layers of 4.x do not swallow the keyword")
def test_layers_that_pass_no_keywords_on_are_named(pool: Pools) -> None:
    told = "does not pass keywords on (as in StableLM and Nemotron): run this model on one process"
    for found in pool(2).run(share_stablelm, False):
        assert [told in one and "StableLmAttention" in one for one in found] == [True, True]
    (found,) = share_stablelm(True)
    assert "hands no keywords on to attention (as StableLM and Nemotron) is not supported" in found


def make_esm(attention: str, counted: str, token_dropout: bool) -> Any:
    register()
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"vocab_size": 61, "pad_token_id": 0, "mask_token_id": 60, "max_position_embeddings": 40}
    config = AutoConfig.for_model("esm", **sizes, position_embedding_type=counted, token_dropout=token_dropout)
    torch.manual_seed(0)
    return AutoModelForMaskedLM.from_config(config, attn_implementation=attention).eval()


@torch.no_grad()
def share_esm(counted: str, token_dropout: bool) -> tuple[float, str]:
    """Distance of the logits of a shard from those of one process, and what was refused."""
    ids = tokens(12).index_fill(1, torch.tensor([0, 1, 4]), 60)
    expected = make_esm("eager", counted, token_dropout)(input_ids=ids).logits
    part = shard_batch({"input_ids": ids}, Ring(), shift_labels=False)
    try:
        found = part["sharding"].unshard(make_esm("ringattn", counted, token_dropout)(**part).logits)
    except NotImplementedError as error:
        return 0.0, str(error)
    return float((found - expected).norm() / expected.norm()), ""


@pytest.mark.skipif(not FIVE, reason="ESM of 4.x draws its masks itself")
def test_embeddings_that_count_the_rows_of_a_rank_are_refused(pool: Pools) -> None:
    for distance, refused in pool(2).run(share_esm, "rotary", False):
        assert (distance < 1e-5, refused) == (True, "")
    for _, refused in pool(2).run(share_esm, "rotary", True):
        assert "got ['token_dropout'] layers in the config of esm" in refused
    for _, refused in pool(2).run(share_esm, "absolute", False):
        assert "a model that counts positions from 1 (padding_idx + 1) must pass them to its attention" in refused


TABLES = {
    "gpt2": {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2},
    "opt": {
        "max_position_embeddings": 16,
        "hidden_size": 16,
        "ffn_dim": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    # counts from 2
    "roberta": {"max_position_embeddings": 18, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    | {"num_attention_heads": 2, "pad_token_id": 1, "is_decoder": True},
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_cache_for_more_tokens_than_a_model_has_positions_is_refused(kind: str) -> None:
    if kind == "roberta" and not FIVE:
        pytest.skip("RoBERTa of 4.x does not ask for attention by name")
    register()
    config = AutoConfig.for_model(kind, vocab_size=61, **TABLES[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ringattn").eval()
    assert max_learned_positions(model) == 16
    with pytest.raises(ValueError, match="max_tokens must"):
        RingCache(model, Ring(), max_tokens=17)
    RingCache(model, Ring(), max_tokens=16)


def make_caches_with_one_wrong_number() -> list[str]:
    """Errors of each rank where rank 1 calls with too large numbers, or with none."""
    register()
    ring, said = Ring(timeout=timedelta(seconds=20)), []
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", vocab_size=61, **TABLES["gpt2"]), attn_implementation="ringattn"
    )
    for max_tokens, batch in ((17, 1), (16, 0)):
        here = (max_tokens, batch) if ring.rank else (16, 1)
        try:
            RingCache(model.eval(), ring, max_tokens=here[0], batch=here[1])
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    return said


def test_numbers_of_a_cache_that_are_wrong_on_one_rank_are_refused_on_all(pool: Pools) -> None:
    for table, batch in pool(2).run(make_caches_with_one_wrong_number):
        assert "max_tokens must be at most 16, the positions that GPT2LMHeadModel has learned, got 17" in table
        assert "batch must be at least 1, got 0" in batch


def test_rotary_positions_have_no_table() -> None:
    assert max_learned_positions(make("llama", "ringattn")) is None


def test_generating_with_a_cache_is_refused() -> None:
    model = make("llama", "ringattn").eval()
    with pytest.raises(NotImplementedError, match="decoding with a cache"):
        model.generate(tokens(5), max_new_tokens=3, do_sample=False)


def test_asking_a_model_for_attention_weights_is_refused() -> None:
    model = make("llama", "ringattn")
    with pytest.raises((NotImplementedError, ValueError), match=r"output_attentions"):
        model(tokens(5), output_attentions=True)


@pytest.mark.parametrize(
    ("entries", "error", "match"),
    [
        ({"input_ids": None}, ValueError, "must have input_ids or inputs_embeds"),
        ({"input_ids": torch.zeros(8)}, ValueError, "input_ids must"),
        ({"input_ids": [[1, 2]]}, ValueError, "input_ids must"),
        ({"inputs_embeds": torch.zeros(8, 4)}, ValueError, "inputs_embeds must"),
        ({"labels": [[1, 2]]}, ValueError, "labels must"),
        ({"position_ids": [[1, 2]]}, ValueError, "position_ids must"),
        ({"pixel_mask": torch.ones(1, 3, 4, 4)}, NotImplementedError, r"got \['pixel_mask'\] too"),
        ({"past_key_values": object()}, NotImplementedError, r"got \['past_key_values'\] too"),
        ({"seq_ids": torch.zeros(2, 8)}, NotImplementedError, r"got \['seq_ids'\] too"),
        ({"seq_idx": torch.arange(8)[None] // 4}, ValueError, "seq_idx must"),
        (
            {"seq_idx": torch.arange(8)[None] // 4, "position_ids": torch.arange(8)[None] % 2},
            ValueError,
            "seq_idx must",
        ),
        ({"labels": torch.zeros(2)}, ValueError, "labels must"),
        ({"attention_mask": torch.ones(2, 1, 8, 8)}, ValueError, "attention_mask must"),
        ({"attention_mask": {"full_attention": None}}, NotImplementedError, "attention_mask must"),
        ({"position_ids": torch.zeros(2, 2, 8)}, ValueError, "position_ids must"),
        ({"use_cache": True}, NotImplementedError, "use_cache must"),
        ({"cu_seq_lens_q": torch.tensor([0, 8])}, ValueError, "cu_seq_lens_q and cu_seq_lens_k must"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 3, 8]), "cu_seq_lens_k": torch.tensor([0, 3, 8])},
            NotImplementedError,
            "packed documents must come in one row, got 2",
        ),
        (
            {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]), "attention_mask": torch.ones(2, 8)},
            ValueError,
            "position_ids must",
        ),
        (
            {
                "cu_seq_lens_q": torch.tensor([0, 8]),
                "cu_seq_lens_k": torch.tensor([0, 8]),
                "attention_mask": torch.arange(16).view(2, 8) > 2,
            },
            ValueError,
            "packed documents must come without padding",
        ),
    ],
)
def test_batches_that_cannot_be_sharded_are_refused(
    entries: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        shard_batch({"input_ids": tokens(8, rows=2), **entries}, Ring())


def test_shifted_labels_are_refused_where_labels_are_not_shifted() -> None:
    ids = tokens(8)
    with pytest.raises(ValueError, match="shift_labels must"):
        shard_batch({"input_ids": ids, "shift_labels": ids}, Ring(), shift_labels=False)


def refused_on_ranks() -> dict[str, str]:
    """Errors of each rank, by mistake."""
    found = {}
    models = {kind: make(kind, "ringattn", torch.float32) for kind in ("llama", "llama4")}
    ids = tokens(24)

    def note(name: str, kind: str = "llama", **kwargs: Any) -> None:
        ring = Ring()
        part = shard_batch({"input_ids": ids}, ring, name.partition(" ")[0])
        given = {name: value(part) if callable(value) else value for name, value in kwargs.items()}
        try:
            models[kind](**{**part, **given})
        except (ValueError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    note("contiguous without", position_ids=None)
    note("zigzag without", "llama4", position_ids=None)  # whose layers pass no positions to attention
    note("zigzag of contiguous", position_ids=lambda part: Ring().sharding(24, "contiguous").positions[None])
    note("zigzag packed", position_ids=lambda part: part["sharding"].positions[None] % 10)
    note("zigzag whole", sharding=None)
    try:
        shard_batch({"input_ids": tokens(1)}, Ring(), pooling=True)
    except ValueError as error:
        found["short"] = f"{type(error).__name__}: {error}"
    for name, mistake in {
        "none": {"position_ids": None},
        "three": {"position_ids": torch.ones(3, 2, 3)},
        "long": {"position_ids": torch.arange(6)[None]},
    }.items():
        try:
            sharding = Ring().sharding(6)
            call(rows=3, sharding=sharding, **mistake)
        except (ValueError, NotImplementedError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_every_rank_refuses_positions_that_are_wrong_on_some(pool: Pools) -> None:
    for rank, found in enumerate(pool(2).run(refused_on_ranks)):
        for name, told in {
            "contiguous without": "must be given to a model whose rows are sharded",
            "zigzag without": "must be given to a model whose rows are sharded",
            "zigzag of contiguous": "must be the global positions of this rank's rows",
            "zigzag packed": "must be the global positions of this rank's rows",
        }.items():
            assert found[name].startswith("ValueError"), (rank, name)
            assert f"position_ids {told}" in found[name], (rank, name)
        assert "position_ids must have this rank's 3 rows of 6, got 6" in found["long"]
        assert found["zigzag whole"].startswith(
            "RuntimeError: a model must be called with a sharding among 2 ranks, got none"
        )
        assert "a sequence must leave each of 2 ranks a row with pooling, got 1 tokens" in found["short"]
        assert "position_ids must be given to a model whose rows are sharded" in found["none"]
        assert "position_ids must be 2-dimensional" in found["three"]


def positions_that_fit() -> None:
    model = make("llama", "ringattn")
    ids = tokens(24, rows=2)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    ring = Ring()
    # counted from the first token, as generation counts; padding has any position
    counted = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    for batch in (
        {"input_ids": ids, "attention_mask": mask, "position_ids": counted},
        {"input_ids": ids, "position_ids": torch.arange(24)[None] + 2},
        {"input_ids": ids, "position_ids": torch.arange(24)[None].expand(2, -1)},
    ):
        for layout in ("contiguous", "zigzag"):
            model(**shard_batch(batch, ring, layout))
    sharding = ring.sharding(24, documents=(0, 9, 24))
    model(sharding.shard(ids), position_ids=sharding.positions[None], sharding=sharding, use_cache=False)


def test_positions_may_count_from_any_start_that_leaves_distances_alone(pool: Pools) -> None:
    pool(2).run(positions_that_fit)


def with_inference_mode() -> Tensor:
    ids = tokens(12)
    with torch.inference_mode():
        part = shard_batch({"input_ids": ids}, Ring())
        logits = make("llama", "ringattn").eval()(**part).logits
        return part["sharding"].unshard(logits).clone()


def test_evaluation_needs_no_gradients(pool: Pools) -> None:
    with torch.no_grad():
        expected = make("llama", "sdpa").eval()(tokens(12)).logits
    torch.testing.assert_close(pool(2).run(with_inference_mode)[1], expected, rtol=1e-5, atol=1e-5)
    assert not dist.is_initialized()


def _call_wrongly(kind: str) -> list[str]:
    """Errors of each rank where rank 1 calls a model or shards a batch wrongly, and then for three right calls."""
    register()
    ring, said = Ring(timeout=timedelta(seconds=20)), []
    model = make("llama", "ringattn").eval()
    whole = tokens(12)
    sizes = {name: getattr(model.config, name) for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")}
    layers, kv_heads, head_dim = sizes.values()
    paged: dict[str, Any] = {"pages": 40, "page_size": 4, "device": "cpu", "dtype": model.dtype}
    cache = PagedKVCache(ring, layers=layers, kv_heads=kv_heads, head_dim=head_dim, **paged)
    for wrong in (kind if ring.rank == 1 else "", "", "", ""):
        try:
            with torch.no_grad():
                if kind == "step":
                    step = cache.extend([cache.add_request(20)], [12])
                    run_step(model, step, whole[:1, : 11 if wrong else 12])
                else:
                    mask = torch.ones(whole.shape[0], 11 if wrong == "batch" else 12)
                    mask[:, 0] = 0  # a mask of tokens only is none
                    part = shard_batch({"input_ids": whole, "attention_mask": mask}, ring)
                    said_so = {"output_attentions": True} if wrong == "option" else {}
                    part["attention_mask"] = part["attention_mask"][:, : 11 if wrong == "mask" else 12]
                    model(**part, **said_so)
            said.append("")
        except (ValueError, NotImplementedError, RuntimeError) as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("batch", "attention_mask must"),
        ("option", "output_attentions must"),
        ("mask", "attention_mask must"),
        ("step", "tokens must"),
    ],
)
def test_wrong_calls_of_one_rank_are_errors_on_all(pool: Pools, kind: str, expected: str) -> None:
    for refused, *after in pool(2).run(_call_wrongly, kind):
        assert expected in refused
        assert after == ["", "", ""]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"deepspeed_plugin": object()}, "must be sharded by FSDP or by DDP, got DeepSpeed"),
        ({"deepspeed_plugin": None, "predict_with_generate": True}, "predict_with_generate must"),
    ],
)
def test_engines_that_are_not_tested_with_a_ring_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(NotImplementedError, match=match):
        support.check_supported(SimpleNamespace(**options), "shared training")


def test_every_purpose_of_the_table_is_checked() -> None:
    folder = Path(support.__file__).parent
    calls = [node for file in folder.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    checked = {
        part.value
        for node in calls
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check_supported"
        for part in ast.walk(node.args[1])
        if isinstance(part, ast.Constant)
    }
    assert checked == {row.purpose for row in support.TABLE}
    assert all(" must " in row.message for row in support.TABLE)


def test_a_ring_whose_processes_are_several_ranks_is_refused() -> None:
    ring, ids = Ring(virtual_size=2), torch.arange(12)[None]
    with pytest.raises(NotImplementedError, match="one virtual rank per process, got virtual_size=2"):
        shard_batch({"input_ids": ids}, ring)
    model, sharding = make("llama", "ringattn"), ring.sharding(12)
    with pytest.raises(NotImplementedError, match="one virtual rank per process, got virtual_size=2"):
        model(input_ids=sharding.shard(ids), position_ids=sharding.positions[None], sharding=sharding)


@pytest.mark.parametrize("kind", ["falcon", "gpt_neo"])
def test_models_with_attention_classes_of_their_own_are_refused_when_they_are_made(kind: str) -> None:
    """Transformers looks for the name among its classes: KeyError, without a word of what to do."""
    register()
    with (
        torch.device("meta"),
        pytest.raises(NotImplementedError, match=r"attention interface, got (Falcon|GPTNeo)Model"),
    ):
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind), attn_implementation="ringattn")
