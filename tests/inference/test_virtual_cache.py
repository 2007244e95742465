"""A cache over a ring of virtual ranks answers with the same bits, however many processes host them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from ringattn import Ring, latent_attention, masks, ring_attention
from ringattn.inference import ForwardBatch, PagedKVCache, attend, latent_attend
from ringattn.launch.check.inference import (
    CHUNKS,
    CROWD,
    OPTIONS,
    PADDED,
    PIECES,
    Answer,
    History,
    Sizes,
    differences,
    gather_answers,
    play,
)
from tests.inference.test_attention import LATENT, MIXED, histories
from tests.support.pool import Pools
from tests.support.request_isolation import BAD, SPOILT, attend_beside

SIZE = 4
FP8 = torch.float8_e4m3fn


def play_virtual(history: History, **of_ring: Any) -> list[Answer]:
    return play(history, Ring(virtual_size=SIZE, **of_ring), "cpu")


def play_plain(history: History, **of_ring: Any) -> list[Answer]:
    return play(history, Ring(**of_ring), "cpu")


def assert_bits(by_rank: list[list[Answer]], expected: list[list[Answer]], what: object) -> None:
    """Compare the whole answers of the processes of two rings, one list per process."""
    pairs = zip(zip(*by_rank, strict=True), zip(*expected, strict=True), strict=True)
    for index, (found, wanted) in enumerate(pairs):
        assert (found[0].mode, found[0].moved) == (wanted[0].mode, wanted[0].moved)
        assert found[0].mode == "prefill" or not any(differences(found, found[0].layers))
        for o, exact in zip(gather_answers(found), gather_answers(wanted), strict=True):
            assert o.isfinite().all()
            assert torch.equal(o, exact), f"step {index} ({found[0].mode}, {found[0].moved}), {what}"


EVERYTHING = OPTIONS["everything"]
HISTORIES = {
    "chunks": History(Sizes(), CHUNKS),
    "chunks, queries": History(Sizes(), CHUNKS, comm_mode="queries", **EVERYTHING),
    "forks, auto": History(Sizes(), CROWD, **OPTIONS["window"]),
    "forks, keys": History(Sizes(), CROWD, comm_mode="keys", **EVERYTHING),
    "forks, pages": History(Sizes(), CROWD, kv_access="pages", **OPTIONS["sinks and window"]),
    "padding, keys": History(Sizes(), PADDED, comm_mode="keys", **OPTIONS["sinks"]),
    "padding, queries": History(Sizes(), PADDED, comm_mode="queries", **OPTIONS["chunks"]),
    "latents": History(LATENT, CHUNKS, comm_mode="keys", **OPTIONS["alibi"]),
    "latents, queries": History(LATENT, CROWD, comm_mode="queries", **EVERYTHING),
    "latents, pages": History(LATENT, CROWD, kv_access="pages"),
    "latents, padding": History(LATENT, PADDED),
    "bf16": History(Sizes(dtype=torch.bfloat16), CROWD, **EVERYTHING),
    "fp64": History(Sizes(dtype=torch.float64), CROWD, comm_mode="queries", **EVERYTHING),
    "large pages": History(Sizes(page_size=64, pages=9), CROWD, comm_mode="queries"),
}


@pytest.mark.rings
@pytest.mark.parametrize("name", HISTORIES)
def test_every_number_of_processes_gives_the_bits_of_a_process_per_rank(pool: Pools, name: str) -> None:
    history = HISTORIES[name]
    expected = pool(SIZE).run(play_plain, history)
    for processes in (1, 2, 4):
        assert_bits(pool(processes).run(play_virtual, history), expected, f"{name} on {processes} processes")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories())
def test_any_history_has_the_same_bits_on_one_and_two_processes(pool: Pools, history: History) -> None:
    # virtual ranks have no packed batches
    ops = tuple(("prefill" if x in PIECES else x for x in op) if op[0] == "extend" else op for op in history.ops)
    history = dataclasses.replace(history, ops=tuple(map(tuple, ops)))
    assert_bits(pool(2).run(play_virtual, history), [play_virtual(history)], history)


def test_virtual_ranks_of_nodes_and_with_a_memory_budget_have_the_same_bits(pool: Pools) -> None:
    for of_ring, comm_mode in (({"nodes": 2}, "keys"), ({"nodes": 2}, "queries"), ({"memory_budget": 2**30}, "keys")):
        history = History(Sizes(), CROWD, comm_mode=comm_mode, **EVERYTHING)
        assert_bits(pool(2).run(play_virtual, history, **of_ring), [play_virtual(history, **of_ring)], of_ring)


def small(virtual_size: int | None = SIZE, **changes: Any) -> PagedKVCache:
    facts: dict[str, Any] = {"layers": 1, "kv_heads": 2, "head_dim": 16, "v_head_dim": 8, "pages": 40, "page_size": 4}
    facts |= {"dtype": torch.float32, "device": "cpu"} | changes
    return PagedKVCache(Ring(virtual_size=virtual_size), **facts)


def draw(batch: int, count: int, seed: int, latent: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, 12), (16,), (4,)) if latent else ((4, 16), (2, 16), (2, 8))
    return [torch.randn(batch, count, *shape, generator=generator) for shape in shapes]


def answer(step: ForwardBatch, qkv: list[Tensor], **options: Any) -> Answer:
    o = attend(step, 0, *map(step.take, qkv), **options)
    return Answer(step.mode, step.taken, step.comm_modes, [o])


def search_beams(kv_dtype: torch.dtype | None, virtual_size: int | None) -> list[Answer]:
    """A batch whose requests take each other's places, speculate on trees, and are cut back."""
    cache = small(virtual_size, kv_dtype=kv_dtype)
    beams = cache.add_batch(60, [0, 0, 0])
    found = [answer(cache.extend(beams, [14] * 3, mode="prefill", same_length=True), draw(3, 14, 0))]
    for turn, order in enumerate(([1, 1, 2], [2, 0, 0], [0, 0, 1]), 1):
        cache.reorder(beams, order)
        found.append(answer(cache.extend(beams, [1] * 3, same_length=True), draw(3, 1, turn), window=9))
    tree = masks.tree([None, 0, 1, 0], [17, 1, 1, 1])
    found.append(answer(cache.extend(beams, [3] * 3), draw(3, 3, 4), mask=masks.per_batch([tree] * 3)))
    for beam in beams:
        cache.truncate(beam, 18)
    for comm_mode, kv_access in (("queries", "pages"), ("queries", "copies"), ("keys", "copies")):
        step = cache.extend(beams, [7] * 3, mode="prefill", same_length=True)
        found.append(answer(step, draw(3, 7, 5), comm_mode=comm_mode, kv_access=kv_access))
    return found


