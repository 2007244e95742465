"""Attention over a cache equals attention over whole sequences, for all histories, chunks and other requests."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import sys
import weakref
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn import Ring, attention_reference, masks, ring_attention
from ringattn.inference import ForwardBatch, PagedKVCache, attend
from ringattn.inference.paged_prefill import is_paged_faster
from ringattn.launch.check.inference import (
    CHUNKS,
    CROWD,
    OPTIONS,
    PACKED,
    PADDED,
    Answer,
    History,
    Op,
    Sizes,
    differences,
    extend,
    gather_answers,
    play,
    reference_answers,
)
from tests.support.budget import assert_within_budget
from tests.support.pool import Pools
from tests.support.request_isolation import BAD, SPOILT, attend_beside

WORLDS = [1, 2, 4]
LATENT = Sizes(kv_heads=4, head_dim=12, v_head_dim=10, latent=(16, 4))
SIZES = pytest.mark.parametrize("sizes", [Sizes(), LATENT], ids=["heads", "latents"])


def play_on_ring(history: History) -> list[Answer]:
    return play(history, Ring(), "cpu")


def judge(history: History, by_rank: list[list[Answer]]) -> None:
    """Holds what ranks answered to a history against its definition."""
    low = min(history.sizes.dtype, torch.float32, key=lambda dtype: dtype.itemsize)
    exact, rounded = reference_answers(history, torch.float64), reference_answers(history, low)
    for index, answers in enumerate(zip(*by_rank, strict=True)):
        assert answers[0].mode == "prefill" or not any(differences(answers, answers[0].layers)), (
            f"step {index} of {history}"
        )
        for layer, o in enumerate(gather_answers(answers)):
            what = f"o of layer {layer} of step {index} ({answers[0].mode}, {answers[0].moved}) of {history}"
            assert_within_budget(o, exact[index][layer], rounded[index][layer], what, history.sizes.dtype)


@pytest.mark.rings
@SIZES
@pytest.mark.parametrize("comm_mode", ["keys", "queries"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_option_is_right_for_every_history(pool: Pools, world_size: int, comm_mode: str, sizes: Sizes) -> None:
    # every option meets every history, either movement and every number of ranks
    turn = comm_mode == "queries"
    for (row, named), (column, ops) in itertools.product(
        enumerate(OPTIONS.values()), enumerate((CHUNKS, CROWD, PACKED, PADDED))
    ):
        if (row // 3 + column) % 2 == turn and (row + column) % len(WORLDS) == WORLDS.index(world_size):
            history = History(sizes, ops, comm_mode=comm_mode, **named)
            judge(history, pool(world_size).run(play_on_ring, history))


@pytest.mark.rings
@SIZES
@pytest.mark.parametrize("world_size", WORLDS)
def test_attention_over_pages_in_place_equals_attention_over_copies(pool: Pools, world_size: int, sizes: Sizes) -> None:
    # a third of the options on each number of ranks
    for named in (*OPTIONS.values(),)[WORLDS.index(world_size) :: len(WORLDS)]:
        for ops in (CHUNKS, CROWD, PACKED, PADDED):
            history = History(dataclasses.replace(sizes, layers=1), ops, kv_access="pages", **named)
            judge(history, pool(world_size).run(play_on_ring, history))


@SIZES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_is_right(pool: Pools, dtype: torch.dtype, sizes: Sizes) -> None:
    for comm_mode, ops in (("keys", CHUNKS), ("queries", CROWD), ("keys", PACKED), ("queries", PADDED)):
        sizes = dataclasses.replace(sizes, dtype=dtype)
        history = History(sizes, ops, comm_mode=comm_mode, features=("sinks", "alibi_slopes"))
        judge(history, pool(2).run(play_on_ring, history))


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(heads=3, kv_heads=3),
        Sizes(heads=8, kv_heads=1),
        Sizes(head_dim=24, v_head_dim=16),
        Sizes(page_size=1),
        Sizes(page_size=64, pages=9),
        dataclasses.replace(LATENT, kv_heads=2),
        dataclasses.replace(LATENT, latent=(20, 2), page_size=64, pages=9),
    ],
    ids=["mha", "mqa", "dims", "page 1", "page 64", "latents of groups", "latents, page 64"],
)
def test_every_shape_is_right(pool: Pools, sizes: Sizes) -> None:
    if sizes.page_size == 1:
        sizes = dataclasses.replace(sizes, pages=400)
    for comm_mode, ops in (("keys", CROWD), ("queries", CROWD), ("auto", PACKED)):
        history = History(sizes, ops, comm_mode=comm_mode)
        judge(history, pool(2).run(play_on_ring, history))


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Any history that the allocator allows."""
    lengths: dict[int, tuple[int, int]] = {}  # tokens and reservation
    ops: list[Op] = []
    for turn in range(draw(st.integers(2, 9))):
        kind = (
            draw(st.sampled_from(["add_request", "extend", "extend", "extend", "fork", "truncate", "free"]))
            if lengths
            else "add_request"
        )
        name = draw(st.sampled_from(sorted(lengths))) if lengths else 0
        if kind == "add_request" and len(lengths) < 4:
            lengths[turn] = (0, 120)
            ops.append(("add_request", turn, 120, 0))
        elif kind == "fork" and len(lengths) < 4:
            length = draw(st.integers(0, lengths[name][0]))
            lengths[turn] = (length, 120)
            ops.append(("fork", turn, name, length, 120))
        elif kind == "truncate":
            length = draw(st.integers(0, lengths[name][0]))
            lengths[name] = (length, lengths[name][1])
            ops.append(("truncate", name, length))
        elif kind == "free" and len(lengths) > 1:
            del lengths[name]
            ops.append(("free", name))
        elif kind == "extend":
            names = draw(st.lists(st.sampled_from(sorted(lengths)), min_size=1, unique=True))
            if draw(st.booleans()):
                counts, mode = (draw(st.integers(1, 16)),) * len(names), "decode"
            else:
                counts, mode = (
                    tuple(draw(st.sampled_from([1, 2, 5, 17, 33, 50])) for _ in names),
                    draw(st.sampled_from(["prefill", "packed", "rows"])),
                )
            kept = [(name, count) for name, count in zip(names, counts, strict=True) if lengths[name][0] + count <= 120]
            if kept:
                for name, count in kept:
                    lengths[name] = (lengths[name][0] + count, 120)
                names, counts = zip(*kept, strict=True)
                ops.append(extend(names, counts, mode))
    page_size = draw(st.sampled_from([1, 3, 4, 16]))
    sizes = dataclasses.replace(
        draw(st.sampled_from([Sizes(), LATENT])), page_size=page_size, pages=4 * 600 // page_size, layers=1
    )
    named = OPTIONS[draw(st.sampled_from(sorted(OPTIONS)))]
    kv_access = draw(st.sampled_from(["auto", "pages"]))
    return History(
        sizes,
        tuple(ops),
        comm_mode=draw(st.sampled_from(["auto", "keys", "queries"])) if kv_access == "auto" else "auto",
        kv_access=kv_access,
        seed=draw(st.integers(0, 99)),
        **named,
    )


