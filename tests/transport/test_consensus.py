"""Ranks that compare stay in step whatever is refused, by whom, how often and inside of what: ranks are threads with one store."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from ringattn.transport.consensus import RankConsensus
from ringattn.transport.copy_engine.symmetric_memory import SymmetricMemory

PATIENCE = timedelta(seconds=20)


class Ranked(RankConsensus):
    """One rank's, with a store that it is given."""

    def __init__(self, name: str, store: HashStore, rank: int, size: int, timeout: timedelta = PATIENCE) -> None:
        # what others of that name left would be taken back from this store
        super().__init__("threads", rank, size, name, timeout)
        self.store = store

    def _store(self) -> HashStore:
        return self.store


_names = count()


def make(size: int, timeout: timedelta = PATIENCE) -> list[Ranked]:
    """All ranks of a ring."""
    name, store = f"ring {next(_names)}", HashStore()
    return [Ranked(name, store, rank, size, timeout) for rank in range(size)]


def run(size: int, program: Callable[[Ranked, int], Any], timeout: timedelta = PATIENCE) -> list[Any]:
    """What a program returns on every rank; ranks must be in the same round when it ends, and agree."""
    ranks = make(size, timeout)

    def end(consensus: Ranked, rank: int) -> Any:
        said = program(consensus, rank)
        assert consensus.share("rank", rank) == list(range(size))
        return said, (consensus._round, consensus.failures)

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(end, ranks, range(size)))
    assert len({counts for _, counts in found}) == 1
    return [said for said, _ in found]


def attempt(call: Callable[..., Any], *args: Any) -> str:
    """How a call ended, in words."""
    try:
        call(*args)
    except (ValueError, RuntimeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def refuse(consensus: Ranked, words: str, how: str) -> None:
    """Refuses before comparing, in one of the ways that happen."""
    if how == "wrapped":
        with consensus.publishing_errors():
            try:
                with consensus.publishing_errors():
                    raise KeyError(words)
            except KeyError as error:
                raise ValueError(words) from error
    elif how == "nested":
        with consensus.publishing_errors(), consensus.publishing_errors():
            raise ValueError(words)
    else:
        consensus.raise_on_all_ranks(ValueError(words))


KINDS = ("ok", "refuse", "all refuse", "all probe", "other text", "other call")
HOW = ("plain", "nested", "wrapped")
steps = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from(HOW), st.sets(st.integers(0, 2), min_size=1, max_size=2)),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(steps, st.booleans())
def test_ranks_stay_in_step_whatever_some_of_them_refuse(steps: list[tuple[str, str, set[int]]], outside: bool) -> None:
    """A program that catches what a step raises, and goes on to the next one."""

    def step(consensus: Ranked, rank: int, number: int) -> None:
        kind, how, who = steps[number]
        if kind == "all refuse" or (kind == "refuse" and rank in who):
            refuse(consensus, f"words {number} of {rank}", how)
        if kind == "all probe":
            for _ in who:
                assert attempt(refuse, consensus, f"probe {number}", how) != "ok"
        if kind == "other call" and rank in who:
            consensus.compare_calls({"call": number}, "another call")
        consensus.assert_equal_across_ranks(
            "a text", f"{number} {rank if kind == 'other text' and rank in who else ''}"
        )

    def within(consensus: Ranked, rank: int, number: int) -> None:
        with consensus.publishing_errors():
            step(consensus, rank, number)

    def program(consensus: Ranked, rank: int) -> list[str]:
        return [attempt(within if outside else step, consensus, rank, number) for number in range(len(steps))]

    said = run(3, program)
    for number, (kind, _, who) in enumerate(steps):
        here = [words[number] for words in said]
        if kind in ("ok", "all probe"):
            assert here == ["ok"] * 3
        for rank, words in enumerate(here):
            if kind == "all refuse" or (kind == "refuse" and rank in who):
                assert words == f"ValueError: words {number} of {rank}"
            elif kind == "refuse":
                assert all(f"words {number} of {other}" in words for other in who)
            elif kind.startswith("other"):
                assert "ValueError: " in words


