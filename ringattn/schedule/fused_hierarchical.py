"""The fused schedule of a hierarchical ring: one launch per node step.

Holds the order of transfers between nodes, gathers and launches, and merges the partials of the launches.

In node step o the ranks of a node hold, together, the shards of another node: each rank one remote shard (Note [Double
ring] in ring_plan.py). Remote shards arrive over the process group in a buffer that the copy engine pushes from, so a launch
finds its own remote shard in place and waits for the others, as it does with shards in node step 0. The remote shards of
step o + 1 are in flight while step o is computed; two buffers alternate.
One launch for all node steps could hang: its kernel may hold every SM while it waits for rows that NCCL needs SMs to
receive. SMs that the kernel leaves free could be taken by another collective that waits for this rank. So transfers between
nodes are over before a launch that waits for their rows. The price is one fp32 partial per node step, and one merge. NCCL's
blocks keep their SMs for a whole transfer, so a launch beside which rows move between nodes leaves `COMM_SMS` free.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ringattn.kernels.comm.grad_reduce import reduce_kv_grads
from ringattn.kernels.constants import COMM_SMS
from ringattn.kernels.interface import Arrivals, BackwardStep, Grads, Returns, Step
from ringattn.kernels.kv.pack import pack
from ringattn.kernels.partials.merge import merge_stack
from ringattn.kernels.runtime.table_cache import find
from ringattn.plan.ring_plan import RankPlan, Rows
from ringattn.schedule.execution_plan import BackwardCall, ForwardCall, Gradients
from ringattn.schedule.fused import gather_of
from ringattn.schedule.kv_rotation import NodeGradSums, slices
from ringattn.transport.base import Buffers, KVGather, Message, RingContext, Work, span


def hierarchical_forward(call: ForwardCall) -> tuple[Tensor, Tensor]:
    """Return o and lse of this rank's query rows, one launch per node step."""
    q, k, v, score, plan, context, _ = call
    fused, kv_gather = gather_of(plan.fused_forward, context)
    mine = plan.ring_plan.ranks[context.rank]
    seeing = [node_step for node_step in range(len(mine.remote_shards)) if _sees(mine, node_step)]
    o, lse = call.results()
    outs, sums = o[None], lse[None]
    if len(seeing) > 1:
        outs, sums = (torch.empty(len(seeing), *x.shape, dtype=plan.wide, device=q.device) for x in (o, lse))
    rows = find(fused.tables.rows)
    remote_shards = _RemoteShards(
        k, v, mine, plan.spec.gather_plan(context.nodes).slot_rows, context, kv_gather, Buffers(), "forward"
    )
    for node_step in range(len(mine.remote_shards)):
        held = remote_shards.wait_for(node_step)
        handle = kv_gather.gather(*held, plan.spec.gather_plan(context.nodes, node_step), fused.groups, "forward")
        if node_step in seeing:
            place = seeing.index(node_step)
            with span("ring forward: all ring steps of node step {} in one launch", node_step):
                step = Step(
                    q,
                    *held,
                    rows,
                    find(fused.tables.keys[node_step]),
                    score if place == 0 else dataclasses.replace(score, sinks=None),
                    outs[place],
                    sums[place],
                    sm_margin=max(kv_gather.sm_margin, COMM_SMS * remote_shards.in_flight),
                )
                plan.kernels.forward_fused(step, Arrivals(handle.k, handle.v, handle.ready_flags))
        handle.close()
    if len(seeing) > 1:
        _merge(outs, sums, o, lse)
    return o, lse


def hierarchical_backward(call: BackwardCall) -> Gradients:
    """Return the gradients of `hierarchical_forward`, of sinks and alibi_slopes at most."""
    do, dlse, q, k, v, o, lse, score, plan, context, wanted, _ = call
    fused, kv_gather = gather_of(plan.fused_backward, context)
    nodes, device = context.nodes, q.device
    mine = plan.ring_plan.ranks[context.rank]
    b, _, hk, d = k.shape
    delta = plan.kernels.delta(o, do, dlse)
    rows = find(fused.tables.rows)
    dq = torch.empty(q.shape, dtype=torch.float32, device=device)
    dalibi = torch.empty(lse.shape, dtype=torch.float32, device=device) if wanted.alibi_slopes else None
    dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=device) for x in (k, v))
    # of this call: a graph that captured it must not lose them to a larger one
    buffers = Buffers()
    remote_shards = _RemoteShards(
        k, v, mine, plan.spec.gather_plan(context.nodes).slot_rows, context, kv_gather, buffers, "backward"
    )
    node_sums = NodeGradSums([(dk, 1), (dv, 1)], mine, context, buffers)
    for node_step in range(len(mine.remote_shards)):
        held = remote_shards.wait_for(node_step)
        gather_plan = plan.spec.gather_plan(nodes, node_step)
        grad_return = kv_gather.grad_return((b, hk, d + v.shape[-1]), gather_plan, "backward")
        handle = kv_gather.gather(*held, gather_plan, fused.groups, "backward", grad_return=grad_return)
        if _sees(mine, node_step):
            # the first launch overwrites, the others add
            part = dq if node_step == 0 else buffers.take("dq", dq.shape, dq.dtype, device)
            slopes = dalibi
            if dalibi is not None and node_step:
                slopes = buffers.take("dalibi", dalibi.shape, dalibi.dtype, device)
            with span("ring backward: all ring steps of node step {} in one launch", node_step):
                margin = max(kv_gather.sm_margin, COMM_SMS * (remote_shards.in_flight or node_sums.in_flight))
                keys = find(fused.tables.keys[node_step])
                backward_step = BackwardStep(do, q, *held, lse, delta, rows, keys, score, sm_margin=margin)
                arrivals = Arrivals(handle.k, handle.v, handle.ready_flags)
                returns = Returns(grad_return.addresses, grad_return.rows)
                plan.kernels.backward_fused(backward_step, arrivals, returns, Grads(part, dalibi=slopes))
            if node_step:
                dq.add_(part)
            if node_step and dalibi is not None and slopes is not None:
                dalibi.add_(slopes)
        else:
            grad_return.local_grads[:, : mine.held(node_step).num_rows].zero_()
        into = node_sums.grads(node_step)
        reduce_kv_grads(
            into[0], into[1], grad_return.local_grads, grad_return.receive()[0], find(fused.tables.returning[node_step])
        )
        grad_return.close()
        node_sums.post(node_step)
    node_sums.finish()
    return call.gradients(dq, dk, dv, delta, dalibi)


