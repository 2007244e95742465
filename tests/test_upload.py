"""Tables that other streams may read: what waits for what, on streams that only remember it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from ringattn.kernels import upload as uploads
from ringattn.kernels.upload import ALIGNMENT, join, upload
from ringattn.layout import zigzag
from ringattn.tables import stationary_side
from ringattn.visibility import Visibility

GPU = torch.device("cuda", 0)


@dataclass(eq=False)
class Stream:
    device: torch.device
    cuda_stream: int
    waits_for: list[Event] = field(default_factory=list)

    def wait_event(self, event: Event) -> None:
        self.waits_for.append(event)


class Event:
    over = False

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.over


class Device:
    """The streams of a device, of which one is current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first, self.second = Stream(GPU, 1), Stream(GPU, 2)
        self.elsewhere = Stream(torch.device("cuda", 1), 1)
        self.capturing = False
        self._current = {GPU: self.first, self.elsewhere.device: self.elsewhere}
        self.under_way: dict[tuple[torch.device, int], Event] = {}
        monkeypatch.setattr(uploads, "_under_way", self.under_way)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", self._current.__getitem__)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def upload(self, stream: Stream) -> None:
        self._current[stream.device] = stream
        uploads._note(stream.device)

    def join(self, stream: Stream) -> list[Event]:
        """What a call in a stream waits for."""
        self._current[stream.device] = stream
        stream.waits_for = []
        join(stream.device)
        return stream.waits_for


def test_another_stream_waits_for_the_last_upload_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    assert device.join(device.second) == []
    device.upload(device.first)
    device.upload(device.first)
    (event,) = device.under_way.values()
    assert event.stream is device.first
    assert device.join(device.second) == [event]
    assert device.join(device.second) == [event], "a stream may wait twice, and must not believe that it has"
    assert device.join(device.first) == [], "its own work is in order"
    assert device.join(device.elsewhere) == []
    event.over = True
    assert device.join(device.second) == []
    assert not device.under_way


def test_a_stream_alone_forgets_its_uploads_and_a_capture_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.upload(device.first)
    device.capturing = True
    assert device.join(device.second) == []
    device.capturing = False
    (event,) = device.under_way.values()
    event.over = True
    assert device.join(device.first) == []
    assert not device.under_way


def test_whoever_finds_tables_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[torch.device] = []
    monkeypatch.setattr("ringattn.tables.join", joined.append)
    for _ in range(2):
        stationary_side(zigzag(16, 2)[0], Visibility(16, 16, causal=True), "cpu")
    assert joined == [torch.device("cpu")] * 2


def test_tables_lie_side_by_side_in_one_buffer() -> None:
    tables = [torch.arange(3), torch.arange(70).view(2, 35), torch.empty(0, 4, dtype=torch.int64)]
    found = upload(tables, torch.device("cpu"))
    assert [x.dtype for x in found] == [torch.int32] * 3
    assert all(torch.equal(x, table.int()) for x, table in zip(found, tables, strict=True))
    assert len({x.untyped_storage().data_ptr() for x in found}) == 1
    assert all(x.storage_offset() % ALIGNMENT == 0 for x in found)
