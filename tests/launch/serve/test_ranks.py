"""Connections between ranks: only ranks connect, messages arrive in order, and a rank that is lost is named in bounded time."""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zmq

from ringattn.launch.common.distributed import Session
from ringattn.launch.serve import rank_channel
from ringattn.launch.serve.messages import StepCommand, Stop
from ringattn.launch.serve.rank_channel import RankChannel, RankLiveness, accept_ranks, close_dealer, connect_to_rank_0
from tests.support.timing import HANGS_S, wait_for


def rank(index: int, world_size: int = 2) -> Session:
    return Session(index, world_size, torch.device("cpu"), "gloo", os.getppid())


@pytest.fixture(autouse=True)
def addresses(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[Any]:
    """Addresses of rank 0, which a queue brings to the others in place of a process group."""
    sent: queue.Queue[Any] = queue.Queue()

    def broadcast(_: Session, value: Any) -> Any:
        if value is None:
            value = sent.get(timeout=HANGS_S)
        sent.put(value)  # for the next rank
        return value

    monkeypatch.setattr(Session, "broadcast", broadcast)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(rank_channel, "BEAT_S", 0.1)
    # the short timeouts of these tests are not for the connections
    monkeypatch.setattr(rank_channel, "accept_ranks", lambda session, _: accept_ranks(session, HANGS_S))
    return sent


def in_thread(body: Callable[[], Any]) -> Callable[[], Any]:
    """Start a function in a thread; return one that waits for its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(body()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(HANGS_S)
        return found[0]

    return result


def test_a_connection_without_the_secret_is_dropped(addresses):
    accepted = in_thread(lambda: accept_ranks(rank(0), HANGS_S))
    host, port, secret = addresses.get(timeout=HANGS_S)
    addresses.put((host, port, secret))
    with zmq.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.routing_id = b"guessed/1"
        stranger.connect(f"tcp://{host}:{port}")
        stranger.send(b"4711")
        time.sleep(0.2)
        dealer, _ = connect_to_rank_0(rank(1))
        router, names = accepted()
        assert list(names.values()) == [f"rank 1 (process {os.getpid()})"]
        router.send_multipart([*names, b"command"])
        assert dealer.recv() == b"command"
        assert not stranger.poll(100)
    close_dealer(dealer)
    router.close()


def test_a_long_message_to_rank_0_is_not_received(addresses):
    """Regression: a stranger could make rank 0 keep a message of any length."""
    accepted = in_thread(lambda: accept_ranks(rank(0), HANGS_S))
    host, port, secret = addresses.get(timeout=HANGS_S)
    addresses.put((host, port, secret))
    with zmq.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.linger, stranger.reconnect_ivl = 0, -1
        stranger.routing_id = b"guessed/1"  # that of rank 1 would be taken until rank 0 has closed its side, too
        ended = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.connect(f"tcp://{host}:{port}")
        stranger.send(b"0" * 2**20)
        assert ended.poll(10_000)
        stranger.disable_monitor()
    dealer, _ = connect_to_rank_0(rank(1))
    router, names = accepted()
    assert list(names.values()) == [f"rank 1 (process {os.getpid()})"]
    close_dealer(dealer)
    router.close()


def test_a_rank_that_does_not_connect_is_named():
    def accept() -> str:
        with pytest.raises(RuntimeError) as refused:
            accept_ranks(rank(0, 3), 2.0)
        return str(refused.value)

    accepted = in_thread(accept)
    dealer, _ = connect_to_rank_0(rank(1, 3))
    assert accepted() == "ranks [2] must connect to rank 0 within 2 s, got nothing from them"
    close_dealer(dealer)


@pytest.fixture
def channels() -> Iterator[tuple[RankChannel, RankChannel]]:
    """Channels of two ranks, both in this process."""
    first = in_thread(lambda: RankChannel(rank(0), HANGS_S))
    other = RankChannel(rank(1), HANGS_S)
    yield first(), other
    first().close()
    other.close()


def test_messages_before_the_end_of_rank_0_are_received_and_then_its_end(channels):
    first, other = channels
    sent = [StepCommand(tokens=[x]) for x in range(20)]
    for message in sent:
        first.broadcast(message)
    first.close()
    time.sleep(0.2)
    assert [other.receive() for _ in sent] == sent
    with pytest.raises(RuntimeError, match="rank 0 is gone"):
        other.receive()


def test_a_rank_0_that_sends_nothing_is_an_error(channels):
    channels[1]._timeout = 0.5
    with pytest.raises(RuntimeError, match=re.escape("rank 0 must send a message within 0.5 s, got none")):
        channels[1].receive()


def test_a_rank_that_is_gone_is_named_by_the_next_send(channels):
    first, other = channels
    first.broadcast(Stop())
    assert other.receive() == Stop()
    other.close()

    def refused() -> str:
        try:
            first.broadcast(Stop())
        except RuntimeError as error:
            return str(error)
        return ""

    assert wait_for(refused) == f"rank 1 (process {os.getpid()}) is gone"


def watch(timeout_s: float, lost: list[str]) -> tuple[RankLiveness, Any, Any]:
    """Liveness of rank 0, and the sockets of a rank 1 that sends nothing by itself."""
    first = in_thread(lambda: RankLiveness(rank(0), lost.append, timeout_s))
    dealer, ended = connect_to_rank_0(rank(1))
    return first(), dealer, ended


def test_a_rank_that_ends_is_lost_at_once_and_named():
    lost: list[str] = []
    _, dealer, _ = watch(2 * HANGS_S, lost)
    time.sleep(0.3)
    assert not lost
    close_dealer(dealer)
    wait_for(lambda: lost)
    assert lost == [f"rank 1 (process {os.getpid()}) is gone"]


def test_a_loss_before_a_signal_is_told_before_the_signal_counts():
    """Regression: a launcher that had lost a rank sent SIGTERM, and clients read that the server was shutting down."""
    lost: list[str] = []
    first, dealer, _ = watch(2 * HANGS_S, lost)
    confirmed = in_thread(lambda: first.confirm() or list(lost))
    dealer.send(b"")
    assert confirmed() == []
    close_dealer(dealer)
    first.confirm()
    assert lost == [f"rank 1 (process {os.getpid()}) is gone"]


def test_a_rank_that_sends_no_heartbeat_is_lost():
    lost: list[str] = []
    _, dealer, _ = watch(0.5, lost)
    wait_for(lambda: lost)
    close_dealer(dealer)
    assert lost == [f"rank 1 (process {os.getpid()}) has sent no heartbeat for 0.5 s"]


def test_a_rank_that_ends_when_it_is_expected_to_is_not_lost_and_rank_0_waits_for_it():
    lost: list[str] = []
    first, dealer, _ = watch(2 * HANGS_S, lost)
    first.expect_end()
    closed = in_thread(lambda: first.close(2 * HANGS_S) or time.monotonic())
    time.sleep(0.3)
    before = time.monotonic()
    close_dealer(dealer)
    assert before < closed()
    assert not lost


@pytest.mark.parametrize(("closes", "message"), [(True, "is gone"), (False, "has sent no heartbeat for 0.5 s")])
def test_a_rank_0_that_ends_or_sends_no_heartbeat_is_lost(closes, message):
    lost: list[str] = []
    accepted = in_thread(lambda: accept_ranks(rank(0), HANGS_S))
    other = RankLiveness(rank(1), lost.append, 2 * HANGS_S if closes else 0.5)
    router, _ = accepted()
    if closes:
        router.close()
    wait_for(lambda: lost)
    assert lost == [f"rank 0 {message}"]
    other.close()
    if not closes:
        router.close()
