"""Copies of pages in host memory: the same bits come back, in whatever order a device runs its two lanes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Ring
from ringattn.inference import PagedKVCache
from ringattn.inference.host_pages import HostPages, Lanes


class Reached:
    """An event of `Shuffled`."""

    def __init__(self, lanes: Shuffled) -> None:
        self._lanes, self.done = lanes, False

    def reach(self) -> None:
        self.done = True

    def synchronize(self) -> None:
        """Let the device run until it is reached."""
        while not self.done:
            self._lanes.advance()


class Shuffled(Lanes):
    """Lanes that run later, in any order that waits allow."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.queues: tuple[deque[Any], deque[Any]] = (deque(), deque())
        self.overlaps = 0

    def run(self, work: Callable[[], None], *, beside: bool) -> None:
        self.queues[beside].append(work)

    def mark(self, *, beside: bool) -> Reached:
        event = Reached(self)
        self.queues[beside].append(event.reach)
        return event

    def wait(self, event: Any, *, beside: bool) -> None:
        if isinstance(event, Reached):
            self.queues[beside].append(event)

    def advance(self) -> None:
        """Run one piece of work."""
        ready = [queue for queue in self.queues if queue and not (isinstance(queue[0], Reached) and not queue[0].done)]
        self.overlaps += len(ready) == 2
        assert ready, "each lane waits for the other one"
        if not isinstance(work := self.draw.choice(ready).popleft(), Reached):
            work()

    def drain(self) -> None:
        while any(self.queues):
            self.advance()


KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"kv_heads": 2, "head_dim": 8, "v_head_dim": 4, "dtype": torch.float32},
    "fp8": {"kv_heads": 2, "head_dim": 16, "dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn},
    "latent": {"latent": (16, 8), "dtype": torch.bfloat16},
    "latent fp8": {"latent": (16, 8), "dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn},
}


def cache_of(kind: str, pages: int) -> PagedKVCache:
    return PagedKVCache(Ring(), layers=3, pages=pages, page_size=4, device="cpu", **KINDS[kind])


def bits(cache: PagedKVCache) -> list[Tensor]:
    """Return all that is stored as bytes, `layers pages bytes`."""
    return [x.reshape(*x.shape[:2], -1).view(torch.uint8) for x in cache.stored]


def scribble(cache: PagedKVCache, page: int, seed: int) -> None:
    """Write any bytes to a page."""
    for x in bits(cache):
        x[:, page] = torch.randint(256, x[:, page].shape, generator=torch.Generator().manual_seed(seed)).byte()


def page_of(cache: PagedKVCache, page: int) -> bytes:
    return b"".join(x[:, page].contiguous().numpy().tobytes() for x in bits(cache))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_pages_come_back_bit_by_bit_in_any_order_of_a_device(kind: str, seed: int) -> None:
    draw, lanes, cache = random.Random(seed), Shuffled(seed), cache_of(kind, 8)
    host = HostPages(cache, slots=5, most=2, lanes=lanes)
    # what each page and slot must hold; pages that are on their way
    pages: list[bytes | None] = [None] * 8
    slots: list[bytes | None] = [None] * 5
    arriving: list[tuple[int, bytes]] = []
    for step in range(60):
        for page, data in arriving:
            pages[page] = data
        saved = draw.sample(range(8), draw.randrange(4))
        saves = [(page, draw.randrange(5)) for page in saved if pages[page] is not None]
        for page, slot in saves:
            slots[slot] = pages[page]
        full = [slot for slot in range(5) if slots[slot] is not None]
        loads = list(zip(draw.sample(full, min(len(full), draw.randrange(4))), draw.sample(range(8), 8), strict=False))
        arriving = [(page, data) for slot, page in loads if (data := slots[slot]) is not None]
        host.move(saves, loads)
        coming = {page for page, _ in arriving}
        # the step: it overwrites any pages but those that come, also those that were saved just now
        for page in draw.sample([page for page in range(8) if page not in coming], 3):
            seen, pages[page] = pages[page], scribbled(kind, 8 * step + page)
            lanes.run(
                lambda page=page, step=step, seen=seen: check_and_write(cache, page, 8 * step + page, seen),
                beside=False,
            )
        for page in coming:
            pages[page] = None
        for _ in range(draw.randrange(6)):
            if any(lanes.queues):
                lanes.advance()
    host.move([], [])
    lanes.drain()
    for page, data in arriving:
        pages[page] = data
    assert [page_of(cache, page) for page, data in enumerate(pages) if data] == [data for data in pages if data]
    assert lanes.overlaps > 20, "copies run beside steps"


def scribbled(kind: str, seed: int) -> bytes:
    cache = cache_of(kind, 1)
    scribble(cache, 0, seed)
    return page_of(cache, 0)


def check_and_write(cache: PagedKVCache, page: int, seed: int, seen: bytes | None) -> None:
    assert seen is None or page_of(cache, page) == seen
    scribble(cache, page, seed)


def test_copies_without_steps_do_not_pile_up() -> None:
    lanes, cache = Shuffled(0), cache_of("fp32", 4)
    host = HostPages(cache, slots=4, most=1, lanes=lanes)
    for _ in range(50):
        host.move([(0, 0)], [(0, 1)])
    assert max(map(len, lanes.queues)) < 30


def test_the_last_copy_to_a_slot_counts() -> None:
    cache = cache_of("fp32", 4)
    for page in range(4):
        scribble(cache, page, page)
    host = HostPages(cache, slots=2, most=4)
    host.move([(0, 0), (1, 1), (2, 0)], [(0, 3)])
    host.move([], [])
    assert page_of(cache, 3) == page_of(cache, 2)
