r"""The recurrence over the rows of one rank, with the state from before left open.

Both recurrences keep one state per head, d x e, with keys of width d and values of width e:

    S_t = a_t S_(t-1) + k_t u_t^T      o_t = S_t^T q_t      a_t = exp(g_t)

    Mamba-2 (SSD):      u_t = v_t
    gated delta rule:   u_t = beta_t (v_t - a_t S_(t-1)^T k_t)

(Dao and Gu 2024, arXiv 2405.21060, equations 1 and 2 with A a multiple of the identity; Yang, Kautz and Hatamizadeh 2024,
arXiv 2412.06464, equation 10.) So a segment is an affine map of the state, S -> A S + B, and such maps compose: a monoid.

Within a chunk, with G the running sum of g, D_ij = exp(G_i - G_j) for j <= i and 0 elsewhere, and S the state before it
(the chunkwise forms of those papers: section 6 of the first, section 3.3 of the second):

    T = (I + strictly lower part of beta K K^T D)^(-1)      U = T beta V      W = T beta exp(G) K      (SSD: U = V, W = 0)
    O = (exp(G) Q - P W) S + P U                            P = Q K^T D
    S <- (exp(G_end) I - K~^T W) S + K~^T U                 K~ = exp(G_end - G) K

Shapes: b batch, s rows, c chunks, i j rows of a chunk, k key heads, r value heads per key head, h = k r value heads, d e widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from ringattn.integrations.linear.segments import Chain, concatenate_chunks, split_chunks

CHUNK_LEN = 64
"""Rows of a chunk: products within chunks cost as many operations per row and head, those between chunks as the widths."""


@dataclass
class LocalScan:
    """The affine map S -> A S + B of each run of one rank, and the way to its outputs."""

    decays: list[Tensor]  # A of each run, `b h d d`, or `b h 1 1` where it is a multiple of the identity
    states: list[Tensor]  # B of each run, `b h d e`: its last state when it starts from zero
    # o, `b s h e`, from the state before each run, `b h d e`, which is used where the first segment continues
    finish: Callable[[Sequence[Tensor]], Tensor]


def scan_rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, chain: Chain) -> LocalScan:
    """Return the scan of this rank's rows, of one segment at least, in plain torch and in the dtype of the inputs.

    q and k are `b s k d`, v `b s h e`, g `b s h` the natural log of the decay, beta `b s h`; None: Mamba-2.
    """
    b, _, key_heads, d = k.shape
    heads, e = v.shape[2:]
    split = partial(split_chunks, lengths=chain.lengths, chunk_len=CHUNK_LEN)
    # one past the last chunk of each segment
    stops = list(accumulate(-(-length // CHUNK_LEN) for length in chain.lengths))
    q, k = (split(x).permute(0, 1, 3, 2, 4) for x in (q, k))  # b c k i d
    v = split(v).unflatten(3, (key_heads, -1)).permute(0, 1, 3, 4, 2, 5)  # b c k r i e
    g = split(g).unflatten(3, (key_heads, -1)).permute(0, 1, 3, 4, 2)  # b c k r i
    later = torch.ones(CHUNK_LEN, CHUNK_LEN, dtype=torch.bool, device=v.device).triu(1)
    # each sum of its own terms: the difference of two running sums would lose the decays that follow a strong one
    sums = g[..., None].masked_fill(later.mT.logical_not(), 0).cumsum(-2)
    decay = sums.masked_fill(later, -torch.inf).exp()
    since, until = g.cumsum(-1).exp()[..., None], decay[..., -1, :, None]
    whole = since[..., -1:, :]  # b c k r 1 1
    scores = torch.einsum("bckid,bckjd->bckij", q, k)[:, :, :, None] * decay
    w = None
    if beta is not None:
        beta = split(beta).unflatten(3, (key_heads, -1)).permute(0, 1, 3, 4, 2)[..., None]
        system = torch.einsum("bckid,bckjd->bckij", k, k)[:, :, :, None] * decay * beta
        known = torch.cat([beta * v, beta * since * k[:, :, :, None]], -1)
        v, w = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True).split([e, d], -1)
    added = torch.einsum("bckid,bckrie->bckrde", k, until * v).unbind(1)
    if w is None:
        steps = whole.unbind(1)
    else:
        kept = whole * torch.eye(d, dtype=v.dtype, device=v.device)
        steps = (kept - torch.einsum("bckid,bckrif->bckrdf", k, until * w)).unbind(1)
    apply = torch.mul if w is None else torch.matmul
    nothing = v.new_zeros(b, key_heads, heads // key_heads, d, e)
    identity = v.new_ones(1, 1, 1, 1, 1) if w is None else torch.eye(d, dtype=v.dtype, device=v.device)
    starts, ends, reach = list[Tensor](), list[Tensor](), dict[int, list[Tensor]]()
    for place, (segment, first, stop) in enumerate(zip(chain.segments, (0, *stops), stops, strict=False)):
        state, power = nothing, identity.expand(b, key_heads, heads // key_heads, *identity.shape[-2:])
        powers = reach.setdefault(place, []) if segment.continues else None
        for chunk in range(first, stop):
            starts.append(state)
            state = apply(steps[chunk], state) + added[chunk]
            if powers is not None:
                powers.append(power)
                power = apply(steps[chunk], power)
        ends.append(state)
        if powers is not None:
            powers.append(power)
    decays, states = list[Tensor](), list[Tensor]()
    for run in chain.runs:
        first, stop = run.segments
        states.append(ends[stop - 1].flatten(1, 2))
        decay_of_run = reach[first][-1] if run.passes else torch.zeros_like(whole[:, 0] if w is None else steps[0])
        decays.append(decay_of_run.flatten(1, 2))

    def finish(incoming: Sequence[Tensor]) -> Tensor:
        state = torch.stack(starts, 1)  # b c k r d e
        for run, before in zip(chain.runs, incoming, strict=True):
            place = run.segments[0]
            if place in reach:
                powers, first = torch.stack(reach[place][:-1], 1), stops[place - 1] if place else 0
                reached = apply(powers, before.unflatten(1, (key_heads, -1))[:, None])
                state[:, first : first + powers.shape[1]] += reached
        if w is None:
            seen = since * torch.einsum("bckid,bckrde->bckrie", q, state)
        else:
            seen = (since * q[:, :, :, None] - scores @ w) @ state
        return concatenate_chunks((seen + scores @ v).permute(0, 1, 4, 2, 3, 5).flatten(3, 4), chain.lengths)

    return LocalScan(decays, states, finish)
