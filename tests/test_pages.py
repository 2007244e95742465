"""The books of the cache against a model in which a request is a list of tokens and memory a dictionary."""

from __future__ import annotations

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

from ringattn.inference.pages import CacheFull, Pages


def state(books: Pages) -> str:
    """All that the books say, as text."""
    return repr({name: value for name, value in vars(books).items() if name != "_names"})


class Model(RuleBasedStateMachine):
    """Random histories; every request must read back its own tokens after each."""

    @initialize(world=st.integers(1, 4), pages=st.integers(1, 9), page_size=st.sampled_from([1, 2, 4, 5]))
    def begin(self, world: int, pages: int, page_size: int) -> None:
        self.books = Pages(world, pages, page_size)
        self.size, self.total = page_size, world * pages
        self.said: dict[int, list[int]] = {}
        self.memory: dict[tuple[int, int, int], int] = {}
        self.groups: list[list[int]] = []  # joined alike, and treated alike ever since
        self.tokens = 0

    def attempt(self, call: Callable[[], Any], *refusals: type[Exception]) -> Any:
        """The result, or None when it was refused, which must have changed nothing."""
        before = state(self.books)
        try:
            return call()
        except refusals:
            assert state(self.books) == before
            return None

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.said)))

    def split(self, *requests: int) -> None:
        """These are no longer treated like others of their group."""
        self.groups = [group for group in self.groups if not set(group) & set(requests)]

    def write(self, request: int, before: int) -> None:
        """What a step does with new tokens."""
        pieces = self.books.pieces(request, before)
        assert [piece.start for piece in pieces][:1] == [before]
        for piece in pieces:
            for i in range(piece.length):
                self.tokens += 1
                assert piece.start + i == len(self.said[request])
                self.said[request].append(self.tokens)
                self.memory[piece.rank, piece.page, piece.row + i] = self.tokens

    def left_at_worst(self) -> int:
        """Free pages less those for all tokens to come, were no page to be appended to."""
        books = self.books
        return sum(books.free) - sum(
            -(-(books.reserved(one) - len(had)) // self.size) for one, had in self.said.items()
        )

    @rule(reserve=st.integers(1, 40), padding=st.integers(0, 3))
    def join(self, reserve: int, padding: int) -> None:
        first = min(padding, reserve)
        must_fit = -(-reserve // self.size) <= self.left_at_worst()
        name = self.attempt(lambda: self.books.join(reserve, first), *(() if must_fit else (CacheFull,)))
        if name is not None:
            assert name not in self.said
            assert self.books.first(name) == first
            self.said[name] = []

    @rule(batch=st.integers(1, 4), reserve=st.integers(1, 30))
    def join_alike(self, batch: int, reserve: int) -> None:
        names = self.attempt(lambda: self.books.join_alike(reserve, [0] * batch), CacheFull)
        if names is not None:
            self.said.update({name: [] for name in names})
            self.groups.append(names)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data)
        length = data.draw(st.integers(0, len(self.said[parent])))
        reserve = data.draw(st.integers(max(1, length), max(1, length) + 20))
        must_fit = -(-(reserve - length) // self.size) <= self.left_at_worst()
        refusals = () if must_fit else (CacheFull,)
        name = self.attempt(lambda: self.books.fork(parent, length, reserve), *refusals)
        if name is not None:
            self.said[name] = self.said[parent][:length]
            self.split(parent)

    @precondition(lambda self: self.said)
    @rule(data=st.data(), alike=st.booleans(), one_by_one=st.booleans())
    def place(self, data: st.DataObject, alike: bool, one_by_one: bool) -> None:
        requests = data.draw(st.lists(st.sampled_from(sorted(self.said)), min_size=1, max_size=4, unique=True))
        left = [self.books.reserved(one) - len(self.said[one]) for one in requests]
        # now and then one token too many
        counts = [data.draw(st.integers(1, 1 + x)) for x in left]
        if alike:
            counts = [min(counts)] * len(counts)
        fits = all(new <= x for new, x in zip(counts, left, strict=True))
        before = [len(self.said[one]) for one in requests]
        refusals = (ValueError, CacheFull) if alike else () if fits else (ValueError,)
        done = self.attempt(
            lambda: self.books.place(requests, counts, alike=alike, one_by_one=one_by_one) or True, *refusals
        )
        if done:
            assert fits
            for one, start in zip(requests, before, strict=True):
                self.write(one, start)
            assert not alike or self.books.are_alike(requests)
            self.split(*requests)

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), one_by_one=st.booleans())
    def place_group(self, data: st.DataObject, one_by_one: bool) -> None:
        group = data.draw(st.sampled_from(self.groups))
        left = self.books.reserved(group[0]) - len(self.said[group[0]])
        if left:
            new, before = data.draw(st.integers(1, left)), len(self.said[group[0]])
            self.books.place(group, [new] * len(group), alike=True, one_by_one=one_by_one)
            for one in group:
                self.write(one, before)
            assert self.books.are_alike(group)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def reorder_group(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.groups))
        index = data.draw(st.lists(st.integers(0, len(group) - 1), min_size=len(group), max_size=len(group)))
        available = self.books.available
        moves = self.books.reorder(group, index)
        assert self.books.available >= available
        rows = {
            (move.rank, move.target, i): self.memory[move.rank, move.source, i]
            for move in moves
            for i in range(move.rows)
        }
        self.memory.update(rows)
        said = [self.said[one] for one in group]
        self.said.update({one: list(said[source]) for one, source in zip(group, index, strict=True)})

    @precondition(lambda self: self.said)
    @rule(data=st.data(), less=st.booleans())
    def crop(self, data: st.DataObject, less: bool) -> None:
        request = self.pick(data)
        had = self.said[request]
        length = data.draw(st.integers(0, len(had)))
        reserve = data.draw(st.integers(max(length, 1), self.books.reserved(request))) if less else None
        # to reserve no more than is left always fits, and so does giving up what is one's own alone
        users = self.users()
        shared = any(users[block.rank, block.page] > 1 for block in self.books.blocks(request) if block.stop > length)
        must_fit = reserve == max(length, 1) if reserve is not None and length else not shared
        done = self.attempt(
            lambda: self.books.crop(request, length, reserve) or True, *(() if must_fit else (CacheFull,))
        )
        if done:
            del had[length:]
        self.split(request)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = self.pick(data)
        self.books.leave(request)
        del self.said[request]
        self.split(request)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def keep_every_promise(self, data: st.DataObject) -> None:
        """All that was reserved fits, whoever comes first and however it comes."""
        books = copy.deepcopy(self.books)
        for group in self.groups:
            left = books.reserved(group[0]) - books.length(group[0])
            if left and data.draw(st.booleans()):
                books.place(group, [left] * len(group), alike=True)
        for one in data.draw(st.permutations(sorted(self.said))):
            left = books.reserved(one) - books.length(one)
            first = data.draw(st.integers(0, left))
            for new in (first, left - first):
                if new:
                    books.place([one], [new], one_by_one=data.draw(st.booleans()))
        assert all(books.length(one) == books.reserved(one) for one in self.said)

    def users(self) -> Counter[tuple[int, int]]:
        return Counter((block.rank, block.page) for one in self.said for block in self.books.blocks(one))

    @invariant()
    def every_request_reads_its_own_tokens(self) -> None:
        for one, tokens in getattr(self, "said", {}).items():
            assert self.books.length(one) == len(tokens)
            read, at = [], 0
            for block in self.books.blocks(one):
                assert block.start == at
                assert 1 <= block.length <= self.size
                at = block.stop
                read += [self.memory[block.rank, block.page, i] for i in range(block.length)]
            assert read == tokens
            ranks = [rank for rank, start, stop in self.books.stretches(one) for _ in range(start, stop)]
            assert ranks == [block.rank for block in self.books.blocks(one) for _ in range(block.length)]

    @invariant()
    def every_page_is_counted(self) -> None:
        if not hasattr(self, "books"):
            return
        users, books = self.users(), self.books
        for rank, free in enumerate(books._free):
            assert len(free) == len(set(free)) == books.free[rank]
            for page in range(books.pages):
                assert books._users[rank][page] == users[rank, page]
                assert (page in free) == (users[rank, page] == 0)
        assert books.available >= 0
        assert set(books.requests) == set(self.said)

    def teardown(self) -> None:
        for one in getattr(self, "said", {}):
            self.books.leave(one)
        if hasattr(self, "books"):
            assert sum(self.books.free) == self.books.available == self.total


def test_every_history_reads_back_what_was_said() -> None:
    run_state_machine_as_test(Model, settings=settings(max_examples=150, stateful_step_count=30, deadline=None))


@pytest.mark.slow
def test_every_long_history_reads_back_what_was_said() -> None:
    run_state_machine_as_test(Model, settings=settings(max_examples=1500, stateful_step_count=60, deadline=None))
