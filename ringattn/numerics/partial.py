"""The partial result of a softmax-weighted sum, and its merge, in plain torch on any device and in any float dtype.

Note [Partial]
    For one query row with scores s_j and values v_j over *some* of its keys:
        m = max_j s_j        l = sum_j exp(s_j - m)        o = sum_j exp(s_j - m) v_j
    `o` is not divided by `l`, so nothing is rounded between merges. With M = max(m_a, m_b):
        merge(a, b) = (M,  l_a e^(m_a - M) + l_b e^(m_b - M),  o_a e^(m_a - M) + o_b e^(m_b - M))
    (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", eq. 4, with the weighted sum of
    Rabe & Staats 2021, "Self-attention does not need O(n^2) memory", carried along). Merging is commutative, and
    associative up to rounding. Units are natural log; kernels keep `m` in log2 units internally.
    A row that has seen nothing is (-inf, 0, 0): the identity, on both sides and to the bit; `finalize` gives it o = 0,
    lse = -inf. No combination of -inf scores makes a NaN, forward or backward. A score of +inf makes its row NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringattn.kernels.interface import accumulation_dtype
from ringattn.tensor_checks import check_tensor


@dataclass(frozen=True)
class Partial:
    """Partial result of softmax attention over some of the keys (Note [Partial]).

    Example:
        >>> s, v = torch.tensor([1.0, 2.0, 3.0, 10.0]), torch.eye(4)
        >>> a, b = Partial.from_scores(s[:2], v[:2]), Partial.from_scores(s[2:], v[2:])
        >>> o, lse = finalize(merge(a, b))
        >>> torch.allclose(o, torch.softmax(s, 0))
        True

    Attributes:
        m: `...`, the largest score, natural log units; -inf for a row that has seen nothing.
        l: `...`, sum of exp(s - m).
        o: `... d`, sum of exp(s - m) * v, not normalised.

    Raises:
        ValueError: The shapes of m, l and o do not fit each other, or their dtypes differ.
        TypeError: One of them is no tensor.
        NotImplementedError: One of them is a tensor with a meaning of its own, such as a masked one.
    """

    m: Tensor
    l: Tensor  # noqa: E741
    o: Tensor

    def __post_init__(self) -> None:
        for name, x in (("m", self.m), ("l", self.l), ("o", self.o)):
            check_tensor(name, x)
        if self.l.shape != self.m.shape:
            raise ValueError(f"l must have the shape of m {tuple(self.m.shape)}, got {tuple(self.l.shape)}; reshape it")
        if self.o.shape[:-1] != self.m.shape or self.o.ndim != self.m.ndim + 1:
            raise ValueError(
                f"o must have the shape of m {tuple(self.m.shape)} and one more dim, got {tuple(self.o.shape)}; "
                "put the value dim last"
            )
        if not (self.m.dtype == self.l.dtype == self.o.dtype) or not self.m.is_floating_point():
            raise ValueError(
                f"m, l and o must have one floating dtype, got {self.m.dtype}, {self.l.dtype}, {self.o.dtype}; cast"
            )

    @classmethod
    def identity(
        cls,
        shape: Sequence[int],
        v_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Partial:
        """Return the partial of no keys, (-inf, 0, 0).

        Args:
            shape: Shape of m and l.
            v_dim: Size of the last dim of o.
            dtype: Any floating dtype.
            device: Device of the tensors; None: torch's default.
        """
        return cls(
            m=torch.full(tuple(shape), float("-inf"), dtype=dtype, device=device),
            l=torch.zeros(tuple(shape), dtype=dtype, device=device),
            o=torch.zeros((*shape, v_dim), dtype=dtype, device=device),
        )

    @classmethod
    def from_scores(cls, s: Tensor, v: Tensor) -> Partial:
        """Return the partial of one set of keys.

        Statistics are kept in fp32 for 16-bit inputs, else in the dtype of the inputs.

        Args:
            s: Scores, `... t`, natural log units; -inf hides a key. No keys (t = 0) give the identity.
            v: Values, `... t d`, against s by the rules of `torch.matmul`: scores `b h s t` take values `b h t d`.

        Returns:
            m and l with the shape of s without its last dim, and o with `d` appended.

        Raises:
            ValueError: s and v differ in dtype or in the number of keys.
            TypeError: One of them is no tensor.
            NotImplementedError: One of them is a tensor with a meaning of its own, such as a masked one.
        """
        for name, x in (("s", s), ("v", v)):
            check_tensor(name, x)
        if s.dtype != v.dtype:
            raise ValueError(f"s must have the dtype of v {v.dtype}, got {s.dtype}; cast one of them")
        if v.ndim < 2 or s.ndim < 1 or s.shape[-1] != v.shape[-2]:
            raise ValueError(
                f"s must be ... t and v ... t d with one t, got {tuple(s.shape)} and {tuple(v.shape)}; "
                "one score per value row is needed"
            )
        s, v = s.to(accumulation_dtype(s.dtype)), v.to(accumulation_dtype(v.dtype))
        if s.shape[-1] == 0:
            return cls.identity(s.shape[:-1], v.shape[-1], s.dtype, s.device)
        m = s.amax(-1)
        p = torch.exp(s - _shift(m).unsqueeze(-1))
        return cls(m=m, l=p.sum(-1), o=p @ v)


def _shift(m: Tensor) -> Tensor:
    # -inf - (-inf) is NaN: an empty row is shifted by 0 instead, and exp(-inf - 0) is the 0 that is wanted
    return torch.where(m == float("-inf"), 0.0, m)


def _check_partial(name: str, x: object) -> None:
    if not isinstance(x, Partial):
        raise TypeError(f"{name} must be a Partial, got {type(x).__name__}; make one with Partial.from_scores")


def merge(a: Partial, b: Partial) -> Partial:
    """Return the partial of the keys of a and b together (Note [Partial]).

    Args:
        a: Partial of some keys.
        b: Partial of other keys of the same rows; leading dims may broadcast.

    Returns:
        The merged partial. If one side is empty, the other one to the bit.

    Raises:
        ValueError: a and b differ in dtype or in the value dim.
        TypeError: One of them is no partial.
    """
    for name, x in (("a", a), ("b", b)):
        _check_partial(name, x)
    if a.m.dtype != b.m.dtype:
        raise ValueError(f"b must have the dtype of a {a.m.dtype}, got {b.m.dtype}; cast one of them")
    if a.o.shape[-1] != b.o.shape[-1]:
        raise ValueError(f"b must have value dim {a.o.shape[-1]} like a, got {b.o.shape[-1]}; merge like with like")
    m = torch.maximum(a.m, b.m)
    shift = _shift(m)
    scale_a, scale_b = torch.exp(a.m - shift), torch.exp(b.m - shift)
    a_empty, b_empty = a.m == float("-inf"), b.m == float("-inf")

    def mix(x: Tensor, y: Tensor, of: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        fx, fy, x_empty, y_empty = of
        # an empty side is made 0 before the product, whose gradient would be NaN where its o is (0 * NaN)
        both = x.masked_fill(x_empty, 0.0) * fx + y.masked_fill(y_empty, 0.0) * fy
        # the select keeps the identity exact to the bit: -0.0 * 1 + 0.0 would be +0.0
        return torch.where(y_empty, x, torch.where(x_empty, y, both))

    row = (scale_a, scale_b, a_empty, b_empty)
    column = (scale_a.unsqueeze(-1), scale_b.unsqueeze(-1), a_empty.unsqueeze(-1), b_empty.unsqueeze(-1))
    return Partial(m=m, l=mix(a.l, b.l, row), o=mix(a.o, b.o, column))


def reduce_partials(parts: Sequence[Partial], how: str = "tree") -> Partial:
    """Merge many partials in an order that depends on their number only.

    Args:
        parts: At least one partial.
        how: "tree": neighbours are merged pairwise, level by level, so that a partial goes through ceil(log2(P))
            merges. "sequential": left to right, as a ring does it.

    Returns:
        The partial of all keys together.

    Raises:
        ValueError: parts is empty, or how is neither "tree" nor "sequential".
        TypeError: parts is no sequence of partials.
    """
    if not isinstance(parts, Sequence):
        raise TypeError(f"parts must be a sequence of partials, got {type(parts).__name__}; pass them in a list")
    for i, part in enumerate(parts):
        _check_partial(f"parts[{i}]", part)
    if not parts:
        raise ValueError("parts must hold at least one partial, got none; start from Partial.identity")
    if how == "sequential":
        total = parts[0]
        for part in parts[1:]:
            total = merge(total, part)
        return total
    if how != "tree":
        raise ValueError(f"how must be 'tree' or 'sequential', got {how!r}; choose one of them")
    level = list(parts)
    while len(level) > 1:
        merged = [merge(x, y) for x, y in zip(level[::2], level[1::2], strict=False)]
        level = merged + level[len(merged) * 2 :]
    return level[0]


def finalize(p: Partial) -> tuple[Tensor, Tensor]:
    """Return the attention output and the log-sum-exp of a finished partial.

    Args:
        p: The partial over all keys.

    Returns:
        (o, lse): o `... d`, normalised; lse `...`, natural log. An empty row has o = 0 and lse = -inf.

    Raises:
        TypeError: p is no partial.
    """
    _check_partial("p", p)
    empty = p.l == 0
    # the divisor is made safe before the division: a NaN in the branch not taken would still poison its gradient
    l = torch.where(empty, 1.0, p.l)  # noqa: E741
    o = torch.where(empty.unsqueeze(-1), 0.0, p.o / l.unsqueeze(-1))
    return o, torch.where(empty, float("-inf"), p.m + torch.log(l))
