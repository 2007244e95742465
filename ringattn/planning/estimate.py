"""Estimates of a job, and the meshes on which it runs best.

Every mesh of data, context and tensor parallel ranks is a candidate. Memory is exact integers and comes first; what fits is ordered
by a bound of its time, and the best are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ringattn.plan.mask import AttentionMask
from ringattn.plan.options import resolve_window
from ringattn.planning.memory import Memory, heads_of, serving_memory, training_memory
from ringattn.planning.profile import Link, Profile, load_profile
from ringattn.planning.ring_time import RingCall, attention_time
from ringattn.planning.shapes import ModelShape, load_shape
from ringattn.planning.step import Seconds, prefill_s, token_ms, training_step

SIMULATED = 6
"""Meshes that are simulated, best bounds first."""
RECOMPUTE = ("none", "selective", "full")
MODES = ("train", "serve")


@dataclass(frozen=True)
class Mesh:
    """Ranks of a job: dp groups of cp x tp ranks; `nodes` is what one ring spans."""

    dp: int
    cp: int
    tp: int
    nodes: int = 1

    @property
    def gpus(self) -> int:
        """All ranks."""
        return self.dp * self.cp * self.tp

    def __str__(self) -> str:
        """Return it as the training job takes it."""
        tp = f",tp={self.tp}" if self.tp > 1 else ""
        return f"dp={self.dp},cp={self.cp}{tp}"


@dataclass(frozen=True)
class Candidate:
    """One mesh with its options, its memory and, where it fits and is fast enough to be simulated, its time.

    Attributes:
        keep: The backward uses the keys that the forward gathered.
        sequences: Sequences of a step of all data-parallel ranks.
        seconds: Of a step, or of a prompt when serving; None: it was not simulated.
        bound_s: Least seconds per step: matrix products and attention at full speed.
        token_ms: Milliseconds per token when serving.
        reason: Why it is not the best; "" for the best.
    """

    mesh: Mesh
    layout: str
    schedule: str
    recompute: str
    keep: bool
    sequences: int
    memory: Memory
    bound_s: float
    seconds: Seconds | None = None
    token_ms: float | None = None
    mfu: float | None = None
    tokens_per_s: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Job:
    """A job to plan: the model, its batch, the mask and the machine; see `estimate`."""

    shape: ModelShape
    tokens: int
    gpus: int
    gpus_per_node: int
    profile: Profile
    mode: str = "train"
    batch: int | None = None
    documents: tuple[int, ...] | None = None
    mask: Mapping[str, Any] = field(default_factory=dict)
    recompute: tuple[str, ...] = RECOMPUTE
    layout: str | None = None
    chunk: int = 131072

    @cached_property
    def masks(self) -> tuple[AttentionMask, AttentionMask | None]:
        """Mask of the layers, and that of layers with a sliding window."""
        whole = AttentionMask(self.tokens, self.tokens, documents=self.documents, **self.mask)
        if not self.shape.window_layers or self.shape.window is None or whole.window is not None:
            return whole, None
        return whole, replace(whole, window=(self.shape.window - 1, 0))

    @cached_property
    def pairs(self) -> float:
        """Visible pairs of a sequence, the mean over layers."""
        whole, windowed = self.masks
        found = whole.pairs(0, self.tokens)
        if windowed is None:
            return float(found)
        share = self.shape.window_layers / self.shape.layers
        return (1 - share) * found + share * windowed.pairs(0, self.tokens)


@dataclass(frozen=True)
class Estimate:
    """Candidates of a job, best first; those that do not fit come last.

    Attributes:
        longest: Tokens of the longest sequence, to a few per cent, that fits on some mesh; 0: none.
    """

    job: Job
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The fastest candidate; None: nothing fits."""
        found = [one for one in self.candidates if one.seconds is not None]
        return found[0] if found else None

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits on some mesh, to 1%; 0: none does."""
        return longest_context(self.job)


def estimate(
    model: str | Path | Mapping[str, Any] | ModelShape,
    tokens: int,
    *,
    gpus: int = 8,
    gpus_per_node: int = 8,
    gpu: str | Path | Profile = "h200",
    link_gbps: float | None = None,
    mode: str = "train",
    batch: int | None = None,
    documents: Sequence[int] | None = None,
    causal: bool = True,
    window: int | Sequence[int | None] | None = None,
    prefix_len: int = 0,
    chunk_len: int | None = None,
    recompute: str | None = None,
    layout: str | None = None,
) -> Estimate:
    """Return memory and time of a job on every mesh, best first. Needs no GPU.

    Args:
        model: A preset such as "llama3-8b", the path of a `config.json` of transformers, or its content.
        tokens: Tokens of a sequence.
        gpus: All GPUs; gpus_per_node: those that NVLink connects.
        gpu: "h100", "h200", "a100", "b200", or a file that `doctor --profile` wrote.
        link_gbps: 10^9 bytes per second of a GPU to another node; None: that of the profile.
        mode: "train": a step with FSDP; "serve": a prompt and tokens, with all weights on every rank.
        batch: Sequences of a step of all ranks, or requests when serving; None: one per data-parallel rank, one request.
        documents: Boundaries (0, ..., tokens) of packed documents.
        causal: See `ring_attention`, as for window, prefix_len and chunk_len.
        recompute: "none", "selective" or "full"; None: all are tried.
        layout: Layout of the shards; None: the best for the mask.

    Returns:
        The candidates, each with its memory in bytes, and with seconds where it was simulated.

    Raises:
        ValueError: A number is out of range, or there is no such model or profile.

    Example:
        >>> found = estimate("llama3-8b", 131072, gpus=4, gpus_per_node=4, batch=1, recompute="selective")
        >>> str(found.best.mesh), found.best.memory.total > 0
        ('dp=1,cp=4', True)
    """
    return estimate_job(
        make_job(
            model,
            tokens,
            gpus=gpus,
            gpus_per_node=gpus_per_node,
            gpu=gpu,
            link_gbps=link_gbps,
            mode=mode,
            batch=batch,
            documents=documents,
            causal=causal,
            window=window,
            prefix_len=prefix_len,
            chunk_len=chunk_len,
            recompute=recompute,
            layout=layout,
        )
    )


def make_job(
    model: str | Path | Mapping[str, Any] | ModelShape,
    tokens: int,
    *,
    gpus: int,
    gpus_per_node: int,
    gpu: str | Path | Profile,
    link_gbps: float | None = None,
    mode: str = "train",
    batch: int | None = None,
    documents: Sequence[int] | None = None,
    causal: bool = True,
    window: int | Sequence[int | None] | None = None,
    prefix_len: int = 0,
    chunk_len: int | None = None,
    recompute: str | None = None,
    layout: str | None = None,
) -> Job:
    """Return the validated job; takes the arguments of `estimate`."""
    for name, number in (("tokens", tokens), ("gpus", gpus), ("gpus_per_node", gpus_per_node), ("batch", batch or 1)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}; give a positive number")
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise ValueError(
            f"gpus must be a multiple of gpus_per_node {gpus_per_node}, got {gpus}; give nodes of equal size"
        )
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}; use one of these")
    if recompute is not None and recompute not in RECOMPUTE:
        raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}; None tries all")
    profile = load_profile(gpu)
    if link_gbps is not None:
        if link_gbps <= 0:
            raise ValueError(f"link_gbps must be above 0, got {link_gbps}; 50 is a link of 400 Gb/s")
        profile = replace(profile, network=Link(link_gbps, profile.network.latency_us, 0.94 * link_gbps))
    options = {"causal": causal, "window": resolve_window(window), "prefix_len": prefix_len, "chunk_len": chunk_len}
    job = Job(
        load_shape(model),
        tokens,
        gpus,
        gpus_per_node,
        profile,
        mode,
        batch,
        None if documents is None else tuple(documents),
        options,
        RECOMPUTE if recompute is None else (recompute,),
        layout,
    )
    _ = job.masks  # a wrong one is refused here
    return job


def estimate_job(job: Job) -> Estimate:
    """Return the candidates of a job, best first."""
    candidates = [one for mesh in meshes(job) for one in _candidates(job, mesh)]
    capacity = job.profile.memory_gib * 2**30
    fitting = sorted(
        (one for one in candidates if one.memory.total <= capacity), key=lambda one: one.bound_s / one.sequences
    )
    # of a mesh only the least recomputation that fits can be the best
    chosen: dict[Mesh, Candidate] = {}
    for one in fitting:
        chosen.setdefault(one.mesh, one)
    simulated = [_simulate(job, one) for one in list(chosen.values())[:SIMULATED]]
    simulated.sort(key=lambda one: _per_sequence(one))
    best = simulated[0] if simulated else None
    ranked = [replace(one, reason="" if one is best else _reason(one, best)) for one in simulated]
    done = {one.mesh for one in simulated}
    slower = [replace(one, reason=_bound_reason(one, best)) for one in chosen.values() if one.mesh not in done]
    over = sorted((one for one in candidates if one.mesh not in chosen), key=lambda one: one.memory.total)
    least: dict[Mesh, Candidate] = {}
    for one in over:
        least.setdefault(one.mesh, one)
    beyond = [
        replace(one, reason=f"out of memory by {(one.memory.total - capacity) / 2**30:.0f} GiB")
        for one in least.values()
    ]
    return Estimate(job, (*ranked, *slower, *beyond))


def longest_context(job: Job) -> int:
    """Return the tokens of the longest sequence that fits on some mesh, to 1%; 0: none does."""
    capacity = job.profile.memory_gib * 2**30

    def fits(tokens: int) -> bool:
        one = replace(job, tokens=tokens, documents=None)
        return any(c.memory.total <= capacity for mesh in meshes(one) for c in _candidates(one, mesh))

    low = job.gpus * 128
    if not fits(low):
        return 0
    high = low
    while fits(2 * high):
        high *= 2
    low, high = high, 2 * high
    while high - low > low // 100:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def meshes(job: Job) -> Iterator[Mesh]:
    """Yield the meshes of a job: tensor parallel ranks within a node, then a ring over the nearest others."""
    for tp in _divisors(min(job.gpus, job.gpus_per_node)):
        if job.shape.kv_heads % tp or (job.mode == "serve" and tp > 1):
            continue
        for cp in _divisors(job.gpus // tp):
            dp = job.gpus // tp // cp
            nodes = max(1, -(-cp * tp // job.gpus_per_node))
            whole = dp == 1 if job.mode == "serve" else job.batch is None or job.batch % dp == 0
            if cp <= job.tokens and whole and cp % nodes == 0:
                yield Mesh(dp, cp, tp, nodes)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _calls(job: Job, mesh: Mesh, schedule: str, *, keep: bool = False) -> tuple[RingCall, RingCall | None]:
    """Return the attention calls of a layer and of one with a sliding window."""
    heads, found = heads_of(job.shape, mesh.tp), list[RingCall | None]()
    for mask in job.masks:
        found.append(
            None
            if mask is None
            else RingCall(mask, mesh.cp, heads, _layout(job, mask), mesh.nodes, schedule, saved=keep)
        )
    assert found[0] is not None, "the first mask is there"
    return found[0], found[1]


def _layout(job: Job, mask: AttentionMask) -> str:
    if job.layout is not None:
        return job.layout
    if mask.documents is not None:
        return "balanced"
    return "contiguous" if mask.window is not None or not mask.causal else "zigzag"


def _schedule(mesh: Mesh) -> str:
    """Return the schedule of a mesh: fused where a node has several ranks of the ring that the copy engine links."""
    return "fused" if mesh.cp // mesh.nodes > 1 or mesh.cp == 1 else "process_group"


def _candidates(job: Job, mesh: Mesh) -> Iterator[Candidate]:
    """Yield the candidates of a mesh with their memory, fastest first."""
    schedule = _schedule(mesh)
    rows, reserve = -(-job.tokens // mesh.cp), job.profile.reserve_gib * 2**30
    call, _ = _calls(job, mesh, schedule)
    sequences = (job.batch or mesh.dp) if job.mode == "train" else (job.batch or 1)
    if job.mode == "serve":
        memory = serving_memory(job.shape, job.tokens, sequences, mesh.cp, job.chunk, call, reserve=reserve)
        yield Candidate(
            mesh, call.layout, schedule, "none", False, sequences, memory, _bound(job, mesh, "none", sequences)
        )
        return
    for recompute in job.recompute:
        for keep in (True, False) if schedule == "fused" and mesh.nodes == 1 and mesh.cp > 1 else (False,):
            memory = training_memory(
                job.shape,
                rows,
                call,
                shards=mesh.dp * mesh.cp,
                tp=mesh.tp,
                recompute=recompute,
                reserve=reserve,
                save_gathered=keep,
            )
            bound = _bound(job, mesh, recompute, sequences)
            yield Candidate(mesh, call.layout, schedule, recompute, keep, sequences, memory, bound)


def _bound(job: Job, mesh: Mesh, recompute: str, sequences: int) -> float:
    """Return the least seconds of a step: matrix products and visible pairs at the speed of the largest, nothing exposed."""
    shape, profile = job.shape, job.profile
    again = 1 if recompute == "none" else 2
    passes = again + 2 if job.mode == "train" else 1
    matmul = 2.0 * shape.layers * shape.active_layer_parameters * job.tokens * passes / profile.matmul_tflops
    attention = 4.0 * shape.layers * shape.heads * shape.head_dim * job.pairs
    attention *= (3.5 + (recompute == "full") if job.mode == "train" else 1) / (0.65 * profile.peak_tflops)
    return sequences * (matmul + attention) / job.gpus / 1e12 * (1 + 0.02 * (mesh.tp > 1))


def _simulate(job: Job, one: Candidate) -> Candidate:
    """Return a candidate with its times."""
    shape, profile, mesh = job.shape, job.profile, one.mesh
    call, windowed = _calls(job, mesh, one.schedule, keep=one.keep)
    if job.mode == "serve":
        seconds = prefill_s(shape, job.tokens, call, profile)
        ms = token_ms(shape, job.tokens, one.sequences, mesh.cp, profile)
        flops = (2.0 * shape.layers * shape.active_layer_parameters * job.tokens) + 4.0 * (
            shape.layers * shape.heads * shape.head_dim * job.pairs
        )
        mfu = flops / seconds.total / job.gpus / profile.peak_tflops / 1e12
        return replace(one, seconds=seconds, token_ms=ms, mfu=mfu, tokens_per_s=one.sequences * 1e3 / ms)
    seconds = training_step(
        shape,
        -(-job.tokens // mesh.cp),
        call,
        profile,
        shards=mesh.dp * mesh.cp,
        gpus_per_node=job.gpus_per_node,
        tp=mesh.tp,
        recompute=one.recompute,
        accumulate=max(1, one.sequences // mesh.dp),
        window_call=windowed,
    )
    flops = one.sequences * shape.step_flops(job.tokens, job.pairs)
    return replace(
        one,
        seconds=seconds,
        mfu=flops / seconds.total / job.gpus / profile.peak_tflops / 1e12,
        tokens_per_s=one.sequences * job.tokens / seconds.total,
    )


def _per_sequence(one: Candidate) -> float:
    assert one.seconds is not None, "a simulated candidate has seconds"
    return one.seconds.total / one.sequences


def _reason(one: Candidate, best: Candidate | None) -> str:
    """Return why a simulated candidate loses."""
    assert best is not None, "something is better"
    assert one.seconds is not None, "it was simulated"
    slower = _per_sequence(one) / _per_sequence(best) - 1
    parts = {"ring": one.seconds.ring_exposed, "FSDP": one.seconds.fsdp_exposed, "TP": one.seconds.tp_exposed}
    name = max(parts, key=lambda key: parts[key])
    share = parts[name] / one.seconds.total
    if share > 0.1:
        return f"{slower:.1%} slower: link-bound, {share:.0%} exposed by {name}"
    if one.recompute != best.recompute and one.recompute != "none":
        return f"{slower:.1%} slower: recomputes ({one.recompute})"
    return f"{slower:.1%} slower"


def _bound_reason(one: Candidate, best: Candidate | None) -> str:
    if best is None or best.seconds is None:
        return "not simulated"
    share = one.bound_s / one.sequences / _per_sequence(best) - 1
    return f"at least {share:.1%} slower" if share > 0 else "not simulated: a later bound"


def attention_estimate(call: RingCall, gpu: str | Path | Profile = "h200") -> dict[str, float]:
    """Return milliseconds of one attention call, forward and backward, and what is exposed of them.

    Args:
        call: The call.
        gpu: See `estimate`.
    """
    profile = load_profile(gpu)
    forward, backward = (attention_time(call, profile, way) for way in ("forward", "backward"))
    return {
        "forward_ms": forward.ms,
        "forward_exposed_ms": forward.exposed_ms,
        "backward_ms": backward.ms,
        "backward_exposed_ms": backward.exposed_ms,
        "forward_bytes": float(forward.bytes_received),
        "backward_bytes": float(backward.bytes_received),
    }
