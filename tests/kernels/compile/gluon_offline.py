"""Compiles for compute capability 9.0, without a GPU, what a call of the Hopper kernels would launch.

Owns a driver that knows a target and no device, through which Triton binds the arguments of a launch exactly as on the
machine, compiles, and stops. Refuses to know any kernel: the launch code says which kernels with which arguments.

    python -m tests.kernels.compile.gluon_offline forward --head-dim 128 --causal
    python -m tests.kernels.compile.gluon_offline forward --head-dim 64 128 --gathered --causal
    python -m tests.kernels.compile.gluon_offline backward --head-dim 64 --features alibi softcap --events
    python -m tests.kernels.compile.gluon_offline backward --deterministic --dump /tmp/kernels
    python -m tests.kernels.compile.gluon_offline backward --gathered --terms
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import jit
from triton.runtime.driver import driver

from ringattn.kernels.interface import (
    PAD_ROWS,
    Arrivals,
    BackwardStep,
    CallShape,
    GatheredKeys,
    Grads,
    KernelSet,
    ReadyFlags,
    RowMetadata,
    Score,
    SoftmaxState,
    Step,
)
from ringattn.numerics.reference import visible_pairs
from tests.kernels.compile import sass, ttgir
from tests.support.fused_cases import Scene, make_visit, make_whole
from tests.support.kernel_conformance import make_side
from tests.support.term_masks import TermMask, sinks_and_window

HOPPER = GPUTarget("cuda", 90, 32)
FEATURES = ("softcap", "sinks", "alibi", "key_bias")


@dataclass(frozen=True)
class Report:
    """What the compiler made of one launch.

    Attributes:
        name: Of the kernel.
        constants: Its compile-time arguments.
        shared: Bytes of shared memory.
        registers: Per thread, at entry.
        spills: Bytes of spill stores and loads, anywhere.
        loops: (warpgroup products, accesses to local memory) of each innermost loop with products, in code order.
        products: Warpgroup products in the whole kernel.
        warnings: Notes of the assembler: warnings, serialised wgmma.
        injected: Notes of the assembler on waits that it put in before products are used.
        schedule: Those loops as lists of events.
        unfenced: Addresses of bulk stores that a fence of every thread and a barrier do not precede.
        stale: Loops whose bounds the compiler took out of the loop around them; Note [Stale bounds] in ttgir.py.
        seconds: Of compilation.
    """

    name: str
    constants: tuple[tuple[str, Any], ...]
    shared: int
    registers: int
    spills: int
    loops: tuple[tuple[int, int], ...]
    products: int
    warnings: tuple[str, ...]
    injected: tuple[str, ...]
    schedule: tuple[tuple[str, ...], ...]
    unfenced: tuple[int, ...]
    stale: tuple[str, ...]
    seconds: float

    @property
    def loop_spills(self) -> int:
        """Accesses to local memory inside loops with products."""
        return sum(spills for _, spills in self.loops)

    def __str__(self) -> str:
        loops = " ".join(f"{products}" + f"!{spills}" * (spills > 0) for products, spills in self.loops)
        return (
            f"{self.name:22} {self.registers:4} registers {self.spills:5} bytes spilled, {self.loop_spills:3} in loops, "
            f"{self.shared:6} bytes shared, {self.products:4} HGMMA, loops [{loops}], {len(self.warnings)} warnings, "
            f"{len(self.injected)} waits injected, {len(self.stale)} stale bounds, {self.seconds:.1f} s"
        )


class _Driver:
    """Knows a target and no device."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        del device
        return 0


