"""The plan computes every visible pair exactly once and moves nothing that nobody sees."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.plan.attention_spec import AttentionSpec, serialize
from ringattn.plan.layouts import Run, Shard, balanced, contiguous, make_shards, striped, zigzag
from ringattn.plan.ring_plan import Nodes, RingPlan, RingStep, Rows, describe, make_nodes, make_plan, moved_rows
from ringattn.plan.sharding import Sharding
from tests.support.random_masks import layouts, log_normal_documents, masks, positions, visible_times
from tests.support.short_mask import ShortMask
from tests.support.timing import assert_quick

DIRECTIONS = ["keys", "queries"]


class Case(NamedTuple):
    """Mask, shards of both sides and the direction of a plan."""

    mask: ShortMask
    queries: tuple[Shard, ...]
    keys: tuple[Shard, ...]
    moving: str

    def plan(self, nodes: Nodes | None = None) -> RingPlan:
        return make_plan(self.queries, self.keys, self.mask, self.moving, nodes)

    @property
    def sides(self) -> tuple[list[list[int]], list[list[int]]]:
        """Positions of every rank's stationary and moving rows."""
        stay, move = (self.queries, self.keys) if self.moving == "keys" else (self.keys, self.queries)
        return [positions(shard) for shard in stay], [positions(shard) for shard in move]

    def pair(self, mine: int, other: int) -> tuple[int, int]:
        """Query and key of a stationary and a moving position."""
        return (mine, other) if self.moving == "keys" else (other, mine)

    def visible(self, mine: int, other: int) -> int:
        return visible_times(self.mask, *self.pair(mine, other))

    def assert_computes_every_visible_pair_once(self, plan: RingPlan) -> None:
        stay, _ = self.sides
        computed = Counter(
            self.pair(mine, other)
            for rank, ring_step in visits_of(plan)
            for mine in stay[rank]
            for other in packed_positions(ring_step)
        )
        assert max(computed.values()) == 1
        everything = itertools.product(range(self.mask.seq_len), range(self.mask.kv_len))
        assert {pair for pair in everything if visible_times(self.mask, *pair)} <= computed.keys()


@st.composite
def cases(draw_value: st.DrawFn) -> Case:
    mask = draw_value(masks(max_len=26))
    world_size = draw_value(st.integers(1, 8))
    queries, keys = (draw_value(layouts(length, world_size)) for length in (mask.seq_len, mask.kv_len))
    return Case(mask, queries, keys, draw_value(st.sampled_from(DIRECTIONS)))


def visits_of(plan: RingPlan) -> list[tuple[int, RingStep]]:
    return [(part.rank, ring_step) for part in plan.ranks for ring_step in part.ring_steps if ring_step is not None]


def rows_in(rows: Rows) -> list[int]:
    return [x for offset, length in rows for x in range(offset, offset + length)]


def packed_positions(ring_step: RingStep) -> list[int]:
    return [start + stride * x for _, length, start, stride in ring_step.runs for x in range(length)]


@settings(max_examples=75, deadline=None)
@given(cases())
def test_every_visible_pair_is_computed_exactly_once(case: Case) -> None:
    case.assert_computes_every_visible_pair_once(case.plan())


@settings(max_examples=75, deadline=None)
@given(cases())
def test_rows_move_from_the_first_to_the_last_that_is_seen_in_each_run(case: Case) -> None:
    plan, (stay, _) = case.plan(), case.sides
    for part in plan.ranks:
        for step in range(1, len(plan.ranks)):
            owner = (part.rank - step) % len(plan.ranks)
            wanted, base = [], 0
            for run in (case.keys if case.moving == "keys" else case.queries)[owner]:
                seen = [x for x in range(run.length) if any(case.visible(p, run.position(x)) for p in stay[part.rank])]
                if seen:
                    wanted.extend(range(base + seen[0], base + seen[-1] + 1))
                base += run.length
            ring_step = part.ring_steps[step]
            assert ([] if ring_step is None else rows_in(ring_step.rows)) == wanted
            assert ring_step is None or (ring_step.step, ring_step.owner) == (step, owner)


@settings(max_examples=75, deadline=None)
@given(cases())
def test_pairs_of_a_visit_are_exact(case: Case) -> None:
    plan, (stay, move) = case.plan(), case.sides
    for part in plan.ranks:
        for step, ring_step in enumerate(part.ring_steps):
            others = move[(part.rank - step) % len(plan.ranks)]
            pairs = sum(case.visible(p, other) for p in stay[part.rank] for other in others)
            assert (0 if ring_step is None else ring_step.pairs) == pairs


