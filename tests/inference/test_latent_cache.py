"""A cache of latents: its rows, what is expanded and absorbed, how rows move, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Ring, attention_reference, latent_attention
from ringattn.inference import ForwardBatch, PagedKVCache, attend, latent_attend
from ringattn.inference.latent_weights import UpWeights
from ringattn.inference.paged_prefill import is_paged_faster
from ringattn.kernels.decode import dispatch
from ringattn.launch.check.inference import CHUNKS, CROWD, OPTIONS, PACKED, PADDED, Answer, History, expand_latents
from ringattn.schedule.latents import Latents
from tests.inference.test_attention import LATENT, MIXED, judge, play_on_ring
from tests.support.budget import assert_within_budget
from tests.support.pool import Pools
from tests.support.request_isolation import BAD, attend_beside

HEADS, R, DR, DN, DV = 4, 16, 4, 8, 10
FP8 = torch.float8_e4m3fn


def make(ring: Ring | None = None, **changes: Any) -> PagedKVCache:
    facts: dict[str, Any] = {"layers": 2, "latent": (R, DR), "pages": 60, "page_size": 4, "dtype": torch.float32}
    return PagedKVCache(Ring() if ring is None else ring, device="cpu", **facts | changes)


def draw(rows: int, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    """q, latents and rotary keys of new tokens, and the weights of a layer."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (batch, rows, HEADS, DN + DR), "latents": (batch, rows, R), "rotary_keys": (batch, rows, DR)}
    found = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    generator = torch.Generator().manual_seed(99)
    weights = {name: torch.randn(HEADS, dim, R, generator=generator) / 4 for name, dim in (("k_up", DN), ("v_up", DV))}
    return found | weights


def rows_of(step: ForwardBatch, **changes: Any) -> dict[str, Any]:
    """Right tensors for a step, but for what is changed."""
    return draw(step.rows, step.batch) | changes


def test_histories_are_right_on_three_ranks(pool: Pools) -> None:
    named = OPTIONS["everything"]
    for ops, moves in ((CHUNKS, {}), (CROWD, {"comm_mode": "queries"}), (PACKED, {"kv_access": "pages"}), (PADDED, {})):
        history = History(LATENT, ops, **moves, **named)
        judge(history, pool(3).run(play_on_ring, history))


def play_in_pieces(history: History, rows: int) -> list[Answer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Latents, "rows_at_once", lambda _: rows)
        return play_on_ring(history)


