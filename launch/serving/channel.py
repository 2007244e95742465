"""What rank 0 tells the other ranks: JSON, as bytes over gloo.

Owns the messages between ranks. Refuses to know what they say, and to unpickle anything.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

import torch
import torch.distributed as dist

from ringattn.launch.distributed import Rank

FRAME = 4096
"""Bytes of the first transfer of a message: 8 for its length, then its beginning. Most messages have one transfer."""


class Channel:
    """Messages from rank 0 to all others.

    Every rank makes it, and calls `send` (rank 0) and `receive` (the others) equally often.

    Args:
        rank: This rank.
        timeout_s: Seconds after which a rank that waits for a message gives up.
    """

    def __init__(self, rank: Rank, timeout_s: float) -> None:
        self._group: Any = None
        if rank.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def send(self, message: dict[str, Any]) -> None:
        """Tells all other ranks."""
        if self._group is None:
            return
        data = json.dumps(message, separators=(",", ":")).encode()
        whole = bytearray(len(data).to_bytes(8, "little") + data)
        whole += bytes(max(0, FRAME - len(whole)))
        frame = torch.frombuffer(whole, dtype=torch.uint8)
        dist.broadcast(frame[:FRAME], src=0, group=self._group)
        if frame.numel() > FRAME:
            dist.broadcast(frame[FRAME:], src=0, group=self._group)

    def receive(self) -> dict[str, Any]:
        """What rank 0 says next.

        Raises:
            RuntimeError: It is gone, or has said nothing for too long.
        """
        frame = torch.empty(FRAME, dtype=torch.uint8)
        dist.broadcast(frame, src=0, group=self._group)
        first = frame.numpy().tobytes()
        length = int.from_bytes(first[:8], "little")
        data = first[8 : 8 + length]
        if len(data) < length:
            rest = torch.empty(length - len(data), dtype=torch.uint8)
            dist.broadcast(rest, src=0, group=self._group)
            data += rest.numpy().tobytes()
        return json.loads(data)

    def close(self) -> None:
        """Lets go of the group, which would abort the process if it lived until the interpreter ends."""
        self._group = None
