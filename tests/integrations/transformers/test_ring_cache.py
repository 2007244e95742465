"""Generation on the ranks of a ring equals that of one process, token by token."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from ringattn import Ring
from ringattn.inference import CacheFull, PagedKVCache
from ringattn.integrations.transformers import RingCache, register, run_step
from ringattn.integrations.transformers.cuda_graph_runner import capture_obstacle
from ringattn.integrations.transformers.support import cache_sizes
from tests.integrations.transformers.models import CONFIGS, make, tokens
from tests.support.graph_recorder import Reruns
from tests.support.pool import Pools

DECODERS = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "llama4")
EAGER = ("gemma2", "gpt_oss")
"""Soft caps and sinks, which eager attention alone knows."""

GREEDY = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 20, "max_new_tokens": 12, "eos_token_id": None}
BEAMS = {"num_beams": 3, **GREEDY}


def prompts(rows: int = 1, length: int = 37, padding: int = 0) -> dict[str, Tensor]:
    """Prompts of one length, all but the last of which begin with some padding."""
    ids = tokens(length, rows)
    mask = torch.ones_like(ids)
    for row in range(rows - 1):
        mask[row, : padding + row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def alone(kind: str, calls: list[dict[str, Any]]) -> list[Tensor]:
    """Tokens that one process generates with the cache of transformers, one call continuing the other."""
    model = make(kind, "eager" if kind in EAGER else "sdpa", torch.float32).eval()
    torch.manual_seed(0)
    cache = transformers.DynamicCache()
    return [model.generate(**call, past_key_values=cache).clone() for call in calls]


def on_ranks(
    kind: str, calls: list[dict[str, Any]], sizes: dict[str, Any], virtual_size: int | None = None
) -> tuple[list[Tensor], bool]:
    """Tokens that a rank generates, and whether all pages are free again."""
    ring = Ring(virtual_size=virtual_size)
    model = make(kind, "ringattn", torch.float32).eval()
    # ranks that were seeded differently must draw alike all the same
    torch.manual_seed(ring.rank)
    with RingCache(model, ring, **{"max_tokens": 64, "batch": 4, "page_size": 4, **sizes}) as cache:
        found = [model.generate(**call, past_key_values=cache).clone() for call in calls]
        cache.reset()
        assert cache.kv is not None
        home = set(cache.kv.allocator.free_pages) == {cache.kv.allocator.pages}
    return found, home and "forward" not in model.__dict__


def assert_same(
    pool: Pools, world_size: int, kind: str, *calls: dict[str, Any], virtual_size: int | None = None, **sizes: Any
) -> None:
    expected = alone(kind, list(calls))
    for found, home in pool(world_size).run(on_ranks, kind, list(calls), sizes, virtual_size):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.tolist() == theirs.tolist()
        assert home


@pytest.mark.models
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED, BEAMS], ids=["greedy", "sampled", "beams"])
@pytest.mark.parametrize("kind", DECODERS)
def test_generation_on_ranks_equals_one_process(
    pool: Pools, kind: str, options: dict[str, Any], world_size: int
) -> None:
    assert_same(pool, world_size, kind, {**prompts(), **options})


PADDED = prompts(rows=3, length=29, padding=5)


@pytest.mark.models
@pytest.mark.parametrize("options", [GREEDY, SAMPLED, BEAMS], ids=["greedy", "sampled", "beams"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss", "llama4"])
def test_batches_padded_on_the_left_generate_the_same_tokens(pool: Pools, kind: str, options: dict[str, Any]) -> None:
    assert_same(pool, 2, kind, {**PADDED, **options}, batch=9)


@pytest.mark.models
@pytest.mark.parametrize("chunk", [8, 19])
@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_prompts_may_come_in_chunks(pool: Pools, kind: str, chunk: int) -> None:
    """Of few tokens, which every rank computes, and of more, which ranks share."""
    for world_size in (2, 4):
        assert_same(pool, world_size, kind, {**prompts(rows=2), **GREEDY, "prefill_chunk_size": chunk})


def test_a_virtual_rank_per_process_generates_the_tokens_of_one_process(pool: Pools) -> None:
    given = {**prompts(rows=2), **GREEDY, "prefill_chunk_size": 19}
    assert_same(pool, 2, "llama", given, virtual_size=2)


def test_several_virtual_ranks_of_a_process_are_refused_before_memory_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring, model = Ring(virtual_size=4), make("llama", "ringattn", torch.float32).eval()
    cache = PagedKVCache(ring, **cache_sizes(model), dtype=model.dtype, pages=4, page_size=4, device="cpu")
    step = cache.extend([cache.add_request(20)], [20])
    with pytest.raises(NotImplementedError, match="one virtual rank per process, got virtual_size=4"):
        run_step(model, step, tokens(20))
    cache.device = torch.device("cuda")
    assert capture_obstacle(model, cache) == "its ring has virtual ranks, virtual_size=4"
    monkeypatch.setattr(torch, "zeros", None)
    with pytest.raises(NotImplementedError, match="one virtual rank per process, got virtual_size=4"):
        RingCache(model, ring, max_tokens=64)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "llama4"])
@pytest.mark.parametrize("chunk", [8, 19])
def test_padding_may_be_longer_than_a_chunk(pool: Pools, kind: str, chunk: int) -> None:
    """Rows whose first chunks are padding alone were refused as padding on the right."""
    given = {**prompts(rows=3, length=43, padding=23), **GREEDY, "prefill_chunk_size": chunk}
    for world_size in (1, 2):
        assert_same(pool, world_size, kind, given, batch=3)


def padded_alone(mask: Tensor, turns: int) -> tuple[list[list[int]], list[int]]:
    """Answers to prompts of which some are padding alone, and the padding of each sequence then."""
    model = make("llama", "ringattn", torch.float32).eval()
    with torch.no_grad(), RingCache(model, Ring(), max_tokens=64, batch=2, page_size=4) as cache:
        ids = tokens(29, rows=2).masked_fill(mask == 0, 0)
        for seed in range(turns):
            ids = model.generate(ids, attention_mask=mask, past_key_values=cache, **{**GREEDY, "max_new_tokens": 3})
            ids = torch.cat([ids, tokens(5, rows=2, seed=seed)], 1)
            mask = torch.nn.functional.pad(mask, (0, 8), value=1)
        return ids.tolist(), cache._paddings


def test_a_row_of_padding_alone_changes_no_other_row(pool: Pools) -> None:
    mask = torch.ones(2, 29, dtype=torch.long)
    expected, _ = padded_alone(mask, 2)
    mask[0] = 0
    for found, paddings in (padded_alone(mask, 2), *pool(2).run(padded_alone, mask, 2)):
        assert found[1] == expected[1]
        assert paddings == [29, 0]


def test_padding_grows_only_where_there_is_nothing_else() -> None:
    model = make("llama", "ringattn", torch.float32).eval()
    mask = (torch.arange(40) >= torch.tensor([[12], [3]])).long()
    with torch.no_grad(), RingCache(model, Ring(), max_tokens=40, batch=2, page_size=4) as cache:

        def call(start: int, stop: int, padding: int = 0) -> None:
            given = mask[:, :stop].clone()
            given[1, :padding] = 0
            model(tokens(40, rows=2)[:, start:stop], attention_mask=given, past_key_values=cache)

        call(0, 8)
        assert cache._paddings == [8, 3]
        with pytest.raises(ValueError, match=r"attention_mask must begin with .* \[8, 3\] .* \[12, 5\]"):
            call(8, 20, padding=5)
        call(8, 20)
        assert cache._paddings == [12, 3]
        with pytest.raises(ValueError, match=r"padding of request 0 must stay 12 tokens"):
            cache.kv.set_padding(cache._requests[0], 13)  # pyright: ignore[reportOptionalMemberAccess]
        cache.crop(-10)
        mask[0, 10:] = 1
        call(10, 20)
        assert cache._paddings == [10, 3]


def several_turns(kind: str, implementation: str) -> list[Tensor]:
    """Three turns over one cache, of which the second is taken back and asked anew."""
    ring = Ring()
    model = make(kind, implementation, torch.float32).eval()
    torch.manual_seed(0)
    found = []

    def turn(cache: Any, ids: Tensor, said: Tensor) -> Tensor:
        ids = torch.cat([ids, said], 1)
        ids = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **GREEDY)
        found.append(ids)
        return ids

    def talk(cache: Any) -> list[Tensor]:
        ids = turn(cache, tokens(0, 2), tokens(23, 2))
        length = cache.get_seq_length()
        turn(cache, ids, tokens(5, 2, seed=1))
        cache.crop(length - cache.get_seq_length())
        assert cache.get_seq_length() == length
        turn(cache, ids, tokens(31, 2, seed=2))
        return found

    if implementation != "ringattn":
        return talk(transformers.DynamicCache())
    with RingCache(model, ring, max_tokens=120, batch=2, page_size=4) as cache:
        return talk(cache)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_turns_go_on_where_the_last_one_ended(pool: Pools, kind: str) -> None:
    expected = several_turns(kind, "eager" if kind in EAGER else "sdpa")
    for found in pool(2).run(several_turns, kind, "ringattn"):
        assert [x.tolist() for x in found] == [x.tolist() for x in expected]


def test_turns_after_beams_are_computed_one_after_another(pool: Pools) -> None:
    first = {**prompts(rows=1, length=19), **BEAMS, "num_return_sequences": 3, "max_new_tokens": 5}
    longer = {"input_ids": tokens(50, rows=3, seed=3), **GREEDY}
    model = make("llama", "sdpa", torch.float32).eval()
    cache = transformers.DynamicCache()
    ids = model.generate(**first, past_key_values=cache)
    longer["input_ids"] = torch.cat([ids, longer["input_ids"][:, ids.shape[1] :]], 1)
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    assert_same(pool, 2, "llama", first, longer, batch=3)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_candidates_are_checked_in_one_call(pool: Pools, options: dict[str, Any]) -> None:
    """Assisted decoding asks for the logits of several tokens, and takes back the tokens it does not believe."""
    ids = tokens(9).repeat(1, 4)
    looked_up = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **options, "eos_token_id": 2}
    looked_up["prompt_lookup_num_tokens"] = 4
    assert_same(pool, 2, "qwen3", looked_up)


def test_several_answers_to_one_prompt_are_drawn(pool: Pools) -> None:
    assert_same(pool, 2, "llama", {**prompts(), **SAMPLED, "num_return_sequences": 4})


def logits_of(keep: Any) -> Tensor:
    ring = Ring()
    model = make("llama", "ringattn", torch.float32).eval()
    with torch.no_grad(), RingCache(model, ring, max_tokens=64, batch=2, page_size=4) as cache:
        return model(tokens(40, rows=2), past_key_values=cache, logits_to_keep=keep).logits


@pytest.mark.parametrize("keep", [0, 1, 7, torch.tensor([3, 39, 20])], ids=["all", "last", "seven", "some"])
def test_logits_of_any_rows_come_to_every_rank(pool: Pools, keep: Any) -> None:
    with torch.no_grad():
        expected = make("llama", "sdpa", torch.float32).eval()(tokens(40, rows=2), logits_to_keep=keep).logits
    results = pool(4).run(logits_of, keep)
    for found in results:
        assert torch.equal(found, results[0])
    torch.testing.assert_close(results[0], expected, rtol=1e-4, atol=1e-4)


def reordered(implementation: str) -> Tensor:
    """Logits after sequences were reordered."""
    model = make("gemma3", implementation, torch.float32).eval()
    wrapped = implementation == "ringattn"
    cache: Any = (
        RingCache(model, Ring(), max_tokens=64, batch=6, page_size=4) if wrapped else transformers.DynamicCache()
    )
    with torch.no_grad(), cache if wrapped else contextlib.nullcontext():
        model(tokens(21, rows=6), past_key_values=cache)
        model(tokens(1, rows=6, seed=1), past_key_values=cache)
        cache.reorder_cache(torch.tensor([5, 5, 0, 2, 3, 5]))
        model(tokens(2, rows=6, seed=2), past_key_values=cache)
        return model(tokens(19, rows=6, seed=3), past_key_values=cache).logits


def test_sequences_may_be_reordered(pool: Pools) -> None:
    expected = reordered("sdpa")
    for found in pool(2).run(reordered, "ringattn"):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_assistant_model_drafts_and_the_ring_checks(pool: Pools) -> None:
    given = {**prompts(length=21), "do_sample": False, "max_new_tokens": 10, "eos_token_id": 2}
    expected = make("llama", "sdpa", torch.float32).eval().generate(**given)
    for found in pool(2).run(proposed, given):
        assert found.tolist() == expected.tolist()


def test_drafts_of_an_assistant_model_are_the_same_on_all_ranks(pool: Pools) -> None:
    given = {**prompts(length=21), **SAMPLED}
    model, small = (make("llama", "sdpa", torch.float32, **sizes).eval() for sizes in ({}, {"num_hidden_layers": 1}))
    torch.manual_seed(0)
    expected = model.generate(**given, assistant_model=small)
    for found in pool(2).run(proposed, given):
        assert found.tolist() == expected.tolist()


def proposed(given: dict[str, Any]) -> Tensor:
    model = make("llama", "ringattn", torch.float32).eval()
    # of one layer, so that it is right sometimes
    small = make("llama", "sdpa", torch.float32, num_hidden_layers=1).eval()
    torch.manual_seed(dist.get_rank())
    with RingCache(model, Ring(), max_tokens=64, page_size=4) as cache:
        return model.generate(**given, past_key_values=cache, assistant_model=small)


FEW = prompts(length=21)


@pytest.mark.parametrize("how", ["model", "lookup"])
def test_a_later_turn_may_begin_with_candidates(how: str) -> None:
    small = make("llama", "sdpa", torch.float32, num_hidden_layers=1).eval()
    ways = {"model": {"assistant_model": small}, "lookup": {"prompt_lookup_num_tokens": 4}}
    mask = (torch.arange(60) >= 3).long()[None]
    greedy = {**GREEDY, "eos_token_id": 2}

    def talk(model: Any, cache: Any, **options: Any) -> Tensor:
        ids = model.generate(tokens(20), attention_mask=mask[:, :20], past_key_values=cache, **greedy)
        ids = torch.cat([ids, tokens(5, seed=1)], 1)
        held = mask[:, : ids.shape[1]]
        return model.generate(ids, attention_mask=held, past_key_values=cache, **greedy, **options)

    expected = talk(make("llama", "sdpa", torch.float32).eval(), transformers.DynamicCache())
    model = make("llama", "ringattn", torch.float32).eval()
    with RingCache(model, Ring(), max_tokens=64, page_size=4) as cache:
        assert talk(model, cache, **ways[how]).tolist() == expected.tolist()


class Breaks(transformers.LogitsProcessor):
    """Fails at the nth call."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        return scores / (1 if self.left else 1 // 0)


