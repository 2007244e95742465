"""The page allocator against a model in which a request is a list of tokens and memory a dictionary."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ringattn.inference import block_table as block_table
from ringattn.inference.block_table import PageCopy
from ringattn.inference.page_allocator import CacheFull, PageAllocator
from tests.support.page_spans import Block, PageSpan, blocks_of, page_spans


def state(allocator: PageAllocator) -> str:
    """State of the allocator, as text."""
    return repr({name: value for name, value in vars(allocator).items() if name != "_names"})


class Model(RuleBasedStateMachine):
    """Random histories; every request must read back its own tokens after each."""

    @initialize(world=st.integers(1, 3), pages=st.integers(3, 12), page_size=st.sampled_from([4, 3, 1]))
    def begin(self, world: int, pages: int, page_size: int) -> None:
        self.allocator = PageAllocator(world, pages, page_size)
        self.looks: list[
            tuple[int, dict[int, list[tuple[int, int, int]]]]
        ] = []  # (number of a change, places of all tokens)
        self.size, self.total = page_size, world * pages
        self.said: dict[int, list[int]] = {}
        self.memory: dict[tuple[int, int, int], int] = {}
        self.groups: list[list[int]] = []  # joined alike, and treated alike ever since
        self.layouts: dict[int, object] = {}
        self.tokens = 0

    def attempt(self, call: Callable[[], Any], *refusals: type[Exception]) -> Any:
        """The result, or None when it was refused, which must have changed nothing."""
        before = state(self.allocator)
        try:
            return call()
        except refusals:
            assert state(self.allocator) == before
            return None

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.said)))

    def split(self, *requests: int) -> None:
        """These are no longer treated like others of their group."""
        self.groups = [group for group in self.groups if not set(group) & set(requests)]

    def write(self, request: int, before: int) -> None:
        """Write new tokens as a step does."""
        pieces = page_spans(self.allocator, request, before)
        assert [piece.start for piece in pieces][:1] == [before]
        for piece in pieces:
            for i in range(piece.length):
                self.tokens += 1
                assert piece.start + i == len(self.said[request])
                self.said[request].append(self.tokens)
                self.memory[piece.rank, piece.page, piece.row + i] = self.tokens

    def grow(self, request: int, most: int) -> None:
        """Says up to so many tokens more, as far as they are reserved."""
        before = len(self.said[request])
        new = min(most, self.allocator.find(request).reserved_tokens - before)
        if new > 0:
            self.allocator.assign([request], [new])
            self.write(request, before)
            self.split(request)

    def left_at_worst(self) -> int:
        """Free pages less those for all tokens to come, were no page to be appended to."""
        allocator = self.allocator
        return sum(allocator.free_pages) - sum(
            -(-(allocator.find(one).reserved_tokens - len(had)) // self.size) for one, had in self.said.items()
        )

    @rule(reserve=st.integers(1, 14), padding=st.integers(0, 3), new=st.integers(0, 9))
    def join(self, reserve: int, padding: int, new: int) -> None:
        first = min(padding, reserve)
        must_fit = -(-reserve // self.size) <= self.left_at_worst()
        name = self.attempt(lambda: self.allocator.add_request(reserve, first), *(() if must_fit else (CacheFull,)))
        if name is not None:
            assert name not in self.said
            assert self.allocator.find(name).first == first
            self.said[name] = []
            self.grow(name, new)

    @rule(batch=st.integers(1, 3), reserve=st.integers(1, 9))
    def add_batch(self, batch: int, reserve: int) -> None:
        names = self.attempt(lambda: self.allocator.add_batch(reserve, [0] * batch), CacheFull)
        if names is not None:
            self.said.update({name: [] for name in names})
            self.groups.append(names)

    @precondition(lambda self: self.said)
    @rule(data=st.data(), mine=st.integers(0, 3), his=st.integers(0, 3))
    def fork(self, data: st.DataObject, mine: int, his: int) -> None:
        parent = self.pick(data)
        had = len(self.said[parent])
        length = data.draw(st.one_of(st.just(had), st.integers(0, had)))
        reserve = max(1, length) + data.draw(st.integers(0, 8))
        must_fit = -(-(reserve - length) // self.size) <= self.left_at_worst()
        refusals = () if must_fit else (CacheFull,)
        name = self.attempt(lambda: self.allocator.fork(parent, length, reserve), *refusals)
        if name is not None:
            self.said[name] = self.said[parent][:length]
            self.split(parent)
            self.grow(name, mine)
            self.grow(parent, his)

    @precondition(lambda self: self.said)
    @rule(data=st.data(), how=st.sampled_from(["each", "each", "alike"]), one_by_one=st.booleans())
    def place(self, data: st.DataObject, how: str, one_by_one: bool) -> None:
        requests = data.draw(st.lists(st.sampled_from(sorted(self.said)), min_size=1, max_size=3, unique=True))
        left = [self.allocator.find(one).reserved_tokens - len(self.said[one]) for one in requests]
        # now and then one token too many
        counts = [x + 1 if x < 1 else data.draw(st.integers(1, x)) for x in left]
        same_length = how == "alike"
        if same_length:
            counts = [min(counts)] * len(counts)
        fits = all(new <= x for new, x in zip(counts, left, strict=True))
        before = [len(self.said[one]) for one in requests]
        refusals = (ValueError, CacheFull) if same_length else () if fits else (ValueError,)
        done = self.attempt(
            lambda: self.allocator.assign(requests, counts, same_length=same_length, one_by_one=one_by_one) or True,
            *refusals,
        )
        if done:
            assert fits
            for one, start in zip(requests, before, strict=True):
                self.write(one, start)
            assert not same_length or self.allocator.have_same_placement(requests)
            self.split(*requests)

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), one_by_one=st.booleans())
    def place_group(self, data: st.DataObject, one_by_one: bool) -> None:
        group = data.draw(st.sampled_from(self.groups))
        left = self.allocator.find(group[0]).reserved_tokens - len(self.said[group[0]])
        if left:
            new, before = data.draw(st.integers(1, left)), len(self.said[group[0]])
            counts = [new] * len(group)
            done = self.attempt(
                lambda: self.allocator.assign(group, counts, same_length=True, one_by_one=one_by_one) or True, CacheFull
            )
            for one in group if done else ():
                self.write(one, before)
            assert self.allocator.have_same_placement(group)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def reorder_group(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.groups))
        index = data.draw(st.lists(st.integers(0, len(group) - 1), min_size=len(group), max_size=len(group)))
        available = self.allocator.available
        moves = self.allocator.reorder(group, index)
        assert self.allocator.available >= available
        rows = {
            (move.rank, move.target, i): self.memory[move.rank, move.source, i]
            for move in moves
            for i in range(move.rows)
        }
        self.memory.update(rows)
        said = [self.said[one] for one in group]
        self.said.update({one: list(said[source]) for one, source in zip(group, index, strict=True)})

    @precondition(lambda self: self.said)
    @rule(data=st.data(), less=st.booleans(), new=st.integers(0, 3))
    def crop(self, data: st.DataObject, less: bool, new: int) -> None:
        request = self.pick(data)
        had = self.said[request]
        length = max(0, len(had) - data.draw(st.integers(0, 2 * self.size)))
        reserve = data.draw(st.integers(max(length, 1), self.allocator.find(request).reserved_tokens)) if less else None
        # to reserve no more than is left always fits, and so does giving up what is one's own alone
        users = self.users()
        shared = any(
            users[block.rank, block.page] > 1 for block in blocks_of(self.allocator, request) if block.stop > length
        )
        must_fit = reserve == max(length, 1) if reserve is not None and length else not shared
        done = self.attempt(
            lambda: self.allocator.truncate(request, length, reserve) or True, *(() if must_fit else (CacheFull,))
        )
        if done:
            del had[length:]
            self.grow(request, new)
        self.split(request)

    @precondition(lambda self: self.said)
    @rule(data=st.data(), more=st.integers(0, 9), new=st.integers(0, 9))
    def reserve(self, data: st.DataObject, more: int, new: int) -> None:
        request = self.pick(data)
        had = self.allocator.find(request).reserved_tokens
        must_fit = -(-more // self.size) <= self.left_at_worst()
        refusals = () if must_fit else (CacheFull,)
        self.attempt(lambda: self.allocator.reserve(request, had + more), *refusals)
        self.grow(request, new)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def place_on_ranks(self, data: st.DataObject) -> None:
        request, before = self.pick(data), self.allocator.free_pages
        ranks = data.draw(st.lists(st.integers(0, self.allocator.world_size - 1), max_size=4))
        lengths = data.draw(st.lists(st.integers(1, self.size), min_size=len(ranks), max_size=len(ranks)))
        start = len(self.said[request])
        there = self.allocator.available, before
        if self.attempt(lambda: self.allocator.place(request, ranks, lengths) or True, CacheFull):
            self.write(request, start) if ranks else None
            blocks = [block for block in blocks_of(self.allocator, request) if block.start >= start]
            assert [(block.rank, block.length) for block in blocks] == list(zip(ranks, lengths, strict=True))
            self.split(request)
        else:
            wanted = [ranks.count(rank) for rank in range(self.allocator.world_size)]
            assert (
                any(map(int.__gt__, wanted, there[1])) or len(ranks) + self.owed_after(request, sum(lengths)) > there[0]
            )

    def owed_after(self, request: int, new: int) -> int:
        """Pages that are reserved for a request after so many tokens in new pages, beyond those that are now."""
        one = self.allocator.find(request)
        left = max(0, one.reserved_tokens - one.length - new)
        return -(-left // self.size) - self.allocator.owed_pages([request])

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = self.pick(data)
        self.allocator.free(request)
        del self.said[request]
        self.split(request)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def keep_every_promise(self, data: st.DataObject) -> None:
        """Everything reserved fits, in any order of calls."""
        allocator = copy.deepcopy(self.allocator)
        for group in self.groups:
            left = allocator.find(group[0]).reserved_tokens - allocator.length(group[0])
            if left:
                with contextlib.suppress(CacheFull):
                    allocator.assign(group, [left] * len(group), same_length=True)
        last = data.draw(st.integers(0, len(self.said)))
        for one in sorted(self.said, key=lambda one: (one >= last, one)):
            left = allocator.find(one).reserved_tokens - allocator.length(one)
            for new in (left // 2, left - left // 2):
                if new:
                    allocator.assign([one], [new], one_by_one=bool(one % 2))
        assert all(allocator.length(one) == allocator.find(one).reserved_tokens for one in self.said)

    def places(self, request: int) -> list[tuple[int, int, int]]:
        """(rank, page, row) of every token."""
        blocks = blocks_of(self.allocator, request)
        return [(block.rank, block.page, row) for block in blocks for row in range(block.length)]

    @rule()
    def look(self) -> None:
        self.looks = [*self.looks[-3:], (self.allocator.changes, {one: self.places(one) for one in self.said})]

    @invariant()
    def what_is_said_to_have_stayed_is_where_it_was(self) -> None:
        for change, places in getattr(self, "looks", ()):
            for one in set(places) & set(self.said):
                found = self.allocator.find(one)
                stayed = len(places[one]) if found.moved_at <= change else min(found.kept, len(places[one]))
                assert self.places(one)[:stayed] == places[one][:stayed]

    @invariant()
    def what_follows_from_blocks_is_what_they_say(self) -> None:
        for name in getattr(self, "said", ()):
            one, blocks = self.allocator.get_requests([name])[0], blocks_of(self.allocator, name)
            assert one.max_blocks_after == max(Counter(block.rank for block in blocks).values(), default=0)
            assert one.last is one.tables[blocks[-1].rank] if blocks else not one.last
            room = max(0, one.full - one.length)
            assert room <= min(one.reserved_tokens - one.length, self.allocator._free_rows(one)), "whatever others did"
            # all but the last block's length
            layout = name, [block[:3] for block in blocks], [block.length for block in blocks[:-1]]
            assert not blocks or self.layouts.setdefault(one.layout, layout) == layout

    def users(self) -> Counter[tuple[int, int]]:
        return Counter((block.rank, block.page) for one in self.said for block in blocks_of(self.allocator, one))

    @invariant()
    def every_request_reads_its_own_tokens(self) -> None:
        for one, tokens in getattr(self, "said", {}).items():
            assert self.allocator.length(one) == len(tokens)
            read, at = [], 0
            for block in blocks_of(self.allocator, one):
                assert block.start == at
                assert 1 <= block.length <= self.size
                at = block.stop
                read += [self.memory[block.rank, block.page, i] for i in range(block.length)]
            assert read == tokens
            ranks = [rank for rank, start, stop in self.allocator.rank_spans(one) for _ in range(start, stop)]
            assert ranks == [block.rank for block in blocks_of(self.allocator, one) for _ in range(block.length)]

    @invariant()
    def every_page_is_counted(self) -> None:
        if not hasattr(self, "allocator"):
            return
        users, allocator = self.users(), self.allocator
        for rank, free in enumerate(allocator._free):
            assert len(free) == len(set(free)) == allocator.free_pages[rank]
            for page in range(allocator.pages):
                assert allocator._users[rank][page] == users[rank, page]
                assert (page in free) == (users[rank, page] == 0)
        to_open = sum(map(allocator._pages_to_open, allocator._requests.values()))
        assert allocator.available == sum(allocator.free_pages) - to_open >= 0
        assert set(allocator.requests) == set(self.said)

    def teardown(self) -> None:
        for one in getattr(self, "said", {}):
            self.allocator.free(one)
        if hasattr(self, "allocator"):
            assert sum(self.allocator.free_pages) == self.allocator.available == self.total


def ranks(allocator: PageAllocator, request: int) -> list[tuple[int, int]]:
    """(rank, tokens) of a request's stretches."""
    return [(rank, stop - start) for rank, start, stop in allocator.rank_spans(request)]