@settings(max_examples=50, deadline=None)
@given(cases())
def test_runs_are_the_rows_packed(case: Case) -> None:
    plan, (_, move) = case.plan(), case.sides
    for _, ring_step in visits_of(plan):
        rows = rows_in(ring_step.rows)
        assert packed_positions(ring_step) == [move[ring_step.owner][x] for x in rows]
        assert ring_step.num_rows == len(rows)
        offset = 0
        for begin, length, _, _ in ring_step.runs:
            assert begin == offset
            assert length > 0
            offset += length
        ends = [offset + length for offset, length in ring_step.rows]
        assert all(end < begin for end, (begin, _) in zip(ends, ring_step.rows[1:], strict=False))


@settings(max_examples=50, deadline=None)
@given(cases())
def test_sends_mirror_visits(case: Case) -> None:
    plan = case.plan()
    world_size = len(plan.ranks)
    for part in plan.ranks:
        assert part.sends[0] is None
        for step in range(1, world_size):
            peer = (part.rank + step) % world_size
            ring_step, send = plan.ranks[peer].ring_steps[step], part.sends[step]
            assert (ring_step is None) == (send is None)
            if ring_step is not None and send is not None:
                assert (send.step, send.peer, send.rows) == (step, peer, ring_step.rows)
                assert ring_step.owner == part.rank


@settings(max_examples=50, deadline=None)
@given(cases())
def test_step_0_holds_the_whole_shard(case: Case) -> None:
    plan, (_, move) = case.plan(), case.sides
    for part, held in zip(plan.ranks, move, strict=True):
        ring_step = part.ring_steps[0]
        if ring_step is None:
            assert not held
        else:
            assert ring_step.rows == ((0, len(held)),)
            assert packed_positions(ring_step) == held


def nodes_of(data: st.DataObject, world_size: int) -> Nodes:
    """Any spread of ranks over nodes of equal size."""
    order = data.draw(st.permutations(range(world_size)))
    size = data.draw(st.sampled_from([x for x in range(1, world_size + 1) if world_size % x == 0]))
    return tuple(tuple(order[first : first + size]) for first in range(0, world_size, size))


def node_of(rank: int, nodes: Nodes) -> tuple[int, ...]:
    return next(node for node in nodes if rank in node)


@settings(max_examples=75, deadline=None)
@given(cases(), st.data())
def test_a_double_ring_computes_every_visible_pair_exactly_once(case: Case, data: st.DataObject) -> None:
    plan, flat = case.plan(nodes_of(data, len(case.queries))), case.plan()
    case.assert_computes_every_visible_pair_once(plan)
    for part, alone in zip(plan.ranks, flat.ranks, strict=True):
        work, same = ({v.owner: v.pairs for v in x.ring_steps if v is not None and v.pairs} for x in (part, alone))
        assert work == same


@settings(max_examples=75, deadline=None)
@given(cases(), st.data())
def test_rows_cross_between_nodes_at_most_once_per_node(case: Case, data: st.DataObject) -> None:
    nodes = nodes_of(data, len(case.queries))
    plan, flat = case.plan(nodes), case.plan()
    needed: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    for rank, ring_step in visits_of(flat):
        if ring_step.owner not in node_of(rank, nodes):
            needed.setdefault((ring_step.owner, node_of(rank, nodes)), set()).update(rows_in(ring_step.rows))
    crossed: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for part in plan.ranks:
        for send in part.sends:
            if send is None:
                continue
            crosses = send.peer not in node_of(part.rank, nodes)
            assert crosses == (len(nodes) > 1 and send.step % part.local_size == 0)
            if crosses:
                crossed[part.rank, node_of(send.peer, nodes)] += 1
                assert needed[part.rank, node_of(send.peer, nodes)] <= set(rows_in(send.rows))
    assert crossed.keys() == needed.keys()
    assert all(times == 1 for times in crossed.values())