def settings(model: Any) -> list[dict[str, Any]]:
    return [dict(vars(model.config)), dict(vars(model.generation_config))]


def broken(calls: list[tuple[int, dict[str, Any]]], given: dict[str, Any]) -> list[list[int]]:
    """Answers of a model after each of several generations that end in an error, or do not."""
    model = make("llama", "ringattn", torch.float32).eval()
    before, answers = settings(model), []
    with RingCache(model, Ring(), max_tokens=64, batch=3, page_size=4) as cache:
        for n, options in calls:
            with pytest.raises(ZeroDivisionError) if n else contextlib.nullcontext():
                breaks = [Breaks(n)] if n else []
                model.generate(**FEW, **options, past_key_values=cache, logits_processor=breaks)
            assert settings(model) == before
            cache.reset()
            answers.append(model.generate(**given, past_key_values=cache)[0].tolist())
            cache.reset()
    return answers


def test_a_model_answers_as_before_after_a_generation_however_it_ended(pool: Pools) -> None:
    given = {**FEW, "do_sample": False, "max_new_tokens": 5}
    calls = [(3, BEAMS), (3, {**GREEDY, "prompt_lookup_num_tokens": 3}), (0, GREEDY)]
    expected = make("llama", "sdpa", torch.float32).eval().generate(**given)[0].tolist()
    for answers in pool(2).run(broken, calls, given):
        assert answers == [expected] * len(calls)


