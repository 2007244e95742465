"""What a gather comes down to: the constant programs of one rank, built once per shape.

Owns who pushes which rows to whom in which order, when a flag rises, and what is copied to be kept. Refuses to know where its
memory comes from (buffers.py), and when a program is enqueued (copy_engine/transport.py).

Note [A gather]
    Every rank has one slot, where it packs its k and v, and one far, which its peers write into.
    The caller's stream packs, which lowers the flags as well, and starts the side stream, which pushes: group by group
    and reader by reader in ring order, it waits for its turn at the reader (`turn`), copies rows of the slot to their
    place in the reader's far, says `ready`, and `turn` to whoever is next there: the next owner, and behind the last one
    the first, for the next group. So one owner writes to a reader at a time, and no two share its link. Nobody waits in
    a circle: each waits for a push of the same reader or the same owner that stands before it in the order of groups
    and ring steps, or for a call that came before. Behind the join, when nobody reads far any more, the caller's stream
    gives the nearest owner the turn of the next call. So rows go to a reader that is late, and it holds up nobody whom
    others could serve meanwhile. Turns are counted by taking part: a nearest owner that has nothing for a reader which
    fetches takes its turn all the same and hands it to the first one, or it would take the next call's turn for this
    one's. A rank that fetches nothing leaves its far to the next call, so it keeps nothing there.
    A third stream, the herald, raises the flags of this rank in the order of groups and ring steps: it waits for the owner's
    `ready`, and writes the flag. So flags rise in order, whatever order pushes end in.
    A bias of keys stands behind the rows of the slot, and comes in front of the first group of an owner's heads, into the
    table behind the rows of far.
    All of this is enqueued before the caller launches the kernel, and nothing of it needs an SM: the kernel may hold all of
    them while it waits. Packing, and zeroing the guard rows of far, do need SMs: they stand on the caller's stream in front
    of the kernel. What the caller's stream has to say it says at once, behind packing. In a capture it is events that start the
    other streams: it says all in front of packing, where no copy waits for it, and beside packing the side stream takes its first
    turn. `close` joins all three streams. So the slot is free when it has returned, as is what was lent; and `turn` and `ready` of
    a call have been taken by all before anybody says them again: an owner takes each `turn` before it says the `ready` of that
    push, and the reader says `turn` again once it has taken every `ready`, whereupon the others follow in turn.
    Why pushes: reads queue their requests behind rows that the GPU sends at the same time, writes are posted
    (kernels/attention/hopper/NOTES.md has the numbers). Why one stream of them: several share the link, and the first rows come
    later. And why turns: halves of shards are of different lengths, owners drift apart, and two that meet at one reader go at
    less than half the speed each.

Note [Kept rows]
    What a gather keeps lands in far like all rows, where its kernel reads it. Behind the last flag the herald copies it into a
    tensor of the call's own, from torch's allocator: no flag waits for that, should such a copy need an SM. The only program
    that knows its address is the herald's: there is one per address, and addresses come back, since an allocator does the same
    in every step of a training. The caller's stream joins the herald before the gather is closed, and the herald passes the
    gate once more: what it has copied was not overwritten (Note [A push that was let go] of watchdog.py), and whoever is given
    the memory later finds nobody writing. A backward that has kept its rows finds flags that are always raised; a failure of
    the ring makes them negative before it lets anybody go, so that no kernel that starts later stores a number at a peer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ringattn.kernels.interface import ReadyFlags
from ringattn.kernels.kv.pack import Cleared
from ringattn.plan.ring_plan import GatherPlan, RecvSpec, Rows, SendSpec
from ringattn.transport.copy_engine.peer_buffers import RemoteKVBuffer, padded, signal, wait_and_reset
from ringattn.transport.copy_engine.semaphores import Semaphores
from ringattn.transport.copy_engine.streams import MAX_PITCH, Copy, Op, Program, Wait, Write
from ringattn.transport.copy_engine.watchdog import (
    COPY,
    COPY_AT,
    DONE,
    FLAG,
    FLAG_AT,
    FLAG_DONE,
    FLAG_START,
    JOINING,
    START,
    ProgramInfo,
)


@dataclass(frozen=True)
class Bias:
    """Where a bias of keys is put and pushed.

    Attributes:
        slot: `b slot_rows`, behind the slot of this rank.
        table: `b t+remote_rows`, for kernels.
        local: Rows of this rank, t.
    """

    slot: Tensor
    table: Tensor
    local: int

    def places(self, *, published: bool) -> tuple[Tensor | None, Tensor, Tensor]:
        """See `GatherPrograms.bias`."""
        return self.slot[:, : self.local] if published else None, self.table[:, : self.local], self.table

    def pushes(self, table: int, reader: SendSpec) -> list[Op]:
        """The copies to one reader, whose table is at an address."""
        b, size = self.slot.shape[0], self.slot.element_size()
        pitches = size * (reader.local_rows + reader.remote_rows), size * self.slot.stride(0)
        at, found = reader.local_rows + reader.at, list[Op]()
        for offset, length in reader.rows:
            found.append(Copy(table + at * size, self.slot.data_ptr() + offset * size, length * size, b, *pitches))
            at += length
        return found


@dataclass(frozen=True, eq=False)
class GatherMemory:
    """Where the rows of one gather stand on this rank.

    Attributes:
        peer_buffer: What peers write into.
        remote: `b remote_rows hk (d + dv)`, its rows.
        dim: d.
        slot: `b slot_rows hk (d + dv)`, what this rank pushes from.
        packed: The part of it that is to be packed; None where nobody reads it or the caller has filled it.
        bias: None: keys have none.
        ready_flags: The flags of this rank, one per group of heads and ring step.
        cleared: See `GatherPrograms`.
        keep: What else must live as long as the programs.
    """

    peer_buffer: RemoteKVBuffer
    remote: Tensor
    dim: int
    slot: Tensor
    packed: Tensor | None
    bias: Bias | None
    ready_flags: ReadyFlags
    cleared: tuple[Cleared, Cleared] | None
    keep: Any

    @property
    def groups(self) -> int:
        """Groups of heads."""
        return self.ready_flags.flags.shape[0]

    def flag(self, group: int, step: int) -> int:
        """Address of the flag of a group of heads at a ring step."""
        flags = self.ready_flags.flags
        return flags.data_ptr() + 4 * (group * flags.shape[1] + step)


@dataclass(eq=False)
class GatherPrograms:
    """The constant part of a gather: one collection, slot, shape and far buffer.

    Attributes:
        info: What the watch says of the caller's stream and the herald.
        pushing: Likewise of the side stream.
        start: On the caller's stream.
        starts_last: It stands behind packing, and not in front of it.
        cleared: What packing clears, without rows of far and with them; None: the start does it, or nothing is fetched.
        opening: On the side stream, beside packing: what it says in front of the first copy; None: the push does.
        push: On the side stream; None where nobody reads, and nobody is skipped.
        flag_program: On the herald; None where nothing is fetched, and where rows are kept: then it depends on the address.
        joining: On the caller's stream: it waits for the others.
        join: On the caller's stream: it waits for the others, and then goes on.
        beginning: What the start says.
        ending: What the join says between that and being done with the ring.
        packed: Where this rank's rows are packed; None where nobody reads them or the caller has put them there.
        bias: Where this rank's bias of keys goes, in the slot (None: nobody reads it) and in the table, and the table.
        remote: All of it, with the keys and the values in it.
        pad_rows: See `pad_rows`.
        layout: Alike where two gathers have the same guards.
        ready_flags: None where nothing is fetched.
        keep: Alive for as long as the programs.
        aim: What the herald does for rows that are kept at an address; None: none are.
        aimed: The programs of that, by address.
    """

    info: ProgramInfo
    pushing: ProgramInfo
    start: Program
    starts_last: bool
    cleared: tuple[Cleared, Cleared] | None
    opening: Program | None
    push: Program | None
    flag_program: Program | None
    joining: Program
    join: Program
    beginning: Sequence[Op]
    ending: Sequence[Op]
    packed: Tensor | None
    bias: tuple[Tensor | None, Tensor, Tensor] | None
    remote: tuple[Tensor, Tensor, Tensor]
    pad_rows: list[tuple[int, int]]
    layout: object
    ready_flags: ReadyFlags | None
    keep: Any
    aim: Callable[[int], list[Op]] | None
    aimed: OrderedDict[int, Program] = field(default_factory=OrderedDict)


def gather_programs(
    semaphores: Semaphores, here: GatherMemory, gather_plan: GatherPlan, what: str, *, keep: bool
) -> GatherPrograms:
    """Builds them: Note [A gather].

    Args:
        semaphores: Those of this rank.
        here: Where its rows stand.
        gather_plan: Who reads what of whom.
        what: Names the call.
        keep: Rows are kept, each time at another address.
    """
    compile_ = semaphores.streams.compile
    recvs, sends, skipped = gather_plan.recvs, gather_plan.sends, gather_plan.skipped
    remote, packed, bias, first = here.remote, here.packed, here.bias, gather_plan.first
    copy_programs = bool(sends) or skipped is not None
    peers = tuple(dict.fromkeys((*(fetch.owner for fetch in recvs), *(reader.peer for reader in sends))))
    info = ProgramInfo(what, peers, first + 1, tuple((first + fetch.step, fetch.owner) for fetch in recvs))
    number = semaphores.watchdog.number(info)
    stops = tuple((first + reader.step, reader.peer) for reader in sends)
    stops = stops if skipped is None else ((first + 1, skipped[0]), *stops)
    pushing = ProgramInfo(what, peers, first + 1, stops, "waiting for its turn at")
    push = _push(semaphores, here, gather_plan, semaphores.watchdog.number(pushing))
    aim, captured = _flag_ops(semaphores, here, recvs, number), semaphores.streams.capturing()
    opening = list[Op]()
    if captured and packed is not None:
        # only copies must wait for packing, and there an event says when it is over
        first_copy = next((i for i, op in enumerate(push) if isinstance(op, Copy)), 0)
        opening, push = push[:first_copy], push[first_copy:]

    # what packs lowers the flags and the error word: each takes longer in stream order
    lowered: list[Op] = [Write(here.flag(g, fetch.step), 0) for g in range(here.groups) for fetch in recvs]
    lowered += semaphores.clear_error() if recvs else []
    beginning = [*(semaphores.wait_copy_stream_idle() if copy_programs else []), *(lowered if packed is None else [])]
    beginning += semaphores.enter_kernel(number)
    beginning += [
        *(semaphores.start_stream(FLAG_START) if recvs else []),
        *(semaphores.start_stream(START) if copy_programs else []),
    ]
    joining = [semaphores.report_place(number, JOINING)]
    # in a capture it is said in front of the events by which streams join
    ending = [
        *(semaphores.wait_stream(DONE) if copy_programs else []),
        *(semaphores.wait_stream(FLAG_DONE) if recvs else []),
    ]
    turn = [here.peer_buffer.turn(semaphores.prev_rank, semaphores.rank)] if recvs else []
    ending += [semaphores.proceed, *signal(turn)]
    join = [*([] if captured else joining), *ending, *semaphores.exit_ring()]
    if not recvs and not copy_programs:
        beginning, joining, ending, join = [], [], [], []
    return GatherPrograms(
        info,
        pushing,
        start=compile_(beginning),
        starts_last=packed is not None and not captured,
        cleared=here.cleared,
        opening=compile_(opening) if opening else None,
        push=compile_(push) if copy_programs else None,
        flag_program=compile_(aim(None)) if recvs and not keep else None,
        joining=compile_(joining),
        join=compile_(join),
        beginning=beginning,
        ending=ending,
        packed=packed,
        bias=None if bias is None else bias.places(published=packed is not None),
        remote=(remote, remote[..., : here.dim], remote[..., here.dim :]),
        pad_rows=pad_rows(remote.shape[1], recvs),
        layout=(tuple((fetch.at, fetch.rows) for fetch in recvs), tuple(remote.shape), remote.dtype),
        ready_flags=here.ready_flags if recvs else None,
        keep=here,
        aim=aim if recvs and keep else None,
    )


def pad_rows(remote_rows: int, recvs: Sequence[RecvSpec]) -> list[tuple[int, int]]:
    """First and last row of what no owner has in far.

    Args:
        remote_rows: Rows of far.
        recvs: The owners' places in it.
    """
    ends = [fetch.at for fetch in recvs[1:]] + [remote_rows]
    return [(fetch.at + _num_rows(fetch.rows), end) for fetch, end in zip(recvs, ends, strict=False)]


def _push(semaphores: Semaphores, here: GatherMemory, gather_plan: GatherPlan, number: int) -> list[Op]:
    """What the side stream does."""
    me, peer_buffer, slot, bias = semaphores.rank, here.peer_buffer, here.slot, here.bias
    b, slot_rows, hk, width = slot.shape
    row = hk * width * slot.element_size()
    push = semaphores.begin_stream(START, COPY, number)
    skipped = 0
    if gather_plan.skipped is not None:
        (peer, owner), skipped = gather_plan.skipped, 1
        push += [
            *wait_and_reset(peer_buffer.turn(me, peer)),
            *signal([peer_buffer.turn(owner, peer)]),
            semaphores.report(COPY_AT, 1),
        ]
    for g in range(here.groups):
        for i, reader in enumerate(gather_plan.sends):
            theirs = peer_buffer.rows(reader.peer)
            turns = len(reader.owners)
            if g == 0 or turns > 1:
                push += wait_and_reset(peer_buffer.turn(me, reader.peer))
            if g == 0 and bias is not None:
                push += bias.pushes(theirs + padded(b * reader.remote_rows * row), reader)
            places = slot.data_ptr(), theirs, (slot_rows, reader.remote_rows)
            push += _copies(*places, b, row, reader.rows, reader.at, g, here.groups)
            push += signal([peer_buffer.ready(reader.peer, me, g)])
            last = reader.owners[-1] == me
            if turns > 1 and not (last and g == here.groups - 1):
                follower = reader.owners[0 if last else reader.owners.index(me) + 1]
                push += signal([peer_buffer.turn(follower, reader.peer)])
            if g == 0:
                push.append(semaphores.report(COPY_AT, i + 1 + skipped))
    return [*push, *semaphores.end_stream(COPY, DONE)]


def _flag_ops(
    semaphores: Semaphores, here: GatherMemory, recvs: Sequence[RecvSpec], number: int
) -> Callable[[int | None], list[Op]]:
    """What the herald does; told an address, it copies there what is kept (Note [Kept rows])."""
    b, remote_rows, hk, width = here.remote.shape
    row = hk * width * here.remote.element_size()
    begins, ends = semaphores.begin_stream(FLAG_START, FLAG, number), semaphores.end_stream(FLAG, FLAG_DONE)
    # between a peer's word and the flag stands nothing that can wait until the last flag
    raises, ready = list[Op](), list[int]()
    for g in range(here.groups):
        for i, fetch in enumerate(recvs):
            ready.append(here.peer_buffer.ready(semaphores.rank, fetch.owner, g))
            raises += [Wait(ready[-1], 1), semaphores.gate, Write(here.flag(g, fetch.step), 1)]
            raises += [semaphores.report(FLAG_AT, i + 1)] if g == 0 else []
    raises += [Write(word, 0) for word in ready]
    mine = here.peer_buffer.rows(semaphores.rank)

    # what is kept with the programs of a transport must hold neither it nor its words
    def aim(address: int | None) -> list[Op]:
        copies = list[Op]()
        if address is not None:
            for fetch in recvs:
                rows = ((fetch.at, _num_rows(fetch.rows)),)
                copies += _copies(mine, address, (remote_rows, remote_rows), b, row, rows, fetch.at, 0, 1)
        return [*begins, *raises, *copies, *ends]

    return aim


def _copies(
    source: int,
    target: int,
    between: tuple[int, int],
    b: int,
    row: int,
    rows: Rows,
    at: int,
    group: int,
    groups: int,
) -> list[Op]:
    """The copies of one group of heads of rows from one address to another, where they stand together from a row on.

    Args:
        source: Where row 0 is.
        target: Likewise.
        between: Rows from batch element to batch element, there and there.
        b: Batch elements.
        row: Bytes of a row.
        rows: Of the source.
        at: The first of them in the target.
        group: Which group.
        groups: How many.
    """
    part, found = row // groups, list[Op]()
    source_pitch, target_pitch = (x * row for x in between)
    for offset, length in rows:
        start, end = source + offset * row + group * part, target + at * row + group * part
        if groups > 1:
            for i in range(b):
                found.append(Copy(end + i * target_pitch, start + i * source_pitch, part, length, row, row))
        elif b > 1 and max(source_pitch, target_pitch) <= MAX_PITCH:
            found.append(Copy(end, start, length * row, b, target_pitch, source_pitch))
        else:
            for i in range(b):
                found.append(Copy(end + i * target_pitch, start + i * source_pitch, length * row))
        at += length
    return found


def _num_rows(rows: Rows) -> int:
    return sum(length for _, length in rows)