@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_beams_that_take_each_others_places_have_the_same_bits(pool: Pools, kv_dtype: torch.dtype | None) -> None:
    expected = pool(SIZE).run(search_beams, kv_dtype, None)
    for processes in (1, 2, 4):
        assert_bits(pool(processes).run(search_beams, kv_dtype, SIZE), expected, f"{processes} processes")


def rows_read_back() -> list[Any]:
    """Where this process's rows are stored, by what is read from there, and which of them are the last ones."""
    cache = small(v_head_dim=16)
    requests = [cache.add_request(60), cache.add_request(20)]
    found = []
    for counts in ([41, 7], [3, 3], [11, 5]):
        step = cache.extend(requests, counts, mode="prefill")
        tokens = torch.cat([torch.arange(n - count, n) for n, count in zip(step.lengths, counts, strict=True)])
        assert torch.equal(tokens[step.taken], step.positions[0])
        rows = (step.positions + torch.repeat_interleave(torch.tensor([0, 100]), torch.tensor(counts))[step.taken])[0]
        x = rows.float()[None, :, None, None].expand(1, -1, 2, 16).contiguous()
        step.put(0, x, x)
        assert step.kv_slots is not None
        assert step.kv_sharding is not None
        stored = cache.take(0, step.kv_slots)[0][0, :, 0, 0].long()
        origins = torch.tensor([0, step.lengths[0]])
        assert torch.equal(stored % 100 + origins[stored // 100], step.kv_sharding.positions)
        lasts = [None if last is None else int(rows[last[1]]) for last in step.last_rows]
        found.append((rows.tolist(), stored.tolist(), lasts))
    return found


def test_a_process_stores_the_rows_of_its_virtual_ranks(pool: Pools) -> None:
    alone = pool(SIZE).run(rows_read_back)
    for processes in (1, 2):
        for rank, steps in enumerate(pool(processes).run(rows_read_back)):
            hosted = alone[rank * SIZE // processes : (rank + 1) * SIZE // processes]
            for found, parts in zip(steps, zip(*hosted, strict=True), strict=True):
                rows, stored, lasts = zip(*parts, strict=True)
                assert found[:2] == ([*itertools.chain(*rows)], [*itertools.chain(*stored)])
                assert found[2] == [next((x for x in each if x is not None), None) for each in zip(*lasts, strict=True)]


def prefill(chunks: list[int], kind: str, comm_mode: str) -> tuple[list[Tensor], list[Tensor]]:
    """O of this process's rows of each chunk, and of the forward of training under the sharding of the whole prompt."""
    latent = kind == "latents"
    cache = small(latent=(16, 4), kv_heads=None, head_dim=None, v_head_dim=None) if latent else small()
    batch = 2 if kind == "batch" else 1
    prompts = 2 if kind in ("packed", "batch") else 1
    requests = cache.add_batch(sum(chunks), [0] * prompts)
    tensors = draw(batch, sum(chunks) * prompts // batch, 0, latent)
    up = [torch.randn(4, n, 16, generator=torch.Generator().manual_seed(n)) for n in ((8, 10) if latent else ())]
    options: dict[str, Any] = {"causal": True, "softcap": 3.0, "window": (40, 0)}
    run: Any = latent_attend if latent else attend
    train: Any = latent_attention if latent else ring_attention
    found, taken, begin, sharding = [], [], 0, None
    for count in chunks:
        step = cache.extend(requests, [count] * prompts, mode="prefill", same_length=kind == "batch")
        some = [x[:, begin : begin + count * prompts // batch] for x in tensors]
        found.append(run(step, 0, *map(step.take, some), *up, **options, comm_mode=comm_mode))
        taken.append(begin + step.taken)
        sharding = step.kv_sharding
        begin += count * prompts // batch
    assert sharding is not None
    whole = train(*(sharding.shard(x) for x in tensors), *up, sharding, **options)
    rows = torch.full((begin,), -1).index_put((sharding.positions,), torch.arange(sharding.shard_len))
    return found, [whole[:, rows[places]] for places in taken]


@pytest.mark.parametrize("kind", ["one", "packed", "batch", "latents"])
def test_a_whole_prompt_is_the_forward_of_training_to_the_bit(pool: Pools, kind: str) -> None:
    for processes in (1, 2, 4):
        for found, expected in pool(processes).run(prefill, [57], kind, "auto"):
            assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize(("chunks", "comm_mode"), [([57], "queries"), ([32, 25], "auto"), ([16, 16, 25], "keys")])
def test_other_chunkings_are_that_forward_but_for_rounding(chunks: list[int], comm_mode: str) -> None:
    for o, expected in zip(*prefill(chunks, "one", comm_mode), strict=True):
        torch.testing.assert_close(o, expected)


@pytest.mark.parametrize("spoilt", SPOILT)
def test_non_finite_values_do_not_reach_other_requests(spoilt: str) -> None:
    healthy, found = (attend_beside(small(pages=60), 4, MIXED, which, BAD[0]) for which in (None, spoilt))
    assert all(map(torch.equal, healthy, found))


def spoil(what: str) -> str:
    """The error of a call that only process 1 makes wrongly, and that the next call works."""
    cache = small()
    request = cache.add_request(60)
    step = cache.extend([request], [21])
    q, k, v = map(step.take, draw(1, 21, 0))
    wrong, window = q, 6
    if cache.ring.rank == 1:
        wrong, window = (q[:, 1:], 6) if what == "rows" else (q, 5)
    with pytest.raises(ValueError, match="must") as caught:
        attend(step, 0, wrong, k, v, window=window)
    assert attend(step, 0, q, k, v).isfinite().all()
    return str(caught.value)


@pytest.mark.parametrize("what", ["rows", "options"])
def test_a_wrong_call_of_one_process_is_an_error_on_all_and_the_next_one_works(pool: Pools, what: str) -> None:
    assert all("must" in found for found in pool(2).run(spoil, what))


def differ() -> None:
    small(4 * (1 + torch.distributed.get_rank()))


def test_processes_with_other_virtual_sizes_refuse(pool: Pools) -> None:
    with pytest.raises(ValueError, match="must"):
        pool(2).run(differ)


def test_what_depends_on_the_process_is_refused() -> None:
    with pytest.raises(ValueError, match="pages or memory must be given for virtual ranks"):
        small(pages=None)
    with pytest.raises(NotImplementedError, match="a static batch must be of a ring without virtual ranks"):
        small().static_batch(1, max_tokens=8)