def refused_generation(rank_of_mistakes: int) -> dict[str, str]:
    """Errors for drafts by early exit, an assistant that would share its rows, and a prompt without new tokens."""
    found = {}
    for name in ("early", "again", *(["assistant"] if Ring().world_size > 1 else [])):
        model = make("llama", "ringattn", torch.float32).eval()
        wrong = rank_of_mistakes in (-1, Ring().rank)
        with torch.no_grad(), RingCache(model, Ring(), max_tokens=64) as cache:
            if name == "again":
                model(tokens(20), past_key_values=cache)
            # whatever is computed from here on is too much
            model.get_input_embeddings().register_forward_pre_hook(lambda *_: 1 / 0)
            mistakes: dict[str, dict[str, Any]] = {
                "early": {"assistant_early_exit": 1},
                "assistant": {"assistant_model": make("llama", "ringattn", torch.float32).eval()},
            }
            mistake = mistakes.get(name, {}) if wrong else {}
            length = 20 if wrong or name != "again" else 21
            try:
                model.generate(tokens(length), **GREEDY, **mistake, past_key_values=cache)
            except (ValueError, NotImplementedError) as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


UNUSABLE = {
    "early": "NotImplementedError: assistant_early_exit must be left out with a RingCache, got 1; ",
    "assistant": "ValueError: assistant_model must not attend with ringattn among 2 ranks, which each run it on whole sequences, ",
    "again": "ValueError: sequences must be longer than the 20 tokens that the cache has, got 20; ",
}


def test_unsupported_generation_is_refused_on_every_rank_before_anything_is_computed(pool: Pools) -> None:
    found = refused_generation(-1)
    for name, said in found.items():
        assert said.startswith(UNUSABLE[name]), name
    for rank, found in enumerate(pool(2).run(refused_generation, 1)):
        for name, told in UNUSABLE.items():
            assert found[name].startswith(told if rank == 1 else f"ValueError: ring rank 1 refused: {told}"), name


