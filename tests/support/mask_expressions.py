"""Random expressions of masks, for property tests."""

import functools

from hypothesis import strategies as st

from ringattn import masks
from ringattn.plan.mask import MaskUnion


def stretches(draw, n):
    edges = sorted(draw(st.lists(st.integers(0, n), max_size=6)))
    return list(zip(edges[::2], edges[1::2], strict=False))


@st.composite
def trees(draw, n):
    parents, lengths, path = [], [], []
    while sum(lengths) < n:
        keep = draw(st.integers(0, len(path)))
        path = path[:keep]
        parents.append(path[-1] if path else None)
        path.append(len(lengths))
        lengths.append(draw(st.integers(1, n - sum(lengths))))
    return masks.tree(parents, lengths)


@st.composite
def leaves(draw, n, m):
    kinds = ["causal", "window", "prefix", "chunks", "sinks", "global_tokens", "blocks"]
    if n == m:
        kinds += ["documents", "spans", "tree"]
    kind = draw(st.sampled_from(kinds))
    if kind == "causal":
        return masks.causal()
    if kind == "window":
        side = st.none() | st.integers(0, max(n, m) + 2)
        return masks.window(draw(side), draw(side))
    if kind == "documents":
        return masks.documents([0, *sorted(draw(st.lists(st.integers(0, n), max_size=4))), n])
    if kind == "spans":
        return masks.spans(stretches(draw, n))
    if kind == "tree":
        return draw(trees(n))
    if kind == "blocks":
        size = 3
        rows, columns = -(-n // size), -(-m // size)
        return masks.blocks([[draw(st.booleans()) for _ in range(columns)] for _ in range(rows)], size)
    return getattr(masks, kind)(draw(st.integers(1, 6)))


@functools.cache  # to build a strategy takes longer than to draw from it
def expressions(n, m):
    """Masks of up to four parts over n queries and m keys."""
    return st.recursive(
        leaves(n, m),
        lambda inner: st.tuples(inner, inner, st.booleans()).map(lambda x: x[0] & x[1] if x[2] else x[0] | x[1]),
        max_leaves=4,
    )


def is_flat(mask, n, documents):
    """Whether a mask over n tokens has as few intervals as calls take."""
    try:
        MaskUnion(n, n, mask, documents).intervals("keys", 0)
    except NotImplementedError:
        return False
    return True