def test_pages_of_a_prompt_are_assigned_in_a_zigzag() -> None:
    allocator = PageAllocator(world_size=3, pages=20, page_size=4)
    request = allocator.add_request(reserve=60)
    allocator.assign([request], [46])
    # twelve pages, four on each rank; the last is half full
    assert ranks(allocator, request) == [(0, 8), (1, 8), (2, 16), (1, 8), (0, 6)]
    allocator.assign([request], [14])
    # what is open is filled first; new pages go to all ranks again
    assert ranks(allocator, request) == [(0, 8), (1, 8), (2, 16), (1, 8), (0, 12), (1, 4), (2, 4)]
    assert allocator.free_pages == (15, 15, 15)


def test_pages_are_split_evenly_up_to_the_capacity_of_ranks() -> None:
    allocator = PageAllocator(world_size=4, pages=100, page_size=4)
    for reserve in (4, 40, 400, 37):
        request = allocator.add_request(reserve)
        allocator.assign([request], [reserve])
        held = [sum(n for rank, n in ranks(allocator, request) if rank == r) for r in range(4)]
        assert max(held) - min(held) <= 4
    assert max(allocator.free_pages) - min(allocator.free_pages) <= 1


def test_tokens_that_come_one_by_one_go_to_the_emptiest_rank() -> None:
    allocator = PageAllocator(world_size=2, pages=10, page_size=2)
    big, small = allocator.add_request(8), allocator.add_request(12)
    allocator.assign([big], [2])
    for _ in range(12):
        allocator.assign([small], [1], one_by_one=True)
    assert ranks(allocator, small) == [(1, 2), (0, 2), (1, 2), (0, 2), (1, 2), (0, 2)]