def stopped_by_the_clock(criteria: list[Any]) -> str:
    model = make("llama", "ringattn", torch.float32).eval()
    given = {"stopping_criteria": criteria} if criteria else {"max_time": 60.0}
    with RingCache(model, Ring(), max_tokens=64) as cache:
        try:
            return str(model.generate(tokens(20), **GREEDY, **given, past_key_values=cache).shape[1])
        except NotImplementedError as error:
            return str(error)


@pytest.mark.parametrize("criteria", [[], [transformers.MaxTimeCriteria(1e6)]], ids=["option", "criterion"])
def test_ranks_do_not_stop_by_the_clock(pool: Pools, criteria: list[Any]) -> None:
    """One of them would stop a token before the others; alone it may."""
    assert stopped_by_the_clock(criteria) == "32"
    for told in pool(2).run(stopped_by_the_clock, criteria):
        assert told.startswith("max_time must be left out among 2 ranks")


def refused_modes() -> list[str]:
    """Errors for a model in training, and for guidance."""
    model = make("llama", "ringattn", torch.float32).eval()
    found = []
    for training, options in ((True, {}), (False, {"guidance_scale": 1.5})):
        with RingCache(model.train(training), Ring(), max_tokens=64) as cache:
            try:
                model.generate(tokens(20), **GREEDY, **options, past_key_values=cache)
            except NotImplementedError as error:
                found.append(str(error))
                assert cache.get_seq_length() == 0, "nothing was computed"
    return found


def test_generation_refuses_training_among_ranks_and_guidance(pool: Pools) -> None:
    """Training drops other rows on each rank, and logits would differ between ranks."""
    guidance = "guidance_scale must be left out with a RingCache, got 1.5"
    alone = refused_modes()
    assert [told[: len(guidance)] for told in alone] == [guidance]
    for training, other in pool(2).run(refused_modes):
        assert training.startswith("a model must be in eval mode among 2 ranks, got LlamaForCausalLM in training")
        assert other.startswith(guidance)


def embedded() -> tuple[Tensor, Tensor]:
    model = make("llama", "ringattn", torch.float32).eval()
    inputs = {"inputs_embeds": model.get_input_embeddings()(tokens(25)), "attention_mask": torch.ones(1, 25).long()}
    with torch.no_grad(), RingCache(model, Ring(), max_tokens=64, page_size=4) as cache:
        return model.generate(**inputs, past_key_values=cache, **GREEDY), cache.kv.k.abs().amax((0, 2, 3, 4))  # pyright: ignore[reportOptionalMemberAccess]


def composite(attention: str, told: dict[str, Any]) -> Tensor:
    """Answers of a model of images and text to text alone."""
    register()
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = transformers.AutoConfig.for_model(
        "llava", text_config=CONFIGS["llama"], vision_config=vision, image_token_id=60
    )
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    return model.generate(tokens(20).clamp(max=59), **GREEDY, **{name: call(model) for name, call in told.items()})


def composite_on_ranks() -> Tensor:
    with contextlib.ExitStack() as stack:
        enter = partial(RingCache, ring=Ring(), max_tokens=64, page_size=4)
        return composite("ringattn", {"past_key_values": lambda model: stack.enter_context(enter(model))})


def test_a_model_of_images_generates_from_text(pool: Pools) -> None:
    expected = composite("sdpa", {})
    for found in (composite_on_ranks(), *pool(2).run(composite_on_ranks)):
        assert torch.equal(found, expected)


def test_embeddings_serve_as_a_prompt_and_every_rank_stores_a_part(pool: Pools) -> None:
    model = make("llama", "sdpa", torch.float32).eval()
    expected = model.generate(input_ids=tokens(25), attention_mask=torch.ones(1, 25).long(), **GREEDY)[:, 25:]
    for found, filled in pool(2).run(embedded):
        assert found.tolist() == expected.tolist()
        assert 0 < int((filled > 0).sum()) <= 5, "36 tokens in pages of 4, about half of them on each rank"


class _Refusing:
    """Errors of calls of a model with a RingCache, by name."""

    def __init__(self, **sizes: Any) -> None:
        self.model = make("llama", "ringattn", torch.float32).eval()
        self.cache = RingCache(self.model, Ring(), **{"max_tokens": 40, "batch": 2, "page_size": 4, **sizes})
        self.found: dict[str, str] = {}

    def note(self, name: str, call: Callable[[], Any]) -> None:
        self.cache.reset()
        self.told(name, call)

    def told(self, name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except (ValueError, RuntimeError, NotImplementedError, CacheFull) as error:
            self.found[name] = f"{type(error).__name__}: {error}"
        else:
            self.found[name] = "nothing"


def refused(rank_of_mistakes: int) -> dict[str, str]:
    """Errors of a rank for mistakes of every rank, or of one of them."""
    here = _Refusing()
    model, cache, mine = here.model, here.cache, rank_of_mistakes in (-1, cache_rank())
    ids = tokens(20)
    holes = torch.ones(1, 20)
    holes[0, 5:8] = 0

    def call(mistake: dict[str, Any], **right: Any) -> Callable[[], Any]:
        given = {"input_ids": ids, "past_key_values": cache, **right}
        return lambda: model(**{**given, **(mistake if mine else {})})

    here.note("entered", lambda: model(ids, past_key_values=cache))
    with torch.no_grad(), cache:
        here.note("use_cache", call({"use_cache": False}))
        here.note("hidden", call({"output_hidden_states": True}))
        here.note("labels", call({"labels": ids}))
        here.note("types", call({"token_type_ids": torch.zeros_like(ids)}))
        here.note("tuple", call({"return_dict": False}))
        here.note("none", call({"input_ids": None}))
        here.note("positions", call({"position_ids": torch.arange(20).expand(3, 1, 20)}))
        here.note("long", call({"input_ids": tokens(41)}))
        here.note("holes", call({"attention_mask": holes}))
        here.note("right", call({"attention_mask": (torch.arange(20) < 15)[None]}))
        here.note("short", call({"attention_mask": torch.ones(1, 19)}))
        call({})()
        here.told("rows", call({"input_ids": tokens(3, rows=2)}))
        here.told("padding", call({"attention_mask": (torch.arange(40) > 2)[None]}))
        here.note("full", call({"input_ids": tokens(20, rows=3)}))
        here.note("other tokens", call({"input_ids": tokens(20, seed=1)}))
        cache.reset()
        here.found["after"] = str(model(ids, past_key_values=cache).logits.shape[1])
    here.told("left", lambda: cache.get_seq_length())
    return here.found


def caches_that_differ(wrong: dict[str, Any]) -> tuple[str, int]:
    """Errors of a rank where rank 1 makes another cache, and tokens of a generation with the same one."""
    model, ring = make("llama", "ringattn", torch.float32).eval(), Ring(timeout=timedelta(seconds=20))
    same: dict[str, Any] = {"max_tokens": 64, "batch": 1, "page_size": 16}
    said = ""
    try:
        RingCache(model, ring, **same | (wrong if ring.rank else {}))
    except ValueError as error:
        said = str(error)
    with RingCache(model, ring, **same) as cache:
        return said, model.generate(tokens(20), **GREEDY, past_key_values=cache).shape[1]


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"max_tokens": 63}, "max_tokens=63, batch=1, CUDA graphs: False on ring rank 1"),
        ({"max_tokens": 32, "batch": 2}, "max_tokens=32, batch=2, CUDA graphs: False on ring rank 1"),
        ({"graphs": Reruns()}, "max_tokens=64, batch=1, CUDA graphs: True on ring rank 1"),
        ({"graphs": True}, "ring rank 1 refused: ValueError: graphs must be False or left out"),
    ],
)
def test_caches_with_different_options_on_ranks_are_refused(pool: Pools, wrong: dict[str, Any], expected: str) -> None:
    (first, length), (second, _) = pool(2).run(caches_that_differ, wrong)
    assert expected in first
    assert second == first or second in first
    assert length == 32


