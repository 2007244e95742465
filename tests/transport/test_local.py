"""Calls of a ring of one rank: each does its work once, whether it is enqueued or replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.transport.copy_engine import graph_cache
from ringattn.transport.local import LocalTransport
from tests.support.fake_streams import FakeStreams, World


class Calls:
    """A lone transport over fake streams, and what its calls did to an accumulator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = World(1, 0)
        self.streams = FakeStreams(self.world, 0)
        self.transport = LocalTransport()
        monkeypatch.setattr(self.transport, "_streams_of", lambda _: self.streams)
        self.enqueued = 0

    def __call__(self, x: Tensor, out: Tensor, key: Any = "forward") -> None:
        def enqueue() -> object:
            self.enqueued += 1
            self.streams.call(lambda: out.add_(x))
            return None

        self.transport.replay_or_enqueue((key,), (x,), (out,), enqueue)
        self.world.drain()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_a_call_with_the_same_tensors_is_replayed_and_does_its_work_each_time(calls: Calls) -> None:
    x, out = torch.tensor([2.0]), torch.zeros(1)
    for count in range(1, 8):
        calls(x, out)
        assert out.item() == 2.0 * count
    # enqueued twice, captured once
    assert calls.enqueued == graph_cache.SEEN + 1
    assert calls.transport.graph_launches == 7 - graph_cache.SEEN


def test_calls_with_other_tensors_or_another_key_are_other_calls(calls: Calls) -> None:
    xs, outs = [torch.tensor([1.0 + i]) for i in range(3)], [torch.zeros(1) for _ in range(3)]
    for _ in range(5):
        for x, out in zip(xs, outs, strict=True):
            calls(x, out)
    calls(xs[0], outs[0], key="backward")
    assert [out.item() for out in outs] == [6.0, 10.0, 15.0]
    assert calls.enqueued == 3 * (graph_cache.SEEN + 1) + 1


def test_a_call_that_cannot_be_captured_is_enqueued(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(work: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(calls.streams, "record", refuse)
    x, out = torch.tensor([2.0]), torch.zeros(1)
    for _ in range(5):
        calls(x, out)
    assert (out.item(), calls.enqueued, calls.transport.graph_launches) == (10.0, 5, 0)


def test_a_call_on_another_stream_is_ordered_behind_the_last_one(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[tuple[int, int]] = []
    monkeypatch.setattr(calls.streams, "order", lambda first, then: orders.append((first, then)))
    main, other = calls.streams.stream, calls.world.new_stream()
    for number, stream in enumerate((main, main, other, other, main)):
        calls.streams.stream = stream
        x, out = torch.tensor([2.0]), torch.zeros(1)
        calls(x, out, key=number)
        assert out.item() == 2.0
    assert orders == [(main, other), (other, main)]


def test_closing_forgets_graphs(calls: Calls) -> None:
    x, out = torch.tensor([2.0]), torch.zeros(1)
    for _ in range(4):
        calls(x, out)
    before = calls.enqueued
    calls.transport.close()
    calls(x, out)
    assert calls.enqueued == before + 1
    assert out.item() == 10.0