def test_a_writer_of_a_shared_page_writes_behind_all_forks() -> None:
    allocator = PageAllocator(world_size=1, pages=6, page_size=4)
    request = allocator.add_request(4)
    allocator.assign([request], [1])
    allocator.fork(request, reserve=1)
    allocator.assign([request], [1])
    allocator.fork(request, reserve=2)
    # behind the second fork's rows, not only behind the first one's
    allocator.truncate(request, 1)
    allocator.assign([request], [3])
    assert page_spans(allocator, request) == [PageSpan(0, 0, 0, 0, 1), PageSpan(0, 1, 0, 1, 3)]


def test_a_writer_appends_behind_its_forks_and_may_truncate_to_them() -> None:
    allocator = PageAllocator(world_size=1, pages=1, page_size=4)
    request = allocator.add_request(4)
    allocator.assign([request], [2])
    fork = allocator.fork(request, reserve=2)
    allocator.assign([request], [2])
    allocator.truncate(request, 2)
    allocator.assign([request], [2])
    assert blocks_of(allocator, request) == (Block(0, 0, 0, 4),)
    assert blocks_of(allocator, fork) == (Block(0, 0, 0, 2),)
    before = state(allocator)
    with pytest.raises(
        CacheFull, match=r"gives up pages that others use when it is truncated to 1 tokens.*needs 1 pages more"
    ):
        allocator.truncate(request, 1)
    assert state(allocator) == before
    allocator.truncate(request, 1, reserve=1)
    allocator.free(fork)
    assert allocator.available == 0
    allocator.free(request)
    assert allocator.available == 1