@pytest.mark.parametrize("world_size", WORLDS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories())
def test_any_history_is_right(pool: Pools, world_size: int, history: History) -> None:
    judge(history, pool(world_size).run(play_on_ring, history))


TOKENS = 20


def small(ring: Ring | None = None, **changes: Any) -> PagedKVCache:
    facts: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 16, "v_head_dim": 8, "pages": 40, "page_size": 4}
    facts |= {"dtype": torch.float32, "device": "cpu"} | changes
    return PagedKVCache(Ring() if ring is None else ring, **facts)


def rows_of(step: ForwardBatch, **changes: Any) -> dict[str, Any]:
    """Right tensors for a step of `small`, but for what is changed."""
    shapes = {"q": (4, 16), "k": (2, 16), "v": (2, 8)}
    given = {name: torch.ones(step.batch, step.rows, *shape) for name, shape in shapes.items()}
    return given | changes


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"q": torch.ones(1, 3, 4, 16)}, r"q must have shape `1 20 h 16`.*got \(1, 3, 4, 16\)"),
    "dims": ({"k": torch.ones(20, 2, 16)}, r"k must have shape \(1, 20, 2, 16\).*got \(20, 2, 16\)"),
    "head dim": ({"v": torch.ones(1, 20, 2, 16)}, r"v must have shape \(1, 20, 2, 8\)"),
    "heads": ({"q": torch.ones(1, 20, 3, 16)}, "query heads must be a multiple of the cache's 2 key heads, got 3"),
    "dtype": (
        {"q": torch.ones(1, 20, 4, 16).bfloat16()},
        "q must have the dtype of the cache, torch.float32, got torch.bfloat16",
    ),
    "device": ({"v": torch.ones(1, 20, 2, 8, device="meta")}, "v must be on the device of the cache, cpu, got meta"),
    "gradients": ({"q": torch.ones(1, 20, 4, 16, requires_grad=True)}, "q must not require gradients.*ring_attention"),
    "sink gradients": ({"sinks": torch.ones(4, requires_grad=True)}, "sinks must not require gradients"),
    "layer": ({"layer": 2}, "layer must be from 0 to 1, got 2"),
    "negative layer": ({"layer": -1}, "layer must be from 0 to 1, got -1"),
    "a fraction as layer": ({"layer": 1.0}, "layer must be an integer, got 1.0; convert it first"),
    "a flag as layer": ({"layer": True}, "layer must be an integer, got True"),
    "sinks": ({"sinks": torch.ones(3)}, r"sinks must be floating point of shape \(4,\)"),
    "slopes": ({"alibi_slopes": torch.ones(4, dtype=torch.int64)}, "alibi_slopes must be floating point"),
    "scale": ({"softmax_scale": float("nan")}, "softmax_scale must be finite, got nan"),
    "softcap": ({"softcap": -1.0}, "softcap must be at least 0"),
    "a wide softcap": ({"softcap": 3e38}, "softcap must be from .* for torch.float32, got 3e"),
    "a word as scale": ({"softmax_scale": "0.5"}, "softmax_scale must be a number, got '0.5'; convert it first"),
    "no softcap": ({"softcap": None}, "softcap must be a number, got None"),
    "a word as flag": ({"causal": "no"}, "causal must be True or False, got 'no'"),
    "window": ({"window": (-1, 0)}, "window must have sides of at least 0 or None"),
    "int window": ({"window": 0}, "window must be at least 1, got 0"),
    "a flag as window": ({"window": True}, r"window must be an int, \(left, right\) or None, got True"),
    "fractions of a window": ({"window": (1.5, 0)}, r"window must be of integers, got \(1.5, 0\)"),
    "chunks": ({"chunk_len": 0}, "chunk_len must be at least 1 or None, got 0"),
    "comm_mode": ({"comm_mode": "values"}, "comm_mode must be one of auto, keys, queries, got 'values'"),
    "kv_access": ({"kv_access": "memory"}, "kv_access must be one of auto, pages, copies, got 'memory'"),
    "copies move": (
        {"kv_access": "pages", "comm_mode": "keys"},
        "comm_mode must be 'queries' or 'auto' with kv_access='pages', got 'keys'",
    ),
}


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_by_name(name: str, mode: Any) -> None:
    changes, message = WRONG[name]
    cache = small()
    count = TOKENS if mode == "prefill" else 2
    step = cache.extend([cache.add_request(30)], [count], mode=mode)
    before = cache.k.clone()
    changes = {
        key: x[:, :2] if torch.is_tensor(x) and x.shape[:2] == (1, 20) and mode == "decode" else x
        for key, x in changes.items()
    }
    given: dict[str, Any] = rows_of(step) | changes
    if "gradients" in name:  # a slice of a leaf requires gradients too
        given = {key: x.requires_grad_() if torch.is_tensor(x) and x.requires_grad else x for key, x in given.items()}
    error = TypeError if "as layer" in name else ValueError
    with pytest.raises(error, match=message.replace("1 20", f"1 {count}").replace("1, 20", f"1, {count}")):
        attend(step, given.pop("layer", 0), **given)
    assert torch.equal(cache.k, before), "what is refused is not kept"
    attend(step, 0, **rows_of(step))


