"""The transport of a ring of one rank: nothing moves, and short calls are launched as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from ringattn.transport.base import Done, Message, Transport, Work
from ringattn.transport.copy_engine.graph_cache import GraphCache
from ringattn.transport.copy_engine.streams import Streams


class LocalTransport(Transport):
    """Transport of a ring of one rank."""

    def __init__(self) -> None:
        self._graphs = GraphCache()
        self._streams: dict[torch.device, Streams | None] = {}
        self._last: tuple[Streams, int] | None = None

    def post(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Work:
        """See `Transport.post`; only empty groups."""
        assert len(sends) + len(receives) == 0, f"a ring of one rank has no peers, yet {what} wants to move tensors"
        return Done()

    def replay_or_enqueue(
        self, key: tuple[Hashable, ...], given: Sequence[Tensor], made: Sequence[Tensor], enqueue: Callable[[], object]
    ) -> None:
        """See `Transport.replay_or_enqueue`, and Note [Graph cache] of graph_cache.py."""
        streams = self._streams_of(given[0].device)
        if streams is None or streams.capturing():
            enqueue()
            return
        stream = streams.main()
        if self._last is not None and self._last != (streams, stream) and self._last[0] is streams:
            # temporary tensors of all graphs share memory
            streams.order(self._last[1], stream)
        self._last = streams, stream
        call = self._graphs.find(key, given, made)
        graph = self._graphs.graph(call, None, streams, enqueue)
        if graph is None:
            enqueue()
            call.count()
        else:
            streams.launch(graph, stream)
            self.graph_launches += 1

    def close(self) -> None:  # noqa: D102
        self._graphs.clear()
        self._streams.clear()
        self._last = None

    def _streams_of(self, device: torch.device) -> Streams | None:
        """Return the streams of a GPU; None: graphs of calls cannot be made there."""
        if device not in self._streams:
            streams = None
            if device.type == "cuda" and torch.version.hip is None:
                from ringattn.transport.copy_engine.cuda_driver import CudaStreams

                try:
                    streams = CudaStreams(device)
                except RuntimeError:
                    pass  # the driver is too old: calls are enqueued piece by piece
            self._streams[device] = streams
        return self._streams[device]
