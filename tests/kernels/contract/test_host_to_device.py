"""Tables that other streams may read: what waits for what, on streams that only remember it."""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch

from ringattn.kernels.runtime import table_cache as uploads
from ringattn.kernels.runtime.table_cache import (
    ALIGNMENT,
    Key,
    clear,
    find,
    protect_from_reuse,
    upload,
    wait_for_uploads,
)
from ringattn.plan.device_tables import stationary_side
from ringattn.plan.layouts import zigzag
from tests.support.short_mask import ShortMask

GPU = torch.device("cuda", 0)


@dataclass(eq=False)
class Stream:
    device: torch.device
    cuda_stream: int
    stream_id: int = 1
    waits_for: list[Event] = field(default_factory=list)

    def wait_event(self, event: Event) -> None:
        self.waits_for.append(event)


class Event:
    over = False

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.over


class Table:
    """Remembers whose reading its memory waits for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sends: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.sends.append(stream)


class Device:
    """The streams of a device, of which one is current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first, self.second = Stream(GPU, 0x10), Stream(GPU, 0x20)
        self.elsewhere = Stream(torch.device("cuda", 1), 0x10)
        self.capturing = False
        self._current = {GPU: self.first, self.elsewhere.device: self.elsewhere}
        self.under_way: dict[tuple[torch.device, int], Event] = {}
        monkeypatch.setattr(uploads, "_under_way", self.under_way)
        monkeypatch.setattr(uploads, "_tables", {})
        monkeypatch.setattr(uploads, "_readers", defaultdict(dict))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", self._current.__getitem__)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        raw = "_cuda_getCurrentRawStream"
        monkeypatch.setattr(torch._C, raw, lambda x: self._current[torch.device("cuda", x)].cuda_stream, raising=False)

    def upload(self, stream: Stream) -> None:
        self._current[stream.device] = stream
        uploads._note(stream.device)

    def make(self, stream: Stream) -> Table:
        """A table that is uploaded in a stream."""
        self.protect_from_reuse(stream)
        table = Table(stream.device)
        uploads._mark(table)  # pyright: ignore[reportArgumentType]
        return table

    def protect_from_reuse(self, stream: Stream) -> int | None:
        self._current[stream.device] = stream
        return protect_from_reuse(stream.device)

    def find(self, stream: Stream, key: Key[torch.Tensor]) -> torch.Tensor:
        self._current[stream.device] = stream
        return find(key)

    def wait_for_uploads(self, stream: Stream) -> list[Event]:
        """What a call in a stream waits for."""
        self._current[stream.device] = stream
        stream.waits_for = []
        wait_for_uploads(stream.device)
        return stream.waits_for


def test_another_stream_waits_for_the_last_upload_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    assert device.wait_for_uploads(device.second) == []
    device.upload(device.first)
    device.upload(device.first)
    (event,) = device.under_way.values()
    assert event.stream is device.first
    assert device.wait_for_uploads(device.second) == [event]
    assert device.wait_for_uploads(device.second) == [event], (
        "a stream may wait twice, and must not believe that it has"
    )
    assert device.wait_for_uploads(device.first) == [], "its own work is in order"
    assert device.wait_for_uploads(device.elsewhere) == []
    event.over = True
    assert device.wait_for_uploads(device.second) == []
    assert not device.under_way


def test_a_stream_alone_forgets_its_uploads_and_a_capture_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.upload(device.first)
    device.capturing = True
    assert device.wait_for_uploads(device.second) == []
    device.capturing = False
    (event,) = device.under_way.values()
    event.over = True
    assert device.wait_for_uploads(device.first) == []
    assert not device.under_way


def test_whoever_finds_tables_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[torch.device] = []
    monkeypatch.setattr("ringattn.kernels.runtime.table_cache.wait_for_uploads", joined.append)
    for _ in range(2):
        stationary_side(zigzag(16, 2)[0], ShortMask(16, 16, causal=True), "cpu")
    assert joined == [torch.device("cpu")] * 2


def test_what_is_dropped_waits_for_all_streams_that_have_met_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    old = device.make(device.first)
    assert device.protect_from_reuse(device.second) == device.second.cuda_stream
    new, far = device.make(device.second), device.make(device.elsewhere)
    device.protect_from_reuse(device.first)
    assert old.sends == [device.first, device.second]
    assert new.sends == [device.first, device.second]
    assert far.sends == [device.elsewhere]
    del old, new
    assert len(uploads._tables) == 1, "what is dropped is forgotten"


def test_neither_a_capture_nor_a_stream_that_may_end_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    table = device.make(device.first)
    assert device.protect_from_reuse(Stream(GPU, 0x30, stream_id=0x30)) is None
    device.capturing = True
    assert device.protect_from_reuse(device.second) is None
    assert table.sends == [device.first]
    device.capturing = False
    assert device.protect_from_reuse(Stream(GPU, 0, stream_id=0)) == 0, "the default stream"
    assert len(table.sends) == 2


def test_a_stream_meets_tables_when_it_first_finds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device, met = Device(monkeypatch), list[torch.device]()
    monkeypatch.setattr(
        "ringattn.kernels.runtime.table_cache.protect_from_reuse",
        lambda place: met.append(place) or protect_from_reuse(place),
    )
    key = Key(GPU, ("one",), lambda _: torch.zeros(1))
    try:
        for stream in (device.first, device.first, device.second, device.second):
            device.find(stream, key)
        assert met == [GPU, GPU]
        device.capturing = True
        device.find(device.first, key)
        device.capturing = False
        device.find(device.first, key)
        assert len(met) == 4, "a capture has met nothing"
    finally:
        clear()


def test_tables_lie_side_by_side_in_one_buffer() -> None:
    tables = [torch.arange(3), torch.arange(70).view(2, 35), torch.empty(0, 4, dtype=torch.int64)]
    found = upload(tables, torch.device("cpu"))
    assert [x.dtype for x in found] == [torch.int32] * 3
    assert all(torch.equal(x, table.int()) for x, table in zip(found, tables, strict=True))
    assert len({x.untyped_storage().data_ptr() for x in found}) == 1
    assert all(x.storage_offset() % ALIGNMENT == 0 for x in found)


def test_what_a_capture_has_found_is_kept_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    monkeypatch.setattr("ringattn.kernels.runtime.table_cache.CACHE_BYTES", 0)
    clear()
    keys = [Key(GPU, (name,), lambda _: torch.zeros(1)) for name in "abc"]
    held = []
    for key, device.capturing in ((keys[0], False), (keys[1], False), (keys[1], True), (keys[2], False)):
        held.append(weakref.ref(device.find(device.first, key)))
    assert [one() is None for one in held] == [True, False, False, False]
    clear()
    assert not any(one() for one in held)
