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

from ringattn.transport.copy_engine.peer_buffers import Station, take
from ringattn.transport.copy_engine.semaphores import Words
from ringattn.transport.copy_engine.streams import Op, Program, Wait, Write
from ringattn.transport.copy_engine.watchdog import FETCHING, POSTED, SIDE, SIDE_AT, START, STARTING, Course


@dataclass(eq=False)
class PostPrograms:
    """The constant part of a post between the same peers.

    Attributes:
        course: What the watch says of it.
        begin: On the caller's stream, in front of the copies into the boxes.
        end: Behind them.
        boxes: Addresses at which what goes out is put, in order of `out`.
        sides: On the side stream: one in front of the copies from each peer, and one behind the last.
        sources: Addresses of the boxes that those read, in order of `into`.
        fetching: On the caller's stream: it waits for the side stream.
        join: Likewise, and then goes on.
    """

    course: Course
    begin: Program
    end: Program
    boxes: list[int]
    sides: list[Program]
    sources: list[int]
    fetching: Program
    join: Program


def post_programs(
    words: Words,
    boxes: Mapping[int, Station],
    out: Sequence[tuple[int, int]],
    into: Sequence[tuple[int, int]],
    index: int,
    what: str,
) -> PostPrograms:
    """Note [A post].

    Args:
        words: Those of this rank.
        boxes: The outboxes whose turn it is, by kind of parcel.
        out: (peer, kind) of what goes out.
        into: (peer, kind) of what comes in.
        index: Which of the posts that may be under way.
        what: Names the call.
    """
    me, compile_ = words.rank, words.streams.compile
    course = Course(what, words.peers if out else (), stops=tuple((None, peer) for peer, _ in into))
    number = words.watch.number(course)
    begin: list[Op] = [words.report_place(number, STARTING)]
    for peer, kind in out:
        for other in words.peers:
            free = boxes[kind].free(me, other)
            begin += take(free) if other == peer else [Wait(free, 1)]
    begin += [*(words.wait_copy_stream_idle() if into else []), words.proceed]
    end: list[Op] = [Write(boxes[kind].full(peer, me), 1) for peer, kind in out]
    end += [*words.exit_ring(), *(words.start_stream(START) if into else [])]
    if not out:
        begin, end = [*begin, *end], []
    sides: list[Program] = []
    side = words.begin_stream(START, SIDE, number)
    for i, (peer, kind) in enumerate(into):
        sides.append(compile_([*side, *take(boxes[kind].full(me, peer))]))
        side = [words.gate, Write(boxes[kind].free(peer, me), 1), words.report(SIDE_AT, i + 1)]
    if into:
        sides.append(compile_([*side, *words.end_stream(SIDE, POSTED + index)]))
    fetching = [words.report_place(number, FETCHING)]
    join = [*fetching, *words.join_stream(POSTED + index), words.proceed, *words.exit_ring()]
    return PostPrograms(
        course,
        begin=compile_(begin),
        end=compile_(end),
        boxes=[boxes[kind].rows(me) for _, kind in out],
        sides=sides,
        sources=[boxes[kind].rows(peer) for peer, kind in into],
        fetching=compile_(fetching),
        join=compile_(join),
    )
