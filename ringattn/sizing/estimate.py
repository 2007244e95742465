"""Estimates of a job, and the meshes on which it runs best.

Every mesh of data, context and tensor parallel ranks is a candidate. Memory comes first; what fits is ordered
by a bound of its time, and the best are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringattn.plan.expressions import Causal, Window
from ringattn.plan.layouts import MAX_SEQ_LEN
from ringattn.plan.mask import MaskUnion, ShortForms, short_mask
from ringattn.plan.options import MaskOptions, resolve_balance
from ringattn.sizing.memory import (
    NO_OFFLOAD,
    Memory,
    Savings,
    attention_peak,
    checkpoint_bytes,
    heads_of,
    host_bytes,
    layers_to_offload,
    serving_memory,
    training_memory,
)
from ringattn.sizing.profile import Link, Profile, load_profile
from ringattn.sizing.ring_time import RingCall, attention_time
from ringattn.sizing.shapes import ModelShape, load_shape
from ringattn.sizing.step import Seconds, prefill_s, token_ms, training_step

if TYPE_CHECKING:
    from typing_extensions import Unpack


SIMULATED = 6
"""Meshes that are simulated, best bounds first."""
RECOMPUTE = ("none", "selective", "full")
MODES = ("train", "serve")
CHUNK = 131072
"""Rows of a prompt that go through the model at once, of all ranks."""


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
class MeshEstimate:
    """One mesh with its options, its memory and, where it fits and is fast enough to be simulated, its time.

    Attributes:
        mesh: Ranks of each dimension.
        layout: Layout of the shards.
        schedule: "fused", "stepwise" or "process_group".
        recompute: "none", "selective" or "full".
        keep: The backward uses the keys that the forward gathered.
        sharded: Serving ranks store slices of the weights: tried where whole ones do not fit.
        sequences: Sequences of a step of all data-parallel ranks.
        memory: Bytes of the fullest rank.
        savings: Offload, chunks of MLPs and of the loss, with a number of layers in place of "auto".
        host_bytes: Bytes of pinned host memory of a rank.
        seconds: Of a step, or of a prompt when serving; None: it was not simulated.
        bound_s: Least seconds per step: matrix products and attention at full speed.
        token_ms: Milliseconds per token when serving.
        mfu: Model FLOPs over seconds, GPUs and peak FLOP/s, from 0 to 1; nothing is counted twice for recomputation.
        tokens_per_s: Tokens per second of all GPUs; new ones when serving.
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
    sharded: bool = False
    reason: str = ""
    savings: Savings = NO_OFFLOAD
    host_bytes: float = 0.0


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
    mask: ShortForms = field(default_factory=ShortForms)
    recompute: tuple[str, ...] = RECOMPUTE
    layout: str | None = None
    savings: Savings = NO_OFFLOAD

    @cached_property
    def masks(self) -> tuple[tuple[MaskUnion, int], ...]:
        """Masks with the number of their layers: those that see all, and those with the model's sliding window."""
        shape = self.shape
        whole = short_mask(self.tokens, documents=self.documents, **self.mask)
        if shape.window is None or self.mask.get("window") is not None:
            return ((whole, shape.layers),)
        windowed = short_mask(self.tokens, documents=self.documents, **(self.mask | {"window": (shape.window - 1, 0)}))
        counts = (shape.layers - shape.window_layers, shape.window_layers)
        return tuple((mask, layers) for mask, layers in zip((whole, windowed), counts, strict=True) if layers)

    @cached_property
    def pairs(self) -> float:
        """Visible pairs of a sequence, the mean over layers."""
        return sum(layers * mask.pairs(0, self.tokens) for mask, layers in self.masks) / self.shape.layers