def test_a_batch_with_truncated_or_freed_requests_is_refused() -> None:
    cache = small()
    request = cache.add_request(40)
    step = cache.extend([request], [TOKENS])
    cache.truncate(request, 7)
    with pytest.raises(ValueError, match="request 0 of 20 tokens, which was truncated to 7 tokens since; extend again"):
        attend(step, 0, **rows_of(step))
    step = cache.extend([request], [3])
    cache.free(request)
    with pytest.raises(ValueError, match="request 0 of 10 tokens, which was freed since"):
        attend(step, 0, **rows_of(step))


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_batch_with_replaced_tokens_is_refused_and_writes_nothing(mode: Any) -> None:
    cache = small()
    request, other = cache.add_request(40), cache.add_request(40)
    first = cache.extend([request], [7])
    step = cache.extend([request], [13], mode=mode)
    cache.truncate(request, 7)
    # of pages that were given up, some are another request's now
    cache.extend([other], [20])
    again = cache.extend([request], [13], mode=mode)
    with pytest.raises(ValueError, match="request 0 of 20 tokens, which has other tokens since; exten"):
        attend(step, 0, **rows_of(step))
    assert not cache.k.any()
    for one in (first, again):
        attend(one, 0, **rows_of(one))


def test_results_carry_no_graph() -> None:
    cache = small()
    step = cache.extend([cache.add_request(30)], [TOKENS])
    weight = torch.ones(16, requires_grad=True)
    with torch.no_grad():
        assert not attend(step, 0, **rows_of(step, q=torch.ones(1, TOKENS, 4, 16) * weight)).requires_grad
    with torch.inference_mode():
        attend(step, 1, **rows_of(step, q=torch.ones(1, TOKENS, 4, 16) * weight))
    # what inference mode made of it serves outside, too
    step = cache.extend([0], [4])
    assert not attend(step, 1, **rows_of(step)).requires_grad


