"""What a post comes down to: the constant programs of one rank, built once per peers; the copies between them are of the call.

Owns whom a sender waits for before it fills an outbox, and when a box is left. Refuses to know what lies in a box, and when a
program is enqueued (copy_engine/transport.py).

Note [A post]
    What goes out waits in an outbox of this rank until its reader has pulled it. There are four, however many ranks there
    are: one for plain parcels and one for replies, by turns. A post of all ranks takes one turn, also on ranks that move
    nothing in it: so a reader knows where a sender's message lies. Whoever was last sent what the box held, the sender
    waits for the words of all peers, which leave the box to it, and takes back the word of the next reader alone. A rank
    in post n waits for what its peers' side streams pull in earlier posts, and these wait for nothing later than n - 1.
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
        info: What the watch says of it.
        begin: On the caller's stream, in front of the copies into the boxes.
        end: Behind them.
        boxes: Addresses at which what goes out is put, in order of `out`.
        copy_programs: On the side stream: one in front of the copies from each peer, and one behind the last.
        sources: Addresses of the boxes that those read, in order of `into`.
        fetching: On the caller's stream: it waits for the side stream.
        join: Likewise, and then goes on.
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
    """Note [A post].

    Args:
        semaphores: Those of this rank.
        boxes: The outboxes whose turn it is, by kind of parcel.
        out: (peer, kind) of what goes out.
        into: (peer, kind) of what comes in.
        index: Which of the posts that may be under way.
        what: Names the call.
    """
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
