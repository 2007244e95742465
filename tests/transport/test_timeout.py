"""The host's wait for its device: late by little, asleep for most of it, and over when a rank does not come."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ringattn import Ring
from ringattn.launch.common.timing import wait_for_events
from ringattn.transport import process_group
from ringattn.transport.timeout import MOST_PAUSE_S, BoundedWait, EventPair
from tests.support.pool import Pools


class Time:
    """A clock in place of `time`. Only looks, a microsecond, and sleeps, 60 microseconds longer than asked for, move it on."""

    def __init__(self) -> None:
        self.now = self.asleep = 0.0
        self.looks = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + 60e-6
        self.asleep += seconds + 60e-6


class At:
    """A mark that the device passes at some time."""

    def __init__(self, time: Time, when: float) -> None:
        self.time, self.when = time, when

    def query(self) -> bool:
        self.time.looks += 1
        self.time.now += 1e-6
        return self.time.now >= self.when


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr("ringattn.transport.timeout.time", found)
    return found


def make(timeout: float = 5.0, world_size: int = 3) -> tuple[BoundedWait, list[torch.device]]:
    gone: list[torch.device] = []
    return BoundedWait(1, world_size, "r#0", timeout, gone.append), gone


@pytest.mark.parametrize("took", [1e-4, 1e-3, 4e-3, 0.02, 0.3])
def test_replays_that_last_equally_long_are_noticed_at_once_and_slept_through(time: Time, took: float) -> None:
    """Also when one of them takes half as long, or half as long again; then it may be late once."""
    bounded_wait, _ = make()
    events = EventPair(At(time, 0.0), At(time, 0.0))
    for number, factor in enumerate((1, 1, 1, 0.97, 1.02, 1, 0.5, 0.5, 0.5, 1.5, 1.5)):
        asleep, start = time.asleep, time.now
        events.begun, events.ended = At(time, start), At(time, start + took * factor)
        assert bounded_wait.wait(events)
        late = time.now - start - took * factor
        steady = number in (1, 2, 3, 4, 5, 8, 10)
        assert 0 <= late <= (2e-6 if steady else max(took / 8 + 1e-4, MOST_PAUSE_S))
        assert not steady or took < 4e-3 or time.asleep - asleep > 0.6 * took * factor


@pytest.mark.parametrize("queued", [0.0, 100.0])
def test_time_counts_from_when_the_device_has_begun(time: Time, queued: float) -> None:
    bounded_wait, gone = make(timeout=2.0)
    for beyond in (0.9, 1.1):
        begins = time.now + queued
        events = EventPair(At(time, begins), At(time, begins + beyond * 3.0))
        assert bounded_wait.wait(events) == (beyond < 1)
        assert time.now < begins + 1.01 * 3.0
    assert not gone


def test_a_wait_that_may_be_long_looks_seldom(time: Time) -> None:
    bounded_wait, _ = make(timeout=30.0)
    assert not bounded_wait.wait(EventPair(At(time, 0.0), At(time, math.inf)))
    assert 32.0 < time.now < 32.1
    assert time.looks < 32.0 / MOST_PAUSE_S + 2000


def test_a_ring_of_one_rank_has_no_timeout(time: Time) -> None:
    bounded_wait, _ = make(timeout=0.01, world_size=1)
    assert bounded_wait.wait(EventPair(None, At(time, 5.0)))


def test_a_timeout_aborts_communicators_once_and_is_raised_from_then_on(time: Time) -> None:
    bounded_wait, gone = make(timeout=2.0)
    stuck = EventPair(At(time, 0.0), At(time, math.inf))
    bounded_wait.check()
    assert not bounded_wait.wait(stuck)
    told = (
        r"ring rank 1 of ring 'r#0': decoding step 7 has not ended 3 s after it began, and ranks may be waited for 2 s: "
        r"one of ring ranks \[0, 2\] did not come; look for an earlier error on those ranks .* end the process"
    )
    with pytest.raises(RuntimeError, match=told):
        bounded_wait.raise_timeout("decoding step 7", torch.device("cpu"))
    for call in (bounded_wait.check, lambda: bounded_wait.wait(stuck)):
        with pytest.raises(RuntimeError, match=told):
            call()
    assert gone == [torch.device("cpu")]


def given_up(how: str) -> tuple[str, str]:
    """What a ring says whose replay does not end, and its exchange afterwards."""
    time = Time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringattn.transport.timeout.time", time)
        return _given_up(time, how)


def _given_up(time: Time, how: str) -> tuple[str, str]:
    ring, device = Ring(), torch.device("cpu")
    ring._bounded_wait = BoundedWait(ring.rank, 2, ring.name, 60.0, lambda _: None)
    reducer: Any = ring.partial_reducer(device)
    ring.synchronize(device)
    ring.synchronize(device, events=EventPair(None, At(time, 61.0)))
    if how == "knows":
        reducer.check = lambda: (_ for _ in ()).throw(RuntimeError("ring ranks [1] did not come"))
    said = []
    splits, o, lse = torch.zeros(1, 2 * 3), torch.zeros(1, 1, 2, 1), torch.zeros(1, 2, 1)
    for call in (
        lambda: ring.synchronize(device, events=EventPair(None, At(time, math.inf)), what="decoding step 3"),
        lambda: reducer.merge_partials(splits, 1, 1, 2, 1, None, o, lse),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        said.append(str(caught.value))
    return said[0], said[1]


def test_a_ring_that_has_given_up_exchanges_no_more(pool: Pools) -> None:
    for rank, (first, then) in enumerate(pool(2).run(given_up, "times out")):
        assert first == then
        assert first.startswith(f"ring rank {rank} of ring ")
        assert "decoding step 3 has not ended 62 s after it began" in first
        assert f"ring ranks [{1 - rank}] did not come" in first


def test_a_reducer_that_knows_the_missing_rank_raises_first(pool: Pools) -> None:
    assert pool(2).run(given_up, "knows") == [("ring ranks [1] did not come",) * 2] * 2


class Backend:
    """A group, and its backend."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def _get_backend(self, device: torch.device) -> Backend:
        self.aborted.append(device.type)
        return self

    def abort(self) -> None:
        raise RuntimeError("aborted twice")


def test_a_timeout_aborts_every_communicator_of_the_ring_and_leaves_none_to_shut_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, link, other = Backend(), Backend(), Backend()
    monkeypatch.setattr(process_group, "resolve_group", lambda name: {"g": group}[name])
    monkeypatch.setattr(process_group, "_COMMUNICATORS", {"r/ring": link, "s/ring": other})
    monkeypatch.setattr(process_group, "_ABORTING", [])
    ended: list[str] = []
    monkeypatch.setattr(process_group, "end_communicator", ended.append)
    process_group.abort_communicators("g", ["r/ring", "r/between nodes"], torch.device("cpu"))
    assert not process_group._ABORTING
    process_group.abort_communicators("g", ["r/ring", "r/between nodes"], torch.device("cuda", 0))
    for thread in process_group._ABORTING:
        thread.join(10)
        assert thread.daemon
    assert (group.aborted, link.aborted, other.aborted) == (["cuda"], ["cuda"], [])
    process_group._end_all()
    assert not ended


def test_timed_calls_end_or_raise() -> None:
    wait_for_events(EventPair(None, At(Time(), 0.0)))
    with pytest.raises(RuntimeError, match=r"calls that are timed must end within 0\.01 s, got some that did not"):
        wait_for_events(EventPair(None, At(Time(), math.inf)), 0.01)
