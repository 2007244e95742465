"""The constant programs of a post on one rank, built once per peers; the copies between them belong to the call.

A message is copied into an outbox of this rank, from where its reader pulls it. There are four outboxes, however many ranks
there are: one for plain messages and one for gradient messages, alternating. A post of all ranks takes one turn, also on ranks
that move nothing in it: so a reader knows where a sender's message lies. Before it fills an outbox, the sender waits for the
`reusable` of all peers, and resets that of the next reader alone. A rank in post n waits for pulls of its peers in earlier
posts, and these wait for nothing later than n - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ringattn.transport.copy_engine.peer_buffers import PeerBuffer, wait_and_reset
from ringattn.transport.copy_engine.semaphores import Semaphores
from ringattn.transport.copy_engine.streams import Op, Program, Wait, Write
from ringattn.transport.copy_engine.watchdog import COPY, COPY_AT, FETCHING, POSTED, START, STARTING, ProgramInfo


@dataclass(eq=False)
class SendRecvPrograms:
    """The constant part of a post between the same peers.

    Attributes:
        begin: On the caller's stream, in front of the copies into the outboxes at `boxes`, in order of `out`; end: behind them.
        copy_programs: On the copy stream: one in front of the copies from each peer's outbox at `sources`, and one at the end.
        fetching: On the caller's stream, in a capture: reports that it waits for the copy stream; join: waits for it.
    """

    info: ProgramInfo
    begin: Program
    end: Program
    boxes: list[int]
    copy_programs: list[Program]
    sources: list[int]
    fetching: Program
    join: Program


def send_recv_programs(
    semaphores: Semaphores,
    boxes: Mapping[int, PeerBuffer],
    out: Sequence[tuple[int, int]],
    into: Sequence[tuple[int, int]],
    index: int,
    what: str,
) -> SendRecvPrograms:
    """Build the programs of a post; out and into are (peer, kind), index is that of the post among those in flight."""
    me, compile_ = semaphores.rank, semaphores.streams.compile
    info = ProgramInfo(what, semaphores.peers if out else (), stops=tuple((None, peer) for peer, _ in into))
    number = semaphores.watchdog.number(info)
    begin: list[Op] = [semaphores.report_place(number, STARTING)]
    for peer, kind in out:
        for other in semaphores.peers:
            reusable = boxes[kind].reusable(me, other)
            begin += wait_and_reset(reusable) if other == peer else [Wait(reusable, 1)]
    begin += [*(semaphores.wait_copy_stream_idle() if into else []), semaphores.proceed]
    end: list[Op] = [Write(boxes[kind].ready(peer, me), 1) for peer, kind in out]
    end += [*semaphores.exit_ring(), *(semaphores.start_stream(START) if into else [])]
    if not out:
        begin, end = [*begin, *end], []
    copy_programs: list[Program] = []
    copy_stream = semaphores.begin_stream(START, COPY, number)
    for i, (peer, kind) in enumerate(into):
        copy_programs.append(compile_([*copy_stream, *wait_and_reset(boxes[kind].ready(me, peer))]))
        copy_stream = [semaphores.gate, Write(boxes[kind].reusable(peer, me), 1), semaphores.report(COPY_AT, i + 1)]
    if into:
        copy_programs.append(compile_([*copy_stream, *semaphores.end_stream(COPY, POSTED + index)]))
    fetching = [semaphores.report_place(number, FETCHING)]
    join = [*fetching, *semaphores.wait_stream(POSTED + index), semaphores.proceed, *semaphores.exit_ring()]
    return SendRecvPrograms(
        info,
        begin=compile_(begin),
        end=compile_(end),
        boxes=[boxes[kind].rows(me) for _, kind in out],
        copy_programs=copy_programs,
        sources=[boxes[kind].rows(peer) for peer, kind in into],
        fetching=compile_(fetching),
        join=compile_(join),
    )