@pytest.mark.parametrize("comm_mode", ["keys", "queries"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_rows_are_expanded_in_pieces_of_any_size(pool: Pools, world_size: int, comm_mode: str) -> None:
    for ops in (CHUNKS, CROWD):
        history = History(LATENT, ops, comm_mode=comm_mode, kv_access="copies", features=("sinks",))
        judge(history, pool(world_size).run(play_in_pieces, history, 7))


def test_a_row_is_stored_once() -> None:
    for kv_dtype, row in ((None, 4 * (R + DR)), (FP8, R + DR + 4)):
        cache = make(kv_dtype=kv_dtype)
        assert cache.bytes_per_token == 2 * row
        assert sum(x.nbytes for x in cache.stored) == cache.bytes_per_token * cache.capacity_tokens
        assert (cache.kv_heads, cache.head_dim, cache.v_head_dim) == (1, R + DR, R)
        assert cache.v.data_ptr() == cache.k.data_ptr()
        assert cache.v_scale is cache.k_scale
        k, k_scale = cache.k[1], cache.scales(1)[0]
        lengths = torch.zeros(1, 1, dtype=torch.int32)
        table = dispatch.PageTable(lengths, lengths, lengths, lengths[0])
        given = (lengths, lengths, lengths, dispatch.Score(1.0), k_scale, cache.scales(1)[1])
        assert dispatch.DecodeCall(torch.zeros(1, 1, HEADS, R + DR), k, cache.v[1], table, *given).latent
    # DeepSeek V3: 128 heads of 192 and 128 columns, 71 times the bytes
    sizes: dict[str, Any] = {"layers": 1, "dtype": torch.bfloat16, "pages": 1, "page_size": 1, "device": "cpu"}
    assert PagedKVCache(Ring(), latent=(512, 64), **sizes).bytes_per_token == 1152
    assert PagedKVCache(Ring(), kv_heads=128, head_dim=192, v_head_dim=128, **sizes).bytes_per_token == 81920


def compare_with_training() -> tuple[Tensor, Tensor]:
    cache, whole = make(), draw(97)
    step = cache.extend([cache.add_request(100)], [97])
    assert step.sharding is not None
    for name in ("q", "latents", "rotary_keys"):
        whole[name] = step.take(whole[name])
    o = latent_attend(step, 0, **whole)
    assert step.comm_modes == ("keys",)
    return o, latent_attention(**whole, sharding=step.sharding, causal=True)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_whole_prompt_is_the_forward_of_training_to_the_bit(pool: Pools, world_size: int) -> None:
    for o, expected in pool(world_size).run(compare_with_training):
        assert torch.equal(o, expected)


def largest_messages(comm_mode: str) -> int:
    """Bytes of the largest message of a chunk over cached tokens."""
    ring = Ring()
    cache, largest = make(ring, layers=1), 0
    transport: Any = ring.context.transport
    request, post = cache.add_request(200), transport.post

    def watched(sends: Any, receives: Any, what: str) -> Any:
        nonlocal largest
        largest = max([largest, *(x.numel() * x.element_size() for _, x in sends)])
        return post(sends, receives, what)

    for count in (140, 60):
        step = cache.extend([request], [count], mode="prefill")
        transport.post = watched if count == 60 else post
        latent_attend(step, 0, **rows_of(step), comm_mode=comm_mode)
    del transport.post
    return largest


def test_only_latents_travel_as_keys(pool: Pools) -> None:
    # 100 stored rows on each of two ranks; expanded they would be 4 heads of 22 numbers
    found = pool(2).run(largest_messages, "keys")
    assert max(found) <= 100 * 4 * (R + DR) + 16
    # partials of 30 new rows: 4 heads of DV + 2 numbers, rather than of R + 2
    assert max(pool(2).run(largest_messages, "queries")) <= 32 * 4 * HEADS * max(DV + 2, DN + DR) + 16


def what_moves(new: int, kv_access: str = "auto") -> tuple[tuple[str, ...], tuple[str, ...]]:
    cache = make(layers=1, pages=400)
    request = cache.add_request(1400)
    for count in (1000, new):
        step = cache.extend([request], [count], mode="prefill")
        latent_attend(step, 0, **rows_of(step), kv_access=kv_access)
    return step.comm_modes, step.kv_accesses


def test_queries_move_while_they_cost_less_than_keys(pool: Pools) -> None:
    # a key is 80 bytes and 2 * 4 * (12 * 20 + 10 * 16) = 3200 FLOP / 1700; a row and its partial 4 * (48 + 48) bytes: N / T < 0.21
    assert pool(2).run(what_moves, 220) == [(("queries",), ("copies",))] * 2
    assert pool(2).run(what_moves, 320) == [(("keys",), ("copies",))] * 2
    assert pool(2).run(what_moves, 320, "pages") == [(("queries",), ("pages",))] * 2


def test_pages_are_read_in_place_while_that_is_less_than_an_expansion() -> None:
    # DeepSeek V3 in bf16, by Note [Expanded or absorbed]
    up = UpWeights(torch.empty(128, 128, 512), torch.empty(128, 128, 512))
    assert up.expansion_flops(64) == 2 * 128 * (192 * 576 + 128 * 512)
    sizes: dict[str, Any] = {"heads": 128, "kv_heads": 1, "element_size": 2, "most": 1}
    costs = {"products": (1088 / 576, 320 / 576), "expansion": up.expansion_flops(64) / 1152}
    assert is_paged_faster([123], [100_000], **sizes, **costs)
    assert not is_paged_faster([126], [100_000], **sizes, **costs)
    # a window is all that is read in place, and all would be expanded
    assert is_paged_faster([250], [100_000], left=4095, **sizes, **costs)


def test_reordered_requests_read_the_rows_of_their_sources() -> None:
    for kv_dtype in (None, FP8):
        cache = make(kv_dtype=kv_dtype, layers=1)
        requests = cache.add_batch(12, [0, 0, 0])
        # a page and three rows: the open pages are copied, in a circle
        step = cache.extend(requests, [7] * 3, mode="prefill", same_length=True)
        latent_attend(step, 0, **rows_of(step))
        before = [read(cache, request) for request in requests]
        cache.reorder(requests, [1, 2, 0])
        for request, source in zip(requests, (1, 2, 0), strict=True):
            assert torch.equal(read(cache, request), before[source])


def read(cache: PagedKVCache, request: int) -> Tensor:
    """All rows of a request on one rank, `1 t c`."""
    table, size = cache.allocator.table(request, 0), cache.page_size
    slots = [page * size + row for page, n in zip(table.pages, table.lengths, strict=True) for row in range(n)]
    k, v = cache.take(0, torch.tensor([slots]))
    assert torch.equal(k[..., : cache.v_head_dim], v)
    return k.squeeze(2)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("kv_access", ["pages", "copies"])
def test_attention_uses_the_rows_as_read_back(kv_access: str, kv_dtype: torch.dtype | None) -> None:
    cache = make(layers=1, kv_dtype=kv_dtype)
    request = cache.add_request(100)
    stored = torch.empty(1, 0, R + DR)
    for count, mode in ((20, "prefill"), (33, "prefill"), (2, "decode"), (19, "prefill")):
        step = cache.extend([request], [count], mode=mode)  # pyright: ignore[reportArgumentType]
        given = draw(count, seed=count)
        # one scale for both: rotary keys are the larger ones
        given["rotary_keys"] *= 8
        stored = torch.cat((stored, torch.cat((given["latents"], given["rotary_keys"]), 2)), 1)
        o = latent_attend(step, 0, **given, kv_access=kv_access)
        if count == 20 and kv_access == "copies":
            continue  # nothing was kept before: the new rows are seen as they came
        error = (read(cache, request) - stored).abs()
        assert (error <= (stored.abs() * 2**-4 + stored.abs().amax(-1, True) * 2**-18 if kv_dtype else 0)).all()
        rows, q = (
            read(cache, request),
            torch.cat((torch.zeros(1, cache.length(request) - count, HEADS, DN + DR), given["q"]), 1),
        )
        named = given | {"latents": rows[..., :R], "rotary_keys": rows[..., R:]}
        exact, low = (
            attention_reference(
                q.to(dtype), *expand_latents(*(x.to(dtype) for name, x in named.items() if name != "q")), causal=True
            )
            for dtype in (torch.float64, torch.float32)
        )
        assert_within_budget(o, exact[:, -count:], low[:, -count:], f"{mode} of {count}")


def test_a_static_batch_equals_a_new_one_to_the_bit() -> None:
    found = []
    for static in (False, True):
        cache = make(layers=1)
        batch = cache.static_batch(2, 3, max_tokens=40)
        requests, answers = [cache.add_request(40) for _ in range(2)], []
        for i, counts in enumerate(([3, 3], [3, 3], [3, 3])):
            step = cache.extend(requests, counts, mode="decode", into=batch if static else None)
            answers.append(latent_attend(step, 0, **draw(3, 2, seed=i)))
        found.append(answers)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("kv_access", ["copies", "pages"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("spoilt", ["q", "latents", "rotary_keys"])
def test_non_finite_rows_do_not_reach_other_requests(
    spoilt: str, bad: float, kv_access: str, kv_dtype: torch.dtype | None
) -> None:
    healthy, found = (
        attend_beside(make(kv_dtype=kv_dtype), HEADS, MIXED, which, bad, kv_access=kv_access)
        for which in (None, spoilt)
    )
    assert all(map(torch.equal, healthy, found))


def test_a_compiled_model_gets_the_same_bits() -> None:
    def model(x: Tensor, step: ForwardBatch, given: dict[str, Any]) -> Tensor:
        return 2 * latent_attend(step, 0, q=x.sin(), **given)

    found = []
    for run in (model, torch.compile(model, backend="eager")):
        cache, answers = make(), []
        request = cache.add_request(60)
        for count in (20, 3):
            step, given = cache.extend([request], [count]), draw(count)
            with torch.no_grad():
                answers.append(run(given.pop("q"), step, given))
        found.append(answers)
    assert all(map(torch.equal, *found))


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rows": ({"q": torch.ones(1, 3, HEADS, DN + DR)}, ValueError, "q must have shape `1 20 h 12`"),
    "batch": ({"q": torch.ones(2, 20, HEADS, DN + DR)}, ValueError, "latents must have shape"),
    "latents": ({"latents": torch.ones(1, 3, R)}, ValueError, "latents must have shape"),
    "rotary keys": ({"rotary_keys": torch.ones(1, 20, DR + 1)}, ValueError, "q must have head_dim"),
    "another latent": (
        {"latents": torch.ones(1, 20, 8), "k_up": torch.ones(HEADS, DN, 8), "v_up": torch.ones(HEADS, DV, 8)},
        ValueError,
        "latents must have the 16 columns of the cache, got 8",
    ),
    "other rotary keys": (
        {"q": torch.ones(1, 20, HEADS, DN + 2), "rotary_keys": torch.ones(1, 20, 2)},
        ValueError,
        "rotary_keys must have the 4 columns of the cache, got 2",
    ),
    "heads": ({"q": torch.ones(1, 20, 3, DN + DR)}, ValueError, "q must have a multiple of the 4 heads"),
    "v_up": ({"v_up": torch.ones(2, DV, R)}, ValueError, "v_up must have shape"),
    "no tensor": ({"k_up": None}, TypeError, "k_up must be a tensor"),
    "dtype": ({"k_up": torch.ones(HEADS, DN, R).double()}, ValueError, "k_up must be torch.float32"),
    "layer": ({"layer": 2}, ValueError, "layer must be from 0 to 1, got 2"),
    "gradients": (
        {"v_up": torch.ones(HEADS, DV, R, requires_grad=True)},
        ValueError,
        "v_up must not require gradients",
    ),
    "unknown": ({"expand": "owner"}, TypeError, "options must be keywords of attend"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap must be at least 0"),
    "moving pages": ({"kv_access": "pages", "comm_mode": "keys"}, ValueError, "comm_mode must be 'queries'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_by_name(name: str) -> None:
    changes, kind, message = WRONG[name]
    cache = make()
    step = cache.extend([cache.add_request(30)], [20])
    before = cache.k.clone()
    given = rows_of(step) | changes
    with pytest.raises(kind, match=message):
        latent_attend(step, given.pop("layer", 0), **given)
    assert torch.equal(cache.k, before), "what is refused is not kept"
    latent_attend(step, 0, **rows_of(step))


def test_a_cache_of_the_other_kind_is_refused() -> None:
    cache = make()
    step = cache.extend([cache.add_request(30)], [20])
    q, k = torch.ones(1, 20, HEADS, R + DR), torch.ones(1, 20, 1, R + DR)
    with pytest.raises(ValueError, match="use latent_attend"):
        attend(step, 0, q, k, k[..., :R])
    with pytest.raises(ValueError, match=r"v must be k\[..., :16\]"):
        step.put(0, k, k[..., :R].clone())
    step.put(0, k, k[..., :R])
    of_heads = make(latent=None, kv_heads=1, head_dim=16)
    step = of_heads.extend([of_heads.add_request(30)], [20])
    with pytest.raises(ValueError, match="latent_attend must be given a cache of latents"):
        latent_attend(step, 0, **rows_of(step))


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"kv_heads": 1}, ValueError, "kv_heads must be left out"),
        ({"head_dim": 20, "v_head_dim": 16}, ValueError, "head_dim and v_head_dim must be left out"),
        ({"latent": (0, 4)}, ValueError, "latent must be"),
        ({"latent": (16, 0)}, ValueError, "latent must be"),
        ({"latent": 16}, ValueError, "latent must be"),
        ({"latent": None}, TypeError, "kv_heads and head_dim, or latent, must be given"),
        ({"heads": 4}, TypeError, "heads"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_latents_are_refused(changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make(**changes)


def differ() -> str:
    ring = Ring()
    cache = make(ring)
    step = cache.extend([cache.add_request(30)], [20])
    given = rows_of(step)
    if ring.rank == 1:
        given |= {"v_up": given["v_up"][:, :5]}
    with pytest.raises(ValueError) as error:  # noqa: PT011
        latent_attend(step, 0, **given)
    return str(error.value)


def test_weights_that_differ_between_ranks_are_an_error_on_every_rank(pool: Pools) -> None:
    assert all("attend" in said for said in pool(2).run(differ))
