"""The constant programs of a gather on one rank, built once per shape: pushes, flags, and copies of rows to save.

Note [A gather]
    Every rank has one slot, where it packs its k and v, and one remote buffer, which its peers write into (docs/transport.md
    has the diagram). Three streams work on it:
    - The caller's stream packs, which lowers the flags as well, and starts the copy stream.
    - The copy stream pushes, group by group and reader by reader in ring order: it waits for its `turn` at the reader, copies
      rows of the slot to the reader's remote buffer, signals `ready`, and `turn` to the next owner there, behind the last one
      to the first, for the next group. So one owner writes to a reader at a time, and no two share its link.
    - The flag stream raises the flags of this rank in the order of groups and ring steps: it waits for the owner's `ready`, and
      writes the flag.
    There is no circular wait: each rank waits for a push of the same reader or the same owner that stands before it in the order of
    groups and ring steps, or for an earlier call. An owner that has nothing for a reader which fetches takes its turn all
    the same, or it would take the next call's turn for this one's.
    All of this is enqueued before the caller launches the kernel, and none of it needs an SM: the kernel may hold all of them
    while it waits. Packing, and zeroing the padding rows, need SMs: they stand on the caller's stream in front of the kernel. In a
    capture events start the other streams. `close` joins all three streams. Then the slot is free, and all ranks have reset
    `turn` and `ready` before any rank signals them again; the nearest owner gets the turn of the next call.
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
from ringattn.transport.copy_engine import watchdog
from ringattn.transport.copy_engine.peer_buffers import RemoteKVBuffer, padded, signal, wait_and_reset
from ringattn.transport.copy_engine.semaphores import Semaphores
from ringattn.transport.copy_engine.streams import MAX_PITCH, Copy, Op, Program, Wait, Write


@dataclass(frozen=True)
class Bias:
    """Buffers of key_bias: `b slot_rows` behind the slot, the table `b t+remote_rows` for kernels, and t, the local rows."""

    slot: Tensor
    table: Tensor
    local: int

    def places(self, *, published: bool) -> tuple[Tensor | None, Tensor, Tensor]:  # noqa: D102
        return self.slot[:, : self.local] if published else None, self.table[:, : self.local], self.table

    def pushes(self, table: int, reader: SendSpec) -> list[Op]:
        """Return the copies to one reader, whose table is at an address."""
        b, size = self.slot.shape[0], self.slot.element_size()
        pitches = size * (reader.local_rows + reader.remote_rows), size * self.slot.stride(0)
        at, found = reader.local_rows + reader.at, list[Op]()
        for offset, length in reader.rows:
            found.append(Copy(table + at * size, self.slot.data_ptr() + offset * size, length * size, b, *pitches))
            at += length
        return found


@dataclass(frozen=True, eq=False)
class GatherMemory:
    """Buffers of one gather on this rank.

    Attributes:
        remote: `b remote_rows hk (d + dv)`, rows of peer_buffer, which peers write into.
        slot: `b slot_rows hk (d + dv)`, the source of this rank's pushes.
        packed: The part of it that is to be packed; None where no rank reads it or the caller has filled it.
        ready_flags: The flags of this rank, one per group of heads and ring step.
        cleared: Flags that packing lowers, without and with padding rows; None: the programs do it, or nothing is fetched.
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

    def flag(self, group: int, step: int) -> int:
        """Return the address of the flag of a group of heads at a ring step."""
        flags = self.ready_flags.flags
        return flags.data_ptr() + 4 * (group * flags.shape[1] + step)


@dataclass(eq=False)
class GatherPrograms:
    """The constant part of a gather, for one plan, slot, shape and remote buffer.

    Attributes:
        push_info: For messages about the copy stream; `info` for the others.
        start: On the caller's stream; behind packing where `starts_last`, else in front of it.
        opening: On the copy stream, beside packing, in a capture: all in front of the first copy.
        push: On the copy stream; None where this rank sends nothing, and has no turn to pass on.
        flag_program: On the flag stream; None where nothing is fetched, and where rows are saved: then it depends on the address.
        joining: On the caller's stream, in a capture: reports that it waits for the others; join: waits for them.
        bias: Targets of key_bias, in the slot (None: no rank reads it) and in the table, and the table.
        layout: Equal where two gathers have the same padding rows.
        save_ops: Returns the operations of the flag stream for rows that are saved at an address; None: none are.
    """

    info: watchdog.ProgramInfo
    push_info: watchdog.ProgramInfo
    start: Program
    starts_last: bool
    opening: Program | None
    push: Program | None
    flag_program: Program | None
    joining: Program
    join: Program
    start_ops: Sequence[Op]
    join_ops: Sequence[Op]
    bias: tuple[Tensor | None, Tensor, Tensor] | None
    remote: tuple[Tensor, Tensor, Tensor]
    pad_rows: list[tuple[int, int]]
    layout: object
    ready_flags: ReadyFlags | None
    memory: GatherMemory
    save_ops: Callable[[int], list[Op]] | None
    save_programs: OrderedDict[int, Program] = field(default_factory=OrderedDict)


