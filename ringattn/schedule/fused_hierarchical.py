"""One launch per outer step: the gathered schedule of a ring of two levels.

Owns the order of crossings, gathers and launches over the nodes, and what is made of their results. Refuses to know who
chooses this schedule (execution_plan.py), how bytes move, and how a kernel waits for them.

Note [One launch per outer step]
    In outer step o the ranks of a node hold, together, the keys of another node: each rank its guest (Note [Double ring] in
    ring_plan.py). Guests come over the process group into a place that is pushed from, so a launch finds its own guest
    in place and waits for the others, as it does with shards in outer step 0. The guests of step o + 1 are on their way while
    step o is computed; two places take turns.
    All outer steps in one launch would be possible if a stream wrote a flag behind each guest, and it could hang: the kernel
    may hold every SM, and NCCL needs some to receive. SMs that a kernel left free could be taken by another collective that
    waits for the rank that waits here. Between launches there is always room. So a launch waits inside for nothing but words
    and copies, whose own crossings are over or stand before a launch that ends: by induction over outer steps, all end.
    What is paid is one partial per outer step, in fp32, and one merge.
    NCCL's blocks sit on their multiprocessors for as long as a transfer takes. Programs of a kernel that stays on all of them
    would begin there only afterwards, each with its share of the work, and the launch would end later by the whole crossing.
    So a launch beside which something crosses leaves them out: 3% of an H200, for as long as that launch lasts.

Note [What crosses, counted]
    L ranks per node, N nodes; a shard is s tokens of K and V, 2 hk d bytes each in 16 bits. Per outer step and GPU one shard
    crosses between nodes, L - 1 are pushed within the node, and L visits are computed. 8K tokens per GPU, head_dim 128, L = 8;
    450 GB/s within, 50 GB/s per GPU between nodes, 650 TFLOP/s, causal (each visit is half of 1.1 TFLOP):
                                32/8 heads          32/32 heads
        a shard                 33.5 MB             134 MB
        pushed in               0.07 ms             0.30 ms         behind a visit of 0.85 ms
        crosses in              0.67 ms             2.7 ms          behind an outer step of 6.8 ms
        one ring of N L ranks   0.67 ms             2.7 ms          behind one visit: at the limit, and three times beyond it
    Backward: as much again for K and V, and twice as much home in fp32: 2.0 ms and 8.0 ms, behind 17 ms; within the node the
    kernel stores contributions through NVLink, 0.15 ms and 0.6 ms per visit of 2.1 ms. L = 2, two GPUs standing for a node, has a
    quarter of the work to hide it behind: 1.7 ms forward, which 32/32 heads exceed.
    What stays exposed: the last sums on their way home, 1.3 ms and 5.4 ms per backward, and the merge, 1% of a forward.
    Step by step within the node the partial passes through memory L times per outer step instead of once, 0.08 ms each, and
    every visit ends with its own tail.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ringattn.kernels.interface import Score, accumulation_dtype
from ringattn.kernels.kv.pack import pack
from ringattn.kernels.partials.merge import merge_stack
from ringattn.kernels.runtime.table_cache import find
from ringattn.plan.ring_plan import RankPlan, Rows
from ringattn.schedule.execution_plan import ExecutionPlan
from ringattn.schedule.kv_rotation import PackedMessage, add_rows_, make_message, slices
from ringattn.schedule.stepwise_backward import Gradients, WantedGrads, sinks_gradient
from ringattn.transport.base import COMM_SMS, Buffers, GradMessage, KVGather, Message, RingContext, Work, span


def hierarchical_forward(
    q: Tensor, k: Tensor, v: Tensor, score: Score, plan: ExecutionPlan, context: RingContext
) -> tuple[Tensor, Tensor]:
    """Return the finished attention of this rank's query rows in a ring of two levels, one launch per outer step.

    Args:
        q: `b s h d`, this rank's rows.
        k: `b t hk d`, this rank's rows.
        v: `b t hk dv`, this rank's rows.
        score: How scores are computed, without terms by key.
        plan: The resolved call, which has a fused forward.
        context: This rank's place in a ring of two levels.

    Returns:
        o `b s h dv` in q's dtype and lse `b h s`.
    """
    fused, kv_gather = plan.fused_forward, context.transport.kv_gather()
    assert fused is not None, "the fused schedule runs calls that were resolved to it"
    assert kv_gather is not None, "the fused schedule needs a transport that gathers"
    mine = plan.ring_plan.ranks[context.rank]
    b, s, h, _ = q.shape
    dv, wide = v.shape[-1], accumulation_dtype(q.dtype)
    seeing = [outer for outer in range(len(mine.remote_shards)) if _sees(mine, outer)]
    o = torch.empty(b, s, h, dv, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, h, s, dtype=wide, device=q.device)
    outs, sums = o[None], lse[None]
    if len(seeing) > 1:
        outs = torch.empty(len(seeing), b, s, h, dv, dtype=wide, device=q.device)
        sums = torch.empty(len(seeing), b, h, s, dtype=wide, device=q.device)
    rows = find(fused.tables.rows)
    remote_shards = _RemoteShards(
        k, v, mine, plan.spec.gather_plan(context.nodes).slot_rows, context, kv_gather, Buffers(), "forward"
    )
    for outer in range(len(mine.remote_shards)):
        held = remote_shards.arrive(outer)
        handle = kv_gather.gather(*held, plan.spec.gather_plan(context.nodes, outer), fused.groups, "forward")
        if outer in seeing:
            place = seeing.index(outer)
            with span("ring forward: all visits of outer step {} in one launch", outer):
                fused.kernels.forward_fused(
                    q,
                    held,
                    (handle.k, handle.v),
                    rows,
                    find(fused.tables.keys[outer]),
                    score if place == 0 else dataclasses.replace(score, sinks=None),
                    handle.ready_flags,
                    o=outs[place],
                    lse=sums[place],
                    sm_margin=max(kv_gather.sm_margin, COMM_SMS * remote_shards.crossing),
                )
        handle.close()
    if len(seeing) > 1:
        _merge(outs, sums, o, lse)
    return o, lse


def hierarchical_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    score: Score,
    plan: ExecutionPlan,
    context: RingContext,
    wanted: WantedGrads,
) -> Gradients:
    """Return the gradients of `hierarchical_forward`: dq stays, dk and dv are returned to their owners.

    Args:
        do: `b s h dv`, cotangent of o.
        dlse: `b h s`, cotangent of lse; ignored on rows that saw nothing.
        q: `b s h d`.
        k: `b t hk d`.
        v: `b t hk dv`.
        o: From the forward.
        lse: From the forward.
        score: As in the forward.
        plan: The resolved call, which has a fused backward.
        context: As in the forward.
        wanted: Which gradients of optional tensors to compute: of sinks and alibi_slopes at most.
    """
    fused, kv_gather = plan.fused_backward, context.transport.kv_gather()
    assert fused is not None, "the fused schedule runs calls that were resolved to it"
    assert kv_gather is not None, "the fused schedule needs a transport that gathers"
    nodes, device = context.nodes, q.device
    kernels, mine = fused.kernels, plan.ring_plan.ranks[context.rank]
    b, _, hk, d = k.shape
    if dlse is not None:
        dlse = dlse.masked_fill(lse == float("-inf"), 0.0)
    delta = kernels.delta(o, do, dlse)
    rows = find(fused.tables.rows)
    dq = torch.empty(q.shape, dtype=torch.float32, device=device)
    dalibi = torch.empty(lse.shape, dtype=torch.float32, device=device) if wanted.alibi_slopes else None
    dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=device) for x in (k, v))
    # of this call: a graph that captured it must not lose them to a larger one
    buffers = Buffers()
    remote_shards = _RemoteShards(
        k, v, mine, plan.spec.gather_plan(context.nodes).slot_rows, context, kv_gather, buffers, "backward"
    )
    home_again = _Sums(dk, dv, mine, context, buffers, "backward, gradients")
    for outer in range(len(mine.remote_shards)):
        held = remote_shards.arrive(outer)
        gather_plan = plan.spec.gather_plan(nodes, outer)
        grad_return = kv_gather.grad_return((b, hk, d + v.shape[-1]), gather_plan, device, "backward")
        handle = kv_gather.gather(*held, gather_plan, fused.groups, "backward", grad_return=grad_return)
        if _sees(mine, outer):
            # the first launch overwrites, the others add
            part = dq if outer == 0 else buffers.take("dq", dq.shape, dq.dtype, device)
            slopes = dalibi
            if dalibi is not None and outer:
                slopes = buffers.take("dalibi", dalibi.shape, dalibi.dtype, device)
            with span("ring backward: all visits of outer step {} in one launch", outer):
                kernels.backward_fused(
                    do,
                    q,
                    held,
                    (handle.k, handle.v),
                    lse,
                    delta,
                    rows,
                    find(fused.tables.keys[outer]),
                    score,
                    handle.ready_flags,
                    grad_return.addresses,
                    grad_return.rows,
                    dq=part,
                    dalibi=slopes,
                    bias_grad_buffers=None,
                    deterministic=plan.spec.deterministic,
                    sm_margin=max(kv_gather.sm_margin, COMM_SMS * (remote_shards.crossing or home_again.crossing)),
                )
            if outer:
                dq.add_(part)
            if outer and dalibi is not None and slopes is not None:
                dalibi.add_(slopes)
        else:
            grad_return.local_grads[:, : mine.held(outer).num_rows].zero_()
        into = home_again.room(outer)
        kernels.reduce_kv_grads(
            into[0], into[1], grad_return.local_grads, grad_return.receive()[0], find(fused.tables.returning[outer])
        )
        grad_return.close()
        home_again.cross(outer)
    home_again.land()
    return Gradients(
        dq=dq,
        dk=dk,
        dv=dv,
        dsinks=sinks_gradient(score, lse, delta) if wanted.sinks else None,
        dalibi=None if dalibi is None else dalibi.sum((0, 2)),
        dkey_bias=None,
        dbias=None,
    )


def _sees(plan: RankPlan, outer: int) -> bool:
    """Whether a rank has anything to compute in an outer step; in the first one it always has: empty rows and sinks."""
    ring_steps = plan.ring_steps[outer * plan.local_size : (outer + 1) * plan.local_size]
    return outer == 0 or any(ring_step is not None and ring_step.pairs for ring_step in ring_steps)


def _merge(outs: Tensor, sums: Tensor, o: Tensor, lse: Tensor) -> None:
    """One result, written to o and lse, of the finished results of several launches, `p b s h dv` and `p b h s`, in their order."""
    p, b, s, h, dv = outs.shape
    m = sums.transpose(2, 3).reshape(p, -1)
    # what is lost stays lost: NaN is not empty
    weights = torch.where(m == float("-inf"), 0.0, 1.0).to(m.dtype)
    rows, whole = outs.view(p, -1, dv), o.view(-1, dv)
    if outs.is_cuda:
        from ringattn.kernels.partials.merge_triton import merge_into

        total = torch.empty_like(m[0])
        merge_into(m, weights, rows, total, None, whole, log2=False, finish=True)
    else:
        found, total = merge_stack(m, weights, rows, finish=True, out_dtype=o.dtype)
        whole.copy_(found)
    lse.copy_(total.view(b, s, h).transpose(1, 2))


class _RemoteShards:
    """Keys on their way between nodes: `arrive` for each outer step in turn, and the next one is on its way."""

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        plan: RankPlan,
        slot_rows: int,
        context: RingContext,
        kv_gather: KVGather,
        buffers: Buffers,
        what: str,
    ) -> None:
        self._keys = k, v
        self._plan = plan
        self._slot_rows = slot_rows
        self._context = context
        self._gatherer = kv_gather
        self._buffers = buffers
        self._what = what
        self._pending: Work | None = None
        self._moves = False
        self._room: Tensor | None = None
        self._packed: tuple[Rows, Tensor] | None = None

    @property
    def crossing(self) -> bool:
        """Whether keys are on their way, to this rank or from it."""
        return self._pending is not None and self._moves

    def arrive(self, outer: int) -> tuple[Tensor, Tensor]:
        """What this rank holds in an outer step: its own keys and values, or those of the guest that has come."""
        held = self._keys
        if outer:
            assert self._pending is not None, "a guest is sent for before it is waited for"
            assert self._room is not None, "a guest has a place"
            self._pending.wait()
            self._pending = None
            d = self._keys[0].shape[-1]
            held = self._room[..., :d], self._room[..., d:]
        if outer + 1 < len(self._plan.remote_shards):
            self._send_for(outer + 1)
        return held

    def _send_for(self, outer: int) -> None:
        k, v = self._keys
        step = outer * self._plan.local_size
        send, remote_shard = self._plan.sends[step], self._plan.remote_shards[outer]
        shape, dims = (k.shape[0], self._slot_rows, k.shape[2]), (k.shape[-1], v.shape[-1])
        rows = self._plan.held(outer).num_rows
        self._room = self._gatherer.remote_shard_buffer(outer % 2, shape, rows, dims, k.dtype, k.device)
        gives: list[Message] = []
        recvs: list[Message] = []
        if send is not None:
            gives = [(send.peer, x) for x in self._messages(self._export(send.rows))]
        if remote_shard is not None:
            recvs = [(remote_shard.owner, x) for x in self._messages(self._room)]
        self._moves = bool(gives or recvs)
        what = f"{self._what}, keys for ring step {step}, between nodes"
        self._pending = self._context.slow_transport.post(gives, recvs, what)

    def _messages(self, x: Tensor) -> list[Tensor]:
        """Rows as they lie in the place of a guest: one message where nothing lies between its batch elements."""
        return [x.view(-1)] if x.shape[1] == self._slot_rows else list(x)

    def _export(self, rows: Rows) -> Tensor:
        """Keys and values side by side, as they are read; packed once for all nodes that get the same."""
        if self._packed is None or self._packed[0] != rows:
            k, v = self._keys
            lengths = [length for _, length in rows]
            shape = (k.shape[0], sum(lengths), k.shape[2], k.shape[-1] + v.shape[-1])
            packed = self._buffers.take("cross", shape, k.dtype, k.device)
            for part, x, y in zip(packed.split(lengths, 1), slices(k, 1, rows), slices(v, 1, rows), strict=True):
                pack(part, x, y)
            self._packed = rows, packed
        return self._packed[1]


class _Sums:
    """What a node has added up for its guests, on the way home: for each outer step `room`, `cross`; at the end `land`.

    The sums of a step cross while the next one is computed, and are added at home in the order of steps.
    """

    def __init__(
        self, dk: Tensor, dv: Tensor, plan: RankPlan, context: RingContext, buffers: Buffers, what: str
    ) -> None:
        self._home = [(dk, 1), (dv, 1)]
        self._plan = plan
        self._context = context
        self._buffers = buffers
        self._what = what
        self._sums: PackedMessage | None = None
        self._landing: list[Tensor] = []
        self._pending: Work | None = None
        self._moves = False
        self._crossing = 0

    @property
    def crossing(self) -> bool:
        """Whether sums are on their way, to this rank or from it."""
        return self._pending is not None and self._moves

    def room(self, outer: int) -> list[Tensor]:
        """Where the sums of an outer step are to be written: dk and dv of what this rank holds."""
        if outer == 0:
            return [x for x, _ in self._home]
        self._sums = self._bundle(self._plan.held(outer).num_rows, f"sums {outer % 2}")
        return self._sums.parts

    def cross(self, outer: int) -> None:
        """Sends them home, once what was sent before has landed; step 0 is home."""
        if outer == 0:
            return
        self.land()
        remote_shard, send = self._plan.remote_shards[outer], self._plan.sends[outer * self._plan.local_size]
        gives: list[Message] = []
        recvs: list[Message] = []
        if remote_shard is not None:
            assert self._sums is not None, "sums are made before they are sent"
            gives = [GradMessage(remote_shard.owner, self._sums.message)]
        if send is not None:
            bundle = self._bundle(send.num_rows, "landing")
            self._landing = bundle.parts
            recvs = [GradMessage(send.peer, bundle.message)]
        self._moves = bool(gives or recvs)
        what = f"{self._what} of ring step {outer * self._plan.local_size}, between nodes"
        self._pending, self._crossing = self._context.slow_transport.post(gives, recvs, what), outer

    def land(self) -> None:
        """Adds what is on its way, if anything is."""
        if self._pending is None:
            return
        self._pending.wait()
        send = self._plan.sends[self._crossing * self._plan.local_size]
        if send is not None:
            for (x, dim), part in zip(self._home, self._landing, strict=True):
                add_rows_(x, dim, send.rows, part)
        self._pending, self._landing = None, []

    def _bundle(self, rows: int, name: str) -> PackedMessage:
        return make_message(self._home, rows, self._buffers, name)
