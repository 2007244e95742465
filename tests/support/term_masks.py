"""Masks of several terms as dense booleans, made in plain Python, so that the library's intervals judge nothing here."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from ringattn.kernels.interface import BlockPatterns


@dataclass(frozen=True, eq=False)
class TermMask:
    """A union of disjoint terms.

    Attributes:
        terms: `terms b n m` bool: the interval of each row, before tables cut it.
        tables: `p x y` bool over blocks of rows and of columns; None: no term is cut.
        of_term: Of each term the index of its table, or -1.
        block_size: Positions of a block.
    """

    terms: Tensor
    tables: Tensor | None = None
    of_term: tuple[int, ...] = ()
    block_size: int = 1

    @property
    def visible(self) -> Tensor:
        """`b n m`: pairs that one of the terms shows."""
        cut = [self._cut(term, self.of_term[k] if self.tables is not None else -1) for k, term in enumerate(self.terms)]
        count = torch.stack(cut).sum(0)
        assert count.max() <= 1, "terms share no pair"
        return count > 0

    def _cut(self, term: Tensor, which: int) -> Tensor:
        if self.tables is None or which < 0:
            return term
        n, m = term.shape[-2:]
        i, j = torch.arange(n) // self.block_size, torch.arange(m) // self.block_size
        return term & self.tables[which][i][:, j]

    def transpose(self) -> TermMask:
        """The same pairs, from the other side."""
        tables = None if self.tables is None else self.tables.transpose(1, 2).contiguous()
        return replace(self, terms=self.terms.transpose(2, 3), tables=tables)

    def expand(self, batch: int) -> TermMask:
        """With bounds of their own for all batch elements."""
        return replace(self, terms=self.terms.expand(-1, batch, -1, -1))

    def patterns(self, device: torch.device | str) -> BlockPatterns | None:
        """The tables as kernels take them."""
        if self.tables is None:
            return None
        tables = self.tables.int()
        of_term = torch.tensor(self.of_term, dtype=torch.int32, device=device)
        return BlockPatterns(tables.to(device), tables, self.of_term, of_term, self.block_size)


TermMaskMaker = Callable[[int], TermMask]
"""Makes the mask of so many tokens."""


def of_intervals(lo: Sequence[Sequence[int]], hi: Sequence[Sequence[int]], columns: int) -> Tensor:
    """`terms 1 n m` from the bounds of each term and row."""
    j = torch.arange(columns)
    low, high = torch.tensor(lo)[:, None, :, None], torch.tensor(hi)[:, None, :, None]
    return (low <= j) & (j < high)


def sinks_and_window(n: int, sinks: int = 4, left: int = 9) -> TermMask:
    """Causal: the first keys, and a window."""
    begin = [max(0, i - left) for i in range(n)]
    return TermMask(of_intervals([[0] * n, begin], [[min(sinks, b) for b in begin], [i + 1 for i in range(n)]], n))


def global_tokens(n: int, count: int = 5, reach: int = 7) -> TermMask:
    """The first tokens see and are seen by all; others have a window on both sides."""
    ends = [n if i < count else min(n, i + reach + 1) for i in range(n)]
    begin = [0 if i < count else max(0, i - reach) for i in range(n)]
    # a term is monotone: what global rows see beyond the window of the first other row is a term of its own
    near = [min(end, min(n, max(i, count) + reach + 1)) for i, end in enumerate(ends)]
    return TermMask(
        of_intervals(
            [[0] * n, begin, near], [[0 if i < count else min(count, begin[i]) for i in range(n)], near, ends], n
        )
    )


def tree(n: int) -> TermMask:
    """A prompt of half the tokens, and answers of which each sees the prompt and itself; the last one has two endings."""
    prompt, answer = n // 2, max(1, n // 8)
    lo, hi = [[0] * n for _ in range(3)], [[0] * n for _ in range(3)]
    for i in range(n):
        hi[0][i] = min(i + 1, prompt)
        start = prompt + (i - prompt) // answer * answer
        fork = prompt + 2 * answer
        if i >= prompt:
            stem = min(start, fork)
            lo[1][i], hi[1][i] = stem, min(i + 1, stem + answer)
            lo[2][i] = hi[2][i] = n if i < fork + answer else start
            if i >= fork + answer:
                hi[2][i] = i + 1
        else:
            lo[1][i] = hi[1][i] = prompt
    for term in (1, 2):  # rows that see nothing stand where bounds do not decrease
        floor = 0
        for i in range(n):
            if lo[term][i] == hi[term][i]:
                lo[term][i] = hi[term][i] = floor
            floor = lo[term][i]
    return TermMask(of_intervals(lo, hi, n))


def random_table(size: int, share: float, seed: int = 0) -> Tensor:
    """`1 size size` bool, true with a probability; the diagonal is true."""
    rng = random.Random(seed)
    return torch.tensor([[[i == j or rng.random() < share for j in range(size)] for i in range(size)]])


def causal_blocks(n: int, block_size: int = 8, share: float = 0.4) -> TermMask:
    """Random blocks of a causal mask."""
    terms = of_intervals([[0] * n], [[i + 1 for i in range(n)]], n)
    return TermMask(terms, random_table(-(-n // block_size), share), (0,), block_size)


def blocks_and_window(n: int, block_size: int = 8, left: int = 10, share: float = 0.3) -> TermMask:
    """A causal window, and random blocks of what lies before it, of a second table for the first half."""
    begin = [max(0, i - left) for i in range(n)]
    half = [min(n // 2, b) for b in begin]
    terms = of_intervals([begin, [0] * n, half], [[i + 1 for i in range(n)], half, begin], n)
    blocks = -(-n // block_size)
    tables = torch.cat([random_table(blocks, share, seed) for seed in (1, 2)])
    return TermMask(terms, tables, (-1, 0, 1), block_size)


def padded_sinks(n: int) -> TermMask:
    """Sinks and a window of three batch elements: the second has padding on the left and the third sees nothing."""
    mask = sinks_and_window(n)
    terms = mask.terms.expand(-1, 3, -1, -1).clone()
    terms[:, 1, : n // 3] = False
    terms[:, 1, :, : n // 3] = False
    terms[:, 2] = False
    return replace(mask, terms=terms)


@st.composite
def any_term_mask(draw: st.DrawFn, max_len: int = 40, cross: bool = True) -> TermMask:
    """Any union of disjoint monotone intervals, some cut by tables of blocks."""
    n, batch = draw(st.integers(1, max_len)), draw(st.integers(1, 2))
    m = draw(st.integers(1, max_len)) if cross else n
    number = draw(st.integers(1, 4))
    # bounds that do not decrease along rows still do not when they are sorted in each row
    bound = st.lists(st.integers(0, m), min_size=n, max_size=n).map(sorted)
    bounds = draw(st.lists(bound, min_size=2 * number * batch, max_size=2 * number * batch))
    at = torch.tensor(bounds).view(batch, 2 * number, n).sort(1).values.transpose(0, 1)[..., None]
    terms = (torch.arange(m) >= at[0::2]) & (torch.arange(m) < at[1::2])
    if draw(st.booleans()):
        return TermMask(terms)
    size, count = draw(st.integers(1, 9)), draw(st.integers(1, 2))
    shape = (count, -(-n // size), -(-m // size))
    share, seed = draw(st.sampled_from([0.1, 0.5, 0.9])), draw(st.integers(0, 2**16))
    tables = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    return TermMask(terms, tables, tuple(draw(st.integers(-1, count - 1)) for _ in range(number)), size)