def test_an_error_long_before_or_after_a_comparison_leaves_ranks_in_step() -> None:
    def program(consensus: Ranked, rank: int) -> list[str]:
        said = []
        for number in range(4):
            time.sleep(0.1 * (rank == number % 2))
            wrong = rank == number // 2
            said.append(
                attempt(
                    refuse if wrong else consensus.assert_equal_across_ranks,
                    *([consensus] if wrong else []),
                    f"{number}",
                    "plain",
                )
            )
        return said

    for rank, words in enumerate(run(2, program)):
        for number, one in enumerate(words):
            assert one.startswith(f"ValueError: {number}" if rank == number // 2 else "ValueError: ring rank")


def test_a_rank_that_timed_out_and_a_late_one_are_in_step_and_count_equal_failures() -> None:
    gave_up, heard = threading.Event(), threading.Event()

    def late(consensus: Ranked, rank: int) -> None:
        assert rank == 0 or gave_up.wait(60)
        with consensus.publishing_errors():
            consensus.assert_equal_across_ranks("a text", "")

    def program(consensus: Ranked, rank: int) -> str:
        said = attempt(late, consensus, rank)
        assert consensus.failures == 1
        consensus.timeout = PATIENCE
        (heard if rank else gave_up).set()
        assert heard.wait(60)
        return said

    waited, came = run(2, program, timedelta(seconds=0.3))
    assert "ring ranks [1] did not make this attention call" in waited
    assert "ring ranks [0] waited" in came


def test_a_rank_that_finds_the_timeout_over_and_all_others_there_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: on a busy host it raised that ring ranks [] had not come."""
    wait = HashStore.wait

    def wake_late(store: HashStore, keys: list[str], timeout: timedelta) -> None:
        wait(store, keys, timeout)
        raise RuntimeError("the timeout is over")

    monkeypatch.setattr(HashStore, "wait", wake_late, raising=False)
    assert run(2, lambda consensus, rank: consensus.compare(f"{rank}")) == [["0", "1"]] * 2


def test_a_rank_that_never_returns_leaves_its_keys() -> None:
    gone, here = make(2)
    with pytest.raises(ValueError, match="no room"):
        gone.raise_on_all_ranks(ValueError("no room"))
    with pytest.raises(
        ValueError, match=r"ring rank 0 refused: ValueError: no room; every rank of the ring refuses with it"
    ):
        here.assert_equal_across_ranks("a text", "")
    assert gone.failures == here.failures == 1


def test_a_thread_that_refuses_beside_one_that_compares_takes_no_round() -> None:
    refused = threading.Barrier(2)

    def program(consensus: Ranked, rank: int) -> None:
        if rank:
            refused.wait(60)  # the other one is comparing
            consensus.assert_equal_across_ranks("a text", "")
            return

        def beside() -> None:
            while not consensus._taken.locked():
                time.sleep(0.001)
            assert attempt(refuse, consensus, "beside", "plain") == "ValueError: beside"
            refused.wait(60)

        thread = threading.Thread(target=beside)
        thread.start()
        consensus.assert_equal_across_ranks("a text", "")
        thread.join()

    run(2, program)


@pytest.mark.parametrize("how", ["same", "other size", "refused"])
def test_ranks_that_make_buffers_raise_the_error_of_another_rank(how: str) -> None:
    def program(consensus: Ranked, rank: int) -> list[str]:
        memory = SymmetricMemory("threads", consensus, torch.device("cpu"), lambda: None)
        wrong = how if rank else ""
        called = (
            [refuse, consensus, "words", "plain"]
            if wrong == "refused"
            else [memory.barrier, f"{wrong == 'other size'}"]
        )
        said = [attempt(*called), attempt(memory.barrier, "again")]
        assert consensus.failures == (how == "refused")
        return said

    for rank, (said, after) in enumerate(run(2, program)):
        expected = {"same": "ok", "other size": "RuntimeError: all ranks of a ring must make the same buffers"}
        refused = "ValueError: words" if rank else "ValueError: ring rank 1 refused: ValueError: words"
        assert said.startswith(expected.get(how, refused))
        assert after == "ok"


def test_no_reference_to_an_error_is_kept() -> None:
    """It holds frames, and these hold tensors."""

    class Held:
        pass

    def fail() -> weakref.ref[Held]:
        held = Held()
        with pytest.raises(ValueError, match="words"), make(2)[0].publishing_errors():
            raise ValueError("words", held)
        return weakref.ref(held)

    found = fail()
    gc.collect()
    assert found() is None