@pytest.mark.parametrize("inside", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_caches_and_static_batches_work_in_inference_mode_and_outside(inside: tuple[bool, bool, bool]) -> None:
    modes = iter([*inside, False, False, True])
    with torch.inference_mode(next(modes)):
        cache = small()
    with torch.inference_mode(next(modes)):
        static = cache.static_batch(2, 4, max_tokens=40)
    request = cache.add_request(40)
    for mode in modes:
        with torch.inference_mode(mode):
            cache.extend([request], [4], into=static)
            attend(static, 0, **rows_of(static), window=(3, 0))


def ask_and_train() -> Tensor:
    """A chunk of a prompt and a forward in inference mode, and then again with gradients, on one ring."""
    ring = Ring()
    cache, sharding = small(ring), ring.sharding(TOKENS)
    for mode in (True, False):
        for comm_mode in ("keys", "queries"):
            request = cache.add_request(40)
            with torch.inference_mode(mode):
                for count in (TOKENS, 3, 1):
                    step = cache.extend([request], [count], mode="prefill" if count > 1 else "decode")
                    attend(step, 0, **rows_of(step), comm_mode=comm_mode)
            cache.free(request)
        with torch.inference_mode(mode):
            q, k, v = (torch.ones(1, sharding.shard_len, h, 16, requires_grad=not mode) for h in (4, 2, 2))
            o = ring_attention(q, k, v, sharding, causal=True)
    o.sum().backward()
    assert v.grad is not None
    return v.grad.sum()


def test_a_ring_used_in_inference_mode_can_train_later(pool: Pools) -> None:
    # each row of values adds 1 to a row of every query head
    assert float(sum(pool(2).run(ask_and_train))) == pytest.approx(TOKENS * 4 * 16)


def test_a_batch_is_freed_with_its_last_reference() -> None:
    cache = small()
    request = cache.add_request(60)
    for count in (TOKENS, 30, 2):
        step = cache.extend([request], [count])
        attend(step, 0, **rows_of(step), window=(9, 0))
        gone = weakref.ref(step)
        gc.disable()
        try:
            del step
            assert gone() is None
        finally:
            gc.enable()


def refuse_together(fault: str) -> str:
    """Errors of this rank when rank 1 makes another call, and whether later calls work."""
    ring = Ring()
    odd = ring.rank == 1
    cache = small(ring)
    request = cache.add_request(100)
    if fault.startswith("decode"):
        step = cache.extend([request], [TOKENS])
        for layer in (0, 1):
            attend(step, layer, **rows_of(step))
    counts = [3 + odd] if fault == "decode longer" else [TOKENS + 2 * odd] if fault == "longer" else [TOKENS]
    if fault == "another request":
        other = cache.add_request(40)
        request = other if odd else request
    if fault == "decode crop" and odd:
        cache.truncate(request, TOKENS - 1)
    if fault.startswith("decode"):
        counts = [3 + (odd and fault == "decode longer")]
    step = cache.extend([request], counts)
    given: dict[str, Any] = rows_of(step)
    options: dict[str, Any] = {}
    if odd and fault == "dtype":
        given["k"] = given["k"].double()
    if odd and fault == "layer":
        options["layer"] = 5
    if odd and fault == "kind of layer":
        options["layer"] = True
    if odd and fault == "window":
        options["window"] = (5, 0)
    if odd and fault == "kind of window":
        options["window"] = 5.5
    if odd and fault == "heads":
        given["q"] = given["q"][:, :, :2]
    if odd and fault == "gradients":
        given["q"].requires_grad_()
    if odd and fault == "sinks":
        options["sinks"] = torch.zeros(4)
    before = cache.k.clone()
    try:
        attend(step, options.pop("layer", 0), **given, **options)
    except (TypeError, ValueError) as error:
        assert torch.equal(cache.k, before), "nothing is kept of what is refused"
        if fault in ("dtype", "layer", "kind of layer", "window", "kind of window", "heads", "gradients", "sinks"):
            attend(step, 0, **rows_of(step))
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dtype", "k must have the dtype of the cache"),
        ("layer", "layer must be from 0 to 1, got 5"),
        ("kind of layer", "layer must be an integer, got True"),
        ("window", "window"),
        ("kind of window", "window must be an int"),
        ("heads", "attend"),
        ("gradients", "q must not require gradients"),
        ("sinks", "attend"),
        ("longer", "requests (0,) with (22,) new tokens"),
        ("another request", "requests (1,) with (20,) new tokens"),
        ("decode longer", "decode of requests (0,) with (4,) new tokens"),
        ("decode crop", "digest"),
    ],
)
def test_differences_between_ranks_are_errors_on_every_rank(pool: Pools, fault: str, message: str) -> None:
    for rank, said in enumerate(pool(2).run(refuse_together, fault)):
        assert message in said, f"rank {rank}"
        assert "rank 1" in said or rank == 1, f"rank {rank}: {said}"


def count_comparisons() -> list[int]:
    """Number of comparisons in each step of a model of four layers of two kinds."""
    ring = Ring()
    cache = small(ring, layers=4)
    calls = []
    agreement: Any = ring._consensus
    compare = agreement.compare
    agreement.compare = lambda *texts: (calls.append(texts), compare(*texts))[1]
    request, found = cache.add_request(140), []
    for count in (16, 31, 20, *[1] * 40):
        step = cache.extend([request], [count], mode="prefill" if count > 1 else "decode")
        before = len(calls)
        for layer in range(4):
            attend(step, layer, **rows_of(step), window=(9, 0) if layer % 2 else None)
        found.append(len(calls) - before)
    return found


def test_ranks_compare_once_per_chunk_and_seldom_per_token(pool: Pools) -> None:
    for found in pool(2).run(count_comparisons):
        first, second, third, *decoded = found
        assert (second, third) == (1, 1)
        assert first <= 3
        # the first token compares its kinds and its exchange, then every sixteenth one
        assert decoded[0] <= 3
        assert sum(decoded[1:]) == 2


def whole_prompt(world_size: int) -> tuple[Tensor, Tensor]:
    """A prompt by attend and the same rows by ring_attention."""
    ring = Ring()
    cache = small(ring)
    step = cache.extend([cache.add_request(100)], [97])
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 97, *shape, generator=generator) for shape in ((4, 16), (2, 16), (2, 8))]
    q, k, v = (step.take(x) for x in whole)
    assert step.sharding is not None
    o = attend(step, 0, q, k, v)
    assert step.comm_modes == ("keys",)
    return o, ring_attention(q, k, v, step.sharding, causal=True)


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_whole_prompt_is_the_forward_of_training_to_the_bit(pool: Pools, world_size: int) -> None:
    for o, expected in pool(world_size).run(whole_prompt, world_size):
        assert torch.equal(o, expected)


def announce(reserve: int) -> tuple[list[int], int]:
    """Sizes that a chunked prompt reserves in the transport, and the bytes of its largest message."""
    ring = Ring()
    cache = small(ring, layers=1, pages=600)
    said, largest = [], 0
    transport: Any = ring.context.transport
    post = transport.post

    def watched(sends: Any, receives: Any, what: str) -> Any:
        nonlocal largest
        largest = max([largest, *(x.numel() * x.element_size() for _, x in sends)])
        return post(sends, receives, what)

    transport.reserve, transport.post = lambda size, replies=0: said.append(size), watched
    request = cache.add_request(reserve)
    for _ in range(10):
        attend(step := cache.extend([request], [100]), 0, **rows_of(step), comm_mode="keys")
    del transport.reserve, transport.post
    return said, largest


