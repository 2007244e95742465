"""Masks of several intervals: terms, counts and plans against the definition, pair by pair."""

# pyright: reportArgumentType=false
# (what is refused has other types)

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.plan import expressions as masks
from ringattn.plan.layouts import make_shards
from ringattn.plan.mask import MaskUnion
from ringattn.plan.ring_plan import make_plan
from tests.support.mask_expressions import expressions
from tests.support.timing import assert_quick


@st.composite
def problems(draw):
    n = draw(st.integers(1, 14))
    m = n if draw(st.booleans()) else draw(st.integers(1, 14))
    return n, m, draw(expressions(n, m))


def dense(expression, n, m, documents=None):
    return {(i, j) for i in range(n) for j in range(m) if expression.visible(i, j, documents=documents)}


def shown(terms, rows):
    """Pairs that terms show, each as often as it is shown."""
    found = []
    for (lower, upper), pattern in terms:
        assert lower.rows == upper.rows == rows
        for f in (lower, upper):
            assert all(f.at(i) <= f.at(i + 1) for i in range(rows - 1))
        for i in range(rows):
            assert lower.at(i) <= upper.at(i)
            keys = range(lower.at(i), upper.at(i))
            found += [(i, j) for j in keys if pattern is None or pattern.sees(i, j)]
    return found


def compiled(n, m, expression, documents=None):
    mask = MaskUnion(n, m, expression, documents)
    try:
        mask.intervals("keys", 0)
    except NotImplementedError:
        return None
    return mask


@settings(max_examples=1500, deadline=None)
@given(problems())
def test_terms_show_each_visible_pair_once_from_both_sides(problem):
    n, m, expression = problem
    mask = compiled(n, m, expression)
    if mask is not None:
        wanted = sorted(dense(expression, n, m))
        assert sorted(shown(mask.intervals("keys", 0), n)) == wanted
        assert sorted((i, j) for j, i in shown(mask.intervals("queries", 0), m)) == wanted
        assert mask.pairs(0, n) == len(wanted)
        assert mask.pairs(n // 3, n) == sum(i >= n // 3 for i, _ in wanted)
        assert masks.from_spec(expression.spec) == expression
        if "blocks" not in repr(expression):  # their table is too large to be shown
            assert eval(repr(expression), dict(vars(masks))) == expression


@settings(max_examples=1000, deadline=None)
@given(
    problems(),
    st.integers(1, 5),
    st.sampled_from(["contiguous", "zigzag", "striped"]),
    st.sampled_from(["keys", "queries"]),
)
def test_every_visible_pair_is_computed_once_and_only_seen_rows_move(problem, world_size, layout, moving):
    n, m, expression = problem
    mask = compiled(n, m, expression)
    if mask is None:
        return
    q_shards, kv_shards = make_shards(layout, n, world_size), make_shards(layout, m, world_size)
    plan = make_plan(q_shards, kv_shards, mask, moving)
    wanted = dense(expression, n, m)
    stationary = q_shards if moving == "keys" else kv_shards
    computed = []
    for part in plan.ranks:
        own = [x for run in stationary[part.rank] for x in range(run.start, run.last + 1, run.stride)]
        for step in part.ring_steps:
            if step is None:
                continue
            rows = [start + stride * x for _, length, start, stride in step.runs for x in range(length)]
            assert len(set(rows)) == len(rows) == step.num_rows
            pairs = [(i, j) if moving == "keys" else (j, i) for i in own for j in rows]
            pairs = [pair for pair in pairs if pair in wanted]
            assert len(pairs) == step.pairs
            computed += pairs
            if step.step and layout != "striped" and mask.is_union:
                assert {pair[moving == "keys"] for pair in pairs} == set(rows)
    assert sorted(computed) == sorted(wanted)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 14).flatmap(lambda n: st.tuples(st.just(n), expressions(n, n), st.sets(st.integers(1, n - 1)))))
def test_documents_of_the_sharding_are_part_of_the_mask(problem):
    n, expression, inner = problem
    documents = (0, *sorted(inner), n)
    mask = compiled(n, n, expression, documents)
    if mask is not None:
        together = {(i, j) for a, e in itertools.pairwise(documents) for i in range(a, e) for j in range(a, e)}
        assert set(shown(mask.intervals("keys", 0), n)) == dense(expression, n, n, documents) & together


def test_batch_elements_may_differ():
    parts = [masks.causal(), masks.sinks(1) & masks.causal() | masks.window(1)]
    mask = MaskUnion(6, 6, masks.per_batch(parts))
    assert mask.batch_size == 2
    for b, expression in enumerate(parts):
        assert set(shown(mask.intervals("keys", b), 6)) == dense(expression, 6, 6)
    assert len(mask.intervals("keys", 0)) == len(mask.intervals("keys", 1)) == 2
    padded = MaskUnion(6, 6, masks.lengths([(0, 4), (2, 6)]) & (masks.sinks(3) | masks.window(1)))
    assert padded.pairs(0, 6, 1) == sum(padded.expression.visible(i, j, b=1) for i in range(6) for j in range(6))


