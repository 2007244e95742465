"""Cases of ring attention: every layout, mask, option and direction, against the fp64 reference.

Every rank draws the same whole-sequence inputs and computes from them, alone, the reference in fp64 and in the dtype under
test. The error budget of each tensor (o, lse, dq, dk, dv, and the gradients of tensor-valued options) follows from these two
only, so it is the same at every world size. Then the ring runs with random cotangents for o and for lse, and the rows of all
ranks are put together; gradients of which every rank has a share are summed. A ratio is the part of the budget that is used up;
above 1 the row is red, and the rank with the largest error is named.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from ringattn.kernels.interface import accumulation_dtype
from ringattn.kernels.registry import FEATURES, select_kernels
from ringattn.launch.check.inference import DTYPES, MOVES, Finding, InferenceCase, budget_dtypes, examine_history
from ringattn.launch.common.ring_variants import ScheduleName, make_ring
from ringattn.launch.common.session import Session, table
from ringattn.numerics.error_budget import Budget, error
from ringattn.simulate import LATENTS

LAYOUTS = ("contiguous", "striped", "zigzag", "balanced")
ALONE = "alone"
OPTIONS = ("softmax_scale", "softcap", "sinks", "alibi_slopes", "key_bias", "bias", "dropout", "deterministic")
SEQUENCE_DIM = {"q": 1, "k": 1, "v": 1, "latents": 1, "rotary_keys": 1, "o": 1, "lse": 2, "key_bias": 1, "bias": 2}
"""The dim that is sharded; tensors that are not named here are whole on every rank."""
PER_HEAD = ("dsinks", "dalibi_slopes")
"""Gradients that are one number per head, each a sum over all rows."""
COMPILE_SECONDS = 300.0
"""Limit of compiling ahead; the check itself compiles the rest."""
PROGRESS_SECONDS = 5.0
"""Between two lines about the progress of compiling."""
STEPWISE = ("stepwise", "process_group")
LARGE_BUDGET = 2**50
"""Bytes that hold the gathered keys of every case."""
Standard = dict[str, tuple[Tensor, Budget]]
"""Per tensor: its fp64 reference on the whole sequence, and its error budget."""
Rings = Sequence[Sequence[ringattn.Ring]]
"""Rings of all ranks, each followed by the same one of this process alone if virtual ranks have other processes."""
Answer = tuple[dict[str, Tensor], Callable[[Tensor, str], Tensor]]
"""Whole tensors by name, the same on every rank, and a function that takes this rank's rows of one of them."""


@dataclass(frozen=True)
class CheckArgs:
    """Checks the ring on this machine, forward and backward, against the fp64 reference.

    Attributes:
        full: Real sizes, all dtypes, head dims and head groups, both directions under every mask: many kernels to compile.
        impl: Kernels to use: "auto", or the name of a kernel set.
        schedule: How keys move: "auto", "fused" (one launch), "fused_saved_kv" (one launch, and backwards use the keys of
            their forwards), "fused_kv_buffer" (here as "fused"), "stepwise" (step by step over the copy engine) or
            "process_group" (step by step over NCCL or gloo). With virtual ranks "auto" is "fused", then "stepwise", over any link.
        device: GPUs where there are any, or the CPU.
        simulate: Ranks of the simulated ring in a single process; 0 for none.
        only: Only cases whose name contains this.
        json: Where to write every row as JSON.
        seed: Seed of all inputs.
        soak: Random calls on one ring instead of the cases, without a pause between them; all ranks.
        delay: While soaking, hosts pause at random, up to 20 ms.
        poison: While soaking, the ring's buffers are filled with NaN between calls.
        fuzz: Seconds of random ring steps of the kernels alone instead of the cases; 0 for a single one.
        fuzz_seed: Seed of the first random ring step.
        ahead: On GPUs, fill the compiler's cache from many processes first; not under a tool that watches one process.
        nodes: Nodes of equal size that the ranks share; more than one makes a ring of two levels.
        nccl_max_ctas: Thread blocks that NCCL may use for a transfer, in place of the ring's default; 0 for the group's own
            communicator.
        virtual_size: Virtual ranks of the ring; results must then have the bits of the simulated ring of so many, and those of a KV
            cache the bits of one process. 0 for none.
    """

    full: bool = False
    impl: str = "auto"
    schedule: ScheduleName = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    simulate: int = 4
    only: str = ""
    json: Path | None = None
    seed: int = 0
    soak: int = 0
    delay: bool = False
    poison: bool = False
    fuzz: float | None = None
    fuzz_seed: int = 0
    ahead: bool = True
    nodes: int = 1
    nccl_max_ctas: int | None = None
    virtual_size: int = 0