def test_the_first_chunk_reserves_buffers_for_the_whole_request(pool: Pools) -> None:
    for said, largest in pool(4).run(announce, 1000):
        # twice for each chunk: ahead, and what the forward itself needs, which is never more than what was first
        assert len(said) == 20
        assert said[0] == max(said)
        assert largest <= said[0] <= 1.2 * largest


def order_of_events() -> list[str]:
    """Events of a chunk that sends its queries, on transport and pages, in order."""
    ring = Ring()
    cache: Any = small(ring)
    events: list[str] = []
    request = cache.add_request(100)
    attend(step := cache.extend([request], [40]), 0, **rows_of(step))
    transport: Any = ring.context.transport
    post, take = transport.post, cache.take
    transport.post = lambda *given: (events.append(given[-1].partition(" ")[2]), post(*given))[1]
    cache.take = lambda *given: (events.append("pages"), take(*given))[1]
    attend(step := cache.extend([request], [33]), 0, **rows_of(step), comm_mode="queries")
    del transport.post
    return events


def test_queries_are_under_way_while_pages_are_copied(pool: Pools) -> None:
    for events in pool(4).run(order_of_events):
        queries, partials = ([f"{what} ring step {i}" for i in (1, 2, 3)] for what in ("queries for", "partials of"))
        assert events == [*queries, "pages", *partials]


def what_moves(new: int) -> tuple[str, ...]:
    ring = Ring()
    cache = small(ring, layers=1, kv_heads=1, pages=400, v_head_dim=16, dtype=torch.bfloat16)
    request = cache.add_request(1200)
    for count in (1000, new):
        step = cache.extend([request], [count], mode="prefill")
        x = torch.ones(1, step.rows, 4, 16, dtype=torch.bfloat16)
        attend(step, 0, x, x[:, :, :1], x[:, :, :1])
    return step.comm_modes


def test_queries_move_while_they_are_fewer_bytes(pool: Pools) -> None:
    # a key row is 64 bytes, a query row and its partial 4 x (32 + 72): queries move below 2 new tokens in 13
    assert pool(4).run(what_moves, 100) == [("queries",)] * 4
    assert pool(4).run(what_moves, 200) == [("keys",)] * 4


# (kept tokens, new rows): microseconds of a layer on one H200, over copies and in place
MEASURED = {
    (32768, 32): (123, 56), (32768, 64): (133, 107), (32768, 128): (177, 195), (32768, 256): (275, 368), (32768, 512): (473, 768),
    (131072, 32): (411, 197), (131072, 64): (481, 398), (131072, 128): (676, 745), (131072, 256): (1067, 1433),
    (262144, 32): (789, 384), (262144, 64): (945, 838), (262144, 128): (1310, 1482),
}  # fmt: skip


def test_auto_chooses_the_faster_kv_access() -> None:
    sizes: dict[str, Any] = {"heads": 32, "kv_heads": 8, "element_size": 2, "most": 32}
    for (kept, new), (copies, in_place) in MEASURED.items():
        assert is_paged_faster([new], [kept + new], **sizes) == (in_place < copies), (kept, new)
    # several requests: few rows on a long one outweigh many on a short one, and not the other way round
    assert is_paged_faster([32, 512], [200_000, 2_000], **sizes)
    assert not is_paged_faster([512, 32], [200_000, 2_000], **sizes)
    # a window is all that is read in place, and all would be copied
    assert is_paged_faster([512], [200_000], left=4095, **sizes)
    assert not is_paged_faster([32] * 257, [200_000] * 257, **sizes)
    # more heads on a key head are more products for the same bytes; half the bytes are half the copy
    more: dict[str, Any] = {"heads": 64, "most": 16}
    fewer: dict[str, Any] = {"element_size": 1}
    assert not is_paged_faster([64], [100_000], **sizes | more)
    assert not is_paged_faster([64], [100_000], **sizes | fewer)


def test_few_rows_of_one_rank_attend_to_all_pages_in_place(pool: Pools) -> None:
    assert pool(4).run(what_is_read) == [(("queries",), ("pages",))] * 4


def what_is_read() -> tuple[tuple[str, ...], tuple[str, ...]]:
    cache = small(Ring())
    request = cache.add_request(40)
    cache.extend([request], [30], mode="prefill")
    step = cache.extend([request], [2], mode="prefill")
    # one rank computes them, the others have none and read their pages all the same
    assert step.rows in (0, 2)
    attend(step, 0, **rows_of(step), kv_access="pages")
    return step.comm_modes, step.kv_accesses


@pytest.mark.parametrize("kv_access", ["pages", "copies"])
@pytest.mark.parametrize(
    "mask",
    [
        {"causal": False, "window": (2, 2**63 - 2)},
        {"causal": False, "window": (2, 2**70), "chunk_len": 2**63 - 1},
        {"causal": True, "chunk_len": 2**70},
    ],
    ids=str,
)
def test_a_prefill_sees_all_that_huge_windows_and_chunks_see(mask: dict[str, Any], kv_access: str) -> None:
    cache = small(layers=1)
    # chunks are counted from the first token that is seen
    request, first = cache.add_request(30, 3), 3
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 30, h, d, generator=draw) for h, d in ((4, 16), (2, 16), (2, 8)))
    found = []
    for done, count in ((0, 20), (20, 10)):
        step = cache.extend([request], [count], mode="prefill")
        rows = (x[:, done : done + count] for x in (q, k, v))
        found.append(attend(step, 0, *rows, **mask, kv_access=kv_access)[:, max(0, first - done) :])
    near = mask | {"window": (2, 30) if "window" in mask else None, "chunk_len": None}
    for o, end, new in zip(found, (20, 30), (17, 10), strict=True):
        expected = attention_reference(*(x[:, first:end] for x in (q, k, v)), **near)[:, -new:]
        torch.testing.assert_close(o, expected)