def test_the_last_user_of_a_page_writes_it_and_still_does_when_it_is_forked() -> None:
    allocator = PageAllocator(world_size=1, pages=2, page_size=4)
    first = allocator.add_request(3)
    allocator.assign([first], [2])
    second = allocator.fork(first, reserve=4)
    allocator.free(first)
    # alone on its page, it needs no other
    other = allocator.add_request(4)
    allocator.fork(second, reserve=2)
    allocator.assign([other], [4])
    allocator.assign([second], [2])
    assert blocks_of(allocator, second) == (Block(0, 0, 0, 4),)


def test_a_fork_of_a_fork_writes_nothing_that_either_sees() -> None:
    allocator = PageAllocator(world_size=1, pages=8, page_size=4)
    first = allocator.add_request(4)
    allocator.assign([first], [3])
    second = allocator.fork(first, 3, reserve=8)
    third = allocator.fork(second, 2, reserve=8)
    for request in (third, second, first):
        allocator.assign([request], [1])
    assert [blocks_of(allocator, request)[-1][:2] for request in (third, second, first)] == [(0, 1), (0, 2), (0, 0)]


def test_same_length_takes_no_pages_that_others_reserved() -> None:
    allocator = PageAllocator(world_size=1, pages=3, page_size=4)
    first = allocator.add_request(7)
    allocator.assign([first], [2])
    second = allocator.fork(first, reserve=6)
    before = state(allocator)
    # the fork cannot write where the first one can: side by side they need a page each, and one is left
    with pytest.raises(
        CacheFull,
        match=r"1 pages must be free for each of 2 requests on the same ranks, got .1. by rank and 0 in all for 1",
    ):
        allocator.assign([first, second], [1, 1], same_length=True)
    assert state(allocator) == before
    allocator.assign([first, second], [1, 1])
    allocator.assign([first, second], [4, 3])