def _sees(plan: RankPlan, node_step: int) -> bool:
    """Return whether a rank computes anything in a node step; in the first one it always does: empty rows and sinks."""
    ring_steps = plan.ring_steps[node_step * plan.local_size : (node_step + 1) * plan.local_size]
    return node_step == 0 or any(ring_step is not None and ring_step.pairs for ring_step in ring_steps)


def _merge(outs: Tensor, sums: Tensor, o: Tensor, lse: Tensor) -> None:
    """Merge the results of several launches, `p b s h dv` and `p b h s`, in their order, into o and lse."""
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


@dataclass
class _RemoteShards:
    """K/V on their way between nodes: `wait_for` each node step in turn; the next shard is then in flight."""

    k: Tensor
    v: Tensor
    plan: RankPlan
    slot_rows: int
    context: RingContext
    kv_gather: KVGather
    buffers: Buffers
    what: str
    _work: Work | None = None
    _moves: bool = False
    _buffer: Tensor | None = None
    _packed: tuple[Rows, Tensor] | None = None

    @property
    def in_flight(self) -> bool:
        """Whether K/V are in flight between nodes, to this rank or from it."""
        return self._work is not None and self._moves

    def wait_for(self, node_step: int) -> tuple[Tensor, Tensor]:
        """Return the K/V that this rank holds in a node step, and start the transfers for the next one."""
        held = self.k, self.v
        if node_step:
            assert self._work is not None, "a remote shard is posted before it is waited for"
            assert self._buffer is not None, "a remote shard has a buffer"
            self._work.wait()
            self._work = None
            d = self.k.shape[-1]
            held = self._buffer[..., :d], self._buffer[..., d:]
        if node_step + 1 < len(self.plan.remote_shards):
            self._post(node_step + 1)
        return held

    def _post(self, node_step: int) -> None:
        k, v = self.k, self.v
        step = node_step * self.plan.local_size
        send, remote_shard = self.plan.sends[step], self.plan.remote_shards[node_step]
        shape, dims = (k.shape[0], self.slot_rows, k.shape[2]), (k.shape[-1], v.shape[-1])
        rows = self.plan.held(node_step).num_rows
        self._buffer = self.kv_gather.remote_shard_buffer(node_step % 2, shape, rows, dims, k.dtype)
        sends, receives = list[Message](), list[Message]()
        if send is not None:
            sends = [(send.peer, x) for x in self._messages(self._export(send.rows))]
        if remote_shard is not None:
            receives = [(remote_shard.owner, x) for x in self._messages(self._buffer)]
        self._moves = bool(sends or receives)
        what = f"{self.what}, keys for ring step {step}, between nodes"
        self._work = self.context.slow_transport.post(sends, receives, what)

    def _messages(self, x: Tensor) -> list[Tensor]:
        """Return the rows of a remote shard as messages: one where they are contiguous across batch elements."""
        return [x.view(-1)] if x.shape[1] == self.slot_rows else list(x)

    def _export(self, rows: Rows) -> Tensor:
        """Return K and V side by side, packed once for all nodes that receive the same rows."""
        if self._packed is None or self._packed[0] != rows:
            k, v = self.k, self.v
            lengths = [length for _, length in rows]
            shape = (k.shape[0], sum(lengths), k.shape[2], k.shape[-1] + v.shape[-1])
            packed = self.buffers.take("between nodes", shape, k.dtype, k.device)
            for part, x, y in zip(packed.split(lengths, 1), slices(k, 1, rows), slices(v, 1, rows), strict=True):
                pack(part, x, y)
            self._packed = rows, packed
        return self._packed[1]
