"""The cache: every rank stores and reads back its part of every history, batches have its place, and wrong calls are refused."""

from __future__ import annotations

import gc
import itertools
import math
import random
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor

from ringattn import Ring, masks, ring_attention
from ringattn.inference import CacheFull, ForwardBatch, PagedKVCache, StaticBatch, attend, batch_metadata
from ringattn.inference.consistency import ConsistencyChecker
from ringattn.kernels.kv import pages as rows
from ringattn.plan.mask import fold_mask
from ringattn.plan.sharding import positions_of
from tests.support.page_spans import blocks_of, page_spans
from tests.support.paging import CASES, Case, assert_put, assert_take
from tests.support.pool import Pools

HEADS, D, DV = 2, 4, 3
SHORT_FORMS: list[tuple[bool, tuple[int | None, int | None] | None, int | None]] = [
    (True, None, None), (False, None, None), (True, (3, 0), None), (True, (0, 5), None), (False, (2, 1), None),
    (False, (None, 2), None), (False, (4, None), None), (True, None, 5), (False, None, 3), (True, (2, 0), 6),
    (False, (2, 2**31 - 5), None), (True, (sys.maxsize - 1, 0), None), (False, (2**40, 2**31), None), (False, None, 2**31),
    (True, (2, 0), 2**31 - 5), (False, (2, sys.maxsize), sys.maxsize),
]  # fmt: skip
MASKS = [fold_mask(causal=causal, window=window, chunk_len=chunk_len) for causal, window, chunk_len in SHORT_FORMS]


def make(rank: int = 0, world_size: int = 1, **changes: Any) -> PagedKVCache:
    """A small cache of a rank of a ring whose other ranks are not there."""
    ring = Ring()
    ring.rank, ring.world_size, ring.virtual_size, ring.hosted = rank, world_size, world_size, range(rank, rank + 1)
    facts: dict[str, Any] = {
        "layers": 2, "kv_heads": HEADS, "head_dim": D, "v_head_dim": DV, "dtype": torch.float32, "pages": 12, "page_size": 4,
        "device": "cpu",
    }  # fmt: skip
    return PagedKVCache(ring, **(facts | changes))


def keys(tokens: Sequence[int], layer: int, dim: int) -> Tensor:
    """Rows that stand for tokens in a layer: `n hk dim`, all numbers different."""
    base = torch.tensor(tokens, dtype=torch.float32).view(-1, 1, 1) * 100 + layer * 50
    return base + torch.arange(HEADS).view(1, -1, 1) * 10 + torch.arange(dim)