def gather_programs(
    semaphores: Semaphores, here: GatherMemory, gather_plan: GatherPlan, what: str, *, keep: bool
) -> GatherPrograms:
    """Build the programs of a gather (Note [A gather]); keep: rows are saved, each time at another address."""
    compile_ = semaphores.streams.compile
    recvs, sends, skipped = gather_plan.recvs, gather_plan.sends, gather_plan.skipped
    remote, packed, bias, first = here.remote, here.packed, here.bias, gather_plan.first
    copy_programs = bool(sends) or skipped is not None
    peers = tuple(dict.fromkeys((*(fetch.owner for fetch in recvs), *(reader.peer for reader in sends))))
    info = watchdog.ProgramInfo(what, peers, first + 1, tuple((first + fetch.step, fetch.owner) for fetch in recvs))
    number = semaphores.watchdog.number(info)
    stops = tuple((first + reader.step, reader.peer) for reader in sends)
    stops = stops if skipped is None else ((first + 1, skipped[0]), *stops)
    push_info = watchdog.ProgramInfo(what, peers, first + 1, stops, "waiting for its turn at")
    push = _push(semaphores, here, gather_plan, semaphores.watchdog.number(push_info))
    save_ops, captured = _flag_ops(semaphores, here, recvs, number), semaphores.streams.capturing()
    opening = list[Op]()
    if captured and packed is not None:
        # only copies wait for packing, by an event
        first_copy = next((i for i, op in enumerate(push) if isinstance(op, Copy)), 0)
        opening, push = push[:first_copy], push[first_copy:]

    # packing lowers the flags and the error word, which would take longer in stream order
    lowered: list[Op] = [Write(here.flag(g, fetch.step), 0) for g in range(here.ready_flags.groups) for fetch in recvs]
    lowered += semaphores.clear_error() if recvs else []
    start_ops = [*(semaphores.wait_copy_stream_idle() if copy_programs else []), *(lowered if packed is None else [])]
    start_ops += semaphores.enter_kernel(number)
    start_ops += [
        *(semaphores.start_stream(watchdog.FLAG_START) if recvs else []),
        *(semaphores.start_stream(watchdog.START) if copy_programs else []),
    ]
    joining = [semaphores.report_place(number, watchdog.JOINING)]
    # in a capture `joining` stands in front of the events by which streams join
    join_ops = [
        *(semaphores.wait_stream(watchdog.DONE) if copy_programs else []),
        *(semaphores.wait_stream(watchdog.FLAG_DONE) if recvs else []),
    ]
    turn = [here.peer_buffer.turn(semaphores.prev_rank, semaphores.rank)] if recvs else []
    join_ops += [semaphores.proceed, *signal(turn)]
    join = [*([] if captured else joining), *join_ops, *semaphores.exit_ring()]
    if not recvs and not copy_programs:
        start_ops, joining, join_ops, join = [], [], [], []
    return GatherPrograms(
        info,
        push_info,
        start=compile_(start_ops),
        starts_last=packed is not None and not captured,
        opening=compile_(opening) if opening else None,
        push=compile_(push) if copy_programs else None,
        flag_program=compile_(save_ops(None)) if recvs and not keep else None,
        joining=compile_(joining),
        join=compile_(join),
        start_ops=start_ops,
        join_ops=join_ops,
        bias=None if bias is None else bias.places(published=packed is not None),
        remote=(remote, remote[..., : here.dim], remote[..., here.dim :]),
        pad_rows=pad_rows(remote.shape[1], recvs),
        layout=(tuple((fetch.at, fetch.rows) for fetch in recvs), tuple(remote.shape), remote.dtype),
        ready_flags=here.ready_flags if recvs else None,
        memory=here,
        save_ops=save_ops if recvs and keep else None,
    )


