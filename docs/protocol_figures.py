"""Draws the protocol of the copy engine: two sequence diagrams, and the timeline of one fused call.

    python docs/protocol_figures.py            writes fused-sequence.svg, grad-return-sequence.svg and fused-timeline.svg

The sequences are written down here, one row per operation. The timeline is computed: `make_gather_plan` gives the rows that each
rank pushes and fetches, and the rules of the protocol give the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ring_figure import COLORS, svg

from ringattn.plan.layouts import zigzag
from ringattn.plan.mask import short_mask
from ringattn.plan.ring_plan import GatherPlan, RingPlan, make_gather_plan, make_plan

HERE = Path(__file__).parent
STYLE = """
  text { font-family: system-ui, sans-serif; fill: #1f2937; font-size: 13px }
  .small { font-size: 11px } .middle { text-anchor: middle } .end { text-anchor: end } .bold { font-weight: 600 }
  .line { stroke: #9ca3af; fill: none } .arrow { stroke: #6b7280; fill: none; stroke-width: 1.5 } .head { fill: #6b7280 }
  .box { fill: #f3f4f6; stroke: #9ca3af } .wait { stroke-dasharray: 4 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e5e7eb } .line { stroke: #6b7280 } .arrow { stroke: #9ca3af } .head { fill: #9ca3af }
    .box { fill: #1f2937; stroke: #6b7280 }
  }
"""
HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
)


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a line of text."""
    return f'<text class="{kind}" x="{x:.4g}" y="{y:.4g}">{words}</text>'


@dataclass(frozen=True)
class Op:
    """One operation of a sequence diagram.

    Attributes:
        row: Row, from the top.
        stream: Index of the stream that executes the operation.
        words: Text of the operation.
        to: Index of the stream that waits for the word that is written; None: the operation stays in its stream.
        rows: Height in rows; 0: text inside a taller box.
        waits: The operation waits for a word.
    """

    row: float
    stream: int
    words: str
    to: int | None = None
    rows: float = 1
    waits: bool = False


GATHER_STREAMS = (
    ("owner A", "caller's stream"),
    ("owner A", "copy stream"),
    ("reader B", "flag stream"),
    ("reader B", "caller's stream"),
)
GATHER = (
    Op(0, 0, "pack K and V into the send slot"),
    Op(0, 3, "flags = 0, error = 0"),
    Op(1, 0, "start = 1", to=1),
    Op(1, 3, "start = 1", to=2),
    Op(2, 0, "attention kernel of A", rows=6),
    Op(2, 3, "attention kernel of B:", rows=6),
    Op(2.7, 3, "local rows first, then", rows=0),
    Op(3.4, 3, "wait for flags[g, s]", rows=0),
    Op(2, 1, "wait turn, turn = 0", waits=True),
    Op(2, 2, "wait ready[g]", rows=2, waits=True),
    Op(3, 1, "copy rows of group g to B"),
    Op(4, 1, "ready[g] = 1", to=2),
    Op(5, 1, "turn = 1 at B's next owner"),
    Op(5, 2, "wait gate", waits=True),
    Op(6, 2, "flags[g, s] = 1", to=3),
    Op(6.5, 3, "compute with A's rows", rows=0),
    Op(7, 1, "after the last push: wait gate", waits=True),
    Op(7, 2, "after the last flag: ready = 0"),
    Op(8, 1, "done = 1", to=0),
    Op(8, 2, "done = 1", to=3),
    Op(9, 0, "wait done, done = 0", waits=True),
    Op(9, 3, "wait done, done = 0", waits=True),
    Op(10, 3, "turn = 1 at the first owner"),
)
"""One owner and one reader of a gather; every rank is both."""

RETURN_STREAMS = (("contributor C", "caller's stream"), ("owner A", "caller's stream"))
GRAD_RETURN = (
    Op(0, 0, "wait reusable, reusable = 0", waits=True),
    Op(1, 0, "backward kernel of C", rows=3),
    Op(1, 1, "backward kernel of A", rows=3),
    Op(2, 0, "stores of dK and dV", to=1),
    Op(4, 0, "ready = 1", to=1),
    Op(5, 1, "wait ready, ready = 0", waits=True),
    Op(6, 1, "sum of all contributions"),
    Op(7, 1, "reusable = 1", to=0),
)
"""One contributor and one owner of a gradient return."""


def sequence(streams: Sequence[tuple[str, str]], ops: Sequence[Op], label: str) -> str:
    """Return a sequence diagram: a column per stream, time runs down."""
    lane, top, row, box = 214, 58, 32, 186
    centers = [12 + lane * (i + 0.5) for i in range(len(streams))]
    height = top + row * (max(op.row for op in ops) + 1) + 6
    parts = []
    for x, (rank, stream) in zip(centers, streams, strict=True):
        parts.append(text(x, 20, rank, "middle bold"))
        parts.append(text(x, 38, stream, "small middle"))
        parts.append(f'<path class="line" d="M{x:g} 48V{height - 4:g}"/>')
    # boxes cover the line of time, arrows and text lie on boxes
    for op in (op for op in ops if op.to is None and op.rows):
        x, y = centers[op.stream], top + row * op.row
        kind = "box wait" if op.waits else "box"
        parts.append(
            f'<rect class="{kind}" x="{x - box / 2:g}" y="{y:g}" width="{box}" height="{row * op.rows - 6:g}" rx="4"/>'
        )
    for op in ops:
        x, y = centers[op.stream], top + row * op.row
        if op.to is None:
            parts.append(text(x, y + 17, op.words, "small middle"))
        else:
            end = centers[op.to]
            parts.append(f'<path class="arrow" marker-end="url(#head)" d="M{x:g} {y + 20:g}H{end:g}"/>')
            parts.append(text((x + end) / 2, y + 14, op.words, "small middle"))
    return svg(24 + lane * len(streams), height, STYLE, label, [HEAD, *parts])


WORLD_SIZE = 4
SEQ_LEN, HEADS, HEAD_DIM, GROUPS = 32768, 32, 128, 4
PUSH_RATE, KERNEL_RATE = 318e9, 650e12
"""Bytes per second of a push while all GPUs push, and operations per second of a kernel."""


@dataclass
class Timeline:
    """Times of one fused forward, in ms.

    Attributes:
        pushes: Per owner: (begin, end, reader, head group).
        flags: Per reader: the time of each (head group, ring step).
        visits: Per reader: (begin, end, owner, head group) of the kernel's work.
    """

    pushes: list[list[tuple[float, float, int, int]]] = field(default_factory=lambda: [[] for _ in range(WORLD_SIZE)])
    flags: list[dict[tuple[int, int], float]] = field(default_factory=lambda: [{} for _ in range(WORLD_SIZE)])
    visits: list[list[tuple[float, float, int, int]]] = field(default_factory=lambda: [[] for _ in range(WORLD_SIZE)])


def simulate(plan: RingPlan, gather_plans: Sequence[GatherPlan]) -> Timeline:
    """Return the times that the rules of the protocol give.

    An owner pushes head group by head group and reader by reader, in ring order, when it is its turn at the reader. The flag
    stream raises flags in the order of groups and steps. The kernel computes groups in order, and waits for the flag of a step.
    """
    found = Timeline()
    row_ms = 1e3 * 2 * 2 * HEAD_DIM * HEADS / GROUPS / PUSH_RATE
    pair_ms = 1e3 * 4 * HEAD_DIM * HEADS / GROUPS / KERNEL_RATE
    queues = [[(group, send) for group in range(GROUPS) for send in part.sends] for part in gather_plans]
    free = [0.0] * WORLD_SIZE
    pushed: list[dict[tuple[int, int], float]] = [{} for _ in range(WORLD_SIZE)]  # per reader: end by (group, owner)
    while any(queues):
        for owner, queue in enumerate(queues):
            if not queue:
                continue
            group, send = queue[0]
            place = send.owners.index(owner)
            before = (group, send.owners[place - 1]) if place else (group - 1, send.owners[-1])
            turn = 0.0 if before[0] < 0 else pushed[send.peer].get(before)
            if turn is None:
                continue  # another owner has the turn
            begin = max(free[owner], turn)
            free[owner] = begin + row_ms * sum(length for _, length in send.rows)
            pushed[send.peer][group, owner] = free[owner]
            found.pushes[owner].append((begin, free[owner], send.peer, group))
            queue.pop(0)
    for rank, part in enumerate(plan.ranks):
        now = raised = 0.0
        for group in range(GROUPS):
            for recv in gather_plans[rank].recvs:
                raised = max(raised, pushed[rank][group, recv.owner])
                found.flags[rank][group, recv.step] = raised
            for step in (step for step in part.ring_steps if step is not None):
                begin = max(now, found.flags[rank].get((group, step.step), 0.0))
                now = begin + pair_ms * step.pairs
                found.visits[rank].append((begin, now, step.owner, group))
    return found


def figure_times() -> Timeline:
    """Return the times of the figure: a causal mask in the zigzag layout."""
    shards = zigzag(SEQ_LEN, WORLD_SIZE)
    plan = make_plan(shards, shards, short_mask(SEQ_LEN, causal=True), "keys")
    return simulate(plan, [make_gather_plan(plan, rank, 128) for rank in range(WORLD_SIZE)])


def timeline() -> str:
    """Return the picture of a fused forward on four GPUs."""
    times = figure_times()
    last = max(end for visits in times.visits for _, end, _, _ in visits)
    left, width, band = 128, 640, 96
    scale = width / last

    def bar(begin: float, end: float, y: float, height: float, rank: int) -> str:
        wide = max((end - begin) * scale - 0.6, 0.8)
        return f'<rect x="{left + begin * scale:.5g}" y="{y:g}" width="{wide:.4g}" height="{height}" fill="{COLORS[rank]}"/>'

    parts = []
    for rank in range(WORLD_SIZE):
        y = 40 + band * rank
        parts.append(text(14, y + 34, f"rank {rank}", "bold"))
        for row, words in enumerate(("copy stream", "flags", "kernel")):
            parts.append(text(left - 8, y + 12 + 24 * row, words, "small end"))
        parts += [bar(begin, end, y, 16, reader) for begin, end, reader, _ in times.pushes[rank]]
        for (_, step), time in times.flags[rank].items():
            owner = (rank - step) % WORLD_SIZE
            x = left + time * scale
            parts.append(f'<path stroke="{COLORS[owner]}" stroke-width="2" d="M{x:.5g} {y + 22:g}v18"/>')
        parts += [bar(begin, end, y + 46, 22, owner) for begin, end, owner, _ in times.visits[rank]]
    bottom = 40 + band * WORLD_SIZE
    parts.append(f'<path class="line" d="M{left} {bottom - 10:g}h{width}"/>')
    for tick in range(int(last * 2) + 1):
        x = left + tick / 2 * scale
        parts.append(f'<path class="line" d="M{x:.5g} {bottom - 10:g}v5"/>')
        parts.append(text(x, bottom + 10, f"{tick / 2:g} ms", "small middle"))
    parts.append(text(14, 20, "Colour: the reader of a push, the owner of a flag or of computed rows:", "small"))
    for rank, color in enumerate(COLORS):
        x = 430 + 86 * rank
        parts.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{color}"/>')
        parts.append(text(x + 18, 20, f"rank {rank}", "small"))
    label = "Copies, flags and kernels of four ranks in one fused forward: copies end long before the kernels"
    return svg(left + width + 24, bottom + 22, STYLE, label, [HEAD, *parts])


def figures() -> dict[str, str]:
    """Return every figure by its file name."""
    return {
        "fused-sequence.svg": sequence(
            GATHER_STREAMS, GATHER, "How owner A pushes rows into the memory of reader B while both kernels run"
        ),
        "grad-return-sequence.svg": sequence(
            RETURN_STREAMS, GRAD_RETURN, "How contributor C returns gradients to owner A"
        ),
        "fused-timeline.svg": timeline(),
    }


if __name__ == "__main__":
    for name, drawn in figures().items():
        (HERE / name).write_text(drawn)