class _Launched:
    """What a launch hands back: a kernel that can be launched again, without effect."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: None


@contextlib.contextmanager
def captured() -> Iterator[list[tuple[Any, Any, float]]]:
    """Compiles instead of launching; gives the list of (function, compiled kernel, seconds), one per launch."""
    launches: list[tuple[Any, Any, float]] = []
    run = jit.JITFunction.run
    before = driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del grid, warmup
        began = time.perf_counter()
        kernel = run(self, *args, grid=None, warmup=True, **kwargs)
        launches.append((self, kernel, time.perf_counter() - began))
        return _Launched()

    launches_of = importlib.import_module("ringattn.kernels.runtime.bound_launch")
    launches_of._kernels.clear()
    driver.set_active(_Driver())  # type: ignore[arg-type]
    jit.JITFunction.run = compile_only
    try:
        yield launches
    finally:
        jit.JITFunction.run = run
        driver._active = before
        launches_of._kernels.clear()


def report(function: Any, kernel: Any, seconds: float, dump: str | None = None) -> Report:
    """Reads a compiled kernel; `dump`: a folder for its ttgir, ptx and cubin."""
    if dump is not None:
        Path(dump).mkdir(parents=True, exist_ok=True)
        for kind in ("ttgir", "ptx", "cubin"):
            content = kernel.asm[kind]
            path = Path(dump, f"{kernel.metadata.name}.{kind}")
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    notes = sass.assemble(kernel.asm["ptx"])
    code = sass.disassemble(kernel.asm["cubin"])
    loops = sass.loops_with_products(code)
    names = function.arg_names
    constants = {names[path[0]]: value for path, value in kernel.src.constants.items() if len(path) == 1}
    return Report(
        name=kernel.metadata.name,
        constants=tuple((name, str(value)) for name, value in constants.items()),
        shared=kernel.metadata.shared,
        registers=notes.registers,
        spills=notes.spills,
        loops=tuple((loop.products, loop.spills) for loop in loops),
        products=sum("HGMMA" in line for _, line in code),
        warnings=notes.warnings,
        injected=notes.injected,
        schedule=tuple(tuple(sass.events(loop)) for loop in loops),
        unfenced=sass.unfenced_stores(code),
        stale=ttgir.stale_bounds(kernel.asm["ttgir"]),
        seconds=seconds,
    )


@dataclass(frozen=True)
class Call:
    """A call of the kernel set, on CPU tensors that nobody reads.

    Attributes:
        kernel: "forward" or "backward".
        head_dim: Of q and k.
        v_head_dim: Of v; None: head_dim.
        dtype: "bfloat16" or "float16".
        causal: Else full.
        group: Query heads per key head.
        features: Of FEATURES.
        first: Forward: nothing is carried in.
        last: Forward: nothing is carried out.
        accumulate: Backward: adds to what is there.
        deterministic: Backward: in a fixed order.
        rounded: Backward: gradients have the dtype of q, as in a ring of one rank; else they are fp32.
        seq_len: Rows and keys.
        through: "module:class" to call in place of the Hopper kernel set.
        gathered: All visits of a rank in one launch, half of the keys being those of another rank.
        wide: Gathered forward: o in fp32.
        terms: Under a mask of several terms in place of full and causal ones.
    """

    kernel: str
    head_dim: int = 128
    v_head_dim: int | None = None
    dtype: str = "bfloat16"
    causal: bool = False
    group: int = 1
    features: tuple[str, ...] = ()
    first: bool = True
    last: bool = True
    accumulate: bool = False
    deterministic: bool = False
    rounded: bool = False
    seq_len: int = 512
    gathered: bool = False
    wide: bool = False
    terms: bool = False
    through: str | None = None


def bind(call: Call, shape: CallShape) -> KernelSet:
    """Bind the kernel set of a call."""
    module, _, name = (call.through or "ringattn.kernels.attention.hopper.api:HopperKernels").partition(":")
    return getattr(importlib.import_module(module), name)(shape)


def _backward_gathered(call: Call) -> None:
    """Calls the gathered backward of the first of two ranks."""
    kv_heads, half = 2, call.seq_len // 2
    heads = kv_heads * call.group
    scene = Scene(
        "offline",
        (((0, 1, half),), ((half, 1, half),)),
        {} if call.terms else {"causal": call.causal},
        terms=sinks_and_window if call.terms else None,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=call.head_dim,
        v_head_dim=call.v_head_dim,
        softcap=20.0 if "softcap" in call.features else 0.0,
        alibi="alibi" in call.features,
        sinks="sinks" in call.features,
        key_bias="key_bias" in call.features,
        dtype=getattr(torch, call.dtype),
    )
    ring_step = make_visit(make_whole(scene), 0, everything=True)
    step, arrivals = ring_step.step(makes_delta=True), ring_step.arrivals
    bind(call, ring_step.call(deterministic=call.deterministic)).backward_fused(
        step, arrivals, ring_step.returns, ring_step.grads()
    )


def compile_call(call: Call, dump: str | None = None) -> list[Report]:
    """What the kernels of one call become, in order of launch."""
    if call.gathered and call.kernel == "backward":
        with captured() as launches:
            _backward_gathered(call)
        return [report(*launch, dump=dump) for launch in launches]
    n, kv_heads = call.seq_len, 2
    heads, d, dv = kv_heads * call.group, call.head_dim, call.v_head_dim or call.head_dim
    dtype = getattr(torch, call.dtype)
    runs = ((0, 1, n),)
    mask = sinks_and_window(n) if call.terms else TermMask(visible_pairs(n, n, causal=call.causal)[None])
    rows, keys = make_side(runs, mask, "cpu"), make_side(runs, mask.transpose(), "cpu")
    q, k = torch.zeros(1, n, heads, d, dtype=dtype), torch.zeros(1, n, kv_heads, d, dtype=dtype)
    v, o = torch.zeros(1, n, kv_heads, dv, dtype=dtype), torch.zeros(1, n, heads, dv, dtype=dtype)
    lse = torch.zeros(1, heads, n)
    unknown = set(call.features) - set(FEATURES)
    assert not unknown, f"features are {FEATURES}, not {unknown}"
    score = Score(
        d**-0.5,
        softcap=20.0 if "softcap" in call.features else 0.0,
        sinks=torch.zeros(heads) if "sinks" in call.features else None,
        alibi_slopes=torch.zeros(heads) if "alibi" in call.features else None,
        key_bias=torch.zeros(1, n) if "key_bias" in call.features else None,
    )
    kernels = bind(call, CallShape.of(q, k, v, score, deterministic=call.deterministic))
    with captured() as launches:
        if call.gathered:
            far = torch.zeros(1, n + PAD_ROWS, kv_heads, d + dv, dtype=dtype)
            if score.key_bias is not None:
                score = dataclasses.replace(score, key_bias=torch.zeros(1, 2 * n + PAD_ROWS))
            ready_flags = ReadyFlags(torch.zeros(2, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 10**10)
            # two ranks hold the same positions: what is compiled does not depend on who sees whom
            sides = _gathered((keys, keys))
            o = o.float() if call.wide else o
            arrivals = Arrivals(far[..., :d], far[..., d:], ready_flags)
            kernels.forward_fused(Step(q, k, v, rows, sides, score, o, lse), arrivals)
        elif call.kernel == "forward":
            carry = (
                None
                if call.first and call.last
                else SoftmaxState(lse.clone(), lse.clone(), torch.zeros(1, n, heads, dv))
            )
            kernels.forward(Step(q, k, v, rows, keys, score, o, lse, carry, call.first, call.last))
        else:
            of_grads = dtype if call.rounded else torch.float32
            grads = Grads(
                dq=torch.zeros(1, n, heads, d, dtype=of_grads),
                dk=torch.zeros(1, n, kv_heads, d, dtype=of_grads),
                dv=torch.zeros(1, n, kv_heads, dv, dtype=of_grads),
                dkey_bias=torch.zeros(1, n) if "key_bias" in call.features else None,
                dalibi=torch.zeros(1, heads, n) if "alibi" in call.features else None,
                accumulate_rows=call.accumulate,
                accumulate_keys=call.accumulate,
            )
            # the visit of a ring of one makes delta
            made_of = None if call.accumulate else o
            step = BackwardStep(o.clone(), q, k, v, lse, lse.clone(), rows, keys, score, made_of)
            kernels.backward(step, grads)
    return [report(*launch, dump=dump) for launch in launches]


def _gathered(sides: tuple[RowMetadata, ...]) -> GatheredKeys:
    """Sides of equal length as the sources of a gathered visit; near first."""
    local_rows, each = sides[0].positions.shape[0], sides[0].positions.shape[0] + PAD_ROWS
    placed = [sides[0]]
    for number, side in enumerate(sides[1:]):
        at = -(-each // PAD_ROWS) * PAD_ROWS * number
        runs = tuple((offset + at, *run) for offset, *run in side.run_list)
        placed.append(dataclasses.replace(side, run_list=runs, runs=torch.tensor(runs, dtype=torch.int32)))
    remote_rows = -(-each // PAD_ROWS) * PAD_ROWS * (len(sides) - 1)
    table = torch.zeros(sides[0].terms, local_rows + remote_rows, dtype=torch.int32)
    return GatheredKeys(tuple(placed), tuple(range(len(sides))), local_rows, remote_rows, table[0], table, table)


def reason_of(error: BaseException) -> str:
    """What the compiler says first: the innermost of the errors that it wraps into one another."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def compile_or_say(call: Call) -> list[Report] | str:
    """The reports of a call, or why it does not compile."""
    try:
        return compile_call(call)
    except Exception as error:
        return reason_of(error)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.compile.gluon_offline", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("kernel", choices=("forward", "backward"))
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128])
    parser.add_argument("--v-head-dim", type=int)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--group", type=int, default=1, help="query heads per key head")
    parser.add_argument("--features", nargs="*", default=[], choices=FEATURES)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--carry-in", action="store_true")
    parser.add_argument("--carry-out", action="store_true")
    parser.add_argument("--accumulate", action="store_true")
    parser.add_argument("--gathered", action="store_true", help="all visits of a rank in one launch")
    parser.add_argument("--terms", action="store_true", help="a mask of several terms")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--rounded", action="store_true", help="gradients in the dtype of q")
    parser.add_argument("--through", help='"module:class" to call in place of the Hopper kernel set')
    parser.add_argument("--events", action="store_true", help="the loops as schedules")
    parser.add_argument("--constants", action="store_true")
    parser.add_argument("--dump", help="a folder for ttgir, ptx and cubin")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Prints a line per launch; see the module."""
    options = _parse(arguments)
    say = sys.stdout.write
    say(f"triton {triton.__version__}\n")
    for head_dim in options.head_dim:
        call = Call(
            options.kernel,
            head_dim,
            options.v_head_dim,
            options.dtype,
            options.causal,
            options.group,
            tuple(options.features),
            not options.carry_in,
            not options.carry_out,
            options.accumulate,
            options.deterministic,
            options.rounded,
            options.seq_len,
            options.gathered,
            terms=options.terms,
            through=options.through,
        )
        dump = None if options.dump is None else os.path.join(options.dump, f"{options.kernel}_{head_dim}")
        try:
            reports = compile_call(call, dump)
        except triton.CompilationError as error:
            say(f"hd {head_dim:3} does not compile: {reason_of(error)}\n")
            continue
        for found in reports:
            say(f"hd {head_dim:3} {found}\n")
            for warning in (*found.warnings, *found.injected, *found.stale):
                say(f"    {warning}\n")
            if options.constants:
                say(f"    {dict(found.constants)}\n")
            if options.events:
                for i, schedule in enumerate(found.schedule):
                    say(f"    loop {i}\n" + "".join(f"        {event}\n" for event in schedule))


if __name__ == "__main__":
    main(sys.argv[1:])