@settings(max_examples=75, deadline=None)
@given(cases(), st.data())
def test_every_ring_step_gets_its_rows_from_their_holder(case: Case, data: st.DataObject) -> None:
    plan, (_, move) = case.plan(nodes_of(data, len(case.queries))), case.sides
    given_rows = 0
    for part in plan.ranks:
        for step in range(1, len(plan.ranks)):
            outer, inner = divmod(step, part.local_size)
            ring_step = part.ring_steps[step] if inner else part.remote_shards[outer]
            senders = [other for other in plan.ranks if (s := other.sends[step]) is not None and s.peer == part.rank]
            assert len(senders) == (ring_step is not None)
            if ring_step is None:
                assert part.ring_steps[step] is None
                continue
            source = plan.ranks[ring_step.source]
            send = source.sends[step]
            assert senders == [source]
            assert send is not None
            remote_shard = source.remote_shards[outer] if inner else None
            held = packed_positions(remote_shard) if remote_shard is not None else move[ring_step.source]
            assert [held[x] for x in rows_in(send.rows)] == packed_positions(ring_step)
            given_rows += ring_step.num_rows
            assert ring_step.num_rows <= (plan.largest_send if inner else plan.largest_remote_send)
    assert sum(part.received_rows for part in plan.ranks) == given_rows


@settings(max_examples=30, deadline=None)
@given(cases())
def test_a_ring_of_one_node_is_the_ring(case: Case) -> None:
    assert case.plan((tuple(range(len(case.queries))),)) == case.plan()