def test_attend_is_not_traced() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    def model(x: Tensor, step: ForwardBatch) -> Tensor:
        x = x + attend(step, 0, x.sin(), x.cos()[:, :, :2], x[:, :, :2, :8].cos()).repeat(1, 1, 1, 2)
        return 2 * attend(step, 1, x.sin(), x.cos()[:, :, :2], x[:, :, :2, :8].cos())

    found = []
    counter = CompileCounterWithBackend("eager")
    for run in (model, torch.compile(model, backend=counter)):
        cache, answers = small(), []
        request = cache.add_request(60)
        for count in (20, 3, 1):
            step = cache.extend([request], [count])
            with torch.no_grad():
                answers.append(run(torch.arange(count * 64.0).view(1, count, 4, 16).sin(), step))
        found.append(answers)
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)
    # before, between and behind the two calls, for each of a few shapes
    assert 0 < counter.frame_count <= 12


def play_on_nodes(history: History) -> list[Answer]:
    return play(history, Ring(nodes=2), "cpu")


def test_rings_of_two_levels_are_right(pool: Pools) -> None:
    for sizes, comm_mode in itertools.product((Sizes(), LATENT), ("keys", "queries")):
        for ops in (CHUNKS, CROWD, PACKED):
            history = History(sizes, ops, comm_mode=comm_mode, **OPTIONS["everything"])
            judge(history, pool(4).run(play_on_nodes, history))


MIXED = ((30, 41, 17), (19, 5, 33), (1, 1, 1), (2, 2, 2))
"""New tokens of three requests: two prefills and two decodes."""


