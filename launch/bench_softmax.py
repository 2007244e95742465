"""Bytes per second of `online_softmax`, beside a device copy and torch.softmax.

Owns the measurement only: `python -m ringattn.launch.bench_softmax --json PATH`. Correctness comes first: every timed
shape is compared with fp64, and with a red check no speed is printed and the exit code is 1.

The formula is 2MN reads + MN writes forward and 4MN reads + MN writes backward, for every implementation: what a kernel
with O(block) state moves. A kernel that keeps a row on chip moves less, so short rows can show more than the copy.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringattn.launch.session import check_output, write_json
from ringattn.numerics.softmax import online_logsumexp, online_softmax

LENGTHS = (1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 15, 1 << 17, 1 << 18, 1 << 20)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GOAL = 0.85  # of a device copy, for rows of 32K and more


def make_case(elements: int, n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random logits `m n` with about `elements` elements, and one row that is -inf throughout."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(max(elements // n, 2), n, device="cuda", dtype=dtype, generator=generator) * 4
    x[1] = float("-inf")
    return x


def check_case(x: Tensor) -> list[str]:
    """What is wrong with the three kernels at exactly this shape, in words; empty if nothing is.

    Sampled rows are held to 2 x the error of torch in x's dtype (fp32 for lse) against fp64, and two fp32 roundings of
    the largest term; the whole output is compared with torch.
    """
    eps = torch.finfo(torch.float32).eps
    m = x.shape[0]
    rows = sorted({0, 2 % m, m // 3, m // 2, m - 1} - {1})
    generator = torch.Generator("cuda").manual_seed(1)
    dy = torch.randn(x.shape, device="cuda", dtype=x.dtype, generator=generator)
    leaf = x.detach().requires_grad_()
    y, lse = online_softmax(leaf, impl="portable"), online_logsumexp(leaf, impl="portable")
    got = {
        "softmax": y.detach()[rows],
        "logsumexp": lse.detach()[rows],
        "softmax backward": torch.autograd.grad(y, leaf, dy)[0][rows],
        "logsumexp backward": torch.autograd.grad(lse, leaf, torch.ones_like(lse))[0][rows],
    }

    def reference(dtype: torch.dtype) -> tuple[Tensor, ...]:
        part = x.detach()[rows].to(dtype).requires_grad_()
        p, total = torch.softmax(part, -1), torch.logsumexp(part.to(torch.promote_types(dtype, lse.dtype)), -1)
        grads = torch.autograd.grad(p, part, dy[rows].to(dtype)) + torch.autograd.grad(total.sum(), part)
        return (p.detach(), total.detach(), *grads)

    wrong = []
    exact, low = reference(torch.float64), reference(x.dtype)
    largest = (1.0, exact[1].abs().max().item(), dy[rows].abs().max().item(), 1.0)
    for (name, value), a, b, term in zip(got.items(), exact, low, largest, strict=True):
        budget = 2 * (b.double() - a).abs().max().item() + 2 * eps * term
        error = (value.double() - a).abs().max().item()
        if not error <= budget:
            wrong.append(f"{name}: error {error:.2e}, budget {budget:.2e}")
    whole = torch.softmax(x, -1)
    whole[1] = 0
    gap = (y.detach() - whole).abs().max().item()
    # two sums of a million terms in different orders; what this finds is an element that was not written
    if not gap <= max(64 * eps, torch.finfo(x.dtype).eps):
        wrong.append(f"softmax: {gap:.2e} from torch.softmax somewhere")
    if lse.detach()[1].item() != float("-inf"):
        wrong.append("logsumexp: a row of -inf must give -inf")
    return wrong


def take_turns(candidates: dict[str, Callable[[], Any]], rounds: int = 7, calls: int = 4) -> dict[str, float]:
    """Median ms of each candidate; they take turns, so that clocks and heat are the same for all."""
    for run in candidates.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            run()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(calls):
                run()
            stop.record()
            stop.synchronize()
            samples[name].append(start.elapsed_time(stop) / calls)
    return {name: statistics.median(times) for name, times in samples.items()}


def measure(x: Tensor) -> dict[str, float]:
    """GB/s by the formula, and shares of a copy of x in the same turns."""
    y = online_softmax(x, impl="portable")
    dy = torch.randn_like(x)
    target = torch.empty_like(x)
    how = (1, None, "portable")
    ms = take_turns(
        {
            "copy": lambda: target.copy_(x),
            "ours": lambda: online_softmax(x, impl="portable"),
            "torch": lambda: torch.softmax(x, -1),
            "lse": lambda: online_logsumexp(x, impl="portable"),
            "ours backward": lambda: torch.ops.ringattn.online_softmax_backward(dy, y, *how),
            "torch backward": lambda: torch.ops.aten._softmax_backward_data(dy, y, -1, x.dtype),
        }
    )
    size = x.numel() * x.element_size() / 1e6
    traffic = {"copy": 2, "ours": 3, "torch": 3, "lse": 1, "ours backward": 5, "torch backward": 5}
    rates = {name: traffic[name] * size / ms[name] for name in traffic}
    return {
        **{f"{name.replace(' ', '_')}_ms": value for name, value in ms.items()},
        **{f"{name.replace(' ', '_')}_gbps": value for name, value in rates.items()},
        "share_of_copy": rates["ours"] / rates["copy"],
        "torch_share_of_copy": rates["torch"] / rates["copy"],
        "backward_share_of_copy": rates["ours backward"] / rates["copy"],
        "torch_backward_share_of_copy": rates["torch backward"] / rates["copy"],
    }


def launches(n: int, itemsize: int) -> list[Any]:
    """Other ways to give long rows to programs: larger tiles, more warps, other shares, and a program for each row."""
    from ringattn.kernels import softmax_triton

    shapes = [(8, 16, 1 << 16), (8, 32, 1 << 16), (16, 16, 1 << 16), (8, 16, 1 << 15), (8, 16, 1 << 17), (16, 16, n)]
    vec = 16 // itemsize
    return [
        softmax_triton.Launch(rows=1, lanes=32 * warps * per_thread // vec, vec=vec, splits=n // share, warps=warps)
        for warps, per_thread, share in shapes
    ]


def sweep(elements: int) -> None:
    """Prints GB/s by the formula of each of `launches`, fastest first, for rows of 256K and 1M."""
    from ringattn.kernels import softmax_triton

    for name, n in [(name, n) for name in DTYPES for n in LENGTHS[-2:]]:
        x = make_case(elements, n, DTYPES[name])
        want, target = online_softmax(x, impl="portable"), torch.empty_like(x)
        runs: dict[str, Callable[[], Any]] = {"copy": lambda x=x, target=target: target.copy_(x)}
        runs["the present choice"] = lambda x=x: online_softmax(x, impl="portable")
        for how in launches(n, x.element_size()):
            runs[str(how)] = lambda x=x, how=how: softmax_triton.softmax(x, -1, how=how)
            # sums in another order; an element that was not written is found by this
            if (
                not (runs[str(how)]() - want).abs().max()
                <= 64 * torch.finfo(torch.float32).eps + torch.finfo(x.dtype).eps
            ):
                raise RuntimeError(f"{how} must give the softmax of the present choice; its kernel is wrong")
        del want
        ms = take_turns(runs, rounds=5)
        copy = ms.pop("copy")
        print(f"{name} rows of {n}: copy {2 * x.numel() * x.element_size() / 1e6 / copy:.0f} GB/s")
        for variant, time in sorted(ms.items(), key=lambda item: item[1]):
            rate = 3 * x.numel() * x.element_size() / 1e6 / time
            print(f"  {rate:6.0f} {1.5 * copy / time:4.0%}  {variant}", flush=True)


def provenance(argv: list[str]) -> dict[str, str]:
    """Machine, versions, commit and command."""
    import triton

    where = Path(__file__).resolve().parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, check=False)
    return {
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit.stdout.strip() or "not a checkout",
        "command": shlex.join(["python", "-m", "ringattn.launch.bench_softmax", *argv]),
    }


def main(argv: list[str] | None = None) -> int:
    """Checks every shape, then times it; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m ringattn.launch.bench_softmax", description=__doc__)
    parser.add_argument("--json", type=Path, help="write one row per case to this file")
    parser.add_argument("--elements", type=int, default=1 << 28, help="elements of a case (default 2^28)")
    parser.add_argument("--sweep", action="store_true", help="only time other launches, for rows of 256K and 1M")
    args = parser.parse_args(argv)
    try:
        check_output(args)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if not torch.cuda.is_available():
        print(
            "bench_softmax needs a GPU, and torch found none; on a CPU the ops run, but there is no device to measure"
        )
        return 2

    if args.sweep:
        sweep(args.elements)
        return 0
    cases = [(name, n) for name in DTYPES for n in LENGTHS]
    failures = []
    for name, n in cases:
        failures += [f"{name} rows of {n}: {what}" for what in check_case(make_case(args.elements, n, DTYPES[name]))]
    if failures:
        print("the check failed, no speed is reported:", *failures, sep="\n  ")
        return 1
    print(f"check: {len(cases)} shapes x 4 kernels inside the budget against fp64")

    about = provenance(argv)
    print(f"{about['device']}, torch {about['torch']}, triton {about['triton']}; GB/s, % of a device copy beside it")
    print(f"{'':5}{'rows':>9}{'copy':>7}{'ours':>12}{'torch':>13}{'logsumexp':>11}{'backward':>13}{'torch':>13}")
    results, missed = [], []
    for name, n in cases:
        x = make_case(args.elements, n, DTYPES[name])
        row = {"dtype": name, "n": n, "m": x.shape[0], **measure(x), **about}
        results.append(row)
        if args.json:
            write_json(args.json, results)
        cells = [
            f"{row[f'{key}_gbps']:7.0f} {100 * row[f'{key}_gbps'] / row['copy_gbps']:3.0f}%"
            for key in ("ours", "torch", "ours_backward", "torch_backward")
        ]
        print(
            f"{name:5}{n:9}{row['copy_gbps']:7.0f}{cells[0]:>12}{cells[1]:>13}{row['lse_gbps']:11.0f}"
            f"{cells[2]:>13}{cells[3]:>13}",
            flush=True,
        )
        if n >= 1 << 15 and row["share_of_copy"] < GOAL:
            missed.append(f"{name} rows of {n}: {row['share_of_copy']:.0%}")
    print(f"goal of {GOAL:.0%} for rows of 32K to 1M: " + ("met" if not missed else "missed by " + "; ".join(missed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
