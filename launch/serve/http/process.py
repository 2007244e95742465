"""The process that serves HTTP: python -m ringattn.launch.serve.http.process PORT LINK FOLDER, as rank 0 starts it.

Receives its settings, serves, and ends when the engine ends. Rank 0's side is engine_server.py. It touches no GPU and joins no
process group.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import sys
from collections.abc import Generator

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from ringattn.launch.serve import messages
from ringattn.launch.serve.config import freeze_gc
from ringattn.launch.serve.http.app import make_app, server_config
from ringattn.launch.serve.http.engine_client import EngineClient
from ringattn.launch.serve.tokenizer import make_tokenizer

TURN_S = 0.0005
"""Seconds after which a thread must let another one run: one thread tokenizes requests, one writes to clients."""


def main(port: int, link: int, folder: str) -> int:
    """Serve until the engine sends Stop, or is gone; return the exit code, 0 after Stop or without settings.

    `port` and `link` are descriptors of the sockets for clients, and of the one that closes with the engine's process. `folder` has
    the other sockets; it is removed if the engine's process cannot do it.
    """
    engine = socket.socket(fileno=link)
    pull, push = messages.receive_at(folder, "http"), messages.send_to(folder, "engine")
    begins = pull in dict(messages.poller(pull, engine).poll())
    settings = messages.decode_to_http(pull.recv()) if begins else None
    if not isinstance(settings, messages.Settings):  # the engine has ended or failed before
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    client = EngineClient(pull, push, engine, settings.args.max_requests, settings.state)
    sys.setswitchinterval(TURN_S)
    app = make_app(client, make_tokenizer(settings.tokenizer), settings)
    _Server(server_config(app, settings.args, client), client).run([socket.socket(fileno=port)])
    if not client.stopped:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if client.stopped else 1


class _Server(uvicorn.Server):
    """Answers clients until the engine has ended."""

    def __init__(self, config: uvicorn.Config, client: EngineClient) -> None:
        super().__init__(config)
        self._client = client

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Ignore signals, as processes that this one starts do, too: rank 0 handles them. multiprocessing unblocks them."""
        for number in HANDLED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            freeze_gc()
            self._client.send_ready()

    async def on_tick(self, counter: int) -> bool:
        return self._client.ended or await super().on_tick(counter)


if __name__ == "__main__":
    code = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    sys.stderr.flush()
    for reader in multiprocessing.active_children():
        reader.kill()
    os._exit(code)  # neither a process nor a thread that reads a long prompt is waited for
