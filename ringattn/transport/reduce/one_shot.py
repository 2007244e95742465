"""Reducer with one kernel per rank, between GPUs of one host: every rank stores its share in the memory of all others.

Owns the mailboxes, and the host's errors. The order of stores is in kernels/comm/one_shot_triton.py.
"""

from __future__ import annotations

from typing import Any

import torch

from ringattn.transport.base import SelectedTransport
from ringattn.transport.consensus import RankConsensus
from ringattn.transport.copy_engine.streams import Streams
from ringattn.transport.copy_engine.symmetric_memory import Memory, Region, aligned
from ringattn.transport.copy_engine.watchdog import Watchdog
from ringattn.transport.reduce.base import Call, MergeCall, PartialReducer, ShareCall

HALVES = 2
SMALLEST = 2**14
"""Least numbers of a slot: 126 rows of dv 128."""
DID_NOT_COME, HAS_FAILED = 1, 2


class OneShotReducer(PartialReducer):
    """Reducer with one launch per call, captured or not.

    Flags and launch numbers lie in the control region, which is made once. Mailboxes grow at the first call of a kind that
    needs more, which is the same call on all ranks and never in a capture. All ranks wait until their devices are idle, so
    only graphs that were captured with the old mailboxes still use them, and keep them (Note [Old memory] of
    symmetric_memory.py). All launches share one numbering. A mailbox has slots for two calls of all ranks.
    """

    capturable = True

    def __init__(
        self,
        rank: int,
        world_size: int,
        name: str,
        streams: Streams,
        memory: Memory,
        consensus: RankConsensus | None,
        watchdog: Watchdog,
        timeout: float,
        why: str,
    ) -> None:
        super().__init__(SelectedTransport("one_shot", why), consensus, world_size)
        self._rank = rank
        self._name = name
        self._streams = streams
        self._memory = memory
        self._watchdog = watchdog
        self._timeout = timeout
        self._timeout_us = min(max(int(timeout * 1e6), 1), 2**31 - 1)
        from ringattn.kernels.comm import one_shot_triton

        self._kernel = one_shot_triton
        words = self._kernel.control_size(world_size)
        self._control: Region | None = memory.region(aligned(words * self._kernel.WORD), "exchange flags")
        # when the ring fails, kernels that wait here end
        self._failed = (self._control.addresses[rank] + (words - 1) * self._kernel.WORD, 1)
        watchdog.recovery.raised.add(self._failed)
        self._errors = memory.pinned_ints(world_size)
        self._said = self._errors.numpy()
        self._silence = self._said.tobytes()
        self._boxes: Region | None = None
        self._table = torch.empty(0, dtype=torch.int64, device="cpu")
        self._slot = 0
        self._stream: int | None = None
        self._captured = False
        self._kept: list[Any] = []

    def check(self) -> None:  # noqa: D102
        if self._control is None:
            raise RuntimeError("an exchange must not be used after its ring was closed, got a call; ask the ring again")
        self._watchdog.check()
        if self._said.tobytes() != self._silence:
            raise RuntimeError(self._describe())

    def close(self) -> None:  # noqa: D102
        if self._control is None:
            return
        if self._watchdog.failure is None and self._said.tobytes() == self._silence:
            self._memory.barrier("exchange closes")
        else:
            self._streams.synchronize()
        self._watchdog.recovery.raised.discard(self._failed)
        self._control = self._boxes = None
        self._slot = 0
        self._kept.clear()

    def _admit(self, call: Call) -> bool:
        self.check()
        if not super()._admit(call):
            return False
        if call.send_numel > self._slot:
            self._grow(call.send_numel)
        streams = self._streams
        if streams.capturing():
            self._captured = True
        else:
            stream = streams.main()
            if stream != self._stream:
                # launches are numbered in the order of one stream
                if self._stream is not None:
                    streams.order(self._stream, stream)
                self._stream = stream
        return True

    def _run_merge(self, call: MergeCall) -> None:
        self._kernel.one_shot(call.splits, call.sinks, call.o, call.lse, self._table, **self._place())

    def _run_sum(self, call: ShareCall) -> None:
        self._kernel.share(call.x, call.out, self._table, adds=True, widths=(), **self._place())

    def _run_columns(self, call: ShareCall) -> None:
        self._kernel.share(call.x, call.out, self._table, adds=False, widths=call.widths, **self._place())

    def _place(self) -> dict[str, int]:
        return {"rank": self._rank, "ranks": self._world_size, "slot": self._slot, "timeout_us": self._timeout_us}

    def _describe(self) -> str:
        found = {
            code: [rank for rank, said in enumerate(self._errors.tolist()) if said == code]
            for code in (DID_NOT_COME, HAS_FAILED)
        }
        reasons = []
        if found[DID_NOT_COME]:
            reasons.append(f"ring ranks {found[DID_NOT_COME]} did not come within {self._timeout:g} s")
        if found[HAS_FAILED]:
            reasons.append(f"ring ranks {found[HAS_FAILED]} have failed")
        return (
            f"ring rank {self._rank} of ring {self._name!r}: an exchange: {', and '.join(reasons)}; look for an "
            "earlier error on the ranks named (results since then are NaN, and this ring can not exchange any more)"
        )

    def _grow(self, needed: int) -> None:
        assert self._control is not None, "a closed exchange grows no mailboxes"
        slot = SMALLEST
        while slot < needed:
            slot *= 2
        if self._boxes is not None:
            self._memory.barrier("exchange mailboxes grow")
            if self._captured:
                self._kept += (self._boxes, self._table)
        self._boxes = None
        self._boxes = self._memory.region(HALVES * self._world_size * slot * 4, "exchange mailboxes")
        addresses = (*self._boxes.addresses, *self._control.addresses, self._errors.data_ptr())
        self._table = torch.tensor(addresses, dtype=torch.int64, device="cpu").to(self._memory.device)
        self._slot = slot