@dataclass(frozen=True)
class Estimate:
    """Candidates of a job, best first; those that do not fit come last.

    Attributes:
        job: The arguments of `estimate`, resolved.
        candidates: One per mesh, with the least recomputation that fits.
    """

    job: Job
    candidates: tuple[MeshEstimate, ...]

    @property
    def best(self) -> MeshEstimate | None:
        """The fastest candidate; None: nothing fits."""
        return next((one for one in self.candidates if one.seconds is not None), None)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits on some mesh, to 1%; 0: none does."""
        capacity = self.job.profile.memory_gib * 2**30

        def fits(tokens: int) -> bool:
            job = replace(self.job, tokens=tokens, documents=None)
            return tokens <= MAX_SEQ_LEN and any(
                one.memory.total <= capacity for mesh in _meshes(job) for one in _candidates(job, mesh)
            )

        low = self.job.gpus * 128
        if not fits(low):
            return 0
        high = 2 * low
        while fits(high):
            low, high = high, 2 * high
        while high - low > low // 100:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


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
    recompute: str | None = None,
    layout: str | None = None,
    savings: Savings = NO_OFFLOAD,
    **mask: Unpack[MaskOptions],
) -> Estimate:
    """Return memory and time of a job on every mesh, best first. Needs no GPU.

    Args:
        model: A preset such as "llama3-8b", the path of a `config.json` of transformers, or its content.
        tokens: Tokens of a sequence.
        gpus: All GPUs of the job.
        gpus_per_node: GPUs that NVLink connects.
        gpu: "h100", "h200", "a100", "b200", or a file that `doctor --profile` wrote.
        link_gbps: 10^9 bytes per second of a GPU to another node; None: that of the profile.
        mode: "train": a step with FSDP; "serve": a prompt and tokens, with all weights on every rank if they fit, else
            sharded over the ranks.
        batch: Sequences of a step of all ranks, or requests when serving; None: one per data-parallel rank, one request.
        documents: Boundaries (0, ..., tokens) of packed documents.
        recompute: "none", "selective" or "full"; None: all are tried.
        layout: Layout of the shards; None: the best for the mask.
        savings: Layers whose checkpoints wait in host memory, rows of an MLP and the loss by chunks, in training.
        mask: causal, by default True, window, prefix_len and chunk_len; see `ring_attention`.

    Returns:
        The candidates, each with its memory in bytes, and with seconds where it was simulated.

    Raises:
        ValueError: A number is out of range, or there is no such model or profile.

    Example:
        >>> found = estimate("llama3-8b", 131072, gpus=4, gpus_per_node=4, batch=1, recompute="selective")
        >>> str(found.best.mesh), found.best.memory.total > 0
        ('dp=1,cp=4', True)
    """
    numbers = {"tokens": tokens, "gpus": gpus, "gpus_per_node": gpus_per_node, "batch": 1 if batch is None else batch}
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}; give a positive number")
    check_nodes(gpus, gpus_per_node)
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}; use one of these")
    if recompute is not None and recompute not in RECOMPUTE:
        raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}; None tries all")
    if recompute is not None and mode == "serve":
        raise ValueError(f"recompute must be left out when serving, got {recompute!r}; nothing is kept for a backward")
    if savings != NO_OFFLOAD and mode == "serve":
        raise ValueError(f"savings must be left out when serving, got {savings}; nothing is kept for a backward")
    if savings.offload and recompute == "none":
        raise ValueError(
            f'recompute must be selective or full with offload, got "none" and {savings.offload}; drop one'
        )
    shape = load_shape(model)
    if savings.layers(shape) > shape.layers:
        raise ValueError(
            f'offload must be at most the number of layers, {shape.layers}, got {savings.offload}; "all" is all of them'
        )
    machine = gpus, gpus_per_node, with_link(load_profile(gpu), link_gbps)
    boundaries = None if documents is None else tuple(documents)
    forms = ShortForms(**resolve_balance({"causal": True, **mask}))
    tried = RECOMPUTE if recompute is None else (recompute,)
    job = Job(shape, tokens, *machine, mode, batch, boundaries, forms, tried, layout, savings)
    _ = job.masks  # a wrong one is refused here
    return estimate_job(job)


def check_nodes(gpus: int, gpus_per_node: int) -> None:
    """Raise ValueError if GPUs do not fill nodes of that size."""
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise ValueError(
            f"gpus must be a multiple of gpus_per_node {gpus_per_node}, got {gpus}; give nodes of equal size"
        )


def with_link(profile: Profile, gbps: float | None) -> Profile:
    """Return the profile with a network of another rate; None: its own."""
    if gbps is None:
        return profile
    if gbps <= 0:
        raise ValueError(f"link_gbps must be above 0, got {gbps}; 50 is a link of 400 Gb/s")
    return replace(profile, network=Link(gbps, profile.network.latency_us))


def estimate_job(job: Job) -> Estimate:
    """Return the candidates of a job, best first."""
    capacity = job.profile.memory_gib * 2**30
    # of a mesh only the least recomputation that fits can be the best
    fitting, beyond = dict[Mesh, MeshEstimate](), dict[Mesh, MeshEstimate]()
    candidates = [one for mesh in _meshes(job) for one in _candidates(job, mesh)]
    for one in sorted(candidates, key=lambda one: one.bound_s / one.sequences):
        if one.memory.total <= capacity:
            fitting.setdefault(one.mesh, one)
    for one in sorted(candidates, key=lambda one: one.memory.total):
        if one.mesh not in fitting:
            beyond.setdefault(one.mesh, one)
    simulated = [_simulate(job, one) for one in list(fitting.values())[:SIMULATED]]
    simulated.sort(key=_per_sequence)
    best = simulated[0] if simulated else None
    slower = [replace(one, reason=_reason(one, best)) for one in (*simulated[1:], *list(fitting.values())[SIMULATED:])]
    missing = [(one.memory.total - capacity) / 2**30 for one in beyond.values()]
    too_large = [
        replace(one, reason=f"out of memory by {gib:.0f} GiB")
        for one, gib in zip(beyond.values(), missing, strict=True)
    ]
    return Estimate(job, (*simulated[:1], *slower, *too_large))


def _meshes(job: Job) -> Iterator[Mesh]:
    """Yield the meshes of a job: tensor parallel ranks within a node, then a ring over the nearest others."""
    per_node = min(job.gpus, job.gpus_per_node)
    for tp in _divisors(per_node):
        if job.shape.kv_heads % tp or (job.mode == "serve" and tp > 1):
            continue
        for cp in _divisors(job.gpus // tp):
            dp = job.gpus // tp // cp
            # a ring has as many ranks on each of its nodes
            whole = per_node % (cp * tp) == 0 or cp * tp % per_node == 0
            wanted = dp == 1 if job.mode == "serve" else job.batch is None or job.batch % dp == 0
            if cp <= job.tokens and whole and wanted:
                yield Mesh(dp, cp, tp, max(1, cp * tp // per_node))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _calls(job: Job, mesh: Mesh, schedule: str, *, keep: bool) -> list[tuple[RingCall, int]]:
    """Return the attention calls of the layers, and of how many; all have the layout of the first."""
    heads, first = heads_of(job.shape, mesh.tp), job.masks[0][0]
    layout = job.layout or best_layout(first)
    return [
        (RingCall(mask, mesh.cp, heads, layout, mesh.nodes, schedule, saved=keep), layers) for mask, layers in job.masks
    ]


def best_layout(mask: MaskUnion) -> str:
    """Return the layout in which ranks have equal work under a mask and move few rows."""
    if mask.documents is not None:
        return "balanced"
    return "contiguous" if Causal() not in mask.parts or any(isinstance(x, Window) for x in mask.parts) else "zigzag"


def _schedule(job: Job, mesh: Mesh) -> str:
    """Return the schedule of a mesh: that of the GPU where a node has several ranks of the ring, fused alone between nodes."""
    schedule = job.profile.schedule
    within = mesh.nodes == 1 or (schedule == "fused" and mesh.cp > mesh.nodes)
    return schedule if within else "process_group"


def _candidates(job: Job, mesh: Mesh) -> Iterator[MeshEstimate]:
    """Yield the candidates of a mesh with their memory, fastest first."""
    schedule, reserve = _schedule(job, mesh), job.profile.reserve_gib * 2**30
    trains = job.mode == "train"
    sequences = job.batch or (mesh.dp if trains else 1)
    keeps = trains and schedule == "fused" and mesh.nodes == 1 and mesh.cp > 1
    if not trains:
        call, _ = _calls(job, mesh, schedule, keep=False)[0]
        bound = _bound(job, mesh, "none", sequences)
        for sharded in (False, True) if mesh.cp > 1 else (False,):
            memory = serving_memory(job.shape, job.tokens, sequences, CHUNK, call, sharded=sharded, reserve=reserve)
            one = MeshEstimate(mesh, call.layout, schedule, "none", False, sequences, memory, bound)
            yield replace(one, sharded=sharded)
        return
    rows, shards = -(-job.tokens // mesh.cp), mesh.dp * mesh.cp
    for recompute in job.recompute:
        saved = checkpoint_bytes(job.shape, rows, recompute, mesh.tp)
        for keep in (True, False) if keeps else (False,):
            call, _ = _calls(job, mesh, schedule, keep=keep)[0]
            plan = partial(
                training_memory,
                *(job.shape, rows, call),
                **{"shards": shards, "tp": mesh.tp, "recompute": recompute, "reserve": reserve},
            )
            savings = _resolved(job, recompute, saved, plan)
            if keep and savings.layers(job.shape) and recompute == "selective":
                continue  # the second run of a layer has what attention returned, but not the keys
            host = host_bytes(job.shape, rows, recompute, savings, mesh.tp)
            memory, bound = plan(savings=savings), _bound(job, mesh, recompute, sequences)
            yield MeshEstimate(
                *(mesh, call.layout, schedule, recompute, keep, sequences, memory, bound),
                savings=savings,
                host_bytes=host,
            )


def _resolved(job: Job, recompute: str, saved: float, plan: Callable[..., Memory]) -> Savings:
    """Return the savings of a candidate, with the fewest layers in host memory with which `plan` fits."""
    if recompute == "none":  # nothing but checkpoints is moved
        return replace(job.savings, offload=0)
    if job.savings.offload != "auto":
        return job.savings
    over = plan(savings=job.savings).total - job.profile.memory_gib * 2**30
    return replace(job.savings, offload=layers_to_offload(over, saved, job.shape.layers))


def _bound(job: Job, mesh: Mesh, recompute: str, sequences: int) -> float:
    """Return the least seconds of a step: matrix products and visible pairs at the speed of the largest, nothing exposed."""
    shape, profile = job.shape, job.profile
    passes = (3 + (recompute != "none"), 3.5 + (recompute == "full")) if job.mode == "train" else (1, 1)
    matmul = passes[0] * shape.layer_flops(job.tokens) / profile.matmul_tflops
    attention = passes[1] * shape.attention_flops(job.pairs) / (0.65 * profile.peak_tflops)
    return sequences * (matmul + attention) / job.gpus / 1e12 * (1 + 0.02 * (mesh.tp > 1))


def _simulate(job: Job, one: MeshEstimate) -> MeshEstimate:
    shape, profile, mesh, ms = job.shape, job.profile, one.mesh, None
    calls = _calls(job, mesh, one.schedule, keep=one.keep)
    if job.mode == "serve":
        seconds = prefill_s(shape, job.tokens, calls, profile, sharded=one.sharded)
        flops = shape.layer_flops(job.tokens) + shape.attention_flops(job.pairs)
        ms = token_ms(shape, job.tokens, one.sequences, mesh.cp, profile, sharded=one.sharded)
        rate = one.sequences * 1e3 / ms
    else:
        rows, accumulate = -(-job.tokens // mesh.cp), one.sequences // mesh.dp
        ranks = {"shards": mesh.dp * mesh.cp, "gpus_per_node": job.gpus_per_node, "tp": mesh.tp}
        seconds = training_step(
            shape, rows, calls, profile, recompute=one.recompute, savings=one.savings, accumulate=accumulate, **ranks
        )
        flops = one.sequences * shape.step_flops(job.tokens, job.pairs)
        rate = one.sequences * job.tokens / seconds.total
    mfu = flops / seconds.total / job.gpus / profile.peak_tflops / 1e12
    return replace(one, seconds=seconds, token_ms=ms, mfu=mfu, tokens_per_s=rate)


def _per_sequence(one: MeshEstimate) -> float:
    assert one.seconds is not None, "a simulated candidate has seconds"
    return one.seconds.total / one.sequences


def _reason(one: MeshEstimate, best: MeshEstimate | None) -> str:
    """Return why a candidate that fits loses."""
    assert best is not None, "something is better"
    if one.seconds is None:
        share = one.bound_s / one.sequences / _per_sequence(best) - 1
        return f"at least {share:.1%} slower" if share > 0 else "not simulated: a later bound"
    slower = _per_sequence(one) / _per_sequence(best) - 1
    parts = {"ring": one.seconds.ring_exposed, "FSDP": one.seconds.fsdp_exposed, "TP": one.seconds.tp_exposed}
    name = max(parts, key=lambda key: parts[key])
    share = parts[name] / one.seconds.total
    if share > 0.1:
        return f"{slower:.1%} slower: link-bound, {share:.0%} exposed by {name}"
    if one.recompute != best.recompute and one.recompute != "none":
        return f"{slower:.1%} slower: recomputes ({one.recompute})"
    return f"{slower:.1%} slower"


def attention_estimate(call: RingCall, gpu: str | Path | Profile = "h200") -> dict[str, float]:
    """Return milliseconds of one attention call, forward and backward, what is exposed of them, and bytes.

    Args:
        call: The call.
        gpu: See `estimate`.
    """
    profile, found = load_profile(gpu), dict[str, float]()
    for way in ("forward", "backward"):
        time = attention_time(call, profile, way)
        found |= {f"{way}_ms": time.ms, f"{way}_exposed_ms": time.exposed_ms}
        found[f"{way}_bytes"] = float(time.bytes_received)
    return found | {"peak_bytes": attention_peak(call, profile)}