def beside(
    spoilt: str | None, bad: float, comm_mode: str, kv_access: str, kv_dtype: torch.dtype | None
) -> list[Tensor]:
    cache = small(kv_dtype=kv_dtype, pages=60)
    return attend_beside(cache, 4, MIXED, spoilt, bad, comm_mode=comm_mode, kv_access=kv_access)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("kv_access", ["copies", "pages"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("spoilt", SPOILT)
def test_non_finite_values_do_not_reach_other_requests(
    spoilt: str, bad: float, kv_access: str, kv_dtype: torch.dtype | None
) -> None:
    healthy, found = (beside(which, bad, "auto", kv_access, kv_dtype) for which in (None, spoilt))
    assert all(map(torch.equal, healthy, found))


@pytest.mark.parametrize(("comm_mode", "kv_access"), [("keys", "copies"), ("queries", "copies"), ("queries", "pages")])
@pytest.mark.parametrize("spoilt", SPOILT)
def test_non_finite_values_do_not_reach_other_requests_on_ranks(
    pool: Pools, spoilt: str, comm_mode: str, kv_access: str
) -> None:
    ranks = pool(2)
    healthy, found = (ranks.run(beside, which, BAD[0], comm_mode, kv_access, None) for which in (None, spoilt))
    for mine, other in zip(healthy, found, strict=True):
        assert all(map(torch.equal, mine, other))


@pytest.mark.parametrize("kv_access", ["copies", "pages"])
def test_attention_over_fp8_pages_uses_the_rows_as_read_back(kv_access: str) -> None:
    cache = small(kv_dtype=torch.float8_e4m3fn)
    request = cache.add_request(100)
    generator = torch.Generator().manual_seed(0)
    for count, mode in ((20, "prefill"), (33, "prefill"), (2, "decode"), (19, "prefill")):
        step = cache.extend([request], [count], mode=mode)  # pyright: ignore[reportArgumentType]
        q, k, v = (torch.randn(1, count, *shape, generator=generator) for shape in ((4, 16), (2, 16), (2, 8)))
        o = attend(step, 0, q, k, v, kv_access=kv_access)
        assert step.kv_accesses == ((kv_access,) if mode == "prefill" else ())
        if count == 20 and kv_access == "copies":
            continue  # nothing was kept before: the new rows are seen as they came
        pages = cache.allocator.table(request, 0)
        slots = [page * 4 + row for page, n in zip(pages.pages, pages.lengths, strict=True) for row in range(n)]
        keys, values = cache.take(0, torch.tensor([slots]))
        n = keys.shape[1]
        whole = torch.cat((torch.zeros(1, n - count, 4, 16), q), 1)
        exact = attention_reference(*(x.double() for x in (whole, keys, values)), causal=True)[:, -count:]
        low = attention_reference(whole, keys, values, causal=True)[:, -count:]
        assert_within_budget(o, exact, low, f"{mode} of {count}")


PREFIXES = (37, 20)
TREES = tuple(masks.tree([None, 0, 1, 2, 1, 0], [n, 1, 1, 1, 1, 1]) for n in PREFIXES)
"""What is cached, then a token with two children, of which the first has a child, and another token."""


def decode_trees(mask: masks.Mask, dtype: torch.dtype, device: str = "cpu") -> list[tuple[Tensor, Tensor, Tensor]]:
    """(o, exact, rounded) of speculative tokens of two requests over their cached prefixes."""
    generator = torch.Generator().manual_seed(0)
    cache = PagedKVCache(Ring(), layers=1, kv_heads=2, head_dim=16, pages=12, page_size=16, dtype=dtype, device=device)
    found, tensors = [], []
    requests = [cache.add_request(reserve=n + 5) for n in PREFIXES]
    for request, n in zip(requests, PREFIXES, strict=True):
        tensors.append([torch.randn(1, n + 5, h, 16, generator=generator).to(device, dtype) for h in (4, 2, 2)])
        step = cache.extend([request], [n])
        attend(step, 0, *(step.take(x[:, :n]) for x in tensors[-1]))
    step = cache.extend(requests, [5, 5], mode="decode")
    o = attend(
        step,
        0,
        *(torch.cat([x[i][:, n:] for x, n in zip(tensors, PREFIXES, strict=True)]) for i in range(3)),
        mask=mask,
    )
    for i, (qkv, n) in enumerate(zip(tensors, PREFIXES, strict=True)):
        exact, rounded = (
            attention_reference(*(x.to(to) for x in qkv), mask=TREES[i])[:, n:] for to in (torch.float64, dtype)
        )
        found.append((o[i : i + 1], exact, rounded))
    return found


@pytest.mark.parametrize(("world_size", "dtype"), [(1, torch.float32), (2, torch.float32), (2, torch.float64)])
def test_trees_of_speculative_tokens_see_their_prefix_and_ancestors(
    pool: Pools, world_size: int, dtype: torch.dtype
) -> None:
    for answers in pool(world_size).run(decode_trees, masks.per_batch(TREES), dtype):
        for o, exact, rounded in answers:
            low = rounded if dtype == torch.float32 else rounded.float()
            assert_within_budget(o, exact, low, "o of a tree", dtype)


def prefill_in_chunks(mask: masks.Mask, comm_mode: str, mode: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(o, exact, rounded) of this rank's rows of each chunk of a prompt."""
    q, k, v = (torch.randn(1, 40, h, 16, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
    cache = PagedKVCache(
        Ring(), layers=1, kv_heads=2, head_dim=16, pages=4, page_size=16, dtype=torch.float32, device="cpu"
    )
    exact, rounded = (
        attention_reference(*(x.to(dtype) for x in (q, k, v)), mask=mask) for dtype in (torch.float64, q.dtype)
    )
    request, found = cache.add_request(reserve=40), []
    for chunk in (slice(23), slice(23, 37), slice(37, 40)):
        step = cache.extend([request], [chunk.stop - (chunk.start or 0)], mode=mode)
        rows, *answers = (step.take(x[:, chunk]) for x in (q, exact, rounded))
        o = attend(step, 0, rows, *(step.take(x[:, chunk]) for x in (k, v)), mask=mask, comm_mode=comm_mode)
        found.append((o, *answers))
    return found


@pytest.mark.parametrize("comm_mode", ["keys", "queries"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_prefill_in_chunks_takes_any_mask_that_sees_no_later_chunk(
    pool: Pools, world_size: int, comm_mode: str
) -> None:
    blocks = masks.causal() & masks.blocks([[1, 0], [1, 1]], 20)
    # "auto" decodes the last three tokens
    for mask, mode in ((masks.causal() | masks.spans([(5, 19)]), "auto"), (blocks, "prefill")):
        for answers in pool(world_size).run(prefill_in_chunks, mask, comm_mode, mode):
            for o, exact, rounded in answers:
                assert_within_budget(o, exact, rounded, "o of a chunk", torch.float32)


@pytest.mark.parametrize(
    ("counts", "mode", "given", "message"),
    [
        ([3, 3], "prefill", {}, "a prefill of several requests.*extend them one by one"),
        ([3], "prefill", {"kv_access": "pages"}, "kv_access=.pages.*use kv_access=.copies"),
        ([3, 3], "decode", {"mask": masks.causal() & masks.blocks([[True]], 64)}, "decode takes no masks.blocks"),
        ([3, 3, 3], "decode", {}, "mask must be one, or one per request, 3, got 2"),
    ],
)  # fmt: skip
def test_masks_that_a_call_with_a_cache_does_not_serve_are_refused(
    counts: list[int], mode: Any, given: dict[str, Any], message: str
) -> None:
    cache = PagedKVCache(
        Ring(), layers=1, kv_heads=1, head_dim=16, pages=8, page_size=16, dtype=torch.float32, device="cpu"
    )
    step = cache.extend([cache.add_request(reserve=9) for _ in counts], counts, mode=mode)
    tree = masks.tree([None, 0, 0], [1, 1, 1])
    given = {"mask": masks.per_batch([tree, tree]) if len(counts) > 1 else tree, **given}
    x = torch.zeros(step.batch, step.rows, 1, 16)
    with pytest.raises((NotImplementedError, ValueError), match=message):
        attend(step, 0, x, x, x, **given)


def test_static_batches_refuse_trees() -> None:
    cache = PagedKVCache(
        Ring(), layers=1, kv_heads=1, head_dim=16, pages=8, page_size=16, dtype=torch.float32, device="cpu"
    )
    request = cache.add_request(reserve=9)
    static = cache.static_batch(1, 1, max_tokens=9)
    cache.extend([request], [1], into=static)
    x = torch.zeros(1, 1, 1, 16)
    with pytest.raises(NotImplementedError, match=r"a static batch.*use PagedKVCache\.extend"):
        attend(static, 0, x, x, x, mask=masks.tree([None], [1]) & masks.spans([(0, 1)]))


@pytest.mark.parametrize("sink_len", [10, sys.maxsize, 2**63])
def test_pages_in_place_show_sink_tokens_to_the_right_of_the_window_too(sink_len: int) -> None:
    mask, found = masks.sinks(sink_len) | masks.window(2, 3), []
    for kv_access in ("copies", "pages"):
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"layers": 1, "kv_heads": 1, "head_dim": 16, "pages": 8, "page_size": 16}
        cache = PagedKVCache(Ring(), dtype=torch.float32, device="cpu", **sizes)
        request, x = cache.add_request(40), torch.randn(1, 40, 1, 16)
        step = cache.extend([request], [4], mode="prefill")
        attend(step, 0, x[:, :4], x[:, :4], x[:, :4], mask=mask, kv_access=kv_access)
        step = cache.extend([request], [36], mode="prefill")
        found.append(attend(step, 0, x[:, 4:], x[:, 4:], x[:, 4:], mask=mask, kv_access=kv_access))
    torch.testing.assert_close(*found)


def test_decode_shows_any_number_of_sink_tokens() -> None:
    found = []
    for sink_len in (40, 2**31, sys.maxsize):
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"layers": 1, "kv_heads": 1, "head_dim": 16, "pages": 8, "page_size": 16}
        cache = PagedKVCache(Ring(), dtype=torch.float32, device="cpu", **sizes)
        request, x = cache.add_request(40, first=2), torch.randn(1, 40, 1, 16)
        cache.extend([request], [39], mode="prefill").put(0, x[:, :39], x[:, :39])
        step, mask = cache.extend([request], [1]), masks.causal() & (masks.sinks(sink_len) | masks.window(3))
        found.append(attend(step, 0, x[:, 39:], x[:, 39:], x[:, 39:], mask=mask))
    assert all(torch.equal(o, found[0]) for o in found)


@pytest.mark.parametrize("kv_access", ["copies", "pages"])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"chunk_len": 3}])
def test_a_chunk_may_end_within_the_padding(kv_access: str, options: dict[str, Any]) -> None:
    """Regression: such a prefill was refused by the name of a mask that nobody had given, while decode took it."""
    q, k, v = (torch.randn(2, 9, heads, 16, generator=torch.Generator().manual_seed(7)) for heads in (4, 2, 2))
    found = []
    for chunks in ((2, 7), (2, 1, 6)):
        cache = PagedKVCache(
            Ring(), layers=1, kv_heads=2, head_dim=16, dtype=torch.float32, pages=8, page_size=4, device="cpu"
        )
        requests, rows = cache.add_batch(9, [5, 0]), []
        for n in chunks:
            step = cache.extend(requests, [n] * 2, mode="prefill", same_length=True)
            new = slice(step.lengths[0] - n, step.lengths[0])
            rows.append(attend(step, 0, q[:, new], k[:, new], v[:, new], kv_access=kv_access, **options))
        found.append(torch.cat(rows, 1))
    assert not found[0][0, :2].any()
    # behind the padding each row is that of a request without it
    exact = attention_reference(q[:1, 5:], k[:1, 5:], v[:1, 5:], causal=True, **options)
    assert torch.allclose(found[0][:1, 5:], exact, atol=1e-6)
    assert torch.allclose(found[1], found[0], atol=1e-6)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kv_access", ["copies", "pages"])
@pytest.mark.parametrize(
    "mask",
    [
        masks.causal() | masks.prefix(4),
        masks.causal() & (masks.sinks(2) | masks.chunks(6)),
        masks.causal() & masks.chunks(6) & (masks.sinks(2) | masks.window(3)),
        masks.sinks(3) | (masks.chunks(6) & (masks.prefix(8) | masks.window(3))),
    ],
    ids=repr,
)
def test_prefixes_chunks_and_sinks_are_those_of_each_request(mask: masks.Mask, kv_access: str, padded: bool) -> None:
    """Regression: copied pages showed the prefix of the first request, and sinks of chunks; pages in place were right."""
    sizes: dict[str, Any] = {"layers": 1, "kv_heads": 1, "head_dim": 16, "pages": 20, "page_size": 4}
    cache = PagedKVCache(Ring(), dtype=torch.float32, device="cpu", **sizes)
    lengths, firsts = ((14, 14), (3, 0)) if padded else ((9, 14), (0, 0))
    requests = cache.add_batch(14, firsts) if padded else [cache.add_request(n) for n in lengths]
    wholes = [torch.randn(1, n, 1, 16, generator=torch.Generator().manual_seed(n + i)) for i, n in enumerate(lengths)]
    rows = []
    for part in (slice(6), slice(6, None)):
        parts = [x[:, part] for x in wholes]
        x = torch.cat(parts, 0 if padded else 1)
        step = cache.extend(requests, [one.shape[1] for one in parts], mode="prefill", same_length=padded)
        o = attend(step, 0, x, x, x, mask=mask, kv_access=kv_access)
        rows.append(o.split(1) if padded else o.split([one.shape[1] for one in parts], 1))
    for x, first, *chunks in zip(wholes, firsts, *rows, strict=True):
        early, whole = (attention_reference(y, y, y, mask=mask) for y in (x[:, first:6], x[:, first:]))
        exact = torch.cat((early, whole[:, 6 - first :]), 1)  # a chunk sees none behind it
        torch.testing.assert_close(torch.cat(chunks, 1)[:, first:], exact)