def test_a_full_mask_moves_half_as_many_rows_between_nodes_as_one_ring() -> None:
    shards, mask = contiguous(64, 4), ShortMask(64, 64)
    plan = make_plan(shards, shards, mask, "keys", make_nodes(4, 2))
    ring_steps = [(v.owner, v.local_root) for v in plan.ranks[0].ring_steps if v is not None]
    assert ring_steps == [(0, None), (1, None), (2, None), (3, 1)]
    crossing = [s.peer for part in plan.ranks for s in part.sends if s is not None and s.peer // 2 != part.rank // 2]
    assert crossing == [2, 3, 0, 1]


def test_a_window_moves_only_its_halo() -> None:
    seq_len, world_size, left = 4096, 8, 100
    shards = contiguous(seq_len, world_size)
    plan = make_plan(shards, shards, ShortMask(seq_len, seq_len, causal=True, window=(left, 0)), "keys")
    for part in plan.ranks:
        received = [0 if ring_step is None else ring_step.num_rows for ring_step in part.ring_steps[1:]]
        assert received == [left if part.rank else 0] + [0] * (world_size - 2)
    assert moved_rows(plan) == left


def test_narrow_windows_over_stripes_visit_only_neighbours() -> None:
    shards = striped(64, 8)
    plan = make_plan(shards, shards, ShortMask(64, 64, window=(1, 0)), "keys")
    for part in plan.ranks:
        assert [ring_step is not None for ring_step in part.ring_steps] == [True, True] + [False] * 6
    alone = make_plan(shards, shards, ShortMask(64, 64, window=(0, 0)), "queries")
    assert moved_rows(alone) == 0


def test_causal_zigzag_shares_the_work_and_skips_nothing_visible() -> None:
    shards = zigzag(64, 4)
    plan = make_plan(shards, shards, ShortMask(64, 64, causal=True), "keys")
    work = [sum(ring_step.pairs for ring_step in part.ring_steps if ring_step) for part in plan.ranks]
    assert work == [64 * 65 // 2 // 4] * 4
    # rank 0 holds the last chunk and so needs all keys; rank 3, in the middle, misses every later second half
    assert [ring_step.num_rows for ring_step in plan.ranks[0].ring_steps if ring_step] == [16, 16, 16, 16]
    assert [ring_step.num_rows for ring_step in plan.ranks[3].ring_steps if ring_step] == [16, 8, 8, 8]


def test_documents_inside_a_shard_move_nothing() -> None:
    shards = contiguous(40, 4)
    for moving in DIRECTIONS:
        plan = make_plan(shards, shards, ShortMask(40, 40, documents=(0, 10, 13, 20, 30, 40)), moving)
        assert moved_rows(plan) == 0


def test_batch_elements_share_the_union_of_their_rows() -> None:
    shards = contiguous(12, 2)
    plan = make_plan(shards, shards, ShortMask(12, 12, lengths=((4, 8), (5, 12), (4, 8))), "keys")
    ring_step = plan.ranks[1].ring_steps[1]
    assert ring_step is not None
    assert ring_step.rows == ((4, 2),)
    assert ring_step.pairs == 2 * (2 * 2) + 6 * 1


def test_shards_need_not_cover_the_sequence() -> None:
    cached, fresh = contiguous(32, 4), tuple((Run(32 + 2 * r, 1, 2),) for r in range(4))
    plan = make_plan(fresh, cached, ShortMask(40, 40, causal=True), "keys")
    assert [sum(ring_step.pairs for ring_step in part.ring_steps if ring_step) for part in plan.ranks] == [64] * 4


def test_plans_are_cached_on_their_arguments() -> None:
    def plan() -> RingPlan:
        return make_plan(zigzag(24, 4), zigzag(24, 4), ShortMask(24, 24, causal=True), "keys")

    assert plan() is plan()


@pytest.mark.parametrize("moving", DIRECTIONS)
def test_plans_of_a_million_tokens_are_quick(moving: str) -> None:
    seq_len = 1 << 20
    documents = log_normal_documents(seq_len, 500, 1.5, seed=6)
    assert len(documents) > 2000
    mask = ShortMask(seq_len, seq_len, causal=True, documents=documents)
    shards = balanced(seq_len, 8, mask.work, chunks_per_rank=64)

    def plan() -> RingPlan:  # of a mask that has counted nothing yet
        make_plan.cache_clear()
        return make_plan(shards, shards, ShortMask(seq_len, seq_len, causal=True, documents=documents), moving)

    assert_quick(plan, 0.5)  # about 50 ms on a quiet core
    assert sum(ring_step.pairs for _, ring_step in visits_of(plan())) == mask.pairs(0, seq_len)


@pytest.mark.parametrize(
    ("layout", "window"), [("contiguous", None), ("zigzag", (3, 0)), ("striped", None), ("balanced", (3, 0))]
)
def test_a_hundred_thousand_documents_are_planned_in_seconds(layout: str, window: tuple[int, int] | None) -> None:
    seq_len = 1 << 20
    documents = (*range(0, seq_len, 10), seq_len)

    def plan() -> None:  # as a first call does: both directions, of a mask that is read from its text
        make_plan.cache_clear()
        mask = ShortMask(seq_len, seq_len, causal=True, documents=documents)
        sharding = Sharding(seq_len, layout, make_shards(layout, seq_len, 8, mask), 0, documents)
        # another scale each time: no text is known already
        call = AttentionSpec.deserialize(serialize(sharding, softmax_scale=next(scales), causal=True, window=window), 0)
        for moving in ("keys", "queries"):
            call.plan(moving)

    scales = itertools.count(1.0)
    assert_quick(plan, 5)  # about 0.5 s on a quiet core


def test_the_plan_of_a_zigzag_takes_milliseconds() -> None:
    shards = zigzag(1 << 20, 8)

    def plan() -> None:
        make_plan.cache_clear()
        make_plan(shards, shards, ShortMask(1 << 20, 1 << 20, causal=True), "keys")

    assert_quick(plan, 0.02)  # about 2 ms on a quiet core


def test_describe_names_moving_rows_and_the_work_of_ranks() -> None:
    shards = zigzag(16, 2)
    text = describe(make_plan(shards, shards, ShortMask(16, 16, causal=True), "keys"))
    assert text.splitlines() == [
        "2 ranks, keys move",
        "rank  step 1       pairs",
        "   0       8          68",
        "   1       4          68",
        "work max/mean 1.000, 8 rows received by the busiest rank",
    ]
    nothing = make_plan(shards, shards, ShortMask(16, 16, lengths=((3, 3),)), "keys")
    assert describe(nothing).endswith("work max/mean 1.000, 0 rows received by the busiest rank")


def test_wrong_arguments_are_refused() -> None:
    shards, mask = contiguous(8, 2), ShortMask(8, 8)
    with pytest.raises(ValueError, match="moving must be 'keys' or 'queries', got 'values'"):
        make_plan(shards, shards, mask, "values")
    with pytest.raises(ValueError, match="kv_shards must have the world size of q_shards, 2, got 4"):
        make_plan(shards, contiguous(8, 4), mask, "keys")
    with pytest.raises(ValueError, match="q_shards must hold positions below 8, got 9 on rank 1"):
        make_plan(contiguous(10, 2), shards, mask, "keys")
    with pytest.raises(ValueError, match="nodes must hold each of 2 ranks once and equally many each"):
        make_plan(shards, shards, mask, "keys", ((0,), (0,)))
    with pytest.raises(ValueError, match="nodes must divide the ring of 4 ranks, got 3"):
        make_nodes(4, 3)
