"""What the books say of a request: which of its tokens lie in which pages, and which of them have stayed there.

Owns the values that the books (pages.py) are made of and answer with, and what follows from one or two of these alone. Refuses to
know who else uses a page, and what is free or promised. Standard library only.

Note [Blocks]
    A request's tokens 0 .. length-1 are cut into blocks. A block is a stretch of consecutive tokens at the beginning of one page
    of one rank, and may cover less than its page. A fork shares its parent's pages, each counted once per user, with the last
    block cut at the fork; what it adds goes to pages of its own. So joining, growing, forking and leaving copy nothing.

Note [What stays]
    Growing leaves every token where it is. Whoever keeps a copy of a request's blocks therefore asks which of its tokens have
    stayed since he looked (`stayed`), and reads on from there. Cropping and reordering note how many tokens they left in
    place, by the number of the change (`Pages.changes`). A note that a later one undercuts says nothing more and is dropped, so the
    rest ascends, and the first one after a change is the least. More than MOST_NOTES are too many: the oldest two then become
    one that says less.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LONGEST = 2**31 - 1
"""Tokens of a request: positions are int32 in kernels."""
MOST_NOTES = 32
"""Notes about what stayed that are kept of a request (Note [What stays])."""


class Block(NamedTuple):
    """Tokens start .. start + length - 1 of a request, in rows 0 .. length - 1 of a page of a rank."""

    rank: int
    page: int
    start: int
    length: int

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.start + self.length


class Piece(NamedTuple):
    """Tokens start .. start + length - 1 of a request and where they are: rows row .. row + length - 1 of a page."""

    rank: int
    page: int
    row: int
    start: int
    length: int


class Stretch(NamedTuple):
    """Tokens start .. stop - 1 of a request, all on one rank."""

    rank: int
    start: int
    stop: int


class Move(NamedTuple):
    """Rows 0 .. rows - 1 of one page of a rank that another page of it must have too."""

    rank: int
    source: int
    target: int
    rows: int


@dataclass(slots=True)
class Table:
    """A request's blocks on one rank, ascending: for reading only.

    Attributes:
        pages: Of each block, int32.
        starts: The first token of each block, int32.
        lengths: Tokens of each block, int32.
    """

    pages: array[int] = field(default_factory=lambda: array("i"))
    starts: array[int] = field(default_factory=lambda: array("i"))
    lengths: array[int] = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self.pages)

    def head(self, blocks: int) -> Table:
        """A copy of the first blocks."""
        return Table(self.pages[:blocks], self.starts[:blocks], self.lengths[:blocks])

    def cut(self, blocks: int) -> None:
        """Forgets all but the first blocks."""
        del self.pages[blocks:], self.starts[blocks:], self.lengths[blocks:]


@dataclass(eq=False, slots=True)
class Request:
    """What the books say of a request: for reading only.

    Attributes:
        name: What it is called by.
        promised: Tokens it may grow to.
        first: Its first token that anybody sees.
        length: Its tokens.
        tables: Its blocks by rank.
        stretches: Ranks of its tokens, ascending: (rank, the first token).
        fixed: Pages promised on each rank; None: promised anywhere.
        owed: Pages of the sum of promises that are its own (Note [Reservations] of pages.py).
        notes: (number of a change, tokens that it left in place), both ascending (Note [What stays]).
        last: Its blocks on the rank that has the last one; none where it has no tokens.
        full: Tokens that it may certainly grow to in its last block (Note [Ends] of pages.py).
        most_blocks: Blocks on the rank where it has most.
        layout: A number that it never shared with others; another one whenever its blocks change otherwise than by tokens that are
            added to the last one.
    """

    name: int
    promised: int
    first: int
    length: int
    tables: list[Table]
    stretches: list[tuple[int, int]] = field(default_factory=list)
    fixed: list[int] | None = None
    owed: int = 0
    notes: list[tuple[int, int]] = field(default_factory=list)
    last: Table = field(default_factory=Table)
    full: int = 0
    most_blocks: int = 0
    layout: int = -1

    def stayed(self, change: int) -> int:
        """As `Pages.stayed`."""
        if not self.notes or self.notes[-1][0] <= change:
            return self.length
        later = bisect_right(self.notes, change, key=lambda note: note[0])
        return self.notes[later][1]

    def note(self, change: int, tokens: int) -> None:
        """Says how many tokens a change has left in place (Note [What stays])."""
        notes = self.notes
        while notes and notes[-1][1] >= tokens:
            notes.pop()
        notes.append((change, tokens))
        if len(notes) > MOST_NOTES:
            notes[:2] = [(notes[1][0], notes[0][1])]


def first_stretches(stretches: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The stretches of the first tokens."""
    return list(stretches[: bisect_left(stretches, length, key=lambda stretch: stretch[1])])


def parting(a: Table, b: Table, same: int) -> int:
    """The first token that may be elsewhere in one of two tables than in the other; the first `same` blocks are in common."""
    rest = [(one.pages[same:], one.starts[same:], one.lengths[same:]) for one in (a, b)]
    if rest[0] == rest[1]:
        return LONGEST
    return min((one.starts[same] for one in (a, b) if same < len(one)), default=LONGEST)


def blocks_in_common(a: Table, b: Table) -> int:
    """How many blocks two tables begin with in common, their last ones aside."""
    low, high = 0, max(0, min(len(a), len(b)) - 1)
    while low < high:
        middle = (low + high + 1) // 2
        same = a.pages[low:middle] == b.pages[low:middle] and a.lengths[low:middle] == b.lengths[low:middle]
        low, high = (middle, high) if same else (low, middle - 1)
    return low