@dataclass(frozen=True)
class Case:
    """One problem, to be solved in several layouts.

    Attributes:
        mask: Options of `ring_attention` that hide keys.
        documents: Boundaries of packed documents, which belong to the sharding.
        backward: What the backward moves: "keys", "queries", or "auto" for whichever is cheaper.
        latent: Of latent attention: columns of latents and of rotary keys, and the rank that expands them.
    """

    name: str
    dtype: str
    seq_len: int
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int = 64
    mask: dict[str, Any] = field(default_factory=dict)
    documents: tuple[int, ...] | None = None
    options: tuple[str, ...] = ()
    backward: str = "auto"
    latent: tuple[int, int, str] | None = None
    layouts: tuple[str, ...] = LAYOUTS

    @property
    def shape(self) -> str:
        """Text of the sizes."""
        dims = f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        return f"b{self.batch} n{self.seq_len} h{self.heads}/{self.kv_heads} d{dims}"


AnyCase = Case | InferenceCase


def masks(n: int) -> dict[str, dict[str, Any]]:
    """Every kind of mask, and some intersections, at length n."""
    cuts = tuple(sorted({0, n // 7, n // 3, n // 2, n - n // 9, n}))
    with_an_empty_one = (*cuts[:3], *cuts[2:])
    m, halves, part = ringattn.masks, (0, n // 3, n), n // 8
    pattern = [[(3 * x + 5 * y) % 7 < 3 for y in range(-(-n // 8))] for x in range(-(-n // 8))]
    unions = {
        "sinks and window": m.causal() & m.documents(halves) & (m.sinks(min(4, n)) | m.window(n // 6)),
        "global tokens": m.global_tokens(max(1, n // 9)) | m.window(n // 7, n // 7),
        "tree": m.tree([None, 0, 1, 1, 0], [n - 4 * part, part, part, part, part]) if part else m.causal(),
        "spans": m.causal() | m.spans([(n // 9, n // 4), (n // 2, n - n // 5)]),
        "blocks": m.blocks(pattern, 8),
        "blocks or window": (m.causal() & m.blocks(pattern, 8)) | m.window(n // 9, 2),
    }
    return {
        "full": {},
        "causal": {"causal": True},
        "causal window": {"causal": True, "window": (n // 5, 0)},
        "band": {"window": (n // 7, n // 9)},
        "look ahead": {"window": (0, None)},
        "documents": {"causal": True, "documents": with_an_empty_one},
        "documents, both ways": {"documents": cuts},
        "documents and window": {"causal": True, "window": (n // 6, 0), "documents": cuts},
        "prefix": {"causal": True, "prefix_len": n // 3},
        "chunks": {"causal": True, "chunk_len": n // 3 + 1},
        "lengths": {"causal": True, "lengths": ((0, n - n // 4), (n // 5, n))},
        "lengths and band": {"window": (n // 7, n // 9), "lengths": ((n // 6, n // 2), (0, n))},
        **{name: {"mask": mask} for name, mask in unions.items()},
    }


def masked(name: str, n: int, title: str | None = None, **sizes: Any) -> Case:
    """A case under one of `masks`."""
    mask = dict(masks(n)[name])
    if "lengths" in mask:
        sizes["batch"] = len(mask["lengths"])
    return Case(title or name, seq_len=n, documents=mask.pop("documents", None), mask=mask, **sizes)


def default_cases(world_size: int, device: str) -> Iterator[Case]:
    """Every layout x mask and layout x option once, each dtype, and the smallest lengths.

    On GPUs one head dim, and options one at a time: about ninety kernels, which compile within a minute on sixteen cores.
    """
    n, d, main = (301, 64, "bf16") if device == "cuda" else (37, 16, "fp32")
    case = functools.partial(masked, head_dim=d, v_head_dim=d)
    yield from (case(name, n, dtype=main) for name in masks(n))
    yield from (case("causal", n, option, dtype=main, kv_heads=4, options=(option,)) for option in OPTIONS)
    for moving in ("keys", "queries"):
        yield case("band", n, f"backward moves {moving}", dtype=main, backward=moving)
    for expand in ("reader", "owner"):
        # no kernel of its own: keys have the head dim of the others
        latent = d, d // 4, expand
        yield case("band", n, f"latents, {expand} expands", dtype=main, kv_heads=4, latent=latent)
    for dtype in DTYPES:
        if dtype != main and not (dtype == "fp64" and device == "cuda"):
            yield case("causal", n, dtype=dtype, layouts=("zigzag",))
    yield case("causal", 1, "one token", dtype=main)
    if world_size > 2:
        yield case("causal", world_size - 1, "fewer tokens than ranks", dtype=main)
    # long enough for "balanced" to give a rank more than one run
    yield case("documents", 256 * world_size + 1, "balanced", dtype=main, layouts=("balanced",))


def full_cases(world_size: int, device: str) -> Iterator[Case]:
    """Real sizes: all dtypes, both sides moving under every mask and option, head dims, head groups, odd lengths.

    On GPUs a kernel is compiled per dtype, head dim and set of options; so each option meets each layout at one dtype
    and head dim, all options together meet the other dtypes, and head dims meet one layout.
    """
    gpu = device == "cuda"
    n, n_odd, d, d_wide, main = (1021, 509, 64, 128, "bf16") if gpu else (131, 67, 16, 24, "fp32")
    dtypes = [name for name in DTYPES if not (gpu and name == "fp64")]
    case = functools.partial(masked, head_dim=d, v_head_dim=d)
    wide: dict[str, Any] = {"head_dim": d_wide, "v_head_dim": d_wide}
    yield from (case(name, n, dtype=main, heads=8, kv_heads=1, backward="keys") for name in masks(n))
    for name in masks(n):
        yield case(name, n, dtype=main, kv_heads=4, backward="queries", **(wide if gpu else {}))
    for dtype, name in itertools.product(dtypes, masks(n_odd)):
        if dtype != main:
            yield case(name, n_odd, dtype=dtype, layouts=("zigzag",) if gpu else LAYOUTS)
    yield from (case("causal", n_odd, option, dtype=main, kv_heads=4, options=(option,)) for option in OPTIONS)
    for option in (one for one in OPTIONS if one != "bias"):
        yield case("band", n_odd, f"{option}, queries move", dtype=main, options=(option,), backward="queries")
    for dtype in dtypes:
        yield case("documents and window", n_odd, "all options", dtype=dtype, options=OPTIONS[:-1])
    yield case("causal", n_odd, "all options", dtype=main, kv_heads=4, options=OPTIONS, **wide)
    for head_dim, v_head_dim in ((16, 16), (40, 40), (96, 96), (256, 256), (d, d_wide), (d_wide, d), (192, 128)):
        dims = {"head_dim": head_dim, "v_head_dim": v_head_dim}
        yield case("causal", n_odd, "head dim", dtype=main, layouts=("zigzag",), **dims)
    for dtype, expand in itertools.product(dtypes, ("reader", "owner")):
        dims = {"head_dim": 192, "v_head_dim": 128, "latent": (512, 64, expand)}
        yield case("causal", n_odd, f"latents, {expand} expands", dtype=dtype, kv_heads=4, layouts=("zigzag",), **dims)
    for heads, kv_heads, batch in ((1, 1, 3), (6, 2, 2), (8, 2, 1), (12, 1, 1)):
        yield case("causal", n_odd, "heads", dtype=main, heads=heads, kv_heads=kv_heads, batch=batch)
    for length in sorted({1, 2, world_size - 1, world_size + 1, 2 * world_size + 1, 128 * world_size} - {0}):
        yield case("causal", length, "length", dtype=main)
    for name in ("causal", "documents", "lengths"):
        yield case(name, 256 * world_size + 1, f"balanced, {name}", dtype=main, layouts=("balanced",))


def draw(case: Case, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Whole-sequence inputs and cotangents, the same on every rank, in the dtypes of a call."""
    generator = torch.Generator().manual_seed(seed)
    b, n, h, hk, dtype = case.batch, case.seq_len, case.heads, case.kv_heads, DTYPES[case.dtype]
    wide = accumulation_dtype(dtype)
    shapes = {
        "q": ((b, n, h, case.head_dim), dtype),
        "k": ((b, n, hk, case.head_dim), dtype),
        "v": ((b, n, hk, case.v_head_dim), dtype),
        "do": ((b, n, h, case.v_head_dim), dtype),
        "dlse": ((b, h, n), wide),
    }
    if case.latent is not None:
        r, dr, _ = case.latent
        del shapes["k"], shapes["v"]
        shapes |= {"latents": ((b, n, r), dtype), "rotary_keys": ((b, n, dr), dtype)}
        shapes |= {"k_up": ((hk, case.head_dim - dr, r), dtype), "v_up": ((hk, case.v_head_dim, r), dtype)}
    options = {"sinks": ((h,), wide), "alibi_slopes": ((h,), wide), "key_bias": ((b, n), wide)}
    options["bias"] = (b, h, n, n), dtype
    shapes |= {name: shape for name, shape in options.items() if name in case.options}
    drawn = {name: torch.randn(shape, generator=generator).to(device, to) for name, (shape, to) in shapes.items()}
    for name in {"k_up", "v_up"} & drawn.keys():
        drawn[name] = drawn[name] / drawn[name].shape[2] ** 0.5
    if "alibi_slopes" in drawn:
        drawn["alibi_slopes"] = drawn["alibi_slopes"].abs() / 8
    return drawn


def scalar_options(case: Case, seed: int) -> dict[str, Any]:
    """The options that are numbers, the same for the ring and for the reference."""
    options: dict[str, Any] = dict(case.mask)
    if "softmax_scale" in case.options:
        options["softmax_scale"] = 0.7 / case.head_dim**0.5
    if "softcap" in case.options:
        options["softcap"] = 1.5
    if "dropout" in case.options:
        options |= {"dropout_p": 0.3, "dropout_seed": 0x9876543210 + seed}
    return options


def ring_options(case: Case, args: CheckArgs) -> dict[str, Any]:
    """The options of a ring that are no tensors."""
    chosen: dict[str, Any] = {"impl": args.impl, "backward": case.backward}
    chosen |= {"deterministic": "deterministic" in case.options or args.virtual_size > 0}
    chosen |= {} if case.latent is None else {"expand": case.latent[2]}
    return scalar_options(case, args.seed) | chosen


def gradients(answer: Callable[..., tuple[Tensor, Tensor]], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """o, lse and the gradient of every input, for the cotangents among the inputs."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if name not in ("do", "dlse")}
    o, lse = answer(**leaves)
    found = torch.autograd.grad([o, lse], list(leaves.values()), [inputs["do"], inputs["dlse"]])
    named = {f"d{name}": gradient for name, gradient in zip(leaves, found, strict=True)}
    return {"o": o.detach(), "lse": lse.detach(), **named}


def define(case: Case, inputs: dict[str, Tensor], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The reference on the whole sequence, computed in `dtype`."""
    cast = {name: x.to(dtype) if torch.float64 in (dtype, x.dtype) else x for name, x in inputs.items()}
    options = scalar_options(case, seed) | {"documents": case.documents, "return_lse": True}
    reference: Any = functools.partial(ringattn.attention_reference, **options)

    def of_latents(latents: Tensor, rotary_keys: Tensor, k_up: Tensor, v_up: Tensor, **others: Tensor) -> Any:
        k = torch.einsum("btr,hdr->bthd", latents, k_up)
        k = torch.cat([k, rotary_keys[:, :, None].expand(*k.shape[:3], -1)], 3)
        return reference(k=k, v=torch.einsum("btr,hdr->bthd", latents, v_up), **others)

    return gradients(reference if case.latent is None else of_latents, cast)


def solve(
    case: Case, layout: str, ring: ringattn.Ring, inputs: dict[str, Tensor], args: CheckArgs, session: Session
) -> Answer:
    """The ring's answer, the rows of all ranks put together."""
    sharding = ring.sharding(case.seq_len, layout=layout, documents=case.documents)

    def local(x: Tensor, name: str) -> Tensor:
        dim = sequence_dim(name)
        return x if dim is None else sharding.shard(x, dim=dim)

    options = ring_options(case, args)
    call: Any = ringattn.ring_attention_with_lse if case.latent is None else ringattn.latent_attention_with_lse
    answer = functools.partial(call, sharding=sharding, **options)
    whole = {}
    for name, x in gradients(answer, {name: local(x, name) for name, x in inputs.items()}).items():
        dim = sequence_dim(name)
        whole[name] = session.sum(x) if dim is None else sharding.unshard(x, dim=dim)
    return whole, local


def solve_simulated(
    case: Case, layout: str, world_size: int, inputs: dict[str, Tensor], args: CheckArgs, budget: int = 0
) -> Answer:
    """The answer of a simulated ring, all ranks in this process; `budget`: bytes for gathered keys, as in `simulate_ring`."""
    if case.latent is not None:
        given = {name: x for name, x in inputs.items() if name not in LATENTS}
        inputs = {**given, "k": None, "v": None, "latents": tuple(inputs[name] for name in LATENTS)}  # pyright: ignore[reportAssignmentType]
    whole = ringattn.simulate_ring(
        **inputs,
        world_size=world_size,
        nodes=args.nodes,
        layout=layout,
        documents=case.documents,
        memory_budget=budget,
        **ring_options(case, args),
    )
    found = {f"d{name}": x for name, x in (whole.grads or {}).items()}
    return {"o": whole.o, "lse": whole.lse, **found}, lambda x, name: x  # noqa: ARG005


def sequence_dim(name: str) -> int | None:
    """The sharded dim of a tensor or of a gradient; None: it is whole on every rank."""
    return SEQUENCE_DIM.get(name, SEQUENCE_DIM.get(name.removeprefix("d")))


def examine(layout: str, solver: Callable[[], Answer], standard: Standard, *others: Callable[[], Answer]) -> Finding:
    """Compare the answer of a solver with the reference; the answers of other solvers must have the same bits."""
    finding = Finding(layout)
    found, rows_of = solver()
    for name, x in found.items():
        exact, budget = standard[name]
        finding.ratios[name] = budget.ratio(x, exact)
        finding.budgets[name] = budget.largest
        finding.errors[name] = error(rows_of(x, name), rows_of(exact, name))
    for other in others:
        again, _ = other()
        what = "same bits twice" if other is solver else "bits of the simulated ring"
        finding.errors[what] = max(error(again[name], x) for name, x in found.items())
        finding.budgets[what], finding.ratios[what] = 0.0, math.inf if finding.errors[what] else 0.0
    return finding


def finders(
    case: AnyCase, rings: Rings, args: CheckArgs, session: Session
) -> Iterator[tuple[str, Callable[[], Finding]]]:
    """The layouts of a case on each ring, with the function that examines it."""
    if isinstance(case, InferenceCase):
        for ring, *alone in rings:
            # on one rank nothing moves, but there are two ways to read
            shown = {one: one for one in case.moves} if ring.virtual_size > 1 else {"keys": ALONE, "pages": "pages"}
            for moves, layout in shown.items():
                yield layout, functools.partial(examine_history, case, moves, ring, session, layout, *alone)
        return
    inputs = draw(case, args.seed, session.device)
    standard = make_standard(case, inputs, args.seed)
    for ring, *_ in rings:
        for layout, solver, *others in solvers_of(case, ring, inputs, args, session):
            yield layout, functools.partial(examine, layout, solver, standard, *others)


def solvers_of(
    case: Case, ring: ringattn.Ring, inputs: dict[str, Tensor], args: CheckArgs, session: Session
) -> Iterator[tuple[Any, ...]]:
    """The layouts of a case, each with its solver and those whose answers must have the same bits."""
    solvers: dict[str, Callable[[], Answer]] = {}
    if ring.world_size > 1 or ring.is_virtual:
        for layout in case.layouts:
            solvers[layout] = functools.partial(solve, case, layout, ring, inputs, args, session)
    else:
        # all layouts are the same on one rank: they run on the simulated ring, with the same plans, loops and kernels
        solvers[ALONE] = functools.partial(solve, case, "contiguous", ring, inputs, args, session)
        budget = LARGE_BUDGET if args.schedule == "fused" else 0
        for layout in case.layouts if args.simulate else ():
            solvers[layout] = functools.partial(solve_simulated, case, layout, args.simulate, inputs, args, budget)
    for layout, solver in solvers.items():
        others = [solver] if "deterministic" in case.options else []
        if ring.is_virtual and session.first:  # every rank has the rows of all
            budget = ring.contexts(session.device)[0].budget
            others.append(functools.partial(solve_simulated, case, layout, ring.virtual_size, inputs, args, budget))
        yield layout, solver, *others


def compile_ahead(cases: Sequence[AnyCase], args: CheckArgs, ranks: int, session: Session) -> None:
    """Fill the compiler's cache from many processes, because one process compiles one kernel at a time.

    They run the cases that differ in their kernels on a simulated ring of `ranks`, and drop the answers. A case that fails
    there fails again in the check, which reports it. All ranks wait for local rank 0.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        distinct = distinct_kernels(cases, args, session)
        jobs = max(1, min(os.cpu_count() or 2, 24, len(distinct)))
        session.say(f"compiling in {jobs} processes first (--no-ahead: as kernels are met)")
        several = session.world_size > 1 and not args.virtual_size
        fused = args.schedule == "fused" or (args.schedule == "auto" and several)
        alone = dataclasses.replace(args, simulate=ranks, schedule="fused" if fused else "auto")
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _init_compiling)
        began, seconds = time.monotonic(), 0.0
        try:
            rest = {pool.submit(compile_case, case, alone, session.device) for case in distinct}
            while rest and seconds < COMPILE_SECONDS:
                _, rest = wait(rest, PROGRESS_SECONDS)
                seconds = time.monotonic() - began
                session.say(f"  {len(distinct) - len(rest)} of {len(distinct)} cases are compiled, {seconds:.0f} s")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()
    session.barrier()


def _init_compiling() -> None:
    """Silence a process of `compile_ahead`, and let it end with its parent."""
    os.environ.pop("WORLD_SIZE", None)  # its rings are of one rank
    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    parent = multiprocessing.parent_process()
    assert parent is not None, "a process of a pool"
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def compile_case(case: AnyCase, args: CheckArgs, device: torch.device) -> None:
    """Run a case in one layout, or a history in all its ways, for the kernels that it compiles."""
    first, session = None if isinstance(case, InferenceCase) else (ALONE, case.layouts[0]), Session(0, 1, device, None)
    for layout, finder in finders(case, open_rings(session, args), args, session):
        if first is None or layout in first:
            finder()


def distinct_kernels(cases: Sequence[AnyCase], args: CheckArgs, session: Session) -> list[AnyCase]:
    """One of the cases for each combination of kernels; those with many options first."""
    found: dict[Hashable, AnyCase] = {}
    for case in cases:
        if unserved(case, args, session.device) is None:
            terms = isinstance(case, Case) and "mask" in case.mask and ("terms", "blocks" in case.name)
            what = case.name if isinstance(case, InferenceCase) else (case.backward, case.batch > 1, terms)
            found[case.dtype, case.head_dim, case.v_head_dim, case.options, what] = case
    return sorted(found.values(), key=lambda case: (-len(case.options), case.name))


def unserved(case: AnyCase, args: CheckArgs, device: torch.device) -> str | None:
    """The reason why no kernel set serves the dtype, head dims and options of a case here; None if one does."""
    features = {"alibi" if option == "alibi_slopes" else option for option in case.options} & FEATURES
    if isinstance(case, Case) and "mask" in case.mask:
        features |= {"terms"} | ({"block_pattern"} if "blocks" in case.name else set())
    if isinstance(case, InferenceCase):
        features |= {"prefill"}
    try:
        select_kernels(device, DTYPES[case.dtype], case.head_dim, case.v_head_dim, impl=args.impl, features=features)
    except (NotImplementedError, ValueError) as refusal:
        return str(refusal)
    return None


def open_rings(session: Session, args: CheckArgs) -> Rings:
    """The rings of all ranks, with the kernels, nodes and link speed of the flags: one, or of virtual ranks one per schedule."""
    common: dict[str, Any] = {"impl": args.impl}
    if args.nccl_max_ctas is not None:
        common["nccl_max_ctas"] = args.nccl_max_ctas or None
    if args.virtual_size:
        budgets = [LARGE_BUDGET] * (args.schedule not in STEPWISE) + [0] * (args.schedule in ("auto", *STEPWISE))
        common |= {"transport": "process_group" if args.schedule == "process_group" else "auto", "nodes": args.nodes}
        groups = [None] if session.world_size == 1 else [None, dist.new_subgroups(group_size=1)[0]]
        common["virtual_size"] = args.virtual_size
        return [[ringattn.Ring(group, memory_budget=budget, **common) for group in groups] for budget in budgets]
    if session.world_size == 1:
        return [[ringattn.Ring(**common)]]
    return [[make_ring(args.schedule, nodes=args.nodes, **common)]]


def run_case(case: AnyCase, rings: Rings, args: CheckArgs, session: Session) -> list[Finding]:
    """Examine a case in each of its layouts on this rank.

    A ValueError or NotImplementedError becomes a finding: every rank raises it before it sends. After another exception
    the ranks may be out of step, so it ends the check.
    """
    findings: list[Finding] = []
    for layout, finder in finders(case, rings, args, session):
        try:
            findings.append(finder())
        except (ValueError, NotImplementedError) as refusal:
            findings.append(Finding(layout, broken=f"{type(refusal).__name__}: {refusal}"))
        except Exception:
            where = f"{case.name!r} ({case.dtype} {case.shape}), {layout}"
            print(f"rank {session.rank}: check failed in {where}", file=sys.stderr)
            raise
    return findings


def make_standard(case: Case, inputs: dict[str, Tensor], seed: int) -> Standard:
    """The fp64 reference of every tensor of a case, and its error budget."""
    low, scaled = budget_dtypes(case.dtype)
    exact, rounded = define(case, inputs, seed, torch.float64), define(case, inputs, seed, low)
    standard = {name: (x, Budget.of(x, rounded[name], scaled)) for name, x in exact.items()}
    if few := [name for name in PER_HEAD if name in exact]:
        # the error of four numbers is luck: one draw may be ten times better than the next. So the budget is the
        # largest error in nine draws of the same problem, under the rule for single elements, without the mean
        draws = [(exact, rounded)]
        for other in range(seed + 1, seed + 9):
            drawn = draw(case, other, inputs["q"].device)
            draws.append((define(case, drawn, other, torch.float64), define(case, drawn, other, low)))
        for name in few:
            pooled = Budget.of(torch.cat([x[name] for x, _ in draws]), torch.cat([x[name] for _, x in draws]), scaled)
            standard[name] = exact[name], Budget(rms=pooled.largest, largest=pooled.largest)
    return standard


@dataclass(frozen=True)
class Verdict:
    """Results of all ranks: a row per case and layout, ready for JSON, and cases that no kernel set serves, with the reason."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)

    @property
    def red(self) -> list[dict[str, Any]]:
        """The rows that are wrong."""
        return [row for row in self.rows if not row["ratio"] <= 1]

    @property
    def summary(self) -> str:
        """Text of how many rows are right."""
        return f"{len(self.rows) - len(self.red)} of {len(self.rows)} runs"


def merge_findings(session: Session, case: AnyCase, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """One row per finding from those of all ranks: the worst tensor, and the rank that holds it."""
    by_rank = session.gather(findings)
    rows = []
    for here, *others in zip(findings, *by_rank, strict=True):
        found = [(one.ratios if one.broken is None else {"answer": math.inf}, one.errors) for one in others]
        ratios: dict[str, float] = {}
        worst = (-1.0, 0.0, "", 0)
        for rank, (used, errors) in enumerate(found):
            for tensor, ratio in used.items():
                ratio = math.inf if math.isnan(ratio) else ratio
                ratios[tensor] = max(ratios.get(tensor, 0.0), ratio)
                worst = max(worst, (ratio, errors.get(tensor, 0.0), tensor, rank))
        ratio, _, tensor, rank = worst
        row = {"case": case.name, "dtype": case.dtype, "shape": case.shape, "options": list(case.options)}
        row |= {"layout": here.layout, "ratio": ratio, "tensor": tensor, "rank": rank}
        row |= {"error": found[rank][1].get(tensor), "budget": here.budgets.get(tensor)}
        rows.append(row | {"ratios": ratios, "broken": others[rank].broken})
    return rows


def check(session: Session, cases: Sequence[AnyCase], args: CheckArgs, *, progress: bool = False) -> Verdict:
    """Run the cases and return the results of all ranks, the same on every rank.

    With `progress` rank 0 prints a line per case when it is done, and red rows at once.
    """
    rings, verdict = open_rings(session, args), Verdict()
    for number, case in enumerate(cases, start=1):
        began = time.perf_counter()
        if (reason := unserved(case, args, session.device)) is not None:
            verdict.skipped.append({"case": case.name, "dtype": case.dtype, "why": reason})
            continue
        rows = merge_findings(session, case, run_case(case, rings, args, session))
        verdict.rows.extend(rows)
        if progress and rows:
            worst = max(rows, key=lambda row: row["ratio"])
            session.say(
                f"[{number}/{len(cases)}] {case.name} ({case.dtype} {case.shape}): {len(rows)} runs, "
                f"worst ratio {worst['ratio']:.2f}, {_name_worst(worst)}, {time.perf_counter() - began:.1f} s"
            )
            for line in describe_red(Verdict(rows)):
                session.say(line)
    return verdict


def show(verdict: Verdict) -> None:
    """Print one line per case, a column per layout, and every red row in full."""
    columns = [one for one in (ALONE, *LAYOUTS, *MOVES) if any(row["layout"] == one for row in verdict.rows)]
    lines: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in verdict.rows:
        line = lines.setdefault((row["case"], row["dtype"], row["shape"]), {"worst": row})
        line[row["layout"]] = max(line.get(row["layout"], row), row, key=lambda one: one["ratio"])
        line["worst"] = max(line["worst"], row, key=lambda one: one["ratio"])
    cells = [
        [*key, *(f"{line[one]['ratio']:.2f}" if one in line else None for one in columns), _name_worst(line["worst"])]
        for key, line in lines.items()
    ]
    title = "part of the error budget that is used up (largest tensor)"
    table(title, ["case", "dtype", "shape", *columns, "worst"], cells)
    for one in verdict.skipped:
        print(f"not served: {one['case']} in {one['dtype']}: {one['why']}")
    for text in describe_red(verdict):
        print(text)


def describe_red(verdict: Verdict) -> Iterator[str]:
    """Every red row in full."""
    for row in verdict.red:
        what = row["broken"] or f"error {row['error']} where {row['budget']} is allowed"
        others = ", ".join(f"{tensor} {ratio:.3g} x" for tensor, ratio in row["ratios"].items() if not ratio <= 1)
        where = f"{row['case']} ({row['dtype']} {row['shape']}), {row['layout']}, {row['tensor']} on rank {row['rank']}"
        yield f"RED: {where}: {what}; over budget: {others}"


def _name_worst(row: dict[str, Any]) -> str:
    return f"{row['tensor']} on rank {row['rank']}, {row['layout']}"
