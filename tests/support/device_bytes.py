"""Device memory that transports and reducers hold."""

from __future__ import annotations

from typing import Any

from ringattn.transport.copy_engine.transport import CopyEngineTransport
from ringattn.transport.reduce.one_shot import OneShotReducer


def transport_bytes(end: CopyEngineTransport) -> int:
    """Bytes of buffers, and of temporary tensors of captured calls."""
    zero_copy = (zero_copy.slot for zero_copy in end._zero_copy.values())
    local = (end._slot, end._flags, end._local_grads, *end._shard_buffers, *zero_copy, *end._raised.values())
    pool: Any = getattr(end.streams, "_pool", None)  # of a device; fake streams have none
    graphs = 0 if pool is None else sum(segment["total_size"] for segment in pool.snapshot())
    peer_buffers = sum(peer_buffer.region.local.numel() for peer_buffer in end._peer_buffers())
    return peer_buffers + graphs + sum(x.untyped_storage().nbytes() for x in local)


def reducer_bytes(end: OneShotReducer) -> int:
    """Bytes of a rank's control words and mailbox."""
    return sum(region.local.numel() for region in (end._control, end._boxes) if region is not None)