class Ranks:
    """Caches of all ranks of a ring in one process, and the tokens that requests should have."""

    def __init__(self, world_size: int, **changes: Any) -> None:
        self.caches = [make(rank, world_size, **changes) for rank in range(world_size)]
        self.said: dict[int, list[int]] = {}
        self.tokens = 0

    def all(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The same call on every rank, whose answers must be the same."""
        answers = [getattr(cache, name)(*args, **kwargs) for cache in self.caches]
        assert all(answer == answers[0] for answer in answers)
        return answers[0]

    def bring(
        self, requests: list[int], counts: list[int], into: list[StaticBatch] | None = None, **how: Any
    ) -> list[ForwardBatch]:
        """New tokens for requests, through steps and puts of all ranks and layers."""
        steps = [
            cache.extend(requests, counts, into=None if into is None else into[rank], **how)
            for rank, cache in enumerate(self.caches)
        ]
        new = []
        for request, count in zip(requests, counts, strict=True):
            new.append(list(range(self.tokens, self.tokens + count)))
            self.tokens += count
            self.said[request] += new[-1]
        batched = steps[0].mode == "decode" or how.get("same_length", False)
        for cache, step in zip(self.caches, steps, strict=True):
            self.check(step, requests, counts, new, batched)
            for layer in range(cache.layers):
                packed = new if batched else [[token for tokens in new for token in tokens]]
                x = [torch.stack([keys(tokens, layer, dim) for tokens in packed]) for dim in (D, DV)]
                x = [torch.cat([y, y.new_full((step.batch - len(y), *y.shape[1:]), math.nan)]) for y in x]
                step.put(layer, step.take(x[0]), step.take(x[1]))
        if steps[0].mode == "prefill":
            rows = torch.cat([step.positions.flatten() for step in steps])
            assert len(rows) == sum(counts)
            assert [sum(step.last_rows[i] is not None for step in steps) for i in range(len(requests))] == [1] * len(
                requests
            )
        else:
            owners = torch.stack([step.slots >= 0 for step in steps]).sum(0)
            assert owners[: len(requests)].eq(1).all()
            assert owners[len(requests) :].eq(0).all()
        return steps

    def check(
        self, step: ForwardBatch, requests: list[int], counts: list[int], new: list[list[int]], batched: bool
    ) -> None:
        """Compare the rows of a step with the allocator, row by row."""
        allocator, size, rank = step.cache.allocator, step.cache.page_size, step.cache.ring.rank
        groups = [[i] for i in range(len(requests))] if batched else [list(range(len(requests)))]
        assert step.batch >= len(groups)
        for element, group in enumerate(groups):
            expected = []
            for i in group:
                for piece in page_spans(allocator, requests[i], allocator.length(requests[i]) - counts[i]):
                    for x in range(piece.length):
                        slot = piece.page * size + piece.row + x if piece.rank == rank else -1
                        if piece.rank == rank or step.mode == "decode":
                            expected.append(
                                (
                                    piece.start + x,
                                    slot,
                                    new[i][piece.start + x - len(self.said[requests[i]]) + counts[i]],
                                )
                            )
            found = zip(step.positions[element].tolist(), step.slots[element].tolist(), strict=True)
            assert [(position, slot) for position, slot, _ in expected] == list(found)
            tokens = torch.tensor([token for i in group for token in new[i]])
            assert step.take(tokens, 0).tolist() == [token for _, _, token in expected]
            for i in group:
                last = step.last_rows[i]
                if last is not None:
                    assert last[0] == element
                    assert step.take(tokens, 0)[last[1]] == new[i][-1]

    def read(self) -> None:
        """Every request's tokens, from the rows of its blocks."""
        for request, tokens in self.said.items():
            for layer in range(self.caches[0].layers):
                for block in blocks_of(self.caches[0].allocator, request):
                    cache = self.caches[block.rank]
                    mine = tokens[block.start : block.stop]
                    for pool, dim in ((cache.k, D), (cache.v, DV)):
                        assert torch.equal(
                            pool[layer, block.page, :, : block.length].transpose(0, 1), keys(mine, layer, dim)
                        )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_every_history_reads_back_the_stored_rows(world_size: int, seed: int) -> None:
    choose = random.Random(seed)
    ranks = Ranks(world_size)
    for _ in range(25):
        here = sorted(ranks.said)
        what = choose.choice(["add_request", "add_request", "fork", "prefill", "prefill", "decode", "truncate", "free"])
        try:
            if what == "add_request":
                ranks.said[ranks.all("add_request", choose.randint(1, 30))] = []
            elif what == "fork" and here:
                parent = choose.choice(here)
                length = choose.randint(0, len(ranks.said[parent]))
                ranks.said[ranks.all("fork", parent, length, length + 9)] = ranks.said[parent][:length]
            elif what == "truncate" and here:
                request = choose.choice(here)
                length = choose.randint(0, len(ranks.said[request]))
                ranks.all("truncate", request, length)
                del ranks.said[request][length:]
            elif what == "free" and here:
                request = choose.choice(here)
                ranks.all("free", request)
                del ranks.said[request]
            elif what in ("prefill", "decode"):
                room = {one: ranks.caches[0].allocator.find(one).reserved_tokens - len(ranks.said[one]) for one in here}
                some = [one for one in here if room[one] and choose.random() < 0.7]
                if some:
                    least = min(room[one] for one in some)
                    counts = [choose.randint(1, room[one]) for one in some]
                    counts = counts if what == "prefill" else [min(16, choose.randint(1, least))] * len(some)
                    ranks.bring(some, counts, mode=what)
        except CacheFull:
            continue
        ranks.read()
    for request in list(ranks.said):
        ranks.all("free", request)
    assert ranks.caches[0].free_pages == (12,) * world_size
    assert ranks.caches[0].used_pages == (0,) * world_size


def test_a_batch_keeps_its_dimension_and_its_ranks() -> None:
    ranks = Ranks(2)
    batch = ranks.all("add_batch", 28, [2, 0])
    ranks.said = {one: [] for one in batch}
    for counts, mode in ((9, "prefill"), (1, "decode"), (3, "decode"), (7, "prefill")):
        steps = ranks.bring(batch, [counts] * 2, mode=mode, same_length=True)
        assert steps[0].batch == 2
        assert steps[0].firsts == (2, 0)
        ranks.read()
    assert ranks.caches[0].allocator.have_same_placement(batch)


def test_a_batch_without_free_pages_on_the_same_ranks_still_decodes() -> None:
    ranks = Ranks(1, pages=3)
    first = ranks.all("add_request", 7)
    ranks.said[first] = []
    ranks.bring([first], [2])
    second = ranks.all("fork", first, 2, 6)
    ranks.said[second] = list(ranks.said[first])
    for _ in range(4):
        ranks.bring([first, second], [1, 1], same_length=True)
    ranks.bring([first], [1])
    ranks.read()


@pytest.mark.parametrize("world_size", [1, 3])
def test_stored_rows_are_those_of_the_kv_sharding(world_size: int) -> None:
    ranks = Ranks(world_size, pages=36 // world_size)
    one, other = ranks.all("add_request", 40), ranks.all("add_request", 30)
    ranks.said = {one: [], other: []}
    ranks.bring([one], [21])
    fork = ranks.all("fork", one, 17, 25)
    ranks.said[fork] = ranks.said[one][:17]
    steps = ranks.bring([fork, other, one], [3, 18, 2], mode="prefill")
    virtual = [token for request in (fork, other, one) for token in ranks.said[request]]
    for cache, step in zip(ranks.caches, steps, strict=True):
        assert step.kv_sharding is not None
        assert step.kv_slots is not None
        kept = positions_of(step.kv_sharding.shards[cache.ring.rank]).tolist()
        for layer in range(2):
            k, v = cache.take(layer, step.kv_slots)
            assert torch.equal(k[0], keys([virtual[x] for x in kept], layer, D))
            assert torch.equal(v[0], keys([virtual[x] for x in kept], layer, DV))
    assert steps[0].kv_sharding is not None
    assert sorted(x for shard in steps[0].kv_sharding.shards for x in positions_of(shard).tolist()) == list(
        range(len(virtual))
    )


def test_numbers_given_as_tensors_become_ints() -> None:
    """Their words name a device, of which each rank has its own, and ranks compare words."""

    def number(x: int) -> Any:
        return torch.tensor(x)

    cache = make(world_size=2)
    one = cache.add_request(number(20), number(1))
    step = cache.extend([number(one)], [number(9)])
    cache.truncate(number(one), number(6), number(15))
    other = cache.fork(number(one), number(3), number(8))
    tensors: list[Any] = [[number(1), 0], torch.tensor([1, 0]), torch.tensor([1])]
    for firsts in tensors:
        cache.add_batch(number(4), firsts)
    cache.extend([one, other], [number(2)] * 2)
    kept = [cache.allocator.rank_spans(x) for x in (one, other)], [cache.length(x) for x in (one, other)]
    assert "tensor" not in repr((step.requests, step.counts, step.lengths, step.firsts, *kept))


@pytest.mark.parametrize("wrong", [1.5, "3", True, [2], torch.tensor([2, 3])])
def test_what_is_no_integer_is_refused_by_its_name(wrong: Any) -> None:
    cache = make()
    request = cache.add_request(20)
    step = cache.extend([request], [9], mode="prefill")
    calls: dict[str, list[Callable[[], object]]] = {
        "reserve": [lambda: cache.add_request(wrong), lambda: cache.add_batch(wrong, [0])],
        "first": [lambda: cache.add_request(9, wrong), lambda: cache.set_padding(request, wrong)],
        "firsts": [lambda: cache.add_batch(9, [wrong])],
        "request": [lambda: cache.free(wrong), lambda: cache.fork(wrong), lambda: cache.length(wrong)],
        "length": [lambda: cache.truncate(request, wrong), lambda: cache.fork(request, length=wrong)],
        "requests": [lambda: cache.extend([wrong], [1]), lambda: cache.reorder([wrong], [0])],
        "counts": [lambda: cache.extend([request], [wrong])],
        "index": [lambda: cache.reorder([request], [wrong])],
        "batch": [lambda: cache.static_batch(wrong, max_tokens=9)],
        "new": [lambda: cache.static_batch(1, wrong, max_tokens=9)],
        "max_tokens": [lambda: cache.static_batch(1, max_tokens=wrong)],
        "max_blocks": [lambda: cache.static_batch(1, max_tokens=9, max_blocks=wrong)],
        "dim": [lambda: step.take(torch.zeros(9, 9), wrong)],
    }
    for name in ("layers", "kv_heads", "head_dim", "v_head_dim", "pages", "page_size"):
        calls[name] = [lambda name=name: make(**{name: wrong})]
    calls["memory"] = [lambda: make(pages=None, memory=wrong)]
    for name, those in calls.items():
        for call in those:
            with pytest.raises(TypeError, match=f"^{name} must be .* got "):
                call()
    assert cache.allocator.requests == (request,)
    assert cache.length(request) == 9


def test_arguments_of_other_types_are_refused_by_their_names() -> None:
    cache, wrong = make(), cast("Any", [1, 2])
    request = cache.add_request(20)
    step, static = cache.extend([request], [9], mode="prefill"), cache.static_batch(1, max_tokens=20)
    k, v = torch.zeros(1, 9, HEADS, D), torch.zeros(1, 9, HEADS, DV)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("ring must be a Ring", lambda: PagedKVCache(wrong, layers=1, dtype=torch.float32, pages=1)),
        ("device must be", lambda: make(device="gpu")),
        ("device must be", lambda: make(device=1.5)),
        ("device must be", lambda: make(device="cuda:99")),
        ("firsts must be", lambda: cache.add_batch(9, cast("Any", 1))),
        ("requests must be", lambda: cache.extend(cast("Any", request), [1])),
        ("counts must be", lambda: cache.extend([request], cast("Any", 1))),
        ("into must be", lambda: cache.extend([request], [1], into=wrong)),
        ("same_length must be", lambda: cache.extend([request], [1], same_length=wrong)),
        ("packed must be", lambda: cache.static_batch(1, max_tokens=9, packed=wrong)),
        ("tokens must be", lambda: step.take(wrong)),
        ("tokens must be the 9 new tokens", lambda: step.take(k[:, 1:])),
        ("tokens must be the 9 new tokens", lambda: step.take(torch.zeros(1, 12))),
        ("tokens must be the 9 new tokens", lambda: step.take(torch.zeros(9))),
        ("taken_by_rank must be of a prefill", static.taken_by_rank),
        ("bounds must be of decode", lambda: step.bounds(masks.causal())),
        ("tokens must be", lambda: static.arrange(wrong)),
        ("tokens must be the 0 new ones", lambda: static.arrange(torch.ones(1, dtype=torch.int64))),
        ("k must be a tensor", lambda: step.put(0, wrong, v)),
        ("step must be", lambda: attend(cast("Any", cache), 0, k, k, v)),
        ("comm_mode must be", lambda: attend(step, 0, k, k, v, comm_mode=wrong)),
        ("kv_access must be", lambda: attend(step, 0, k, k, v, kv_access=wrong)),
    ]
    for text, call in calls:
        with pytest.raises((TypeError, ValueError), match=text):
            call()
    assert cache.length(request) == 9


def test_reordered_requests_read_the_tokens_of_their_sources() -> None:
    ranks = Ranks(2, kv_dtype=None)
    beams = ranks.all("add_batch", 20, [0, 0, 0])
    ranks.said = {one: [] for one in beams}
    ranks.bring(beams, [6] * 3, mode="prefill", same_length=True)
    for index in ([1, 0, 0], [2, 2, 2], [0, 1, 2], [1, 2, 0]):
        ranks.all("reorder", beams, index)
        ranks.said = {one: list(ranks.said[beams[i]]) for one, i in zip(beams, index, strict=True)}
        ranks.read()
        ranks.bring(beams, [1] * 3, same_length=True)
        ranks.read()


def table_of(step: ForwardBatch) -> list[list[tuple[int, int, int]]]:
    """(page, start, length) of every block of every row of a decode step."""
    assert step.table is not None
    blocks = zip(step.table.pages.tolist(), step.table.starts.tolist(), step.table.lengths.tolist(), strict=True)
    counts = step.table.counts.tolist()
    return [list(zip(*row, strict=True))[:n] for row, n in zip(blocks, counts, strict=True)]


def test_a_static_batch_equals_a_new_one_at_the_same_addresses() -> None:
    said, fresh = Ranks(2, pages=20), Ranks(2, pages=20)
    steps = [cache.static_batch(4, 2, max_tokens=40) for cache in said.caches]
    addresses = [[x.data_ptr() for x in tensors(step)] for step in steps]
    for ranks in (said, fresh):
        for _ in range(4):
            ranks.said[ranks.all("add_request", 40 if not ranks.said else 12, 0)] = []
        ranks.bring([0], [19])
    for requests in ([0], [2, 0, 1], [3, 1, 0, 2], [1], [0, 2, 3]):
        said.bring(requests, [2] * len(requests), into=steps)
        for step, other in zip(steps, fresh.bring(requests, [2] * len(requests)), strict=True):
            n = len(requests)
            assert (step.requests, step.lengths, step.firsts, step.last_rows) == (
                other.requests, other.lengths, other.firsts, other.last_rows,
            )  # fmt: skip
            assert table_of(step) == table_of(other) + [[]] * (4 - n)
            assert torch.equal(step.positions[:n], other.positions)
            assert torch.equal(step.slots[:n], other.slots)
            assert step.slots[n:].eq(-1).all()
            for mask in MASKS:
                [(lo, hi)], [(other_lo, other_hi)] = step.bounds(mask), other.bounds(mask)
                assert torch.equal(lo[:n], other_lo)
                assert torch.equal(hi[:n], other_hi)
                assert torch.equal(lo[n:], hi[n:])
                assert lo is step.bounds(mask)[0][0]
        said.read()
    assert addresses == [[x.data_ptr() for x in tensors(step)] for step in steps]


class Shown:
    """A history of a rank's cache, and static steps of four shapes by turns, which must equal the allocator."""

    def __init__(self, seed: int, rank: int) -> None:
        self.draw, self.cache = random.Random(seed), make(rank, 2, layers=1, pages=40)
        self.allocator = self.cache.allocator
        shapes = [(3, 1, False), (5, 3, False), (9, 1, True), (6, 3, True)]
        self.steps = [
            self.cache.static_batch(batch, new, max_tokens=60, packed=packed) for batch, new, packed in shapes
        ]
        self.groups: list[list[int]] = []
        self.decoded: list[tuple[int, ...]] = []

    def change(self) -> None:
        draw, cache, here = self.draw, self.cache, list(self.allocator.requests)
        what = draw.choice(
            ["add_request", "same_length", "fork", "truncate", "free", "reorder", "reorder", "prefill", "decode"]
        )
        one = draw.choice(here) if here else -1
        if what == "add_request":
            cache.add_request(draw.randint(10, 40), draw.choice([0, 3]))
        elif what == "same_length":
            self.groups.append(cache.add_batch(30, [0] * draw.randint(2, 3)))
            cache.extend(self.groups[-1], [7] * len(self.groups[-1]), mode="prefill", same_length=True)
        elif what == "reorder" and self.groups:
            group = draw.choice(self.groups)
            cache.reorder(group, [draw.randrange(len(group)) for _ in group])
        elif what == "fork" and here:
            length = draw.randint(0, cache.length(one))
            cache.fork(one, length, max(1, length) + draw.randint(0, 20))
        elif what == "truncate" and here:
            cache.truncate(one, draw.randint(max(0, cache.length(one) - 9), cache.length(one)))
        elif what == "free" and len(here) > 4:
            cache.free(one)
            self.groups = [group for group in self.groups if one not in group]
        elif (
            what in ("prefill", "decode")
            and here
            and self.allocator.find(one).reserved_tokens > self.allocator.length(one)
        ):
            cache.extend([one], [1], mode=what)

    def decode(self) -> bool:
        step = self.draw.choice(self.steps)
        (batch, new), packed = step.tiles, step.pieces is not None
        left = {
            one: self.allocator.find(one).reserved_tokens - self.allocator.length(one)
            for one in self.allocator.requests
        }
        able = [one for one in left if left[one] >= (1 if packed else new)]
        chosen = self.draw.sample(able, min(len(able), self.draw.randint(1, batch)))
        group = self.draw.choice(self.groups) if self.groups else []
        # beams go on together, and most requests stay in their row
        chosen = group if group and set(group) <= set(able) and len(group) <= batch else sorted(chosen)
        if not chosen:
            return False
        counts = [self.draw.randint(1, min(left[one], batch // len(chosen) * new)) if packed else new for one in chosen]
        self.cache.extend(chosen, counts, into=step, same_length=chosen == group)
        self.check(step, counts)
        return True

    def check(self, step: ForwardBatch, counts: list[int]) -> None:
        """Compare all of a static batch with the allocator, row by row."""
        (batch, new), rank, allocator = step.tiles, self.cache.ring.rank, self.allocator
        tables, tokens, lasts = [], [], []
        for one, count in zip(step.requests, counts, strict=True):
            first, length = allocator.find(one).first, allocator.length(one)
            pieces = [piece for piece in page_spans(allocator, one, length - count) if piece.rank == rank]
            slot = {piece.start + x: 4 * piece.page + piece.row + x for piece in pieces for x in range(piece.length)}
            for begin in range(length - count, length, new):
                tables.append([tuple(x)[1:] for x in blocks_of(allocator, one) if x.rank == rank])
                there = range(begin, min(begin + new, length))
                tokens += [(x, slot.get(x, -1), first, length) for x in there] + [(0, -1, 0, 0)] * (new - len(there))
                lasts.append(len(tokens) - 1 - new + len(there))
        some = sum(-(-count // new) for count in counts)
        ends = [lasts[i - 1] for i in itertools.accumulate(-(-count // new) for count in counts)]
        assert table_of(step) == tables + [[]] * (batch - some)
        columns = [step.positions32, step.slots, step.starts, step.ends]
        said = zip(*[x.flatten().tolist() for x in columns if x is not None], strict=True)
        causal = [(first, max(first, x + 1) if length else 0) for x, _, first, length in tokens]
        lo, hi = (x.flatten().tolist() for x in step.bounds(masks.causal())[0])
        assert list(zip(lo, hi, strict=True)) == causal + [(0, 0)] * ((batch - some) * new)
        assert list(said) == tokens + [(0, -1, 0, 0)] * ((batch - some) * new)
        assert step.positions.flatten().tolist() == [x[0] for x in tokens] + [0] * ((batch - some) * new)
        assert step.last_rows == tuple((0, end) if step.pieces else divmod(end, new) for end in ends)
        assert (step.lengths, step.firsts) == (
            tuple(map(allocator.length, step.requests)), tuple(allocator.find(one).first for one in step.requests),
        )  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_a_static_batch_equals_the_allocator_after_every_history(rank: int) -> None:
    decoded = 0
    for seed in range(8):
        shown = Shown(seed, rank)
        for _ in range(60):
            try:
                for _ in range(shown.draw.randint(0, 3)):
                    shown.change()
                decoded += shown.decode()
            except (CacheFull, ValueError):  # beams that were cropped apart, and what has no room
                shown.groups = []
    assert decoded > 200


def test_rows_of_padding_see_nothing_in_a_static_batch() -> None:
    cache = make(pages=40)
    requests = [cache.add_request(20), cache.add_request(20, 4)]
    step = cache.static_batch(2, max_tokens=20)
    for length in range(1, 9):
        cache.extend(requests, [1, 1], into=step)
        [(lo, hi)] = step.bounds(masks.causal())
        assert (lo.tolist(), hi.tolist()) == ([[0], [4]], [[length], [max(4, length)]])


def test_a_failed_upload_is_repeated_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its rows would go on from blocks that the device never got."""
    cache = make(pages=40)
    requests = [cache.add_request(30) for _ in range(3)]
    step = cache.static_batch(3, max_tokens=30)
    cache.extend(requests, [1] * 3, into=step)
    for request in requests[:2]:
        cache.extend([request], [9], mode="prefill")
    with monkeypatch.context() as broken:
        broken.setattr(batch_metadata, "copy_to_device", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.extend(requests, [1] * 3, into=step)
    cache.extend(requests, [1] * 3, into=step)
    assert table_of(step) == [[x[1:] for x in blocks_of(cache.allocator, one)] for one in requests]
    assert step.positions.flatten().tolist() == [cache.length(one) - 1 for one in requests]


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_tensors_of_a_decode_batch_are_aligned(batch: int) -> None:
    """Else kernels would be compiled, and launches recorded, again and again as requests grow."""
    cache = make(pages=400)
    requests = [cache.add_request(100) for _ in range(batch)]
    static = cache.static_batch(batch, 3, max_tokens=100)
    for _ in range(9):
        for step in (cache.extend(requests, [1] * batch), cache.extend(requests, [3] * batch, into=static)):
            assert [x.data_ptr() % 32 for x in tensors(step)] == [0] * len(tensors(step))


def tensors(step: ForwardBatch) -> list[Tensor]:
    assert step.table is not None
    assert step.positions32 is not None
    assert step.starts is not None
    assert step.ends is not None
    table = step.table
    bounds = [x for mask in MASKS for pair in step.bounds(mask) for x in pair]
    return [
        step.positions, step.slots, step.positions32, step.starts, step.ends, step.taken, table.pages, table.starts, table.lengths,
        table.counts, *bounds,
    ]  # fmt: skip


@pytest.mark.parametrize("mask", SHORT_FORMS, ids=str)
def test_bounds_are_what_each_row_may_see(mask: tuple[bool, tuple[int | None, int | None] | None, int | None]) -> None:
    causal, window, chunk_len = mask
    cache = make(pages=16)
    batch = cache.add_batch(30, [4, 0])
    cache.extend(batch, [9, 9], same_length=True)
    step = cache.extend(batch, [3, 3], same_length=True)
    [(lo, hi)] = step.bounds(fold_mask(causal=causal, window=window, chunk_len=chunk_len))
    left, right = (None, None) if window is None else window
    for element, first in enumerate((4, 0)):
        for row, i in enumerate((9, 10, 11)):
            seen = [
                j
                for j in range(first, 12)
                if (not causal or j <= i) and (left is None or j >= i - left) and (right is None or j <= i + right)
                if chunk_len is None or (i - first) // chunk_len == (j - first) // chunk_len
            ]
            assert list(range(lo[element, row], hi[element, row])) == seen


def lines_of(call: Callable[[], object]) -> int:
    """Lines of Python that a call runs."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def test_a_decode_step_costs_the_same_over_a_million_tokens() -> None:
    found = []
    for tokens in (2**10, 2**20):
        cache = make(0, 4, layers=1, kv_heads=1, head_dim=1, v_head_dim=1, pages=8 * 2**12 + 8, page_size=64)
        requests = [cache.add_request(tokens + 100) for _ in range(8)]
        for request in requests:
            cache.allocator.assign([request], [tokens])
        cache.extend(requests, [1] * 8)
        found.append(lines_of(partial(cache.extend, requests, [1] * 8)))
        assert table_of(cache.extend(requests, [1] * 8))[0][-1][1] <= tokens
    assert found[0] == found[1]


def test_to_come_and_to_go_cost_the_same_beside_a_thousand_that_have_ended() -> None:
    found = []
    for ended in (10, 1000):
        cache = make(pages=4000)
        for _ in range(ended):
            request = cache.add_request(9)
            cache.extend([request], [6], mode="prefill")
            cache.truncate(request, 6, 6)
        costs = [
            lines_of(partial(cache.add_request, 9)),
            lines_of(partial(cache.fork, cache.allocator.requests[0], 5, 9)),
        ]
        request = cache.add_request(9)
        cache.extend([request], [7], mode="prefill")
        costs += [lines_of(partial(cache.truncate, request, 6, 6)), lines_of(partial(cache.free, request))]
        found.append(costs)
    assert found[0] == found[1]


def test_the_upload_for_a_token_does_not_grow_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    upload = batch_metadata.copy_to_device
    monkeypatch.setattr(
        batch_metadata, "copy_to_device", lambda data, words: (sizes.append(len(data)), upload(data, words))
    )
    found, costs = [], []
    for tokens in (2**14, 2**20):
        cache = make(0, 4, layers=1, kv_heads=1, head_dim=1, v_head_dim=1, pages=8 * 2**12 + 64, page_size=64)
        requests = [cache.add_request(tokens + 1000) for _ in range(8)]
        for request in requests:
            cache.allocator.assign([request], [tokens])
        step = cache.static_batch(8, max_tokens=tokens + 1000, max_blocks=2**13)
        bring = partial(cache.extend, requests, [1] * 8, into=step)
        bring()
        assert sizes.pop() >= 256 + 20 * 8 * tokens // 64 // 4, "the first brings all blocks"
        costs.append(lines_of(bring))
        for _ in range(300):
            bring()
        found.append(sizes.copy())
        sizes.clear()
        # what is taken back and said anew, as guesses are, costs no more
        for request in requests:
            cache.truncate(request, cache.length(request) - 1)
        bring()
        assert sizes.pop() <= 416
        assert all(
            table_of(step)[i][-1][0] == cache.allocator.table(one, 0).pages[-1] for i, one in enumerate(requests)
        )
    assert found[0] == found[1]
    assert 256 <= min(found[0]) < max(found[0]) <= 416
    assert costs[0] == costs[1]


def test_a_prompt_of_a_million_tokens_is_planned_in_runs() -> None:
    cache = make(0, 4, layers=1, kv_heads=1, head_dim=1, v_head_dim=1, pages=2**12 + 8, page_size=64)
    request = cache.add_request(2**20)
    steps: list[ForwardBatch] = []
    # Python walks pages where they are handed out, in three lines, and nowhere else
    assert lines_of(lambda: steps.append(cache.extend([request], [2**20], mode="prefill"))) < 3 * 2**20 / 64 + 2000
    assert steps[0].sharding is not None
    assert max(map(len, steps[0].sharding.shards)) == 2
    assert steps[0].rows == 2**18


@pytest.mark.parametrize("case", CASES, ids=str)
def test_put_and_take_equal_their_definition(case: Case) -> None:
    assert_put(rows.put, case)
    assert_take(rows.take, case)


@pytest.mark.parametrize(
    ("heads", "columns", "apart", "match"),
    [(1, 8, "", r"pool\.k must have .* got 1 heads and 0 columns"), (2, 4, "", r"pool\.k must have one head .* got 2 heads"),
     (1, 4, "v", r"v must be columns of k .*pass k\[..., :4\]"), (1, 4, "contained", "contained must be columns of k")],
)  # fmt: skip
def test_pools_of_latents_that_cannot_be_kept_are_refused(heads: int, columns: int, apart: str, match: str) -> None:
    pool, k = torch.zeros(2, heads, 4, 8), torch.ones(1, 1, heads, 8)
    v = k[..., :columns].clone() if apart == "v" else k[..., :columns]
    contained = torch.zeros_like(k), torch.zeros_like(k)[..., :columns]
    slots = torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(ValueError, match=match):
        rows.put(rows.Pool(pool, pool[..., :columns]), k, v, slots, contained if apart == "contained" else None)
    if apart != "contained":
        with pytest.raises(ValueError, match=match):
            rows.take(rows.Pool(pool, pool[..., :columns]), slots, k, v)
    assert not pool.any()


def test_keys_given_as_values_are_no_latents() -> None:
    x = torch.tensor([[[[1.0, 2.0], [3.0, math.inf]]]])
    pools = torch.zeros(2, 1, 2, 4, 2)
    rows.put(rows.Pool(pools[0], pools[1]), x, x, torch.zeros(1, 1, dtype=torch.long))
    assert torch.equal(pools[0, 0, :, 0].nan_to_num(-1.0), torch.tensor([[1.0, 2.0], [-1.0, -1.0]]))
    assert torch.equal(pools[1, 0, :, 0], torch.tensor([[1.0, 2.0], [0.0, 0.0]]))


def test_fp8_rows_are_off_by_half_a_step_of_three_bits_at_most() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 2, 128, generator=generator) * torch.rand(500, 2, 1, generator=generator) ** 4
    x[..., ::7] *= 1e-4
    x[0] = 0
    quantised, scale = rows.quantise(x)
    found = rows.dequantise(quantised, scale, torch.float32)
    # half a unit of the third bit for numbers that are normal in e4m3, half the least subnormal for others
    bound = torch.maximum(x.abs() * 2**-4, scale.unsqueeze(-1) * 2**-10) * (1 + 2**-20)
    assert ((found - x).abs() <= bound).all()
    relative = (found - x).norm() / x.norm()
    # errors spread evenly over a step of 2^-3 relative to a mantissa in [1, 2): about 2^-3 / sqrt(12) / 1.5
    assert 0.02 < relative < 0.03, relative


def test_attention_over_fp8_is_as_close_as_its_three_bits_allow() -> None:
    torch.manual_seed(0)
    n, h, d = 700, 4, 64
    q, k, v = (torch.randn(1, n, heads, d).bfloat16() for heads in (h, HEADS, HEADS))
    found = {}
    for kv_dtype in (None, torch.float8_e4m3fn):
        cache = make(head_dim=d, v_head_dim=d, dtype=torch.bfloat16, pages=11, page_size=64, kv_dtype=kv_dtype)
        request = cache.add_request(n)
        step = cache.extend([request], [n - 1])
        step.put(0, step.take(k[:, :-1]), step.take(v[:, :-1]))
        found[kv_dtype] = attend(cache.extend([request], [1]), 0, q[:, -1:], k[:, -1:], v[:, -1:]).float()
    # scores move by at most delta, so weights by a factor of e^(2 delta); values by 2^-4 of themselves
    reach = (q[0, -1].float().abs().view(HEADS, -1, 1, d) * k[0].float().abs().transpose(0, 1).unsqueeze(1)).sum(-1)
    delta = reach.max().item() * d**-0.5 * 2**-4
    largest = v.float().abs().max().item()
    worst = (math.exp(2 * delta) - 1 + 2**-4) * largest + 2**-8 * largest
    error = (found[None] - found[torch.float8_e4m3fn]).abs().max().item()
    assert 0 < error < worst
    # roundings are independent, so in fact they mostly cancel: 700 keys leave about 1 / 26 of a value's own error
    assert error < 2**-4 * found[None].abs().max().item()


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_rows_of_freed_requests_are_not_seen(mode: Literal["prefill", "decode"]) -> None:
    found = []
    for spoiled in (False, True):
        cache = make(pages=3)
        if spoiled:
            request = cache.add_request(12)
            step = cache.extend([request], [12])
            step.put(0, *(torch.full((1, 12, HEADS, dim), math.nan) for dim in (D, DV)))
            cache.free(request)
        torch.manual_seed(1)
        request = cache.add_request(10)
        x = [torch.randn(1, 10, heads, dim) for heads, dim in ((HEADS, D), (HEADS, D), (HEADS, DV))]
        parts = []
        for begin, end in ((0, 5), (5, 6), (6, 10)):
            step = cache.extend([request], [end - begin], mode=mode)
            parts.append(attend(step, 0, *(y[:, begin:end] for y in x)))
        found.append(torch.cat(parts, 1))
    assert found[0].isfinite().all()
    assert torch.equal(*found)


def test_rows_without_a_request_see_nothing_and_are_not_stored() -> None:
    cache = make()
    request = cache.add_request(20)
    step = cache.static_batch(3, max_tokens=20)
    torch.manual_seed(0)
    for _ in range(3):
        cache.extend([request], [1], into=step)
        q, k, v = (torch.randn(3, 1, heads, dim) for heads, dim in ((HEADS, D), (HEADS, D), (HEADS, DV)))
        k[1:], v[1:] = math.nan, math.nan
        o = attend(step, 0, q, k, v)
        assert torch.equal(o[1:], torch.zeros(2, 1, HEADS, DV))
        assert o[0].isfinite().all()
    assert cache.k.isfinite().all()
    assert cache.v.isfinite().all()


def test_memory_is_bounded_by_what_is_given() -> None:
    cache = make(pages=None, memory=10_000)
    # two layers, two heads, 4 + 3 numbers of 4 bytes; 448 bytes for a page of 4
    assert cache.bytes_per_token == 112
    assert cache.allocator.pages == 22
    assert cache.capacity_tokens == 88
    assert sum(x.nbytes for x in (cache.k, cache.v)) == 22 * 448
    small = make(pages=None, memory=10_000, kv_dtype=torch.float8_e4m3fn)
    assert small.bytes_per_token == 2 * 2 * (4 + 3 + 2 * 4)
    assert small.allocator.pages == 41
    scales = [x for x in small.scales(0) if x is not None]
    assert small.k.nbytes + small.v.nbytes + 2 * sum(x.nbytes for x in scales) == 41 * 4 * small.bytes_per_token
    with pytest.raises(
        CacheFull, match=r"a request of up to 89 tokens needs 23 pages of 4 \(10304 bytes\), got 22 of 22 on 1 ranks"
    ):
        cache.add_request(89)


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"pages": None}, ValueError, "pages or memory must be given on cpu"),
        ({"memory": 10}, ValueError, "pages and memory must"),
        ({"pages": None, "memory": 400}, ValueError, "memory must"),
        ({"page_size": 2**40}, ValueError, "bytes on each rank, got .* of memory on the smallest machine"),
        ({"pages": 0}, ValueError, "pages must"),
        ({"layers": 0}, ValueError, "layers must"),
        ({"kv_heads": 0}, ValueError, "kv_heads must"),
        ({"page_size": 0}, ValueError, "page_size must"),
        ({"v_head_dim": 0}, ValueError, "v_head_dim must"),
        ({"dtype": torch.int8}, ValueError, "dtype must"),
        ({"kv_dtype": torch.float8_e5m2}, NotImplementedError, "kv_dtype must"),
        ({"kv_dtype": torch.bfloat16}, NotImplementedError, "kv_dtype must"),
        ({"dtype": torch.float64, "kv_dtype": torch.float8_e4m3fn}, NotImplementedError, "float64 too"),
    ],
)  # fmt: skip
def test_a_cache_that_cannot_be_is_refused(changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make(**changes)


def test_rows_that_do_not_belong_there_are_refused() -> None:
    cache = make()
    request = cache.add_request(20)
    step = cache.extend([request], [5])
    k, v = torch.zeros(1, 5, HEADS, D), torch.zeros(1, 5, HEADS, DV)
    before = cache.k.clone()
    cases: list[tuple[str, Callable[[], object]]] = [
        ("layer must", lambda: step.put(2, k, v)),
        ("layer must", lambda: step.put(-1, k, v)),
        ("k must", lambda: step.put(0, k[:, 1:], v)),
        ("v must", lambda: step.put(0, k, k)),
        ("k must", lambda: step.put(0, k[:, :, 1:], v)),
        ("v must", lambda: step.put(0, k, v.double())),
        ("k must", lambda: step.put(0, k.to("meta"), v)),
        ("k must", lambda: step.put(0, k.mT.contiguous().mT, v)),
        ("decode must", lambda: cache.extend([request], [17], mode="decode")),
        ("mode must be", lambda: cache.extend([request], [1], mode="encode")),  # pyright: ignore[reportArgumentType]
        ("must stay within the 20 tokens it reserved, got 5 and 16 more", lambda: cache.extend([request], [16])),
        ("batch must", lambda: cache.static_batch(0, max_tokens=4)),
        ("max_tokens must", lambda: cache.static_batch(1, max_tokens=0)),
        ("max_tokens must", lambda: cache.static_batch(1, max_tokens=2**31)),
        ("new must", lambda: cache.static_batch(1, 17, max_tokens=40)),
    ]  # fmt: skip
    for text, call in cases:
        with pytest.raises(ValueError, match=text):
            call()
        assert cache.length(request) == 5
    assert torch.equal(cache.k, before)


def test_a_batch_of_freed_requests_stores_nothing() -> None:
    cache = make()
    first, second = cache.add_request(20), cache.add_request(20)
    step = cache.extend([first], [5])
    k, v = torch.ones(1, 5, HEADS, D), torch.ones(1, 5, HEADS, DV)
    cache.free(second)
    step.put(0, k, v)
    cache.truncate(first, 4)
    with pytest.raises(ValueError, match="request 0 of 5 tokens, which was truncated to 4 tokens since; extend again"):
        step.put(1, k, v)
    cache.free(first)
    with pytest.raises(ValueError, match="request 0 of 5 tokens, which was freed since"):
        step.put(1, k, v)
    assert not cache.k[1].any()


def test_a_static_batch_refuses_too_large_requests_before_pages_are_assigned() -> None:
    cache = make(pages=16)
    requests = [cache.add_request(30) for _ in range(2)]
    step = cache.static_batch(1, 2, max_tokens=8)
    narrow = cache.static_batch(2, 1, max_tokens=30, max_blocks=1)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("at most 1 requests with 2 new tokens each, got 2", lambda: cache.extend(requests, [2, 2], into=step)),
        ("at most 1 requests with 2 new tokens each, got 1 with .1.", lambda: cache.extend(requests[:1], [1], into=step)),
        ("8 tokens in 3 blocks of each rank, got request 0 with 9 in up", lambda: cache.extend(requests[:1], [2], into=step)),
        ("in 1 blocks of each rank, got request 0 with 8 in up to 3", lambda: cache.extend(requests[:1], [1], into=narrow)),
        ("into must", lambda: cache.extend(requests[:1], [2], mode="prefill", into=step)),
        ("into must", lambda: cache.extend([0], [2], into=make().static_batch(1, max_tokens=8))),
    ]  # fmt: skip
    cache.extend(requests[:1], [7])
    for text, call in cases:
        with pytest.raises(ValueError, match=text):
            call()
        assert cache.length(requests[0]) == 7


def test_requests_that_cannot_be_prefilled_together_are_refused_before_pages_are_assigned() -> None:
    cache = make(0, 2)
    padded, other = cache.add_request(20, first=3), cache.add_request(20)
    free = cache.free_pages
    with pytest.raises(NotImplementedError, match=r"must be prefilled with same_length, got firsts \[3, 0\]"):
        cache.extend([padded, other], [9, 4])
    cache.extend([other], [4])
    with pytest.raises(NotImplementedError, match=r"must have equal lengths on the same ranks .* got lengths \[0, 4\]"):
        cache.extend([padded, other], [5, 5], mode="prefill", same_length=True)
    with pytest.raises(ValueError, match="requests must have at most 2147483647 tokens together, got 2147483652"):
        cache.extend([other, padded], [2**30, 2**30], mode="prefill")
    assert cache.length(padded) == 0
    assert sum(free) - sum(cache.free_pages) == 1


def _differing(what: str) -> str:
    changes: dict[str, Any] = {"pages": 3 + Ring().rank} if what == "pages" else {"head_dim": 0 if Ring().rank else 8}
    facts: dict[str, Any] = {
        "layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": torch.float32, "pages": 3, "device": "cpu",
    }  # fmt: skip
    try:
        PagedKVCache(Ring(), **(facts | changes))
    except ValueError as error:
        return str(error)
    return ""


def _least(refusing: bool) -> int | str:
    ring = Ring()
    try:
        with ring.propagate_errors():
            if refusing and ring.rank:
                raise ValueError("no")
        return ring.all_reduce_min(7 - ring.rank)
    except ValueError as error:
        return str(error)


def test_the_least_number_is_that_of_all_ranks(pool: Pools) -> None:
    assert Ring().all_reduce_min(3) == 3
    assert pool(3).run(_least, False) == [5, 5, 5]
    here, there, _ = pool(3).run(_least, True)
    assert "ring rank 1 refused: ValueError: no" in here
    assert there == "no"


def test_caches_that_differ_are_refused_on_every_rank(pool: Pools) -> None:
    for text in pool(2).run(_differing, "pages"):
        assert "a cache of keys and values must be the same on all ranks" in text
    here, there = pool(2).run(_differing, "head_dim")
    assert "ring rank 1 refused: ValueError: head_dim must be at least 1, got 0" in here
    assert there == "head_dim must be at least 1, got 0; give a number that fits"


class Comparing:
    """In place of a ring: counts what its ranks compare."""

    world_size, failures = 2, 0

    def __init__(self) -> None:
        self.compared: list[str] = []

    def assert_equal_across_ranks(self, what: str, text: str) -> None:
        self.compared.append(text)

    def init_transport(self, device: torch.device) -> None:
        """Rows move somehow."""


def test_ranks_compare_prefills_always_and_decoding_as_often_as_it_pays() -> None:
    cache, ring = make(pages=400), Comparing()
    consistency = ConsistencyChecker(ring)  # pyright: ignore[reportArgumentType]
    requests = [cache.add_request(200) for _ in range(6)]
    static, packed = cache.static_batch(4, max_tokens=200), cache.static_batch(8, 4, max_tokens=200, packed=True)

    def compared(call: Callable[[int], ForwardBatch], times: int) -> list[bool]:
        found = []
        for turn in range(times):
            before = len(ring.compared)
            consistency.check_batch(call(turn), "a kind", torch.device("cpu"))
            found.append(len(ring.compared) > before)
        return found

    assert compared(lambda _: cache.extend(requests[:1], [9], mode="prefill"), 3) == [True] * 3
    # the same requests: the first, and then one in seventeen
    assert compared(lambda _: cache.extend(requests[:2], [1, 1]), 35) == [turn in (0, 17, 34) for turn in range(35)]
    # others every time
    assert compared(lambda turn: cache.extend(requests[turn % 2 :][:3], [1] * 3), 6) == [True] * 6
    # static ones that are others every time: as if they were the same, packed ones among them
    assert compared(lambda turn: cache.extend(requests[turn % 3 :][:3], [1] * 3, into=static), 35) == [
        turn in (16, 33) for turn in range(35)
    ]
    turns = [
        partial(cache.extend, requests[:2], [5, 9], into=packed),
        partial(cache.extend, requests[:3], [1] * 3, into=static),
    ]
    assert compared(lambda turn: turns[turn % 2](), 18) == [turn == 15 for turn in range(18)]
    assert compared(lambda _: cache.extend(requests[:2], [1, 1], into=static), 18).count(True) == 1
    assert len(set(ring.compared)) == len(ring.compared), "every text says how long requests are"


WRONG = {
    "add_request": "reserve must",
    "extend": "must stay within the 20 tokens it reserved, got 0 and 21 more",
    "mode": "mode must",
    "truncate": "length must",
    "fork": "request must",
    "static": "new must",
}


def _bring(cache: PagedKVCache, step: ForwardBatch, dtype: torch.dtype = torch.float32) -> None:
    x = torch.ones(step.batch, step.rows, 1, 16)
    attend(step, 0, x.to(dtype), x, x)


def _paged(ring: Ring) -> PagedKVCache:
    sizes: dict[str, Any] = {"layers": 1, "kv_heads": 1, "head_dim": 16, "pages": 16, "page_size": 4}
    return PagedKVCache(ring, dtype=torch.float32, device="cpu", **sizes)


def _call_wrongly(kind: str) -> list[str]:
    """Errors of each rank where rank 1 calls a cache wrongly, and then of right calls of another cache."""
    ring, said = Ring(timeout=timedelta(seconds=20)), []
    for wrong in (kind if ring.rank == 1 else "", ""):
        cache = _paged(ring)
        try:
            request = cache.add_request(0 if wrong == "add_request" else 20)
            new = 21 if wrong == "extend" else 18
            _bring(cache, cache.extend([request], [new], mode="some" if wrong == "mode" else "auto"))  # pyright: ignore
            cache.truncate(request, 19 if wrong == "truncate" else 17)
            cache.fork(9 if wrong == "fork" else request)
            cache.static_batch(1, 17 if wrong == "static" else 1, max_tokens=20)
            _bring(cache, cache.extend([request], [1]))
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_calls_of_one_rank_are_errors_on_all(pool: Pools, kind: str) -> None:
    for refused, after in pool(2).run(_call_wrongly, kind):
        assert WRONG[kind] in refused
        assert after == ""


def _go_on_after_a_refusal(same_step: bool, same_request: bool) -> list[str]:
    """Errors of each rank for an attention call that rank 1 makes wrongly, and then for right ones."""
    ring, said = Ring(timeout=timedelta(seconds=20)), []
    cache = _paged(ring)
    a, b = cache.add_request(50), cache.add_request(50)
    for request in (a, b):
        _bring(cache, cache.extend([request], [18]))
    _bring(cache, cache.extend([a], [1]))
    cache.consistency.record("words before")
    step = cache.extend([b], [17 if same_step else 1])
    for wrong in (ring.rank == 1, False):
        try:
            _bring(cache, step, torch.float64 if wrong else torch.float32)
            said.append("")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
            if not same_step:
                cache.truncate(b, 18)
                cache.consistency.record("words after")
                step = cache.extend([b if same_request else a], [1])
    _bring(cache, cache.extend([a], [1]))
    cache.consistency.check_recorded("the end")
    return said


@pytest.mark.parametrize(("same_step", "same_request"), [(True, True), (False, True), (False, False)])
def test_ranks_compare_again_after_a_refusal(pool: Pools, same_step: bool, same_request: bool) -> None:
    """One of them came to the comparison and the other one did not, so they remembered different steps and words."""
    for refused, after in pool(2).run(_go_on_after_a_refusal, same_step, same_request):
        assert "q must have the dtype of the cache, torch.float32, got torch.float64" in refused
        assert after == ""


def _ask_for_room(who: set[int]) -> list[int]:
    """Comparisons of each step of decoding before which some ranks ask in vain for room, and are told so."""
    ring = Ring(timeout=timedelta(seconds=20))
    cache, agreement, found = _paged(ring), ring._consensus, list[int]()
    assert agreement is not None
    request = cache.add_request(100)
    _bring(cache, cache.extend([request], [30]))
    for _ in range(20):
        before = agreement._round
        if ring.rank in who:
            with pytest.raises(CacheFull, match="a request of up to 1000 tokens needs 250 pages"):
                cache.add_request(1000)
            with pytest.raises(CacheFull, match="a batch of 2 requests of up to 100 tokens needs"):
                cache.add_batch(100, [0, 0])
            with pytest.raises(CacheFull):
                cache.fork(request, reserve=1000)
        _bring(cache, cache.extend([request], [1]))
        found.append(agreement._round - before)
    return found


@pytest.mark.parametrize("who", [{0}, {0, 1}])
def test_a_full_cache_is_an_answer_that_programs_may_ask_for(pool: Pools, who: set[int]) -> None:
    """By one rank that plans for all of them, or on all ranks before each step: neither an error nor a message more."""
    for found in pool(2).run(_ask_for_room, who):
        assert sum(found[1:]) == 1, "every sixteenth step is compared"


def _probe_alike() -> list[str]:
    """Errors of a rank for right calls between calls that fail on all ranks."""
    ring, said = Ring(timeout=timedelta(seconds=20)), list[str]()
    cache = _paged(ring)
    request = cache.add_request(50)
    probes: list[Callable[[], object]] = [
        lambda: ring.sharding(0),
        lambda: cache.fork(9),
        lambda: cache.truncate(request, 99),
        lambda: cache.extend([request], [51]),
        lambda: cache.static_batch(0, max_tokens=1),
        lambda: ring.sharding(9).shard(torch.ones(8), 0),
        lambda: ring.kv_buffer(ring.sharding(9), 1, 1, 16, dtype=torch.float32, name="a", device="no device"),
    ]
    for number in range(3 * len(probes)):
        for probe in (probes * 4)[number : number + number % 4]:
            with pytest.raises((ValueError, RuntimeError)):
                probe()
        try:
            _bring(cache, cache.extend([request], [1]))
            said.append("")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    return said


def test_a_full_cache_on_all_ranks_fails_no_later_call(pool: Pools) -> None:
    assert pool(2).run(_probe_alike) == [[""] * 21] * 2


MISTAKES = ("truncate", "extend", "mode", "dtype", "softcap", "sharding", "attention")


def _make_step(
    cache: PagedKVCache, live: list[int], draw: random.Random, length: int, wrong: str, mistake: str
) -> None:
    """Any step of a program, drawn alike on all ranks; length: of no other step; wrong: this rank's mistake, mistake: anybody's."""
    ring, kind = cache.ring, draw.choice(("prefill", "decode", "decode", "attend", "probe", "ask"))
    if mistake in ("sharding", "attention") or (kind == "attend" and not mistake):
        sharding = ring.sharding(0 if wrong == "sharding" else length)  # known calls are not compared
        x = torch.full((1, sharding.shard_len, 1, 16), 3.0)
        softcap = -1.0 if wrong == "attention" else 0.0
        torch.testing.assert_close(ring_attention(x, x, x, sharding, window=draw.randrange(1, 9), softcap=softcap), x)
    elif mistake or kind == "prefill" or not live:
        if len(live) > 5:
            cache.free(live.pop(0))
        request = cache.add_request(60)
        if wrong == "truncate":
            cache.truncate(request, 1)
        new = 61 if wrong == "extend" else 17
        step = cache.extend([request], [new], mode="some" if wrong == "mode" else "prefill")  # pyright: ignore
        x = step.take(torch.full((1, new, 1, 16), float(request)))
        attend(step, 0, x.double() if wrong == "dtype" else x, x, x, softcap=-1.0 if wrong == "softcap" else 0.0)
        live.append(request)
    elif kind == "decode":
        some = [request for request in live if cache.length(request) < 60 and draw.random() < 0.8] or live[-1:]
        x = torch.tensor(some, dtype=torch.float32)[:, None, None, None].expand(-1, 1, 1, 16).contiguous()
        torch.testing.assert_close(attend(cache.extend(some, [1] * len(some)), 0, x, x, x), x)
    elif kind == "probe":
        for probe in (lambda: cache.fork(999), lambda: ring.sharding(0)) * draw.randrange(3):
            with pytest.raises(ValueError, match="must be"):
                probe()
    elif ring.rank == draw.randrange(ring.world_size):
        with pytest.raises(CacheFull):
            cache.add_request(9999)


def _run_program(seed: int) -> int:
    """Number of failed steps of a program, on all ranks, in which one made a mistake."""
    ring, draw, live, failed = Ring(timeout=timedelta(seconds=20)), random.Random(seed), list[int](), 0
    cache = PagedKVCache(
        ring, layers=1, kv_heads=1, head_dim=16, dtype=torch.float32, pages=99, page_size=4, device="cpu"
    )
    for number in range(50):
        mistake, who = draw.choice(("", "", *MISTAKES)) if draw.random() < 0.4 else "", draw.randrange(ring.world_size)
        # what is drawn in a step that ends early is not drawn by all
        rest = random.Random(draw.random())
        step = partial(_make_step, cache, live, rest, 9 + number, mistake if ring.rank == who else "", mistake)
        if not mistake:
            step()
            continue
        with pytest.raises(ValueError, match=None if ring.rank == who else f"ring rank {who} refused"):
            step()
        failed += 1
        for request in set(cache.allocator.requests) - set(live):
            cache.free(request)
    ring.assert_equal_across_ranks("the end", str([(request, cache.length(request)) for request in live]))
    return failed


@pytest.mark.parametrize(("world_size", "seed"), [(2, 0), (2, 1), (3, 2), (3, 3)])
def test_programs_continue_after_errors_of_single_ranks(pool: Pools, world_size: int, seed: int) -> None:
    """Prefill, decoding, attention, probes on all ranks and questions of one: results are right, and nobody waits for a rank."""
    assert min(pool(world_size).run(_run_program, seed)) > 5
