"""A step of decoding that stays where it is, for CUDA graphs: the next tokens are said to it in place.

Owns `StaticStep`, what it said last, and what of the next tokens is not on the device yet. Refuses to know how numbers lie in an
upload (upload.py), and how a step is made that is used once (step.py).

Note [Steps that stay]
    A captured CUDA graph reads the addresses that it was captured with. A `StaticStep` has its tensors at fixed addresses and
    in fixed shapes; the next tokens are said to it in place (`PagedKVCache.extend(..., into=step)`), in stream order, and a
    graph that was captured with it then serves them. Rows of the batch that no request fills see nothing and are kept nowhere.

Note [Blocks that stay]
    The blocks of eight requests of a million tokens, in pages of 64 on 4 ranks, are 393,216 bytes on each of them, and a token
    changes one block of a request, on one rank. A static step therefore knows which blocks it has on the device: for each row
    the request that was said there, when, and how long it was. Tokens that have stayed since (Note [What stays] of blocks.py)
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
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, compress
from operator import sub
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringattn.inference.blocks import Request, Table
from ringattn.inference.pages import Pages
from ringattn.inference.step import Mask, Step
from ringattn.inference.upload import WORD, Changed, Lines, Places, upload

if TYPE_CHECKING:
    from ringattn.inference.cache import PagedKVCache

_NONE = -1  # no request's layout


class StaticStep(Step):
    """A step of decoding whose tensors stay where they are (Note [Steps that stay]); made by `PagedKVCache.static_step`.

    Attributes:
        max_tokens: The longest request that it serves.
        max_blocks: Blocks of a request on one rank that it has room for.
    """

    max_tokens: int
    max_blocks: int
    _places: Places
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
        places = Places(batch, new)
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
        lines = Lines(here, self.lengths, said, self._rows, self.cache.ring.rank, new)
        try:
            blocks = self._sheet.say(lines, self._begins, books.changes)
            upload(self._places.with_changes(self._sheet.data, blocks), self._inbox)
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


class _Sheet:
    """What a static step said last, row by row, and which blocks its rows have (Notes [Rows that go on], [Blocks that stay]).

    Args:
        places: Of its numbers.
        page_size: Tokens of a page.
        columns: Blocks that a row has room for.

    Attributes:
        data: All numbers of its rows, as they are uploaded.
    """

    def __init__(self, places: Places, page_size: int, columns: int) -> None:
        batch, size = places.batch, WORD * places.begins[-1]
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

    def say(self, lines: Lines, begins: Sequence[int], change: int) -> Changed:
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
        blocks = Changed()
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

    def _bring(self, lines: Lines, row: int, change: int, blocks: Changed) -> None:
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
