"""Reducers that stack the shares of all ranks: of a ring of one rank, and over the process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.kernels.partials.packed import finish_parts
from ringattn.transport.base import SelectedTransport
from ringattn.transport.consensus import RankConsensus
from ringattn.transport.process_group import resolve_group
from ringattn.transport.reduce.base import MergeCall, PartialReducer
from ringattn.transport.timeout import BoundedWait

# torch 2.13 renames the collective and warns of the old name
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class LocalReducer(PartialReducer):
    """The reducer of a ring of one rank."""

    capturable = True

    def __init__(self) -> None:
        super().__init__(SelectedTransport("alone", "one rank: every key is here already"), None, 1)

    def _run_merge(self, call: MergeCall) -> None:
        finish_parts(call.splits, call.rows, call.dv, call.sinks, call.o, call.lse)

    def _stack(self, mine: Tensor, what: str) -> Tensor:
        del what
        return mine[None]


class ProcessGroupReducer(PartialReducer):
    """Reducer with one collective of the process group per call: NCCL between GPUs, gloo between CPU processes."""

    def __init__(self, consensus: RankConsensus, bounded_wait: BoundedWait, why: str) -> None:
        super().__init__(SelectedTransport("group", why), consensus, consensus.world_size)
        self._group_name, self._rank = consensus.group_name, consensus.rank
        self._bounded_wait = bounded_wait
        # gloo's collectives run on the host
        self.capturable = "cuda:nccl" in dist.get_backend_config(resolve_group(self._group_name))

    def check(self) -> None:
        """See `PartialReducer.check`."""
        self._bounded_wait.check()

    def _stack(self, mine: Tensor, what: str) -> Tensor:
        self.check()
        # not kept from call to call: a graph that captured this has memory of its own
        stack = mine.new_empty((self._world_size, *mine.shape))
        try:
            # bytes, which every backend moves
            parts = [x.view(-1).view(torch.uint8) for x in (stack, mine)]
            _gather(*parts, group=resolve_group(self._group_name, (self._rank, self._world_size)))
        except RuntimeError as error:
            peers = [peer for peer in range(self._world_size) if peer != self._rank]
            raise RuntimeError(
                f"ring rank {self._rank}: an exchange of {what}: the collective with ring ranks {peers} failed or timed out; look "
                f"for an earlier error on those ranks ({error})"
            ) from error
        return stack