def test_reordered_requests_share_full_pages_and_have_a_last_page_each() -> None:
    allocator = PageAllocator(world_size=2, pages=6, page_size=2)
    beams = allocator.add_batch(6, [1, 0, 0])
    allocator.assign(beams, [3, 3, 3], same_length=True)
    full = [blocks_of(allocator, one)[0] for one in beams]
    last = [blocks_of(allocator, one)[1] for one in beams]
    moves = allocator.reorder(beams, [1, 1, 0])
    assert moves == [
        PageCopy(last[0].rank, last[1].page, last[0].page, 1),
        PageCopy(last[0].rank, last[0].page, last[2].page, 1),
    ]
    assert [blocks_of(allocator, one) for one in beams] == [(full[1], last[0]), (full[1], last[1]), (full[0], last[2])]
    assert [allocator.find(one).first for one in beams] == [0, 0, 1]
    allocator.assign(beams, [3, 3, 3], same_length=True)


def test_errors_name_the_numbers_and_change_nothing() -> None:
    allocator = PageAllocator(world_size=2, pages=3, page_size=4, page_bytes=1000)
    request = allocator.add_request(10)
    allocator.assign([request], [5])
    other = allocator.add_request(1)
    before = state(allocator)
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (CacheFull, r"a request of up to 9 tokens needs 3 pages of 4 \(3000 bytes\), got 2 of 6 on 2 ranks",
            lambda: allocator.add_request(9)),
        (CacheFull, "a fork of up to 14 tokens needs 3 pages", lambda: allocator.fork(request, reserve=14)),
        (CacheFull, "a batch of 3 requests of up to 4 tokens needs 3 pages", lambda: allocator.add_batch(4, [0] * 3)),
        (ValueError, "reserve must be from 1", lambda: allocator.add_request(0)),
        (ValueError, "reserve must be from 1", lambda: allocator.add_request(2**31)),
        (ValueError, "first from 0 to reserve, got 4 and 5", lambda: allocator.add_request(4, first=5)),
        (ValueError, "firsts must have one number per request", lambda: allocator.add_batch(4, [])),
        (ValueError, "length must be from 0 to the 5 tokens there are", lambda: allocator.fork(request, 6)),
        (ValueError, "reserve at least as long, got 5 and 4", lambda: allocator.fork(request, reserve=4)),
        (ValueError, "length must be from 0 to the 5 tokens", lambda: allocator.truncate(request, 6)),
        (ValueError, "reserve from there to the 10", lambda: allocator.truncate(request, 5, reserve=11)),
        (ValueError, "tokens must be from the 10 that are reserved", lambda: allocator.reserve(request, 9)),
        (CacheFull, r"request \d+ of up to 40 tokens needs", lambda: allocator.reserve(request, 40)),
        (ValueError, "a rank below 2 and 1 to 4 tokens", lambda: allocator.place(request, [2], [1])),
        (ValueError, "give a rank and a length for each page", lambda: allocator.place(request, [0, 1], [4])),
        (CacheFull, r"\[9, 0\] pages must be free by rank", lambda: allocator.place(request, [0] * 9, [4] * 9)),
        (ValueError, "must stay within the 10 tokens it reserved, got 5 and 6 more",
            lambda: allocator.assign([other, request], [1, 6])),
        (ValueError, "occur once each", lambda: allocator.assign([request, request], [1, 1])),
        (ValueError, "occur once each", lambda: allocator.assign([request], [0])),
        (ValueError, "occur once each", lambda: allocator.assign([], [])),
        (ValueError, "occur once each", lambda: allocator.assign([request], [1, 1])),
        (ValueError, "equally long", lambda: allocator.assign([request, other], [1, 1], same_length=True)),
        (ValueError, "one that was added and not freed, got 7", lambda: allocator.assign([request, 7], [1, 1])),
        (ValueError, "not freed, got 7", lambda: allocator.free(7)),
        (ValueError, "index must name one of 2", lambda: allocator.reorder([request, other], [0, 2])),
        (ValueError, "added and extended together", lambda: allocator.reorder([request, other], [0, 0])),
    ]  # fmt: skip
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()
        assert state(allocator) == before, text


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_an_allocator_has_at_least_one_page(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        PageAllocator(*sizes)


def test_every_history_reads_back_its_tokens() -> None:
    run_state_machine_as_test(Model, settings=settings(max_examples=100, stateful_step_count=40, deadline=None))


@pytest.mark.slow
def test_every_long_history_reads_back_its_tokens() -> None:
    run_state_machine_as_test(Model, settings=settings(max_examples=1000, stateful_step_count=50, deadline=None))