def cache_rank() -> int:
    return Ring().rank


TOLD = {
    "entered": "RuntimeError: a RingCache must be entered before its model is called",
    "use_cache": "NotImplementedError: use_cache must be True in a call with a RingCache",
    "hidden": "NotImplementedError: output_hidden_states must be False",
    "labels": "NotImplementedError: labels must be left out",
    "types": "NotImplementedError: token_type_ids must be left out",
    "tuple": "NotImplementedError: return_dict must be True",
    "none": "ValueError: the model must be called with input_ids or inputs_embeds",
    "positions": "NotImplementedError: position_ids must be 2-dimensional, sequences x new tokens, got shape (3, 1, 20)",
    "long": "ValueError: a sequence must stay within max_tokens=40, got 0 tokens and 41 more",
    "holes": "NotImplementedError: attention_mask must have padding on the left only, got other padding in 1 of 1",
    "right": "NotImplementedError: attention_mask must have padding on the left only, got other padding in 1 of 1",
    "short": "ValueError: attention_mask must be of 1 sequences and the 20 tokens",
    "full": "ValueError: the batch must be of at most batch=2 sequences, prompts times beams or returned sequences, got 3",
    "rows": "ValueError: the batch must be of the 1 sequences that the cache has, got 2",
    "padding": "ValueError: attention_mask must begin with the padding of the earlier calls, [0]",
}


def test_calls_that_a_ring_cannot_share_are_refused() -> None:
    found = refused(-1)
    for name, told in TOLD.items():
        assert found[name].startswith(told), name
    assert found["after"] == "20"
    assert found["left"].startswith("RuntimeError: a RingCache must be used inside of its `with`")


def test_errors_of_one_rank_are_errors_on_all(pool: Pools) -> None:
    for rank, found in enumerate(pool(2).run(refused, 1)):
        for name, told in TOLD.items():
            if name != "entered":
                others = f"ValueError: ring rank 1 refused: {told}"
                assert found[name].startswith(told if rank == 1 else others), name
        assert "what the model is called with must be the same on all ranks" in found["other tokens"]
        assert found["after"] == "20"


class Failing(transformers.LogitsProcessor):
    """Fails at its first token, on one rank or, by -1, on all."""

    def __init__(self, rank: int) -> None:
        self.here = rank in (-1, Ring().rank)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.here:
            raise ZeroDivisionError("of a processor")
        return scores

    def put(self, value: Tensor) -> None:
        if self.here:
            raise ZeroDivisionError("of a streamer")

    def end(self) -> None:
        """Nothing."""


def failing_between_calls(rank: int) -> list[str]:
    model = make("llama", "ringattn", torch.float32).eval()
    failing, found = Failing(rank), []
    with RingCache(model, Ring(), max_tokens=64) as cache:
        for options in ({"logits_processor": [failing]}, {"streamer": failing}, {}):
            given = {**GREEDY, **options, "past_key_values": cache}
            try:
                found.append(str(model.generate(tokens(20), **given).shape[1]))
            except (ValueError, ZeroDivisionError) as error:
                found.append(f"{type(error).__name__}: {error}")
            cache.reset()
    return found


def test_errors_between_calls_are_raised_on_the_other_ranks(pool: Pools) -> None:
    """They waited for the timeout."""
    for rank, (*failed, after) in enumerate(pool(2).run(failing_between_calls, 1)):
        for told, what in zip(failed, ("processor", "streamer"), strict=True):
            said = f"ZeroDivisionError: of a {what}"
            assert told.startswith(said if rank == 1 else f"ValueError: ring rank 1 refused: {said}"), told
        assert after == "32"
    for found in pool(2).run(failing_between_calls, -1):
        assert found == ["ZeroDivisionError: of a processor", "ZeroDivisionError: of a streamer", "32"]


class Counted:
    """Counts how often ranks compare and gather, exchanges aside."""

    def __init__(self, ring: Ring) -> None:
        self.count = 0
        agreement: Any = ring._consensus
        for owner, name in ((agreement, "compare"), (ring, "gather"), (ring, "sum")):
            setattr(owner, name, self.counting(getattr(owner, name)))

    def counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return call(*args, **kwargs)

        return counted

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


