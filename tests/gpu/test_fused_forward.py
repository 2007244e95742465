"""All visits of a rank in one Hopper launch on a GPU, while copies from the host bring the rows of other ranks.

Only copies and no kernels run beside it: a kernel that waits may hold every multiprocessor.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.kernels.interface import Arrivals, CallShape, ReadyFlags, Score, Step
from ringattn.kernels.runtime.table_cache import find
from ringattn.plan.device_tables import fused_tables
from tests.kernels.emulator.emulated_arrivals import Gathering, Scene, assert_right, make_scene

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.0")]

SIZES: dict[str, Any] = {"head_dim": 128, "heads": 8, "kv_heads": 2, "seq_len": 4000, "world_size": 4}
CASES = [
    Gathering("zigzag", **SIZES),
    Gathering("zigzag_groups", **{**SIZES, "kv_heads": 8, "groups": 4}),
    Gathering("full", layout="contiguous", mask={}, **SIZES),
    Gathering("window", layout="contiguous", mask={"causal": True, "window": (700, 0)}, **SIZES),
    Gathering("packed", **{**SIZES, "seq_len": 100, "heads": 32}),
    Gathering("hd64", **{**SIZES, "head_dim": 64}),
    Gathering("scores", options={"softcap": 5.0, "alibi": True, "sinks": True}, **{**SIZES, "heads": 4}),
    Gathering("key_bias", options={"key_bias": True}, **{**SIZES, "kv_heads": 8, "groups": 4}),
    Gathering("every_term", options={"softcap": 5.0, "alibi": True, "key_bias": True}, **{**SIZES, "head_dim": 64}),
    Gathering("wide", **{**SIZES, "head_dim": 256, "seq_len": 3000}),
    Gathering("wide_key_bias", options={"key_bias": True}, **{**SIZES, "head_dim": 192, "v_head_dim": 128}),
    Gathering("split", layout="contiguous", mask={}, **{**SIZES, "heads": 2, "dtype": torch.float16}),
]
SECOND = 10**9  # nanoseconds
DEVICE = torch.device("cuda")


class FusedLaunch:
    """A gathered forward on the GPU, before its rows are there."""

    def __init__(self, case: Gathering, patience: int = 5 * SECOND) -> None:
        self.case = case
        self.scene = make_scene(case)
        self.call = case.call
        self.far = self.scene.buffer.to(DEVICE)
        table = self.scene.key_bias
        self.table = None if table is None else table.to(DEVICE)
        self.scene.finish()
        self.there = self.scene.buffer.pin_memory()
        self.biases = None if table is None else table.pin_memory()
        self.flags = torch.zeros_like(self.scene.flags, device=DEVICE)
        self.error = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.patience = patience
        self.q, *self.near = (x.to(DEVICE) for x in (self.scene.q, *self.scene.near))
        s = self.scene
        terms = {"sinks": s.score.sinks, "alibi_slopes": s.score.alibi_slopes, "key_bias": self.table}
        moved = {name: None if x is None else x.to(DEVICE) for name, x in terms.items()}
        self.score = Score(s.score.softmax_scale, s.score.softcap, **moved)  # type: ignore[arg-type]

    def start(self) -> tuple[Tensor, Tensor]:
        """Launches the kernel; (o, lse) once it ends."""
        from ringattn.kernels.attention.hopper.api import HopperKernels

        d = self.case.head_dim
        o = torch.full((*self.q.shape[:3], self.near[1].shape[-1]), -7.0, dtype=self.q.dtype, device=DEVICE)
        lse = torch.full((o.shape[0], o.shape[2], o.shape[1]), -7.0, device=DEVICE)
        k, v, tables = *self.near, fused_tables(self.call, DEVICE)
        step = Step(self.q, k, v, find(tables.rows), find(tables.keys[0]), self.score, o, lse)
        arrivals = Arrivals(self.far[..., :d], self.far[..., d:], ReadyFlags(self.flags, self.error, self.patience))
        HopperKernels(CallShape.of(self.q, k, v, self.score)).forward_fused(step, arrivals)
        return o, lse

    def bring(self, delay: float, last: int = 1) -> None:
        """Copies rows and flags from the host on another stream; the last flag becomes `last`."""
        word = torch.ones(2, dtype=torch.int32).pin_memory()
        word[1] = last
        recvs = self.call.gather_plan().recvs
        places = [(group, fetch) for group in range(self.case.groups) for fetch in recvs]
        with torch.cuda.stream(torch.cuda.Stream()):
            for number, (group, fetch) in enumerate(places):
                time.sleep(delay)
                if group == 0:
                    rows = slice(fetch.at, fetch.at + sum(length for _, length in fetch.rows))
                    self.far[:, rows].copy_(self.there[:, rows], non_blocking=True)
                    if self.table is not None and self.biases is not None:
                        near = self.near[0].shape[1]
                        rows = slice(near + rows.start, near + rows.stop)
                        self.table[:, rows].copy_(self.biases[:, rows], non_blocking=True)
                is_last = number == len(places) - 1
                self.flags[group, fetch.step : fetch.step + 1].copy_(word[is_last:][:1], non_blocking=True)
        self.keep = word

    def finished(self) -> Scene:
        """The scene, for judging results."""
        return self.scene


@pytest.fixture
def warm() -> Any:
    """Compiles a launch with everything there, so that no delay is one of the compiler's."""

    def warmed(case: Gathering) -> tuple[Tensor, Tensor]:
        launch = FusedLaunch(case)
        launch.bring(0.0)
        torch.cuda.synchronize()
        found = launch.start()
        torch.cuda.synchronize()
        assert int(launch.error) == 0
        return found

    return warmed


@pytest.mark.parametrize("delay", [0.0, 0.02])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_that_come_late_are_waited_for(case: Gathering, delay: float, warm: Any) -> None:
    expected = warm(case)
    assert_right(FusedLaunch(case).finished(), *(x.cpu() for x in expected))
    launch = FusedLaunch(case)
    torch.cuda.synchronize()
    found = launch.start()
    launch.bring(delay)
    torch.cuda.synchronize()
    assert int(launch.error) == 0
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_tiles_are_split_in_the_case_that_says_so(monkeypatch: pytest.MonkeyPatch, warm: Any) -> None:
    from ringattn.kernels.attention.hopper import launcher

    slots = []

    def noted(*args: Any) -> Any:
        plan = schedule_tiles(*args)
        slots.append(plan.slots)
        return plan

    schedule_tiles = launcher.schedule_tiles
    monkeypatch.setattr(launcher, "schedule_tiles", noted)
    warm(CASES[-1])
    assert slots
    assert min(slots) > 0


@pytest.mark.parametrize("kind", ["refused", "lost"])
@pytest.mark.parametrize("case", [case for case in CASES if not case.mask], ids=str)
def test_rows_that_never_come_leave_no_number_behind(case: Gathering, kind: str, warm: Any) -> None:
    expected = warm(case)
    launch = FusedLaunch(case, patience=SECOND // 20)
    torch.cuda.synchronize()
    began = time.perf_counter()
    found = launch.start()
    if kind == "refused":
        launch.bring(0.002, last=-1)
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 2.0
    assert int(launch.error) == 1
    assert all(x.isnan().all() for x in found), "every row sees all keys"
    again = FusedLaunch(case)
    again.bring(0.0)
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(again.start(), expected, strict=True)), "the GPU is as before"
