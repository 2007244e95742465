"""NaN in all idle buffers of a ring, which shows reads of stale rows."""

from __future__ import annotations

import torch

import ringattn
from ringattn.transport.copy_engine.transport import CopyEngineTransport


def poison_buffers(ring: ringattn.Ring, device: torch.device) -> None:
    """Fill every buffer of a ring that no call is using with NaN; buffers of `kv_buffer` are left alone.

    Every rank calls it between the same two calls, outside of captures and after `torch.cuda.synchronize()`; work
    enqueued later on the current stream reads NaN wherever nothing was written since.
    """
    if isinstance(ring.context.transport, CopyEngineTransport):
        poison_transport(ring.context.transport)
    poison_flat(ring, device)


def poison_flat(ring: ringattn.Ring, device: torch.device) -> None:
    """Set all bits of the flat buffers of all ranks that this process hosts: NaN in every floating dtype."""
    for context in ring.contexts(device):
        for flat in context.buffers._flat.values():
            flat.view(torch.uint8).fill_(255)


def poison_transport(transport: CopyEngineTransport) -> None:
    """Set all bits of the memory that holds rows between two calls; every rank calls it."""
    if transport.streams.capturing():
        raise RuntimeError("poison_transport must be called outside of a capture, got one; call it between replays")
    transport._enter()
    transport._finish()
    # twice: nothing is left here, and then nothing is left anywhere that may read the memory
    transport._memory.barrier("poison comes")
    transport._memory.barrier("poison begins")
    for peer_buffer in transport._peer_buffers():
        rows = peer_buffer.region.local[peer_buffer._header :]
        transport.streams.call(lambda rows=rows: rows.fill_(255))
    for local in (transport._slot, transport._local_grads, *transport._shard_buffers):
        transport.streams.call(lambda local=local: local.fill_(255))
    transport._remote_layout = None
    transport._memory.barrier("poison ends")