def messages() -> list[int]:
    """Number of messages for generating 4, and 38 tokens."""
    ring = Ring()
    model = make("llama", "ringattn", torch.float32).eval()
    counted, found = Counted(ring), []
    with RingCache(model, ring, max_tokens=120, batch=4, page_size=4) as cache:
        for new in (4, 4, 38):
            model.generate(**prompts(rows=2), **{**SAMPLED, "max_new_tokens": new}, past_key_values=cache)
            cache.reset()
            found.append(counted.take())
    assert counted.take() == 0, "nothing is left to compare"
    return found[1:]


def test_generation_costs_one_message_in_seventeen_tokens(pool: Pools) -> None:
    for few, more in pool(2).run(messages):
        assert more - few == 34 // 17
        # arguments, generators, prompt, its step, its logits, the first step of decoding, the result
        assert few == 7


class Strays(transformers.LogitsProcessor):
    """From some length on, one rank takes other tokens than the rest."""

    def __init__(self, strays: bool, length: int) -> None:
        self.strays, self.length = strays, length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(1, -1) if self.strays and input_ids.shape[1] == self.length else scores


def stray(cache: RingCache, model: Any, new: int, how: str) -> None:
    """Generates, or calls, on ring rank 1 otherwise than on the others."""
    one = cache_rank() == 1
    options = {**GREEDY, "max_new_tokens": new + (one and how == "options"), "past_key_values": cache}
    if how == "calls":
        model(tokens(20), past_key_values=cache)
        for number in range(new):
            model(tokens(1, seed=number + 100 * (one and number == 2)), past_key_values=cache)
    else:
        model.generate(**prompts(length=20), **options, logits_processor=[Strays(one and how == "generate", 23)])


def strayed(new: int, how: str) -> tuple[str, int]:
    """Error of a rank when another one has sampled another token, and the number of tokens by then."""
    model = make("llama", "ringattn", torch.float32).eval()
    cache, length = RingCache(model, Ring(), max_tokens=120, page_size=4), 0
    try:
        with torch.no_grad(), cache:
            try:
                stray(cache, model, new, how)
            finally:
                length = cache.get_seq_length()
    except ValueError as error:
        return str(error), length
    return "nothing", length


@pytest.mark.parametrize("how", ["generate", "calls"])
@pytest.mark.parametrize("new", [8, 40])
def test_a_rank_that_chooses_otherwise_is_an_error_on_all_ranks_by_the_end(pool: Pools, how: str, new: int) -> None:
    """Within 17 tokens, or when generate, or the cache, comes to an end."""
    found = pool(2).run(strayed, new, how)
    assert found[0] == found[1]
    said, length = found[0]
    assert "must be the same on all ranks of a ring, got " in said
    assert "tokens and options of " in said
    assert length <= 20 + 3 + 17
    if new == 8:
        end = (
            "what generate returns"
            if how == "generate"
            else "what the model was called with before the RingCache was left"
        )
        assert said.startswith(end)


def test_different_arguments_of_generate_raise_before_anything_is_computed(pool: Pools) -> None:
    for said, length in pool(2).run(strayed, 8, "options"):
        assert said.startswith("what generate is called with must be the same on all ranks of a ring, got ")
        assert "max_new_tokens: 8" in said
        assert "max_new_tokens: 9" in said
        assert length == 0


