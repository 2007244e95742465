"""What rank 0 tells the other ranks: JSON over TCP.

Owns the messages between ranks. Refuses to know what they say, and to unpickle anything.

Note [Sockets]
    A message per step has to be short on the way: rank 0 tells it before it starts the step itself. A plan of 64 requests, made
    JSON and written to the connection of one rank, keeps it for 60 us, where one small broadcast of gloo took 350 (medians of 300
    on a busy machine of two cores).
"""

from __future__ import annotations

import datetime
import json
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from ringattn.launch.runtime.distributed import Rank
from ringattn.launch.serving.links import accept_ranks, connect
from ringattn.launch.serving.wire import Message, Unpacker, pack

FRAME = 1024
"""Bytes in which rank 0 says where it listens."""
PART = 2**16
"""Bytes that are read at a time."""


class Channel:
    """Messages from rank 0 to all others.

    Every rank makes it, and calls `send` (rank 0) and `receive` (the others) equally often.

    Args:
        rank: This rank.
        timeout_s: Seconds after which a rank that waits for a message, or for a reader, gives up.

    Raises:
        RuntimeError: A rank did not connect in time.
    """

    def __init__(self, rank: Rank, timeout_s: float) -> None:
        self._rank, self._timeout = rank, timeout_s
        self._unpacker = Unpacker()
        self._messages: deque[Message] = deque()
        if rank.world_size == 1:
            self._connections = []
        elif rank.first:
            self._connections = [link.connection for link in accept_ranks(rank, self._meet, timeout_s)]
        else:
            self._connections = [connect(rank, self._meet(), timeout_s)]
        for connection in self._connections:
            connection.settimeout(timeout_s)

    def send(self, message: dict[str, Any]) -> None:
        """Tells all other ranks.

        Raises:
            OSError: One is gone, or does not read.
        """
        data = pack(message)
        for connection in self._connections:
            connection.sendall(data)

    def receive(self) -> dict[str, Any]:
        """What rank 0 says next.

        Raises:
            RuntimeError: It is gone, or has said nothing for too long.
        """
        while not self._messages:
            try:
                data = self._connections[0].recv(PART)
            except TimeoutError:
                raise RuntimeError(f"rank 0 must say something within {self._timeout:g} s, got nothing") from None
            if not data:
                raise RuntimeError("rank 0 is gone")
            self._messages.extend(self._unpacker.push(data))
        return self._messages.popleft()

    def close(self) -> None:
        """Lets go of the connections."""
        for connection in self._connections:
            connection.close()
        self._connections = []

    def _meet(self, where: dict[str, Any] | None = None) -> dict[str, Any]:
        """Where rank 0 listens, which it says to all; the only word over a process group."""
        data = json.dumps(where or {}).encode()
        frame = torch.frombuffer(bytearray(data.ljust(FRAME)), dtype=torch.uint8)
        group: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=self._timeout))
        dist.broadcast(frame, src=0, group=group)
        return json.loads(frame.numpy().tobytes())
