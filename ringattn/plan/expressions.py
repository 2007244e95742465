"""Masks as expressions: what users build, intersect and unite, and the terms that they compile to (Note [Mask terms])."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from itertools import accumulate, pairwise
from operator import and_, index, or_
from typing import Any, ClassVar

from ringattn.plan.block_pattern import BlockPattern
from ringattn.plan.intervals import Bounds, PiecewiseBound, Term, both, clamp, constant, count_term, from_pieces, united
from ringattn.plan.layouts import MAX_SEQ_LEN

MAX_CHUNKS = 2**20
"""Chunks of the longest mask: their boundaries take 0.5 GB and 9 s on the host."""


@dataclass(frozen=True)
class Frame:
    """The sequences of a mask.

    Attributes:
        b: The batch element.
        documents: Boundaries of the documents that enclose an expression; None: the sequence is one.
    """

    seq_len: int
    kv_len: int
    b: int = 0
    documents: tuple[int, ...] | None = None

    def inside(self, documents: tuple[int, ...]) -> Frame:
        """The frame of an expression that is intersected with documents as well; raises where they do not divide the sequence."""
        n = documents[-1]
        if (self.seq_len, self.kv_len) != (n, n):
            raise ValueError(
                f"documents must divide the sequence of {self.seq_len} queries and {self.kv_len} keys, got boundaries "
                f"that end at {n}; pass cumulative lengths of all tokens"
            )
        merged = tuple(sorted({*(self.documents or ()), *documents}))
        return Frame(self.seq_len, self.kv_len, self.b, merged)

    def cut(self, given: list[Term]) -> list[Term]:
        """The parts of terms inside of the documents."""
        pairs = [(a, e) for a, e, _, _ in self.stretches]
        found = [Term((clamp(term.bounds[0], pairs), clamp(term.bounds[1], pairs)), term.pattern) for term in given]
        return [term for term in found if not term.is_empty]

    @property
    def stretches(self) -> list[tuple[int, int, int, int]]:
        """First query, end of queries, first key and end of keys of each document that is not empty."""
        if self.documents is None:
            return [(0, self.seq_len, 0, self.kv_len)]
        return [(a, e, a, e) for a, e in pairwise(self.documents) if a < e]


@dataclass(frozen=True, eq=False)
class Mask(ABC):
    """Visible pairs of queries and keys, by global position; `&` intersects masks, `|` unites them.

    Masks know no sequence; `pairs`, `draw` and calls of attention give them one. They are immutable and hashable, and
    their text (`repr`) is the expression that makes them.

    Attributes:
        word: First word of `spec`.
        kinds: All kinds of masks by this word.
        text: The literal of `spec`, which is part of the text of a call.
    """

    word: ClassVar[str]
    kinds: ClassVar[dict[str, Callable[..., Mask]]] = {}
    text: str = field(init=False)

    def __init_subclass__(cls, word: str = "") -> None:
        cls.word = word
        Mask.kinds[word] = cls

    def __post_init__(self) -> None:
        # now: torch.compile, which calls with a mask, does not trace the lock of a cached property
        object.__setattr__(self, "text", repr(self.spec))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Mask) and self.text == other.text)

    def __hash__(self) -> int:
        return hash(self.text)

    def __and__(self, other: Mask) -> Mask:
        return Intersection((*_flat(self, Intersection), *_flat(check_mask(other), Intersection)))

    def __or__(self, other: Mask) -> Mask:
        return Union((*_flat(self, Union), *_flat(check_mask(other), Union)))

    @abstractmethod
    def visible(self, i: Any, j: Any, *, b: int = 0, documents: tuple[int, ...] | None = None) -> Any:
        """Return whether query i sees key j: the definition, for integers or for integer tensors that broadcast.

        Args:
            i: Global positions of queries.
            j: Global positions of keys.
            b: The batch element, where the mask differs between them.
            documents: Boundaries of the documents that `sinks` and `global_tokens` belong to, if not part of the mask.
        """

    def pairs(self, seq_len: int, kv_len: int | None = None, *, b: int = 0) -> int:
        """Count the visible pairs in closed form: the cost grows with the pieces of the mask, not with tokens.

        Example:
            >>> (causal() & (sinks(2) | window(2))).pairs(8)
            30
        """
        frame = self._frame(seq_len, kv_len, b)
        return sum(count_term(term, 0, seq_len) for term in self.intervals(frame))

    def draw(self, seq_len: int, kv_len: int | None = None, *, b: int = 0) -> str:
        """Draw a small mask: a line per query, `x` for each key that it sees.

        Example:
            >>> print((causal() & (sinks(1) | window(1))).draw(5))
            x....
            xx...
            xxx..
            x.xx.
            x..xx
        """
        frame = self._frame(seq_len, kv_len, b)
        rows, columns = range(frame.seq_len), range(frame.kv_len)
        return "\n".join("".join("x" if self.visible(i, j, b=frame.b) else "." for j in columns) for i in rows)

    def _frame(self, seq_len: int, kv_len: int | None, b: int) -> Frame:
        rows = _natural("seq_len", seq_len, 0)
        frame = Frame(rows, rows if kv_len is None else _natural("kv_len", kv_len, 0), _natural("b", b, 0))
        if self.batch_size is not None and frame.b >= self.batch_size:
            raise ValueError(
                f"b must be below {self.batch_size}, the batch elements of the mask, got {b}; count from 0"
            )
        return frame

    @abstractmethod
    def intervals(self, frame: Frame) -> list[Term]:
        """Return disjoint terms."""

    def bounds(self, here: Any, starts: Any, ends: Any) -> list[tuple[Any, Any]] | None:
        """Return lo <= position < hi of the disjoint intervals that rows see, or None where only `intervals` knows them.

        For rows at positions `here` of requests whose tokens are `starts` .. `ends` - 1: integer tensors that broadcast, or with
        None for all of them only whether it is known. Chunks, prefixes and sinks are counted from `starts`.
        """
        del here, starts, ends

    @property
    def batch_size(self) -> int | None:
        """Batch elements with visible pairs of their own; None: all have the same."""
        return None

    def of_element(self, b: int) -> Any:
        """Return facts that batch elements with the same mask share."""
        del b

    def check(self, seq_len: int, kv_len: int) -> None:
        """Raise where the mask does not fit sequences of these lengths, as far as that is seen without `intervals`."""
        del seq_len, kv_len

    @property
    def spec(self) -> tuple[Any, ...]:
        """The mask as nested tuples of primitives, which `from_spec` reads."""
        return (self.word, *(getattr(self, one.name) for one in fields(self) if one.init))

    def __repr__(self) -> str:
        return f"{self.word}({', '.join(map(repr, self.spec[1:]))})"


@dataclass(frozen=True, repr=False, eq=False)
class Causal(Mask, word="causal"):
    """Keys j <= i."""

    def visible(self, i: Any, j: Any, **_: Any) -> Any:  # noqa: D102
        return j <= i

    def bounds(self, here: Any, starts: Any, ends: Any) -> list[tuple[Any, Any]] | None:  # noqa: D102
        return [] if here is None else [(starts.expand_as(here), _reach(here, 1, ends))]

    def intervals(self, frame: Frame) -> list[Term]:  # noqa: D102
        n, m = frame.seq_len, frame.kv_len
        return [Term((constant(n, 0), from_pieces([(min(n, m), 1, 1), (n - m, m, 0)])))]


@dataclass(frozen=True, repr=False, eq=False)
class Window(Mask, word="window"):
    """Keys `i - left <= j <= i + right`; None: unbounded."""

    left: int | None
    right: int | None

    def visible(self, i: Any, j: Any, **_: Any) -> Any:  # noqa: D102
        before = j == j if self.left is None else i - j <= self.left
        return before if self.right is None else before & (j - i <= self.right)

    def bounds(self, here: Any, starts: Any, ends: Any) -> list[tuple[Any, Any]] | None:  # noqa: D102
        if here is None:
            return []
        lo = starts.expand_as(here) if self.left is None else starts.maximum(here - min(self.left, MAX_SEQ_LEN))
        return [(lo, ends.expand_as(here) if self.right is None else _reach(here, self.right + 1, ends))]

    def intervals(self, frame: Frame) -> list[Term]:  # noqa: D102
        n, m = frame.seq_len, frame.kv_len
        left, right = (max(n, m) if side is None else min(side, max(n, m)) for side in (self.left, self.right))
        lower = from_pieces([(min(n, left), 0, 0), (min(n - left, m), 0, 1), (n - left - m, m, 0)])
        rising = max(0, min(n, m - right))
        upper = from_pieces([(rising, right + 1, 1), (n - rising, m, 0)])
        return [Term((lower, upper))]


@dataclass(frozen=True, repr=False, eq=False)
class Documents(Mask, word="documents"):
    """i and j in the same document."""

    boundaries: tuple[int, ...]

    def visible(self, i: Any, j: Any, **_: Any) -> Any:  # noqa: D102
        return _inside_one(pairwise(self.boundaries), i, j)

    def intervals(self, frame: Frame) -> list[Term]:  # noqa: D102
        every = constant(frame.seq_len, 0), constant(frame.seq_len, frame.kv_len)
        return frame.inside(self.boundaries).cut([Term(every)])


@dataclass(frozen=True, repr=False, eq=False)
class Prefix(Mask, word="prefix"):
    """Keys j < length."""

    length: int

    def visible(self, i: Any, j: Any, **_: Any) -> Any:  # noqa: D102
        return (j < self.length) & (i == i)

    def bounds(self, here: Any, starts: Any, ends: Any) -> list[tuple[Any, Any]] | None:  # noqa: D102
        return [] if here is None else [(starts.expand_as(here), _reach(starts, self.length, ends).expand_as(here))]

    def intervals(self, frame: Frame) -> list[Term]:  # noqa: D102
        n = frame.seq_len
        return [Term((constant(n, 0), constant(n, min(self.length, frame.kv_len))))]


@dataclass(frozen=True, repr=False, eq=False)
class Chunks(Mask, word="chunks"):
    """`i // length == j // length`."""

    length: int

    def visible(self, i: Any, j: Any, **_: Any) -> Any:  # noqa: D102
        return i // self.length == j // self.length

    def check(self, seq_len: int, kv_len: int) -> None:  # noqa: D102
        del kv_len
        if seq_len > MAX_CHUNKS * self.length:
            raise NotImplementedError(
                f"chunks must be at most {MAX_CHUNKS:,}, got {-(-seq_len // self.length):,} of {self.length} tokens; "
                "use longer chunks"
            )

    def bounds(self, here: Any, starts: Any, ends: Any) -> list[tuple[Any, Any]] | None:  # noqa: D102
        if here is None:
            return []
        length = min(self.length, MAX_SEQ_LEN)
        begin = here - (here - starts).remainder(length)
        return [(begin, _reach(begin, length, ends))]

    def intervals(self, frame: Frame) -> list[Term]:  # noqa: D102
        n, m, length = frame.seq_len, frame.kv_len, self.length
        self.check(n, m)
        if n == m:
            # documents compile faster where chunks are thousands
            return Documents((*range(0, n, length), n)).intervals(frame)
        rows = [(a, min(a + length, n), min(a, m), min(a + length, m)) for a in range(0, n, length)]
        return [Term(_of_stretches(rows, n))]


@dataclass(frozen=True, repr=False, eq=False)
class Lengths(Mask, word="lengths"):
    """Both i and j in [start, stop) of their batch element."""

    extents: tuple[tuple[int, int], ...]

    def visible(self, i: Any, j: Any, *, b: int = 0, **_: Any) -> Any:  # noqa: D102
        start, stop = self.extents[b]
        return (start <= i) & (i < stop) & (start <= j) & (j < stop)

    def intervals(self, frame: Frame) -> list[Term]:  # noqa: D102
        self.check(frame.seq_len, frame.kv_len)
        start, stop = self.extents[frame.b]
        n = frame.seq_len
        lower = from_pieces([(stop, start, 0), (n - stop, stop, 0)])
        return [Term((lower, from_pieces([(start, start, 0), (n - start, stop, 0)])))]

    def check(self, seq_len: int, kv_len: int) -> None:  # noqa: D102
        if seq_len != kv_len:
            raise ValueError(
                f"lengths must bound one sequence, got {seq_len} queries and {kv_len} keys; "
                "mask padded keys of cross attention with key_bias"
            )
        for b, (start, stop) in enumerate(self.extents):
            if not 0 <= start <= stop <= seq_len:
                raise ValueError(
                    f"lengths must be 0 <= start <= stop <= seq_len {seq_len}, got ({start}, {stop}) for element {b}; "
                    "give positions of the padded sequence"
                )

    @property
    def batch_size(self) -> int | None:  # noqa: D102
        return len(self.extents)

    def of_element(self, b: int) -> Any:  # noqa: D102
        return self.extents[b]


@dataclass(frozen=True, repr=False, eq=False)
class Spans(Mask, word="spans"):
    """i and j in the same span; a token outside of all spans neither sees nor is seen."""

    stretches: tuple[tuple[int, int], ...]

    def visible(self, i: Any, j: Any, **_: Any) -> Any:  # noqa: D102
        return _inside_one(self.stretches, i, j)

    def intervals(self, frame: Frame) -> list[Term]:  # noqa: D102
        n = frame.seq_len
        if frame.kv_len != n or (self.stretches and self.stretches[-1][1] > n):
            raise ValueError(
                f"spans must lie in one sequence, got {self.stretches[-1:]} for {n} queries and {frame.kv_len} keys; "
                "give positions of the whole sequence"
            )
        return [Term(_of_stretches([(a, e, a, e) for a, e in self.stretches], n))]


@dataclass(frozen=True, repr=False, eq=False)
class Sinks(Prefix, word="sinks"):
    """The first keys of the document of i."""

    def visible(self, i: Any, j: Any, *, documents: tuple[int, ...] | None = None, **_: Any) -> Any:  # noqa: D102
        if documents is None:
            return super().visible(i, j)
        inside = [(a <= i) & (i < e) & (a <= j) & (j < min(a + self.length, e)) for a, e in pairwise(documents)]
        return reduce(or_, inside)

    def intervals(self, frame: Frame) -> list[Term]:  # noqa: D102
        rows = [(a, e, first, min(first + self.length, stop)) for a, e, first, stop in frame.stretches]
        return [Term(_of_stretches(rows, frame.seq_len))]


@dataclass(frozen=True, repr=False, eq=False)
class GlobalTokens(Mask, word="global_tokens"):
    """Pairs of which one is among the first tokens of their document."""

    length: int

    def visible(self, i: Any, j: Any, *, documents: tuple[int, ...] | None = None, **_: Any) -> Any:  # noqa: D102
        if documents is None:
            return (j < self.length) | (i < self.length)
        together = [
            (a <= i) & (i < e) & (a <= j) & (j < e) & ((i < a + self.length) | (j < a + self.length))
            for a, e in pairwise(documents)
        ]
        return reduce(or_, together)

    def intervals(self, frame: Frame) -> list[Term]:  # noqa: D102
        rows = [
            (a, min(a + self.length, e), min(first + self.length, stop), stop) for a, e, first, stop in frame.stretches
        ]
        return [*Sinks(self.length).intervals(frame), Term(_of_stretches(rows, frame.seq_len))]


@dataclass(frozen=True, repr=False, eq=False)
class Tree(Mask, word="tree"):
    """Nodes of tokens in depth-first order: a row sees the nodes above its own, and its own up to itself.

    Attributes:
        parents: Per node the index of the node above it, -1 for roots.
        lengths: Tokens of each node.
    """

    parents: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def starts(self) -> list[int]:
        """First position of each node, and the number of tokens."""
        return list(accumulate(self.lengths, initial=0))

    @property
    def depths(self) -> list[int]:
        """Nodes above each node."""
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent < 0 else found[parent] + 1)
        return found

    @property
    def ends(self) -> list[int]:
        """The end of the last token below each node."""
        starts, found = self.starts, [0] * len(self.parents)
        for node in reversed(range(len(self.parents))):
            found[node] = max(found[node], starts[node + 1])
            if self.parents[node] >= 0:
                found[self.parents[node]] = max(found[self.parents[node]], found[node])
        return found

    @property
    def positions(self) -> list[int]:
        """The place of each token in its own sequence, from the root on: what rotary embeddings take."""
        at, found = [], []
        for parent, length in zip(self.parents, self.lengths, strict=True):
            begin = 0 if parent < 0 else at[parent]
            at.append(begin + length)
            found.extend(range(begin, begin + length))
        return found

    def visible(self, i: Any, j: Any, **_: Any) -> Any:  # noqa: D102
        starts, ends = self.starts, self.ends
        above = [
            (starts[k] <= j) & (j < starts[k + 1]) & (starts[k] <= i) & (i < ends[k]) for k in range(len(self.parents))
        ]
        return reduce(or_, above) & (j <= i)

    def intervals(self, frame: Frame) -> list[Term]:  # noqa: D102
        starts, ends, depths = self.starts, self.ends, self.depths
        n = starts[-1]
        if (frame.seq_len, frame.kv_len) != (n, n):
            raise ValueError(
                f"tree must hold the sequence of {frame.seq_len} queries and {frame.kv_len} keys, got nodes of {n} tokens; "
                "pass the lengths of all nodes, padding as a root of its own"
            )
        found = []
        for depth in range(max(depths) + 1):
            lower, upper, at = [], [], 0
            for k in (k for k, d in enumerate(depths) if d == depth):
                a, end, stop = starts[k], starts[k + 1], ends[k]
                lower += [(a - at, at, 0), (stop - a, a, 0)]
                upper += [(a - at, at, 0), (end - a, a + 1, 1), (stop - end, end, 0)]
                at = stop
            found.append(Term((from_pieces([*lower, (n - at, at, 0)]), from_pieces([*upper, (n - at, at, 0)]))))
        return found


@dataclass(frozen=True, repr=False, eq=False)
class Blocks(Mask, word="blocks"):
    """Pairs whose blocks of positions a table shows."""

    pattern: BlockPattern

    def visible(self, i: Any, j: Any, **_: Any) -> Any:  # noqa: D102
        size = self.pattern.block_size
        if isinstance(i, int) and isinstance(j, int):
            return self.pattern.sees(i, j)
        tensor: Any = j if isinstance(i, int) else i
        return tensor.new_tensor(self.pattern.rows()).bool()[i // size, j // size]

    def intervals(self, frame: Frame) -> list[Term]:  # noqa: D102
        n, m, size = frame.seq_len, frame.kv_len, self.pattern.block_size
        wanted = (-(-n // size), -(-m // size))
        if (len(self.pattern.lines), self.pattern.columns) != wanted:
            raise ValueError(
                f"pattern must have {wanted[0]} x {wanted[1]} blocks of {size} for {n} queries and {m} keys, got "
                f"{len(self.pattern.lines)} x {self.pattern.columns}; give one flag per pair of blocks"
            )
        return [Term((constant(n, 0), constant(n, m)), self.pattern)]

    @property
    def spec(self) -> tuple[Any, ...]:  # noqa: D102
        lines = " ".join(f"{line:x}" for line in self.pattern.lines)
        return self.word, lines, self.pattern.columns, self.pattern.block_size

    def __repr__(self) -> str:
        return f"blocks(<{len(self.pattern.lines)} x {self.pattern.columns}>, {self.pattern.block_size})"


@dataclass(frozen=True, repr=False, eq=False)
class _Combined(Mask):
    parts: tuple[Mask, ...]

    @property
    def batch_size(self) -> int | None:
        sizes = {part.batch_size for part in self.parts} - {None}
        if len(sizes) > 1:
            raise ValueError(
                f"parts of a mask must be for one batch size, got {sorted(map(str, sizes))}; give one entry per element"
            )
        return sizes.pop() if sizes else None

    def of_element(self, b: int) -> Any:
        return tuple(part.of_element(b) for part in self.parts)

    def check(self, seq_len: int, kv_len: int) -> None:
        for part in self.parts:
            part.check(seq_len, kv_len)

    @property
    def spec(self) -> tuple[Any, ...]:
        return (self.word, *(part.spec for part in self.parts))


@dataclass(frozen=True, repr=False, eq=False)
class Intersection(_Combined, word="all"):
    """Pairs that all parts show."""

    def visible(self, i: Any, j: Any, *, b: int = 0, documents: tuple[int, ...] | None = None) -> Any:  # noqa: D102
        for part in self.parts:
            if isinstance(part, Documents):
                documents = tuple(sorted({*(documents or ()), *part.boundaries}))
        return reduce(and_, (part.visible(i, j, b=b, documents=documents) for part in self.parts))

    def bounds(self, here: Any, starts: Any, ends: Any) -> list[tuple[Any, Any]] | None:  # noqa: D102
        found = None
        for part in self.parts:
            more = part.bounds(here, starts, ends)
            if more is None:
                return None
            pairs = more if found is None else [(a, b) for a in found for b in more]
            found = more if found is None else [(a[0].maximum(b[0]), a[1].minimum(b[1])) for a, b in pairs]
        return found and [(lo, lo.maximum(hi)) for lo, hi in found]

    def intervals(self, frame: Frame) -> list[Term]:  # noqa: D102
        documents = [part for part in self.parts if isinstance(part, Documents)]
        for part in documents:
            frame = frame.inside(part.boundaries)
        others = [part for part in self.parts if not isinstance(part, Documents)]
        if not others:
            return documents[0].intervals(frame)
        found = others[0].intervals(frame)
        for part in others[1:]:
            more = part.intervals(frame)
            found = [term for a in found for b in more if not (term := both(a, b)).is_empty]
        # last: documents may be thousands
        return frame.cut(found) if documents else found

    def __repr__(self) -> str:
        return " & ".join(f"({part!r})" if isinstance(part, Union) else repr(part) for part in self.parts)


@dataclass(frozen=True, repr=False, eq=False)
class Union(_Combined, word="any"):
    """Pairs that one part shows at least."""

    def visible(self, i: Any, j: Any, **context: Any) -> Any:  # noqa: D102
        return reduce(or_, (part.visible(i, j, **context) for part in self.parts))

    def bounds(self, here: Any, starts: Any, ends: Any) -> list[tuple[Any, Any]] | None:  # noqa: D102
        first = [part for part in self.parts if isinstance(part, Prefix)]
        others = [part for part in self.parts if part not in first]
        if len(first) != 1 or len(others) != 1:
            return None
        [other], head = others, first[0].bounds(here, starts, ends)
        found = other.bounds(here, starts, ends)
        if not head or not found:
            return found
        # the head begins at the first token, so what is left of the others begins behind it
        return [*((lo.maximum(head[0][1]), hi) for lo, hi in found), *head]

    def intervals(self, frame: Frame) -> list[Term]:  # noqa: D102
        found: list[Term] = []
        for part in self.parts:
            for term in part.intervals(frame):
                found = united(found, term)
        return found

    def __repr__(self) -> str:
        return " | ".join(f"({part!r})" if isinstance(part, Intersection) else repr(part) for part in self.parts)


@dataclass(frozen=True, repr=False, eq=False)
class PerBatch(_Combined, word="per_batch"):
    """A mask of its own for each batch element."""

    def visible(self, i: Any, j: Any, *, b: int = 0, **context: Any) -> Any:  # noqa: D102
        return self.parts[b].visible(i, j, b=b, **context)

    def intervals(self, frame: Frame) -> list[Term]:  # noqa: D102
        return self.parts[frame.b].intervals(frame)

    @property
    def batch_size(self) -> int | None:  # noqa: D102
        return len(self.parts)

    def of_element(self, b: int) -> Any:  # noqa: D102
        return self.parts[b]

    def __repr__(self) -> str:
        return f"per_batch({list(self.parts)!r})"


def causal() -> Mask:
    """Return the mask of keys j <= i."""
    return Causal()


def window(left: int | None, right: int | None = 0) -> Mask:
    """Return the mask of keys `i - left <= j <= i + right`.

    Args:
        left: Keys before a query that it sees, at least 0; None: all.
        right: Keys behind a query that it sees, at least 0; None: all.

    Raises:
        ValueError: A width is negative or no integer.

    Example:
        >>> print(window(1, 0).draw(3))
        x..
        xx.
        .xx
    """
    widths = {"left": left, "right": right}
    return Window(*(None if side is None else _natural(name, side, 0) for name, side in widths.items()))


def documents(boundaries: Sequence[int]) -> Mask:
    """Return the mask of pairs in the same document.

    Args:
        boundaries: Cumulative lengths `[0, ..., seq_len]`, ascending; two equal ones enclose an empty document.

    Raises:
        ValueError: The boundaries do not ascend from 0, or one is no integer.
    """
    found = tuple(_natural("boundaries", boundary, 0) for boundary in _listed("boundaries", boundaries))
    if len(found) < 2 or found[0] != 0 or any(a > b for a, b in pairwise(found)):
        raise ValueError(f"boundaries must ascend from 0 to seq_len, got {boundaries!r}; pass cumulative lengths")
    return Documents(found)


def prefix(length: int) -> Mask:
    """Return the mask of the first `length` keys, at least 0, of the sequence; united with `causal()`, that of prefix-LMs."""
    return Prefix(_natural("length", length, 0))


def chunks(length: int) -> Mask:
    """Return the mask of pairs with `i // length == j // length`; length is at least 1 token."""
    return Chunks(_natural("length", length, 1))


def lengths(extents: Sequence[Sequence[int]]) -> Mask:
    """Return the mask of queries and keys in [start, stop) of their batch element, for padded sequences.

    Args:
        extents: (start, stop) per batch element, 0 <= start <= stop <= seq_len.

    Raises:
        ValueError: There are none, one does not ascend, or a bound is no integer of at least 0.
    """
    found = _pairs("lengths", extents)
    if not found or any(not 0 <= a <= b for a, b in found):
        raise ValueError(
            f"lengths must be one 0 <= start <= stop per batch element, got {extents!r}; (0, n) are n tokens"
        )
    return Lengths(found)


def spans(stretches: Sequence[Sequence[int]]) -> Mask:
    """Return the mask of pairs in the same span; a token outside of all spans sees nothing and is not seen.

    `causal() | spans(images)` is causal text in which images see all of themselves.

    Args:
        stretches: (start, stop) of each span, such as the tokens of an image, ascending and without overlap.

    Raises:
        ValueError: Spans overlap or do not ascend, or a bound is no integer of at least 0.
    """
    found = _pairs("spans", stretches)
    edges = [edge for stretch in found for edge in stretch]
    if edges != sorted(edges) or any(edge < 0 for edge in edges):
        raise ValueError(
            f"spans must be (start, stop) that ascend without overlap, got {stretches!r}; merge or sort them"
        )
    return Spans(tuple((a, e) for a, e in found if a < e))


def sinks(length: int) -> Mask:
    """Return the mask of the first `length` keys, at least 0, of the document of each query (attention sinks).

    The documents are those that the mask is intersected with and those of the sharding; without, the whole sequence.
    """
    return Sinks(_natural("length", length, 0))


def global_tokens(length: int) -> Mask:
    """Return the mask of pairs of which one is among the first `length` tokens of its document; documents as for `sinks`."""
    return GlobalTokens(_natural("length", length, 0))


def tree(parents: Sequence[int | None], lengths: Sequence[int]) -> Tree:
    """Return the mask of a tree of nodes of tokens: a row sees the nodes above its own, and its own up to itself.

    Args:
        parents: Per node the index of the node above it, None or -1 for roots. Nodes stand in depth-first order: a node
            follows the one above it or the last of its earlier children's descendants.
        lengths: Tokens of each node, at least 1.

    Returns:
        The mask, whose `positions` are the place of each token in its own path, for rotary embeddings.

    Raises:
        ValueError: The nodes are not in depth-first order, parents and lengths differ in number, or one is no integer.

    Example:
        >>> print(tree([None, 0, 0], [2, 1, 2]).draw(5))
        x....
        xx...
        xxx..
        xx.x.
        xx.xx
    """
    above = tuple(-1 if parent is None else _natural("parents", parent, -1) for parent in _listed("parents", parents))
    sizes = tuple(_natural("lengths", length, 1) for length in _listed("lengths", lengths))
    if len(above) != len(sizes) or not above:
        raise ValueError(f"parents and lengths must name the same nodes, got {len(above)} and {len(sizes)}")
    path: list[int] = []
    for node, parent in enumerate(above):
        while path and path[-1] != parent:
            path.pop()
        if parent >= 0 and not path:
            raise ValueError(
                f"parents must be in depth-first order, got parent {parent} of node {node}, which is complete or comes later; "
                "order nodes so that each subtree is contiguous"
            )
        path.append(node)
    return Tree(above, sizes)


def blocks(pattern: Any, block_size: int = 128) -> Mask:
    """Return the mask of pairs whose blocks of positions a table shows.

    Args:
        pattern: Flags, blocks of queries x blocks of keys: a 2-D tensor, array or nested sequence. One for all batch elements
            (`per_batch` takes others) and all heads.
        block_size: Positions of a block, on both sides; the last block of a side may be shorter.

    Raises:
        ValueError: The pattern is no matrix of flags, or the block size no integer of at least 1.
    """
    shape = tuple(getattr(pattern, "shape", (0, 0)))
    if len(shape) != 2:
        raise ValueError(
            f"pattern must have 2 dims, blocks of queries x blocks of keys, got shape {shape}; one pattern serves all heads, "
            "and per_batch([...]) takes one mask per batch element"
        )
    rows = [_listed("pattern", row) for row in _listed("pattern", pattern)]
    return Blocks(BlockPattern.from_rows(rows, _natural("block_size", block_size, 1)))


def per_batch(masks: Sequence[Mask]) -> PerBatch:
    """Return the mask that is masks[b] for batch element b.

    Raises:
        ValueError: There are no masks, or one differs between batch elements already.
    """
    parts = tuple(map(check_mask, _listed("masks", masks)))
    if not parts or any(part.batch_size is not None for part in parts):
        raise ValueError(
            f"masks must be one per batch element, each the same for all elements, got {list(parts)!r}; "
            "combine lengths with per_batch by & instead"
        )
    return PerBatch(parts)


def from_spec(spec: Sequence[Any]) -> Mask:
    """Return the mask that `Mask.spec` describes; lists serve as well as tuples (JSON)."""
    word, *values = spec
    if word in ("all", "any", "per_batch"):
        return Mask.kinds[word](tuple(map(from_spec, values)))
    if word == "blocks":
        lines, columns, size = values
        return Blocks(BlockPattern(tuple(int(line, 16) for line in lines.split(" ")), columns, size))
    return Mask.kinds[word](*map(_frozen, values))


def _of_stretches(stretches: list[tuple[int, int, int, int]], rows: int) -> Bounds:
    """Bounds of rows [a, e) that see [first, stop), in order; rows between them see nothing."""
    lower, upper = PiecewiseBound(), PiecewiseBound()
    reached = 0
    for a, e, first, stop in [*stretches, (rows, rows, 0, 0)]:
        if lower.rows < a:
            lower.append(a - lower.rows, reached, 0)
            upper.append(a - upper.rows, reached, 0)
        if a < e:
            lower.append(e - a, first, 0)
            upper.append(e - a, stop, 0)
        reached = stop
    return lower, upper


def _inside_one(stretches: Iterable[tuple[int, int]], i: Any, j: Any) -> Any:
    """Return whether one [a, e) holds both i and j."""
    inside = [(a <= i) & (i < e) & (a <= j) & (j < e) for a, e in stretches]
    return reduce(or_, inside, (i != i) & (j != j))


def _flat(mask: Mask, kind: type[Intersection] | type[Union]) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, kind) else (mask,)


def check_mask(mask: Any) -> Mask:
    """Return a mask; refuse anything else."""
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be made by ringattn.masks, got {type(mask).__name__}; for example masks.causal()")
    return mask


def _reach(position: Any, width: int, ends: Any) -> Any:
    """Return position + width, or ends if that is less: sums of positions and widths may not fit into int32, differences do."""
    return (ends - position).clamp(max=min(width, MAX_SEQ_LEN)) + position


def _natural(name: str, number: Any, least: int) -> int:
    try:
        found = least - 1 if isinstance(number, bool) else index(number)
    except TypeError:
        found = least - 1
    if found < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {number!r}; convert or correct it")
    return found


def _listed(name: str, values: Any) -> list[Any]:
    """Return the content of a tensor, an array or a sequence."""
    found = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(found, Iterable):
        raise ValueError(f"{name} must be a sequence, got {values!r}; pass a list")
    return list(found)


def _pairs(name: str, values: Any) -> tuple[tuple[int, int], ...]:
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in _listed(name, values)]
    if any(not isinstance(row, Sequence) or len(row) != 2 for row in rows):
        raise ValueError(f"{name} must be pairs (start, stop), got {values!r}; (0, n) are the first n tokens")
    return tuple((_natural(name, start, 0), _natural(name, stop, 0)) for start, stop in rows)


def _frozen(x: Any) -> Any:
    return tuple(map(_frozen, x)) if isinstance(x, (list, tuple)) else x