@pytest.mark.parametrize(
    ("expression", "number"),
    [
        (masks.causal() | masks.spans([(2, 5), (7, 9)]), 1),
        (masks.causal() | masks.prefix(4), 1),
        (masks.causal() & (masks.sinks(2) | masks.window(3)), 2),
        (masks.global_tokens(2) | masks.window(2, 2), 3),
        (masks.tree([None, 0, 1, 0], [3, 4, 2, 3]), 2),
        (masks.documents([0, 5, 12]) & masks.causal() & (masks.sinks(1) | masks.window(2)), 2),
    ],
)
def test_common_masks_have_the_fewest_terms(expression, number):
    assert len(MaskUnion(12, 12, expression).intervals("keys", 0)) == number


def test_a_tree_of_a_million_tokens_is_planned_in_seconds():
    leaves_ = 64
    parents = [None, *([0] * leaves_)]
    lengths = [2**20 - leaves_ * 8192, *([8192] * leaves_)]
    shards = make_shards("zigzag", 2**20, 64)
    plans = []
    mask = MaskUnion(2**20, 2**20, masks.tree(parents, lengths))
    assert_quick(lambda: plans.append(make_plan(shards, shards, mask, "keys")), 2)
    plan = plans[0]
    assert (
        sum(step.pairs for part in plan.ranks for step in part.ring_steps if step)
        == sum((n * (n + 1)) // 2 for n in lengths) + leaves_ * 8192 * lengths[0]
    )


def test_masks_of_too_many_intervals_are_refused_with_their_number():
    comb = MaskUnion(80, 80, masks.per_batch([masks.tree([None, *range(17)], [2] * 17 + [46])]))
    assert len(comb.intervals("keys", 0)) == 1  # a chain of nodes is causal
    branches = masks.tree([node - 1 if node % 2 else max(-1, node - 2) for node in range(40)], [2] * 40)
    with pytest.raises(NotImplementedError, match=r"at most 16 intervals per query, got \d+ of tree"):
        MaskUnion(80, 80, branches).intervals("keys", 0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: masks.window(-1), "left must be an integer of at least 0"),
        (lambda: masks.spans([(3, 5), (4, 6)]), "without overlap"),
        (lambda: masks.tree([1, None], [1, 1]), "depth-first order"),
        (lambda: masks.tree([None, 0, None, 1], [1, 1, 1, 1]), "depth-first order"),
        (lambda: masks.tree([None], [0]), "at least 1"),
        (lambda: masks.documents([1, 4]), "ascend from 0"),
        (lambda: masks.blocks([[True], [True, False]]), "matrix of flags"),
        (
            lambda: masks.blocks(torch.tensor([[0.0, float("-inf")]])),
            "pattern must be of bool, .* got 0.0; compare first",
        ),
        (lambda: masks.blocks(torch.ones(2, 2)), "pattern must be of bool, or of integers 0 and 1, got 1.0"),
        (lambda: masks.blocks([[1, 0], [2, 0]]), "pattern must be of bool, or of integers 0 and 1, got 2"),
        (lambda: masks.blocks([["no", "yes"]]), "pattern must be of bool, or of integers 0 and 1, got 'no'"),
        (lambda: masks.blocks([1, 0]), "pattern must be a sequence, got 1"),
        (lambda: masks.blocks(3), "pattern must be a sequence, got 3"),
        (lambda: masks.documents(5), "boundaries must be a sequence, got 5"),
        (lambda: masks.documents(torch.tensor(5)), r"boundaries must be a sequence, got tensor\(5\)"),
        (lambda: masks.spans(3), "spans must be a sequence, got 3"),
        (lambda: masks.spans([0, 4]), r"spans must be pairs \(start, stop\), got \[0, 4\]"),
        (lambda: masks.lengths([0, 4]), r"lengths must be pairs \(start, stop\), got \[0, 4\]"),
        (lambda: masks.lengths(torch.tensor([0, 4])), r"lengths must be pairs \(start, stop\), got tensor"),
        (lambda: masks.tree(3, [1]), "parents must be a sequence, got 3"),
        (lambda: masks.per_batch(masks.causal()), "masks must be a sequence, got causal"),
        (lambda: masks.causal().pairs(-1), "seq_len must be an integer of at least 0, got -1"),
        (lambda: masks.causal().pairs(4, -1), "kv_len must be an integer of at least 0, got -1"),
        (lambda: masks.causal().draw(2.5), "seq_len must be an integer of at least 0, got 2.5"),
        (lambda: masks.lengths([(0, 4)]).pairs(4, b=1), "b must be below 1, the batch elements of the mask, got 1"),
        (lambda: masks.lengths([(0, 4)]).pairs(4, b=-1), "b must be an integer of at least 0, got -1"),
        (lambda: masks.causal() & "causal", "made by ringattn.masks"),  # pyright: ignore[reportOperatorIssue]
        (lambda: masks.per_batch([masks.lengths([(0, 1)])]), "one per batch element"),
        (lambda: masks.blocks([[True, False]], 4).pairs(16), "4 x 4 blocks"),
        (lambda: masks.documents([0, 4]).pairs(8), "cumulative lengths"),
        (lambda: (masks.causal() & masks.sinks(2) & masks.documents([0, 4])).pairs(8), "cumulative lengths"),
        (lambda: (masks.causal() & masks.sinks(2) & masks.documents([0, 12])).pairs(8), "cumulative lengths"),
    ],
)
def test_what_is_no_mask_is_refused_by_name(make, says):
    with pytest.raises((ValueError, TypeError), match=says):
        make()