def test_the_model_gets_its_forward_back() -> None:
    model = make("llama", "ringattn", torch.float32).eval()
    own, own_generate = model.forward, model.generate
    with RingCache(model, Ring(), max_tokens=20) as outer:
        with RingCache(model, Ring(), max_tokens=30) as inner, torch.no_grad():
            model(tokens(9), past_key_values=outer)
            model(tokens(7), past_key_values=inner)
            assert (outer.get_seq_length(), inner.get_seq_length()) == (9, 7)
            assert model(tokens(7), use_cache=False).logits.shape[1] == 7
        assert model.forward != own
    assert (model.forward, model.generate) == (own, own_generate)
    with pytest.raises(RuntimeError, match="must be entered once"):
        inner.__enter__()
    first, second = (RingCache(model, Ring(), max_tokens=20) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with torch.no_grad():
        model(tokens(9), past_key_values=second)
    second.__exit__(None, None, None)
    assert (model.forward, model.generate) == (own, own_generate)
    assert first.kv is second.kv is None


def test_an_error_inside_is_raised_whatever_became_of_the_model() -> None:
    model = make("llama", "ringattn", torch.float32).eval()
    cache = RingCache(model, Ring(), max_tokens=20)

    def fail() -> None:
        with cache:
            del model.generate
            model.forward = lambda *_: None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert cache.kv is None


def wrapped(how: str) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of a wrapped model with a RingCache of it, and of the model alone."""
    peft = pytest.importorskip("peft")
    model: Any = make("llama", "ringattn", torch.float32).eval()
    plain = make("llama", "sdpa", torch.float32).eval()
    if how != "compile":
        torch.manual_seed(0)
        options = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "r": 2}
        model = peft.get_peft_model(model, peft.LoraConfig(**options)).eval()
        torch.manual_seed(0)
        plain = peft.get_peft_model(plain, peft.LoraConfig(**options)).eval()
    if how != "peft":
        model = torch.compile(model, backend="eager")
    expected = plain.generate(**FEW, **GREEDY)
    with torch.no_grad(), RingCache(model, Ring(), max_tokens=64, page_size=4) as cache:
        found = model.generate(**FEW, **GREEDY, past_key_values=cache)
        cache.reset()
        first = model(**FEW, past_key_values=cache).logits[:, -1].argmax(-1)
        assert cache.get_seq_length() == 21
        assert first.tolist() == expected[:, 21].tolist()
    assert "forward" not in vars(getattr(model, "_orig_mod", model))
    return found.tolist(), expected.tolist()


@pytest.mark.parametrize("how", ["peft", "compile", "both"])
def test_a_cache_serves_the_model_inside_a_wrapper(pool: Pools, how: str) -> None:
    for found, expected in (wrapped(how), *pool(2).run(wrapped, how)):
        assert found == expected


def test_other_wrappers_are_refused_by_type() -> None:
    peft = pytest.importorskip("peft")

    def adapted(config: Any) -> Any:
        return peft.get_peft_model(make("llama", "ringattn", torch.float32), config)

    tokens_of_its_own = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    from_a_token_on = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[3])
    cases: Any = (
        (adapted(tokens_of_its_own), r"got PeftModelForCausalLM \['PromptTuningConfig'\]; pass"),
        (adapted(from_a_token_on), r"got PeftModelForCausalLM \['LoraConfig'\]; pass"),
        (torch.nn.Sequential(make("llama", "ringattn")), "got Sequential"),
    )
    for model, named in cases:
        with pytest.raises(NotImplementedError, match=named):
            RingCache(model, Ring(), max_tokens=20)


def test_a_cache_passed_to_another_model_is_refused_as_such() -> None:
    """The message asked to enter a cache that was entered."""
    model, other = (make("llama", "ringattn", torch.float32).eval() for _ in range(2))
    with (
        torch.no_grad(),
        RingCache(model, Ring(), max_tokens=20) as cache,
        pytest.raises((RuntimeError, NotImplementedError), match="got one passed to another model"),
    ):
        other(tokens(9), past_key_values=cache)


def test_a_model_is_copied_before_it_is_wrapped_or_not_at_all() -> None:
    model = make("llama", "ringattn", torch.float32).eval()
    with RingCache(model, Ring(), max_tokens=20):
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(RuntimeError, match="must be copied or saved whole outside of"):
                copied(model)
        assert model.state_dict()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
        assert not twin(tokens(9), use_cache=False).logits.any()


def test_a_failed_call_leaves_the_cache_unchanged() -> None:
    model = make("llama", "ringattn", torch.float32).eval()
    with torch.no_grad(), RingCache(model, Ring(), max_tokens=40) as cache:
        model(tokens(20), past_key_values=cache)
        expected = model(tokens(3, seed=1), past_key_values=cache).logits
        cache.crop(-3)
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens(19, seed=2), past_key_values=cache)
        hook.remove()
        assert cache.get_seq_length() == 20
        assert torch.equal(model(tokens(3, seed=1), past_key_values=cache).logits, expected)
    with torch.no_grad(), RingCache(model, Ring(), max_tokens=40, batch=2) as cache:
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens(19, seed=2), past_key_values=cache)
        hook.remove()
        assert cache.batch_size == -1, "other sequences may come next"
        assert model(tokens(20, rows=2), past_key_values=cache).logits.shape[0] == 2


@pytest.mark.parametrize("keyword", ["cache", "past_key_values"])
def test_a_cache_is_passed_by_the_keyword_of_any_release(keyword: str) -> None:
    model = make("llama", "ringattn", torch.float32).eval()
    expected = make("llama", "sdpa", torch.float32).eval().generate(**FEW, **GREEDY)
    with torch.no_grad(), RingCache(model, Ring(), max_tokens=40) as cache, warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        found = model.generate(**FEW, **GREEDY, **{keyword: cache}, return_dict_in_generate=True)
        assert found.sequences.tolist() == expected.tolist()
        assert found.past_key_values is cache
        assert model(tokens(1), **{keyword: cache}).past_key_values is cache
        assert cache.get_seq_length() == expected.shape[1]
        both: Any = {"cache": cache, "past_key_values": transformers.DynamicCache()}
        for call in (model, partial(model.generate, **GREEDY)):
            with pytest.raises(ValueError, match="must be passed once, got cache and past_key_values"):
                call(tokens(50), **both)


def test_a_call_without_the_cache_is_refused_without_a_guess_why() -> None:
    """The message spoke of Phi 3 whatever had left the cache out."""
    model = make("llama", "ringattn", torch.float32).eval()
    prepare = model.prepare_inputs_for_generation

    def without(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: x for name, x in prepare(*args, **kwargs).items() if not isinstance(x, RingCache)}

    model.prepare_inputs_for_generation = without
    with RingCache(model, Ring(), max_tokens=40) as cache:
        with pytest.raises(NotImplementedError, match="got a call of LlamaForCausalLM without it, after 0") as caught:
            model.generate(tokens(20), **GREEDY, past_key_values=cache)
        assert "Phi" not in str(caught.value)


def test_other_caches_are_refused() -> None:
    model = make("llama", "ringattn", torch.float32).eval()
    with pytest.raises(NotImplementedError, match="generate with a RingCache"):
        model.generate(tokens(20), **GREEDY)
    with pytest.raises(NotImplementedError, match="got 20 and 31: decoding with a cache of transformers"):
        model.generate(tokens(20), **GREEDY, cache_implementation="static")
    with RingCache(model, Ring(), max_tokens=40) as cache:
        with pytest.raises(ValueError, match="cache_implementation"):
            model.generate(tokens(20), **GREEDY, past_key_values=cache, cache_implementation="static")
        with pytest.raises(NotImplementedError, match="use_cache must be True"):
            model.generate(tokens(20), **GREEDY, past_key_values=cache, use_cache=False)
        with pytest.raises(NotImplementedError, match="call of offload"):
            cache.offload(0)
    model = make("llama", "sdpa", torch.float32).eval()
    with (
        RingCache(model, Ring(), max_tokens=40) as cache,
        pytest.raises(RuntimeError, match="must attend with ringattn"),
    ):
        model.generate(tokens(20), **GREEDY, past_key_values=cache)


def crossed() -> list[str]:
    """Errors of models that are called with each other's caches."""
    one, other = (make(kind, "ringattn", torch.float32).eval() for kind in ("llama", "qwen3"))
    found = []
    with RingCache(one, Ring(), max_tokens=40) as cache, RingCache(other, Ring(), max_tokens=40), torch.no_grad():
        for call in (partial(other.generate, **GREEDY), other):
            try:
                call(tokens(20), past_key_values=cache)
            except ValueError as error:
                found.append(str(error))
        found.append(str(cache.get_seq_length()))
    return found


def test_a_cache_of_another_model_is_refused(pool: Pools) -> None:
    """Its decoding would call the model that it was made of."""
    told = "a RingCache must be of the model that is called, a Qwen3ForCausalLM, got one of another Llama"
    for found in [crossed(), *pool(2).run(crossed)]:
        assert [said.startswith(told) for said in found] == [True, True, False]
        assert found[2] == "0"


@pytest.mark.parametrize("given", [{"max_tokens": 0}, {"max_tokens": 4, "batch": 0}, {"max_tokens": 4, "page_size": 0}])
def test_sizes_of_a_cache_are_at_least_one(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        RingCache(make("llama", "ringattn"), Ring(), **given)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "given", [{"ring": None}, {"max_tokens": 1.5}, {"batch": True}, {"page_size": "4"}, {"graphs": "no"}]
)
def test_arguments_of_a_cache_are_of_their_types(given: dict[str, Any]) -> None:
    """Regression: batch=True was a batch of one, and graphs="no" a capturer."""
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(given))} must be .* got "):
        RingCache(make("llama", "ringattn"), **{"ring": Ring(), "max_tokens": 4, **given})


