"""How one call of a model brings new tokens to a cache: who computes which rows, where they are kept, what they see.

Owns `Step`, which is made once per call and serves all layers. Refuses to know keys and values themselves (cache.py) and how
attention is computed (attention.py).

Note [Two modes]
    prefill: the rows of the new tokens are shared out. A rank computes the rows that it will keep, so their keys need not move
        to be kept. Requests stand one after another in one virtual sequence, each a document: its tokens of before, then the
        new ones; what is computed are rows of that sequence. A batch of requests that are alike keeps its batch dimension
        instead.
    decode: each request brings the same few tokens, every rank computes them all, and whoever keeps a token writes it.

Note [One upload]
    All that the device must know of a step is laid out in one piece of memory on the host and copied once; rows that can be
    counted from blocks are counted on the device. Memory on the host is pinned and the copy asynchronous: torch keeps it until
    the copy has been made. Each tensor of a decode step begins on a line of its own: a kernel is compiled anew for a pointer that
    is not aligned, and where the blocks begin would depend on how many there are.

Note [Steps that stay]
    A captured CUDA graph reads the addresses that it was captured with. A `StaticStep` has its tensors at fixed addresses and
    in fixed shapes; the next tokens are said to it in place (`PagedKVCache.extend(..., into=step)`), in stream order, and a
    graph that was captured with it then serves them. Rows of the batch that no request fills see nothing and are kept nowhere.

Note [Blocks that stay]
    The blocks of eight requests of a million tokens, in pages of 64 on 4 ranks, are 393,216 bytes on each of them, and a token
    changes one block of a request, on one rank. A static step therefore knows which blocks it has on the device: for each row
    the request that was said there, when, and how long it was. Tokens that have stayed since (Note [What stays] of pages.py)
    and lie in blocks that ended before the last of them are there already. Behind the row's numbers the upload has the other
    blocks and where they go, 20 bytes each, and one kernel puts them there: 448 bytes at most for one new token of each of the
    eight, whatever their lengths. A request that comes, or moves to another row, brings all its blocks once. Rows of one request
    (Note [Pieces]) are all brought what any of them lacks.

Note [Rows that go on]
    From one step to the next most requests stay in their row, get as many tokens as the others, and have them in the block they
    were in. All numbers of such a row grow by that many, but for its first token and the number of its blocks, and the slots of
    tokens that are kept elsewhere. So the host keeps what it said last (`_Sheet`), advances all of it by one addition, and then
    writes the other rows anew: those whose request has another layout (`Request.layout`) or got another number of tokens, and
    those of more than one row.

Note [Pieces]
    A short prompt is a step of decoding, too: every rank computes all of its rows, attends over the keys that it keeps, and one
    exchange makes the answers. Who keeps what is then said by tables alone, so one graph serves all prompts that have room in
    it, where a prefill is planned and launched anew each time. It costs P times the products, which take no longer than
    reading the weights does as long as rows are a few hundred. A packed step has so many pieces of so many rows. Each request's
    new tokens are cut into pieces, each with all blocks of its request; rows of a last piece that are too many see nothing and
    are kept nowhere. The model gets the rows of all pieces in one line.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, compress, repeat
from operator import sub
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from ringattn.inference.pages import Pages, Request, Stretch, Table
from ringattn.kernels.decode import PageTable
from ringattn.layout import Run, Shard
from ringattn.sharding import Sharding

if TYPE_CHECKING:
    from ringattn.inference.cache import PagedKVCache

MOST_DECODED = 16
"""New tokens per request up to which a step may be one of decoding."""
_WORD = 4  # bytes of an int32
_LINE = 8  # words: 32 bytes, which is what kernels may be told of a pointer
Mask = tuple[bool, tuple[int | None, int | None] | None, int | None]
"""causal, window and chunk_len."""
_Known = TypeVar("_Known")
_NONE = -1  # no request's layout


@dataclass(eq=False)
class Step:
    """One call of a model, seen from this rank (Note [Two modes]).

    Attributes:
        cache: What the new tokens are added to.
        mode: "prefill" or "decode".
        requests: Who brings tokens.
        counts: How many each.
        lengths: Tokens of each request after the step.
        firsts: The first token of each request that is seen.
        batch: The model's batch: 1 when requests are packed, else one per request.
        rows: Rows per batch element that this rank computes; may be 0.
        positions: `batch rows` int64 on the device: the place of each row in its request, which is what rotary embeddings want.
        taken: `rows` int64 on the device: which of the new tokens this rank computes, packed one request after another (for a
            batch: of each request).
        slots: `batch rows` int64 on the device: page * page_size + row where a row's keys are kept here; -1: on another rank.
        last_rows: Where the last new token of each request is among this rank's rows, as (batch element, row), or None on other
            ranks.
        sharding: prefill: who computes which rows of the virtual sequence.
        kv_sharding: prefill: who keeps which.
        kept_slots: prefill: `batch t` int64 on the device: where the keys of kv_sharding's rows of this rank are.
        table: decode: the blocks of this rank.
        positions32: decode: `tiles` int32 on the device: positions.
        starts: decode: `tiles` int32 on the device: the first token that each row may see.
        ends: decode: `tiles` int32 on the device: tokens of the row's request.
        causal_ends: decode: `tiles` int32 on the device: one past the row itself, or starts where it lies before that: where a
            causal mask ends.
        memo: What is worked out once for all layers.
        known: How many changes the cache had seen when the step was last found to be in place (`Pages.changes`).
        met: Ranks have compared the step, as far as they do (accord.py).
        calls: What was decided about calls with this step, by their options and shapes (attention.py).
        shared: What layers have found for each other (`once`).
        pieces: decode: how many there are, and rows of each, where requests are packed (Note [Pieces]); else None.
    """

    cache: PagedKVCache
    mode: Literal["prefill", "decode"]
    requests: tuple[int, ...]
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    firsts: tuple[int, ...]
    batch: int
    rows: int
    positions: Tensor
    taken: Tensor
    slots: Tensor
    last_rows: tuple[tuple[int, int] | None, ...]
    sharding: Sharding | None = None
    kv_sharding: Sharding | None = None
    kept_slots: Tensor | None = None
    table: PageTable | None = None
    positions32: Tensor | None = None
    starts: Tensor | None = None
    ends: Tensor | None = None
    causal_ends: Tensor | None = None
    memo: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    known: int = -1
    met: bool = False
    calls: dict[object, Any] = field(default_factory=dict, repr=False)
    shared: dict[Hashable, Tensor | None] = field(default_factory=dict, repr=False)
    pieces: tuple[int, int] | None = None

    @property
    def tiles(self) -> tuple[int, int]:
        """Decode: the rows as kernels take them, which is how tables and bounds are laid out: `batch rows`, or pieces."""
        return self.pieces or (self.batch, self.rows)

    @property
    def moved(self) -> tuple[str, ...]:
        """What went round the ring in each kind of call of this step so far: "keys" or "queries"; empty for decode."""
        return tuple(known.moves for known in self.calls.values() if hasattr(known, "moves"))

    @property
    def read(self) -> tuple[str, ...]:
        """How each kind of call of this step so far read what was kept: "copies" or "pages"; empty for decode."""
        return tuple(known.reads for known in self.calls.values() if hasattr(known, "reads"))

    def take(self, tokens: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of the new tokens.

        Args:
            tokens: All new tokens: of a packed prefill one request after another in `dim`; otherwise one request per batch
                element.
            dim: Where they are.
        """
        return tokens if self.mode == "decode" else tokens.index_select(dim, self.taken.to(tokens.device))

    @property
    def seen_from(self) -> Tensor:
        """Decode: `tiles` int32 on the device: the first token that each row may see."""
        assert self.starts is not None, "rows of a prefill see documents"
        return self.starts

    def bounds(
        self, causal: bool, window: tuple[int | None, int | None] | None, chunk_len: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Decode: what each row sees, lo <= position < hi, as `tiles` int32 on the device; found once for all layers."""
        mask = (causal, window, chunk_len)
        known = self._said_bounds(mask) or self.memo.get(mask)
        if known is None:
            known = self.memo[mask] = self._empty_bounds()
            self._find_bounds(mask, *known)
        return known

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """Inside, layers of one call of a model may share what they find (`once`)."""
        yield

    def once(self, key: Hashable, find: Callable[[], Tensor | None]) -> Tensor | None:
        """Decode: what does not differ between layers, found by the first of them; None where nobody says which are of one call.

        Args:
            key: What else it depends on.
            find: Finds it, in stream order on a GPU.
        """
        if key not in self.shared:
            self.shared[key] = find()
        return self.shared[key]

    def _said_bounds(self, mask: Mask) -> tuple[Tensor, Tensor] | None:
        """Bounds that came with the upload, those of most models; None: they are to be found."""
        causal, window, chunk_len = mask
        if not causal or chunk_len is not None or window not in (None, (None, None), (None, 0)):
            return None
        assert self.causal_ends is not None, "rows of a prefill see documents"
        return self.seen_from, self.causal_ends

    def _empty_bounds(self) -> tuple[Tensor, Tensor]:
        return torch.empty_like(self.seen_from), torch.empty_like(self.seen_from)

    def _find_bounds(self, mask: Mask, lo: Tensor, hi: Tensor) -> None:
        causal, window, chunk_len = mask
        here, ends = self.positions32, self.ends
        assert here is not None, "rows of a prefill see documents"
        assert ends is not None, "rows of a prefill see documents"
        left, right = (None, None) if window is None else window
        right = 0 if causal and (right is None or right > 0) else right
        if left is None:
            lo.copy_(self.seen_from)
        else:
            torch.maximum(self.seen_from, here - left, out=lo)
        if right is None:
            hi.copy_(ends)
        else:
            torch.minimum(ends, here + (right + 1), out=hi)
        if chunk_len is not None:
            # chunks are counted from the first token that is seen
            into = torch.remainder(here - self.seen_from, chunk_len)
            torch.maximum(lo, here - into, out=lo)
            torch.minimum(hi, here - into + chunk_len, out=hi)
        torch.maximum(lo, hi, out=hi)


class StaticStep(Step):
    """A step of decoding whose tensors stay where they are (Note [Steps that stay]); made by `PagedKVCache.static_step`.

    Attributes:
        max_tokens: The longest request that it serves.
        max_blocks: Blocks of a request on one rank that it has room for.
    """

    max_tokens: int
    max_blocks: int
    _places: _Places
    _inbox: Tensor
    _blocks: Tensor  # `3 words`: pages, starts and lengths, `batch max_blocks` each
    _sheet: _Sheet
    _rows: list[int]  # of each request
    _begins: list[int]  # the first row of each request, and one past the last one
    _views: dict[int, tuple[Tensor, Tensor]]  # by how many blocks have changed
    _found: dict[Mask, tuple[Tensor, Tensor]]
    _fresh: set[Mask]
    _in_call: bool = False

    @classmethod
    def make(
        cls, cache: PagedKVCache, batch: int, new: int, max_tokens: int, max_blocks: int, packed: bool
    ) -> StaticStep:
        """A step without requests.

        Args:
            cache: Whose.
            batch: Requests at most, or pieces.
            new: New tokens of each.
            max_tokens: See the class.
            max_blocks: See the class.
            packed: Requests are cut into pieces (Note [Pieces]).
        """
        places = _Places(batch, new)
        inbox = torch.zeros(places.words_of_changes(batch * max_blocks), dtype=torch.int32, device=cache.device)
        blocks = torch.zeros(3, places.table_words(max_blocks), dtype=torch.int32, device=cache.device)
        shape, pieces = ((1, batch * new), (batch, new)) if packed else ((batch, new), None)
        found = places.view(inbox, places.table(blocks, max_blocks), shape)
        step = cls(cache, "decode", (), (), (), (), *shape, **found, last_rows=(), pieces=pieces)
        step.max_tokens, step.max_blocks = max_tokens, max_blocks
        step._places, step._inbox, step._blocks = places, inbox, blocks
        step._sheet = step._empty_sheet()
        step._rows, step._begins, step._views, step._found, step._fresh = [], [0], {}, {}, set()
        step.slots.fill_(-1)
        return step

    def check(self, requests: Sequence[int], counts: Sequence[int]) -> list[Request]:
        """Refuses what does not fit, before room is made for it; returns what the books say of the requests."""
        books, (batch, new) = self.cache.pages, self.tiles
        if self.pieces is not None:
            if min(counts, default=1) < 1 or sum(-(-count // new) for count in counts) > batch:
                raise ValueError(
                    f"a packed step must be given new tokens that fit into {batch} pieces of {new}, each request's in "
                    f"pieces of its own, got {list(counts)}; bring fewer at a time, or extend without into"
                )
        elif len(requests) > batch or counts.count(new) != len(counts):
            raise ValueError(
                f"a static step must be given at most {batch} requests with {new} new tokens each, got "
                f"{len(requests)} with {list(counts)}; make one of another shape, or extend without into"
            )
        found = books.look(requests)
        most = max(counts, default=0)
        longest = max([one.length for one in found], default=0) + most
        if longest <= self.max_tokens and _most_blocks(books, found, most) <= self.max_blocks:
            return found
        for one, count in zip(found, counts, strict=False):
            length, most = one.length + count, _most_blocks(books, [one], count)
            if length > self.max_tokens or most > self.max_blocks:
                raise ValueError(
                    f"a static step must be given requests of at most {self.max_tokens} tokens in {self.max_blocks} "
                    f"blocks of each rank, got request {one.name} with {length} in up to {most}; make one with more "
                    "max_tokens or max_blocks, or extend without into"
                )
        return found

    def refill(self, requests: Sequence[int], here: Sequence[Request], counts: Sequence[int]) -> None:
        """Says the next tokens, for which room was made, in place; here: what `check` returned."""
        books, new = self.cache.pages, self.tiles[1]
        said = tuple(counts)
        if said != self.counts:
            self.counts = said
            self._rows = [-(-count // new) for count in said]
            self._begins = list(accumulate(self._rows, initial=0))
            lasts = [(end - 1) * new + (count - 1) % new for end, count in zip(self._begins[1:], said, strict=True)]
            self.last_rows = tuple([(0, last) if self.pieces else divmod(last, new) for last in lasts])
        self.requests, self.firsts = tuple(requests), tuple([one.first for one in here])
        self.lengths = tuple([one.length for one in here])
        self.known, self.met = books.changes, False
        lines = _Lines(here, self.lengths, said, self._rows, self.cache.ring.rank, new)
        try:
            blocks = self._sheet.say(lines, self._begins, books.changes)
            _upload(self._places.with_changes(self._sheet.data, blocks), self._inbox)
            if blocks.at:
                self._blocks.index_copy_(1, *self._changes(len(blocks.at)))
        except BaseException:
            # nobody knows what the device has
            self._sheet = self._empty_sheet()
            raise
        for mask, found in self._found.items():
            self._find_bounds(mask, *found)
        self._fresh = set(self._found)

    def _empty_sheet(self) -> _Sheet:
        return _Sheet(self._places, self.cache.page_size, self.max_blocks)

    def _changes(self, count: int) -> tuple[Tensor, Tensor]:
        """Where the device finds so many blocks that have changed."""
        known = self._views.get(count)
        if known is None:
            known = self._places.changes(self._inbox, count)
            if count <= self.tiles[0]:
                # as many as go on, in one step after another
                self._views[count] = known
        return known

    def lay(self, tokens: Tensor) -> Tensor:
        """The new tokens where the model is to find them: `batch rows` on the CPU, 0 where there is none.

        Args:
            tokens: All new tokens that were said last, one request after another.
        """
        new = self.tiles[1]
        found = tokens.new_zeros(self.batch * self.rows, device="cpu")
        at = 0
        for part in tokens.flatten().cpu().split(self.counts):
            found[at : at + len(part)] = part
            at += -(-len(part) // new) * new
        return found.view(self.batch, self.rows)

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """As `Step.one_call`. What is found in a call is not true of the next one, and in a capture it is found in every replay."""
        self.shared, self._in_call = {}, True
        try:
            yield
        finally:
            self.shared, self._in_call = {}, False

    def once(self, key: Hashable, find: Callable[[], Tensor | None]) -> Tensor | None:
        """As `Step.once`, inside of `one_call` alone."""
        return super().once(key, find) if self._in_call else None

    def bounds(
        self, causal: bool, window: tuple[int | None, int | None] | None, chunk_len: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `Step.bounds`, at fixed addresses.

        What was asked for once is worked out again whenever the step is said anew, so a graph that is captured afterwards need
        not do it. A graph that is captured before does it by itself.
        """
        mask = (causal, window, chunk_len)
        known = self._said_bounds(mask)
        if known is not None:
            return known
        known = self._found.get(mask)
        if known is None:
            known = self._found[mask] = self._empty_bounds()
        if mask not in self._fresh:
            self._find_bounds(mask, *known)
            # nothing runs in a capture
            if not (known[0].is_cuda and torch.cuda.is_current_stream_capturing()):
                self._fresh.add(mask)
        return known


def most_blocks(books: Pages, requests: Sequence[int], new: int) -> int:
    """Blocks that one of some requests may have on one rank when each has got `new` more tokens; the same on every rank."""
    return _most_blocks(books, books.look(requests), new)


def _most_blocks(books: Pages, requests: Sequence[Request], new: int) -> int:
    return max([one.most_blocks for one in requests], default=0) + -(-new // books.page_size)


def _kept(one: Request, table: Table, shown: tuple[int, int] | None, stayed: int) -> int:
    """The first blocks of a request on this rank that a row has (Note [Blocks that stay]).

    Args:
        one: Who.
        table: Its blocks.
        shown: Whom the row's blocks are of, and since which change.
        stayed: How long that request was.
    """
    if shown is None or shown[0] != one.name:
        return 0
    if one.notes:
        stayed = min(stayed, one.stayed(shown[1]))
    starts = table.starts
    blocks = len(starts)
    if blocks and starts[-1] >= stayed:
        blocks = bisect_left(starts, stayed)
    # the block that ends with them may have been longer, or shorter
    return blocks - (blocks > 0 and starts[blocks - 1] + table.lengths[blocks - 1] >= stayed)


@dataclass(frozen=True, slots=True)
class _Lines:
    """New tokens of requests, in rows of so many tokens; each request begins in a row of its own.

    Attributes:
        requests: Whose they are.
        lengths: Of each how long it is with them.
        counts: Of each how many tokens.
        rows: Of each how many rows.
        rank: Whose blocks are asked for.
        new: Tokens of a row.
    """

    requests: Sequence[Request]
    lengths: Sequence[int]
    counts: Sequence[int]
    rows: Sequence[int]
    rank: int
    new: int

    @property
    def tables(self) -> list[Table]:
        """The blocks of each request."""
        return [one.tables[self.rank] for one in self.requests]

    def part(self, begin: int, end: int) -> _Lines:
        """Those of some requests."""
        these = slice(begin, end)
        return _Lines(
            self.requests[these], self.lengths[these], self.counts[these], self.rows[these], self.rank, self.new
        )

    def spread(self, known: Sequence[_Known]) -> Sequence[_Known]:
        """What is known of each request, for every row."""
        if max(self.rows) == 1:
            return known
        return list(chain.from_iterable(map(repeat, known, self.rows)))


@dataclass(frozen=True, slots=True)
class _Changed:
    """Blocks of some rows.

    Attributes:
        at: Their places among all blocks of a step.
        pages: Of each block.
        starts: Of each block.
        lengths: Of each block.
    """

    at: array[int] = field(default_factory=lambda: array("q"))
    pages: array[int] = field(default_factory=lambda: array("i"))
    starts: array[int] = field(default_factory=lambda: array("i"))
    lengths: array[int] = field(default_factory=lambda: array("i"))

    def add(self, table: Table, begin: int, end: int, rows: range, columns: int) -> None:
        """Blocks begin .. end - 1 of a request, for each of some rows of so many columns."""
        if begin >= end:
            return
        begins, ends = (range(rows.start * columns + x, rows.stop * columns + x, columns) for x in (begin, end))
        self.at.extend(chain.from_iterable(map(range, begins, ends)))
        self.pages.extend(table.pages[begin:end] * len(rows))
        self.starts.extend(table.starts[begin:end] * len(rows))
        self.lengths.extend(table.lengths[begin:end] * len(rows))


class _Sheet:
    """What a static step said last, row by row, and which blocks its rows have (Notes [Rows that go on], [Blocks that stay]).

    Args:
        places: Of its numbers.
        page_size: Tokens of a page.
        columns: Blocks that a row has room for.

    Attributes:
        data: All numbers of its rows, as they are uploaded.
    """

    def __init__(self, places: _Places, page_size: int, columns: int) -> None:
        batch, size = places.batch, _WORD * places.begins[-1]
        self.data = bytearray(size)
        self._places, self._page_size, self._columns = places, page_size, columns
        self._ints, self._longs = memoryview(self.data).cast("i"), memoryview(self.data).cast("q")
        growth = bytearray(size)
        self._more_ints, self._more_longs = memoryview(growth).cast("i"), memoryview(growth).cast("q")
        # two numbers of 32 bits at once: none that grows is negative, or overflows
        self._words, self._growth = (
            torch.frombuffer(self.data, dtype=torch.int64),
            torch.frombuffer(growth, dtype=torch.int64),
        )
        self._filled = 0
        # of each row: the layout with which it goes on, its request and the last change, and how long that was
        self._layouts = [_NONE] * batch
        self._shown: list[tuple[int, int] | None] = [None] * batch
        self._lengths = [0] * batch
        # of the block that a row goes on in: whether it is here, its place, page and start
        self._grows = [False] * batch
        self._at, self._pages, self._starts = [0] * batch, [0] * batch, [0] * batch
        places.clear(self._ints, self._longs, 0, batch)

    def say(self, lines: _Lines, begins: Sequence[int], change: int) -> _Changed:
        """Writes the rows of the next tokens.

        Args:
            lines: They.
            begins: The first row of each request, and one past the last one.
            change: The number of the last change in the books.

        Returns:
            What its rows do not have yet.
        """
        rows = begins[:-1]
        more = list(map(sub, lines.lengths, map(self._lengths.__getitem__, rows)))
        same = [
            one.layout == layout
            for one, layout in zip(lines.requests, map(self._layouts.__getitem__, rows), strict=True)
        ]
        # the others get as many as the first one that goes on
        ahead = next(compress(more, same), 0)
        goes_on = True, ahead, lines.new
        anew = [i for i, found in enumerate(zip(same, more, lines.counts, strict=True)) if found != goes_on]
        if ahead:
            self._words.add_(self._growth, alpha=ahead)
        blocks = _Changed()
        for begin, end in _spans(anew):
            part, row = lines.part(begin, end), rows[begin]
            self._places.write(self._ints, self._longs, self._page_size, part, row)
            self._bring(part, row, change, blocks)
        if begins[-1] != self._filled:
            self._fill(begins[-1])
        self._lengths[: self._filled] = lines.spread(lines.lengths)
        # what goes on here has one block that is longer
        blocks.at.extend(compress(self._at, self._grows))
        blocks.pages.extend(compress(self._pages, self._grows))
        starts, ends = (array("i", compress(x, self._grows)) for x in (self._starts, self._lengths))
        blocks.starts.extend(starts)
        blocks.lengths.extend(map(sub, ends, starts))
        return blocks

    def _bring(self, lines: _Lines, row: int, change: int, blocks: _Changed) -> None:
        """Adds the blocks that rows lack, from this one on, but for those in which they go on; notes what they have."""
        for one, table, count, rows in zip(lines.requests, lines.tables, lines.counts, lines.rows, strict=True):
            these, before = slice(row, row + rows), one.length - count
            begin = _kept(one, table, self._shown[row], self._lengths[row])
            if begin and rows > 1:
                had = set(zip(self._shown[these], self._lengths[these], strict=True))
                begin = min([_kept(one, table, *shown) for shown in had])
            # all of its tokens are in its last block, and none is padding
            goes_on = rows == 1 and count == lines.new and one.first - 1 <= before >= one.last.starts[-1]
            here = goes_on and one.last is table
            blocks.add(table, begin, len(table) - here, range(row, row + rows), self._columns)
            self._layouts[these] = [one.layout if goes_on else _NONE] * rows
            self._shown[these] = [(one.name, change)] * rows
            self._grows[these] = [here] * rows
            self._places.grow(self._more_longs, row, here)
            if here:
                last = len(table) - 1
                self._at[row], self._pages[row], self._starts[row] = (
                    row * self._columns + last, table.pages[last], table.starts[last],
                )  # fmt: skip
            row += rows

    def _fill(self, rows: int) -> None:
        """Makes the first rows, and no others, hold tokens."""
        if rows < self._filled:
            self._places.clear(self._ints, self._longs, rows, self._filled)
            empty = self._filled - rows
            self._layouts[rows : self._filled], self._grows[rows : self._filled] = [_NONE] * empty, [False] * empty
        self._places.count(self._more_ints, self._more_longs, rows)
        self._filled = rows


def _spans(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (first, one past the last) of those that follow each other.

    Example:
        >>> _spans([1, 2, 3, 7])
        [(1, 4), (7, 8)]
    """
    found: list[tuple[int, int]] = []
    for number in numbers:
        begin = found.pop()[0] if found and found[-1][1] == number else number
        found.append((begin, number + 1))
    return found


def _slots(table: Table, page_size: int, before: int, count: int) -> array[int]:
    """Where a request's last tokens are kept on this rank, from `before` on: page * page_size + row; -1: on another one."""
    found = array("q", (-1,)) * count
    for page, start, length in zip(*map(reversed, (table.pages, table.starts, table.lengths)), strict=True):
        if start + length <= before:
            break
        begin = max(start, before)
        slot = page * page_size + begin - start
        found[begin - before : start + length - before] = array("q", range(slot, slot + start + length - begin))
    return found


@dataclass(frozen=True)
class _Places:
    """Where the integers of a decode step are in its one upload (Note [One upload]); in words of 4 bytes."""

    batch: int
    new: int

    def words(self, columns: int) -> int:
        """Words of a step with so many columns of blocks, which come last."""
        return self.begins[-1] + 3 * self.table_words(columns)

    def words_of_changes(self, count: int) -> int:
        """Words of a step with so many changed blocks, which come last (Note [Blocks that stay])."""
        return self.begins[-1] + _lines(2 * count) + _lines(3 * count)

    def table_words(self, columns: int) -> int:
        """Words from one number of all blocks to the next one."""
        return _lines(self.batch * columns)

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return self.batch * self.new

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Where positions, slots, positions32, starts, ends, causal_ends, counts and blocks begin."""
        long, short = _lines(2 * self.rows), _lines(self.rows)
        return tuple(accumulate((long, long, short, short, short, short, _lines(self.batch)), initial=0))

    def table(self, words: Tensor, columns: int) -> Tensor:
        """Pages, starts and lengths of all blocks, `3 batch columns`, of the words that hold them."""
        return words.view(3, -1)[:, : self.batch * columns].view(3, self.batch, columns)

    def view(self, x: Tensor, blocks: Tensor, shape: tuple[int, int]) -> dict[str, Any]:
        """The tensors of a step, as parts of an upload; blocks: `table`; shape: of the model's rows."""
        at, rows, tiles = self.begins, self.rows, (self.batch, self.new)
        positions, slots = (x[begin : begin + 2 * rows].view(torch.int64).view(shape) for begin in at[:2])
        positions32, starts, ends, causal_ends = (x[begin : begin + rows].view(tiles) for begin in at[2:6])
        return {
            "positions": positions,
            "slots": slots,
            "positions32": positions32,
            "starts": starts,
            "ends": ends,
            "causal_ends": causal_ends,
            "table": PageTable(blocks[0], blocks[1], blocks[2], x[at[6] : at[6] + self.batch]),
            "taken": torch.arange(shape[1], device=x.device),
        }

    def changes(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Places of changed blocks among all of a step, and the blocks, `3 count`; parts of an upload."""
        begin = self.begins[-1]
        at = begin + _lines(2 * count)
        return x[begin : begin + 2 * count].view(torch.int64), x[at : at + 3 * count].view(3, count)

    def fill(self, page_size: int, lines: _Lines, columns: int) -> bytearray:
        """The upload of a step with so many columns of blocks."""
        data = bytearray(_WORD * self.words(columns))
        ints = memoryview(data).cast("i")
        self.write(ints, memoryview(data).cast("q"), page_size, lines)
        width = self.table_words(columns)
        for i, table in enumerate(lines.tables):
            begin, blocks = self.begins[-1] + i * columns, len(table)
            ints[begin : begin + blocks] = table.pages
            ints[begin + width : begin + width + blocks] = table.starts
            ints[begin + 2 * width : begin + 2 * width + blocks] = table.lengths
        return data

    def with_changes(self, rows: bytearray, blocks: _Changed) -> bytearray:
        """The upload of a step's rows and of blocks that have changed."""
        if not blocks.at:
            return rows
        words = 2 * len(blocks.at)
        gap = bytes(_WORD * (_lines(words) - words))
        return bytearray().join((rows, blocks.at, gap, blocks.pages, blocks.starts, blocks.lengths))

    def clear(self, ints: memoryview, longs: memoryview, begin: int, end: int) -> None:
        """Writes rows that hold no token: they see nothing and are kept nowhere."""
        positions, slots, *short, counts, _ = self.begins
        begins, count = begin * self.new, (end - begin) * self.new
        for first in (positions // 2, slots // 2):
            longs[first + begins : first + begins + count] = array("q", (0 if first == positions // 2 else -1,)) * count
        for first in short:
            ints[first + begins : first + begins + count] = array("i", (0,)) * count
        ints[counts + begin : counts + end] = array("i", (0,)) * (end - begin)

    def count(self, ints: memoryview, longs: memoryview, rows: int) -> None:
        """Writes by how much numbers grow with a token more of each of the first rows; slots of these: `grow`."""
        positions, slots, here, _, ends, causal_ends, _, _ = self.begins
        more, none = rows * self.new, self.rows - rows * self.new
        longs[positions // 2 : positions // 2 + self.rows] = array("q", (1,)) * more + array("q", (0,)) * none
        longs[slots // 2 + more : slots // 2 + self.rows] = array("q", (0,)) * none
        for first in (here, ends, causal_ends):
            ints[first : first + self.rows] = array("i", (1,)) * more + array("i", (0,)) * none

    def grow(self, longs: memoryview, row: int, here: bool) -> None:
        """Writes by how much a row's slots grow with a token more: those of tokens that are kept here."""
        at = self.begins[1] // 2 + row * self.new
        longs[at : at + self.new] = array("q", (here,)) * self.new

    def write(self, ints: memoryview, longs: memoryview, page_size: int, lines: _Lines, row: int = 0) -> None:
        """Writes all of some rows, from this one on, but the blocks: what holds no token sees nothing and is kept nowhere."""
        new, tables = self.new, lines.tables
        place, slots, here, starts, ends, causal_ends, counts, _ = self.begins
        place, slots = place // 2, slots // 2
        last = row + sum(lines.rows)
        longs[slots + row * new : slots + last * new] = array("q", (-1,)) * ((last - row) * new)
        ints[counts + row : counts + last] = array("i", lines.spread([len(table.pages) for table in tables]))
        together = max(lines.rows) == 1 < len(lines.rows)
        if together:
            self._write_rows(ints, longs, lines, row)
        stop = row * new
        for one, table, count, rows in zip(lines.requests, tables, lines.counts, lines.rows, strict=True):
            at, stop, before = stop, stop + rows * new, one.length - count
            end = at + count
            if not together:
                numbers, nexts = range(before, one.length), range(before + 1, one.length + 1)
                longs[place + at : place + end] = array("q", numbers)
                ints[here + at : here + end] = array("i", numbers)
                ints[causal_ends + at : causal_ends + end] = array(
                    "i", (max(one.first, x) for x in nexts) if one.first else nexts
                )
                ints[starts + at : starts + end] = array("i", (one.first,)) * count
                ints[ends + at : ends + end] = array("i", (one.length,)) * count
            if end < stop:
                # the last row has fewer tokens
                nothing = array("i", (0,)) * (stop - end)
                longs[place + end : place + stop] = array("q", nothing)
                for first in (here, starts, ends, causal_ends):
                    ints[first + end : first + stop] = nothing
            if not table.starts or table.starts[-1] + table.lengths[-1] <= before:
                continue  # its new tokens are on other ranks
            if count == 1:
                longs[slots + at] = table.pages[-1] * page_size + before - table.starts[-1]
            else:
                longs[slots + at : slots + end] = _slots(table, page_size, before, count)

    def _write_rows(self, ints: memoryview, longs: memoryview, lines: _Lines, row: int) -> None:
        """Writes what is known of the tokens of requests that have a row each, but where they are kept."""
        positions, _, here, starts, ends, causal_ends, _, _ = self.begins
        befores = [length - count for length, count in zip(lines.lengths, lines.counts, strict=True)]
        firsts, lengths = array("i", [one.first for one in lines.requests]), array("i", lines.lengths)
        stop = (row + len(befores)) * self.new
        for x in range(self.new):
            # token x of every row at once
            at, places = row * self.new + x, [before + x for before in befores]
            nexts = [max(before + x + 1, first) for before, first in zip(befores, firsts, strict=True)]
            longs[positions // 2 + at : positions // 2 + stop : self.new] = array("q", places)
            columns = (here, array("i", places)), (starts, firsts), (ends, lengths), (causal_ends, array("i", nexts))
            for first, column in columns:
                ints[first + at : first + stop : self.new] = column


def _lines(words: int) -> int:
    return -(-words // _LINE) * _LINE


def make_step(
    cache: PagedKVCache, requests: Sequence[int], counts: Sequence[int], mode: Literal["prefill", "decode"], alike: bool
) -> Step:
    """The step that brings tokens for which room was made.

    Args:
        cache: Where to.
        requests: Who brings tokens.
        counts: How many each.
        mode: How they are computed.
        alike: prefill: the requests keep a batch dimension.
    """
    books = cache.pages
    lengths = tuple(map(books.length, requests))
    firsts = tuple(map(books.first, requests))
    common = (cache, mode, tuple(requests), tuple(counts), lengths, firsts)
    if mode == "decode":
        places = _Places(len(requests), counts[0])
        here = books.look(requests)
        lines = _Lines(here, lengths, counts, [1] * len(here), cache.ring.rank, places.new)
        # a kernel wants one column at least
        columns = max(1, *map(len, lines.tables))
        words = _uploaded(places.fill(books.page_size, lines, columns), cache.device)
        last = tuple((i, counts[0] - 1) for i in range(len(requests)))
        found = places.view(words, places.table(words[places.words(0) :], columns), (places.batch, places.new))
        return Step(*common, places.batch, places.new, **found, last_rows=last, known=books.changes)
    return _prefill_step(common, alike)


def _prefill_step(common: tuple, alike: bool) -> Step:
    cache, _, requests, counts, lengths, _ = common
    books, rank, world = cache.pages, cache.ring.rank, range(cache.ring.world_size)
    befores = [length - new for length, new in zip(lengths, counts, strict=True)]
    batch = len(requests) if alike else 1
    documents = None if alike else tuple(accumulate(lengths, initial=0))
    # where a request begins in the virtual sequence, and its new tokens among all new ones
    origins = (0,) * batch if documents is None else documents[:-1]
    firsts_new = (0,) * batch if alike else tuple(accumulate(counts[:-1], initial=0))
    total = lengths[0] if alike else sum(lengths)
    # those of a batch are on the same ranks
    stood_for = range(1 if alike else len(requests))
    new = [(i, stretch) for i in stood_for for stretch in books.stretches(requests[i], befores[i])]
    kept = [(i, stretch) for i in stood_for for stretch in books.stretches(requests[i])]
    sharding, kv_sharding = (
        Sharding(total, "part", _shards(found, origins, world), rank, documents, ring=cache.ring, device=cache.device)
        for found in (new, kept)
    )
    tables = [books.table(request, rank) for request in requests]
    added = [_since(table, before) for table, before in zip(tables, befores, strict=True)]
    shifts = [first - before for first, before in zip(firsts_new, befores, strict=True)]
    ours = _Rows.of([table for table, _ in added], [skipped for _, skipped in added], shifts)
    held = _Rows.of(tables)
    words = _uploaded(ours.data() + held.data(), cache.device)
    pages, starts, row, skipped, shift = ours.count(words, sharding.shard_len * batch)
    held_pages, _, held_row = held.count(words[len(ours.words) :], kv_sharding.shard_len * batch)
    positions = (starts + row).view(batch, sharding.shard_len)
    slots = (pages * cache.page_size + skipped + row).view(batch, sharding.shard_len)
    taken = (starts + row + shift)[: sharding.shard_len]
    kept_slots = (held_pages * cache.page_size + held_row).view(batch, kv_sharding.shard_len)
    return Step(
        *common,
        batch=batch,
        rows=sharding.shard_len,
        positions=positions,
        taken=taken,
        slots=slots,
        last_rows=_last_rows(books, requests, befores, rank, alike),
        sharding=sharding,
        kv_sharding=kv_sharding,
        kept_slots=kept_slots,
        known=books.changes,
    )


def _last_rows(
    books: Pages, requests: Sequence[int], befores: Sequence[int], rank: int, alike: bool
) -> tuple[tuple[int, int] | None, ...]:
    found: list[tuple[int, int] | None] = []
    row = 0
    for i, (request, before) in enumerate(zip(requests, befores, strict=True)):
        stretches = books.stretches(request, before)
        here = sum(stretch.stop - stretch.start for stretch in stretches if stretch.rank == rank)
        row = here if alike else row + here
        found.append((i if alike else 0, row - 1) if stretches[-1].rank == rank else None)
    return tuple(found)


def _shards(found: Sequence[tuple[int, Stretch]], origins: Sequence[int], world: range) -> tuple[Shard, ...]:
    """Every rank's runs of the virtual sequence, those that touch joined."""
    shards: list[list[Run]] = [[] for _ in world]
    for i, (rank, start, stop) in found:
        runs, begin = shards[rank], origins[i] + start
        if runs and runs[-1].last + 1 == begin:
            runs[-1] = Run(runs[-1].start, 1, runs[-1].length + stop - start)
        else:
            runs.append(Run(begin, 1, stop - start))
    return tuple(map(tuple, shards))


def _since(table: Table, before: int) -> tuple[Table, int]:
    """The part of a request's blocks from a token on, and how many rows of the first page lie before it."""
    begin = bisect_right(table.starts, before)
    if begin and table.starts[begin - 1] + table.lengths[begin - 1] > before:
        begin -= 1
    part = Table(table.pages[begin:], table.starts[begin:], table.lengths[begin:])
    skipped = max(0, before - part.starts[0]) if part else 0
    if skipped:
        part.starts[0] += skipped
        part.lengths[0] -= skipped
    return part, skipped


@dataclass(frozen=True)
class _Rows:
    """Blocks whose rows are counted on the device (Note [One upload]).

    Attributes:
        words: Pages, starts and lengths of all blocks, then whatever else is known of each block.
        fields: How many numbers of each block.
    """

    words: array[int]
    fields: int

    @classmethod
    def of(cls, tables: Sequence[Table], skipped: Sequence[int] = (), shifts: Sequence[int] = ()) -> _Rows:
        """Of the blocks of several requests, one after another.

        Args:
            tables: Of each request.
            skipped: A number of each request that only its first block has, the others 0; may be left out.
            shifts: A number of each request that all its blocks have; may be left out.
        """
        words = array("i")
        for name in ("pages", "starts", "lengths"):
            for table in tables:
                words += getattr(table, name)
        for table, here in zip(tables, skipped, strict=False):
            words += array("i", (0,)) * len(table)
            if here:
                words[-len(table)] = here
        for table, here in zip(tables, shifts, strict=False):
            words += array("i", (here,)) * len(table)
        return cls(words, 3 + bool(skipped) + bool(shifts))

    def data(self) -> bytes:
        """As it is uploaded."""
        return self.words.tobytes()

    def count(self, words: Tensor, total: int) -> tuple[Tensor, ...]:
        """What is known of each row's block, and which row of the block it is in place of lengths: `total` int64 each.

        Args:
            words: An upload that begins with `data`.
            total: How many rows there are.
        """
        blocks = len(self.words) // self.fields
        known = words[: len(self.words)].view(self.fields, blocks).long()
        block = torch.repeat_interleave(known[2], output_size=total)
        row = torch.arange(total, device=words.device) - (known[2].cumsum(0) - known[2])[block]
        pages, starts, _, *others = known[:, block]
        return pages, starts, row, *others


def _uploaded(data: bytes | bytearray, device: torch.device) -> Tensor:
    """The words of a step on a device, as int32."""
    words = torch.empty(len(data) // _WORD, dtype=torch.int32, device=device)
    _upload(data, words)
    return words


def _upload(data: bytes | bytearray, words: Tensor) -> None:
    """Writes the words of a step to the beginning of a tensor, in stream order."""
    if not data:
        return
    there = torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.int32)
    if words.is_cuda:
        there = torch.empty(len(there), dtype=torch.int32, pin_memory=True).copy_(there)
    words[: len(there)].copy_(there, non_blocking=True)