def pad_rows(remote_rows: int, recvs: Sequence[RecvSpec]) -> list[tuple[int, int]]:
    """Return the first and last row of each range of the remote buffer that belongs to no owner."""
    ends = [fetch.at for fetch in recvs[1:]] + [remote_rows]
    return [(fetch.at + fetch.num_rows, end) for fetch, end in zip(recvs, ends, strict=False)]


def _push(semaphores: Semaphores, here: GatherMemory, gather_plan: GatherPlan, number: int) -> list[Op]:
    """Return the operations of the copy stream."""
    me, peer_buffer, slot, bias = semaphores.rank, here.peer_buffer, here.slot, here.bias
    b, slot_rows, hk, width = slot.shape
    row = hk * width * slot.element_size()
    push = semaphores.begin_stream(watchdog.START, watchdog.COPY, number)
    skipped = 0
    if gather_plan.skipped is not None:
        (peer, owner), skipped = gather_plan.skipped, 1
        push += [
            *wait_and_reset(peer_buffer.turn(me, peer)),
            *signal([peer_buffer.turn(owner, peer)]),
            semaphores.report(watchdog.COPY_AT, 1),
        ]
    for g in range(here.ready_flags.groups):
        for i, reader in enumerate(gather_plan.sends):
            theirs = peer_buffer.rows(reader.peer)
            turns = len(reader.owners)
            if g == 0 or turns > 1:
                push += wait_and_reset(peer_buffer.turn(me, reader.peer))
            if g == 0 and bias is not None:
                push += bias.pushes(theirs + padded(b * reader.remote_rows * row), reader)
            places = slot.data_ptr(), theirs, (slot_rows, reader.remote_rows)
            push += _copies(*places, b, row, reader.rows, reader.at, g, here.ready_flags.groups)
            push += signal([peer_buffer.ready(reader.peer, me, g)])
            last = reader.owners[-1] == me
            if turns > 1 and not (last and g == here.ready_flags.groups - 1):
                follower = reader.owners[0 if last else reader.owners.index(me) + 1]
                push += signal([peer_buffer.turn(follower, reader.peer)])
            if g == 0:
                push.append(semaphores.report(watchdog.COPY_AT, i + 1 + skipped))
    return [*push, *semaphores.end_stream(watchdog.COPY, watchdog.DONE)]


def _flag_ops(
    semaphores: Semaphores, here: GatherMemory, recvs: Sequence[RecvSpec], number: int
) -> Callable[[int | None], list[Op]]:
    """Return the operations of the flag stream; given an address, they end with copies of the remote rows to it.

    These copies stand behind the last flag, so no flag waits for them. The gate behind them ensures that they were not overwritten.
    """
    b, remote_rows, hk, width = here.remote.shape
    row = hk * width * here.remote.element_size()
    begins, ends = (
        semaphores.begin_stream(watchdog.FLAG_START, watchdog.FLAG, number),
        semaphores.end_stream(watchdog.FLAG, watchdog.FLAG_DONE),
    )
    # nothing that can wait until the last flag stands between `ready` and the flag
    raises, ready = list[Op](), list[int]()
    for g in range(here.ready_flags.groups):
        for i, fetch in enumerate(recvs):
            ready.append(here.peer_buffer.ready(semaphores.rank, fetch.owner, g))
            raises += [Wait(ready[-1], 1), semaphores.gate, Write(here.flag(g, fetch.step), 1)]
            raises += [semaphores.report(watchdog.FLAG_AT, i + 1)] if g == 0 else []
    raises += [Write(word, 0) for word in ready]
    mine = here.peer_buffer.rows(semaphores.rank)

    # the programs that a transport keeps must hold neither it nor its semaphores
    def save_ops(address: int | None) -> list[Op]:
        copies = list[Op]()
        if address is not None:
            for fetch in recvs:
                rows = ((fetch.at, fetch.num_rows),)
                copies += _copies(mine, address, (remote_rows, remote_rows), b, row, rows, fetch.at, 0, 1)
        return [*begins, *raises, *copies, *ends]

    return save_ops


def _copies(
    source: int, target: int, between: tuple[int, int], b: int, row: int, rows: Rows, at: int, group: int, groups: int
) -> list[Op]:
    """Return the copies of one group of heads of row ranges to consecutive rows.

    source and target are the addresses of row 0, between the rows from batch element to batch element in both, row the bytes of a
    row, and at the first row in the target.
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