def differential() -> list[list[int]] | str:
    """Answers of a model whose layers attend twice, with other values each time."""
    register()
    shape = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 61,
    }
    config = transformers.AutoConfig.for_model("diffllama", num_key_value_heads=2, head_dim=8, **shape)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ringattn").eval()
    with RingCache(model, Ring(), max_tokens=64, page_size=4) as cache:
        try:
            return model.generate(tokens(20), max_new_tokens=4, past_key_values=cache).tolist()
        except NotImplementedError as error:
            return str(error)


@pytest.mark.skipif(not transformers.__version__.startswith("5."), reason="4.x computes this attention itself")
def test_layers_that_attend_twice_with_other_values_are_refused(pool: Pools) -> None:
    """Both calls were kept in one place, and tokens that followed saw the second values only."""
    for told in (differential(), *pool(2).run(differential)):
        assert str(told).startswith("a layer with a cache must attend once in a call, got DiffLlamaAttention")


def decoder_alone(kind: str) -> str:
    """Errors of the decoder of a model that embeds positions and counts them in the cache."""
    register()
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_ffn_dim": 16, "vocab_size": 61}
    sizes |= {"decoder_attention_heads": 2, "encoder_attention_heads": 2}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ringattn").eval()
    with RingCache(model, Ring(), max_tokens=64, page_size=4) as cache:
        try:
            return str(model.generate(tokens(20), max_new_tokens=4, past_key_values=cache).tolist())
        except NotImplementedError as error:
            return str(error)


@pytest.mark.skipif(not transformers.__version__.startswith("5."), reason="those of 4.x do not swallow the keyword")
@pytest.mark.parametrize("kind", ["bart", "blenderbot"])
def test_models_that_number_the_rows_of_a_call_themselves_are_refused(kind: str, pool: Pools) -> None:
    """They began to count anew in every call, and on every rank."""
    for told in (decoder_alone(kind), *pool(2).run(decoder_alone, kind)):
        assert told.startswith(
            "a model must take position_ids where ranks share a sequence or a cache stores its keys, got one with "
        )


@pytest.mark.skipif("gemma4_text" not in transformers.CONFIG_MAPPING, reason="this release has no layers that differ")
def test_layers_whose_keys_differ_in_size_are_refused() -> None:
    sizes = {**CONFIGS["gemma3"], "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8}
    del sizes["model_type"]
    register()
    models = []
    for width in (8, 16):
        config = transformers.AutoConfig.for_model("gemma4_text", **sizes, global_head_dim=width)
        models.append(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ringattn").eval())
    RingCache(models[0], Ring(), max_tokens=40)
    with pytest.raises(
        NotImplementedError, match=r"as many key heads, of the same width, .* \[\(2, 8, 8\), \(2, 16, 16\)\]"
    ):
        RingCache(models[1], Ring(), max_tokens=40)


def dropping(length: int) -> str:
    """Answers of a model that drops its cache where a sequence grows beyond 24 tokens."""
    register()
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    lengths: dict[str, Any] = {"max_position_embeddings": 24, "original_max_position_embeddings": 24}
    if not transformers.__version__.startswith("5."):  # where others keep it
        lengths["rope_scaling"] = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    config = transformers.AutoConfig.for_model("phi3", **shape, **lengths, vocab_size=61, pad_token_id=0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ringattn").eval()
    with RingCache(model, Ring(), max_tokens=64, page_size=4) as cache:
        try:
            given = {"do_sample": False, "eos_token_id": None, "past_key_values": cache}
            return str(model.generate(tokens(length), max_new_tokens=6, **given).shape)
        except NotImplementedError as error:
            return str(error)


def test_models_that_drop_the_cache_are_refused_by_name(pool: Pools) -> None:
    """Ranks were told that they call a model without a sharding."""
    for length in (20, 30):
        for told in (dropping(length), *pool(2).run(dropping, length)):
            assert told.startswith("generation must pass the RingCache to every call of the model, got a call of Phi3")
            assert f"after {24 if length == 20 else 0} tokens" in told
    assert dropping(18) == "torch.Size([1, 24])"


def with_weights_away() -> tuple[Tensor, Tensor]:
    """Logits of a call without positions, and tokens, of a model whose first weights are not where it computes."""
    ring, ids = Ring(), tokens(11)
    model = make("llama", "ringattn", torch.float32).eval()
    for module in (model, model.model):
        module.register_parameter("away", torch.nn.Parameter(torch.empty(0, device="meta")))
    sharding = ring.sharding(ids.shape[1])
    logits = sharding.unshard(model(ids, sharding=sharding, use_cache=False).logits)
    with RingCache(model, ring, max_tokens=64, device=ids.device) as cache:
        return logits.detach(), model.generate(**prompts(), **GREEDY, past_key_values=cache)


def test_models_compute_where_their_inputs_are(pool: Pools) -> None:
    """With FSDP's CPU offload weights are in host memory before a call."""
    expected = make("llama", "sdpa", torch.float32).eval()(tokens(11)).logits
    for logits, generated in pool(2).run(with_weights_away):
        torch.testing.assert_close(logits, expected)
        assert torch.equal(generated, alone("llama", [{**prompts(), **GREEDY}])[0])
