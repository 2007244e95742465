"""The process that serves HTTP: python -m ringattn.launch.serving.http_process DESCRIPTOR, as rank 0 starts it.

Owns its life: what it is told at first, and when it ends. Refuses to know routes (http.py) and who started it (front.py). It
touches no GPU and joins no process group.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from ringattn.launch.serving.collector import settle
from ringattn.launch.serving.config import Limits
from ringattn.launch.serving.desk import Desk
from ringattn.launch.serving.http import Server, make_app
from ringattn.launch.serving.scheduling import Room
from ringattn.launch.serving.text import make_tokenizer
from ringattn.launch.serving.wire import Unpacker

TURN_S = 0.0005
"""Seconds for which a thread may keep the others waiting: what reads requests, for one, and what writes to clients."""
LOOK_S = 1.0
"""Seconds between looks at whether the thread that serves is still there."""


def main(descriptor: int) -> int:
    """Serves until the engine says stop, or is gone.

    Args:
        descriptor: Of the connection to the engine.

    Returns:
        The exit code: 0 when it was told to stop, or had not begun.
    """
    connection = socket.socket(fileno=descriptor)
    told = _receive(connection)
    if told is None:
        return 0
    settings, listening = told
    desk = Desk(connection, Room(**settings["room"]), settings["state"])
    app = make_app(
        desk,
        make_tokenizer(settings["tokenizer"]),
        settings["model"],
        Limits(**settings["limits"]),
        key=settings["key"],
        hosts=settings["hosts"],
        about=settings["about"],
    )
    sys.setswitchinterval(TURN_S)
    server = Server(listening, settings["connections"])
    server.start(app)
    settle()
    desk.say_ready()
    while not desk.over.wait(LOOK_S):
        if not server.alive:
            return 1
    server.stop()
    return 0 if desk.told else 1


def _receive(connection: socket.socket) -> tuple[dict[str, Any], socket.socket] | None:
    """The first message and the listening socket that comes with it; None when the engine is gone before."""
    unpacker, descriptors = Unpacker(), []
    while True:
        data, found, _, _ = socket.recv_fds(connection, 2**16, 1)
        if not data:
            return None
        descriptors += found
        if messages := unpacker.push(data):
            return messages[0]["serve"], socket.socket(fileno=descriptors[0])


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread that reads a long prompt is not waited for
