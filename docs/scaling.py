"""Writes the tables of the page "From one GPU to a thousand" and its picture, from the planner.

python docs/scaling.py
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from markdown_table import table

from ringattn.launch.plan.picture import draw
from ringattn.plan.mask import short_mask
from ringattn.sizing import MeshEstimate, Profile, estimate, load_profile, load_shape
from ringattn.sizing.attention_launch import Heads
from ringattn.sizing.packing import compare
from ringattn.sizing.ring_time import RingCall, attention_time
from ringattn.sizing.step import prefill_s

HERE = Path(__file__).parent
PAGE = HERE / "scaling.md"
PICTURE = HERE / "plan.svg"
K, M = 2**10, 2**20
H100, H200 = load_profile("h100"), load_profile("h200")
MIXES: dict[str, tuple[tuple[int, int, float], ...]] = {
    # "real-world varlen seqlen distribution" of the benchmarks of MagiAttention (exps/attn/run_benchmark.py): a long tail
    "long-tail": (
        (1, 2 * K, 0.16),
        (2 * K, 4 * K, 0.05),
        (4 * K, 8 * K, 0.04),
        (8 * K, 16 * K, 0.06),
        (16 * K, 32 * K, 0.08),
        (32 * K, 64 * K, 0.21),
        (64 * K, 128 * K, 0.4),
        (128 * K, 256 * K, 0.2),
        (256 * K, 512 * K, 0.05),
        (512 * K, 1024 * K, 0.04),
        (1024 * K, 2048 * K, 0.01),
        (2048 * K, 4096 * K, 0.01),
    ),
    # the simple distribution of its benchmark of kernels (exps/attn): many short documents
    "short": ((1, K, 0.4), (K, 2 * K, 0.3), (2 * K, 4 * K, 0.2), (4 * K, 8 * K, 0.1)),
    # lognormal with a mean of 1,850 tokens, as `bench ring --masks documents` packs them
    "lognormal": (),
}
"""Buckets of lengths, with weights, by the name of the mix."""


def draw_lengths(mix: str, count: int, *, longest: int, seed: int = 0) -> list[int]:
    """Return the lengths of documents of a mix, none longer than `longest`: longer ones are drawn again.

    Example:
        >>> draw_lengths("short", 3, longest=4096)
        [3770, 989, 1853]
    """
    source, found = random.Random(seed), list[int]()
    buckets = MIXES[mix]
    while len(found) < count:
        if buckets:
            low, high, _ = source.choices(buckets, weights=[weight for *_, weight in buckets])[0]
            length = source.randrange(low, high)
        else:
            length = 1 + int(source.lognormvariate(math.log(900), 1.2))
        if length <= longest:
            found.append(length)
    return found


def short(tokens: int) -> str:
    """Return a number of tokens with its unit."""
    return f"{tokens // M}M" if tokens >= M else f"{tokens // K}K"


def cell(one: MeshEstimate | None) -> str:
    """Return time, MFU and mesh of a candidate; a dash where nothing fits."""
    if one is None or one.seconds is None or one.mfu is None:
        return "-"
    seconds = one.seconds.total
    time = f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.0f} s"
    return f"{time}, {one.mfu:.0%}, {one.mesh}"


def strong(gpus: Iterable[int], per_node: int) -> str:
    """Return step times of one sequence of Llama 3 8B by tokens and GPUs."""
    counts = list(gpus)
    rows = []
    for tokens in (128 * K, M, 10 * M, 100 * M):
        found = [estimate("llama3-8b", tokens, gpus=n, gpus_per_node=per_node, batch=1).best for n in counts]
        rows.append([short(tokens), *map(cell, found)])
    return table(["tokens", *(f"{n} GPUs" for n in counts)], rows)


def share(call: RingCall, profile: Profile) -> str:
    """Return the share of the kernels in the time of a call, forward and backward."""
    times = [attention_time(call, profile, way) for way in ("forward", "backward")]
    return f"{sum(x.kernel_ms for x in times) / sum(max(x.device_ms, x.kernel_ms) for x in times):.0%}"


def rings() -> str:
    """Return the share of kernels by kind of ring, GPUs and tokens per GPU: weak scaling."""
    rows = []
    for per_gpu in (8 * K, 32 * K, 128 * K):
        for n in (8, 64, 256, 1024):
            mask = short_mask(n * per_gpu, causal=True)
            heads = Heads(1, 32, 8, 128)
            nodes = n // 8
            one = RingCall(mask, n, heads, nodes=n if n > 8 else 1, schedule="process_group" if n > 8 else "fused")
            double = RingCall(mask, n, heads, nodes=nodes)
            # two heads of keys per rank: tensor parallel over 4 of the 8 GPUs of a node
            beside = RingCall(mask, n // 4, replace(heads, heads=8, kv_heads=2), nodes=nodes)
            wide = RingCall(mask, n, heads, nodes=max(1, -(-n // 64)))
            rows.append([short(per_gpu), n, *(share(x, H200) for x in (one, double, beside, wide))])
    heads_ = [
        "tokens per GPU",
        "GPUs",
        "ring over all GPUs",
        "double ring",
        "double ring beside TP of 4",
        "double ring, NVLink of 64",
    ]
    return table(heads_, rows)


def published() -> str:
    """Return points of others beside what the planner says of the same shape on the same GPUs."""
    shape = load_shape("llama3-405b")
    rows = []
    for tokens, seconds in ((M, 77.0), (128 * K, 3.8)):
        mask = short_mask(tokens, causal=True)
        call = RingCall(mask, 16, Heads(1, shape.heads // 8, 1, shape.head_dim), nodes=16, schedule="process_group")
        found = prefill_s(shape, tokens, [(call, shape.layers)], H100, tp=8)
        rows.append(
            [
                f"prefill of {short(tokens)}, Llama 3 405B, 128 H100: ring of 16 nodes beside TP of 8",
                f"{seconds:g} s",
                f"{found.total:.1f} s",
            ]
        )
    for n, tokens in ((8, "3.7M"), (32, "15M")):
        longest = estimate("llama3-8b", 128 * K, gpus=n, gpu="h100").longest
        rows.append(
            [
                f"longest sequence in training, Llama 3 8B, {n} H100: ALST, with activations and optimizer in host memory",
                f"{tokens} tokens",
                f"{longest / 1e6:.1f}M tokens, all in GPU memory",
            ]
        )
    best = estimate("llama3-8b", M, gpus=1024, gpu="b200", batch=4).best
    assert best is not None, "it fits"
    assert best.mfu is not None, "it was simulated"
    rows.append(
        [
            "training at 1M, Llama 3 8B, 1,024 B200: NeMo in FP8, TP of 4 beside CP of 16",
            "1,608 TFLOP/s per GPU",
            f"{best.mfu * 2250:,.0f} TFLOP/s per GPU in bf16, with kernels scaled from an H200",
        ]
    )
    return table(["what", "published", "planned"], rows)


def bottlenecks() -> str:
    """Return the largest parts of the best step by size, that of one sequence of Llama 3 8B."""
    names = {"ring_exposed": "ring", "fsdp_exposed": "FSDP", "tp_exposed": "TP", "matmul": "matrix products"}
    rows = []
    for tokens, n in (
        (128 * K, 8),
        (128 * K, 64),
        (M, 8),
        (M, 64),
        (M, 512),
        (10 * M, 64),
        (10 * M, 1024),
        (100 * M, 1024),
    ):
        best = estimate("llama3-8b", tokens, gpus=n, batch=1).best
        if best is None or best.seconds is None:
            rows.append([short(tokens), n, "-", "-", "memory"])
            continue
        parts = sorted(vars(best.seconds).items(), key=lambda item: -item[1])[:3]
        said = ", ".join(f"{names.get(name, name)} {value / best.seconds.total:.0%}" for name, value in parts)
        memory = max(best.memory.gib().items(), key=lambda item: item[1])
        rows.append([short(tokens), n, said, f"{memory[0]} {memory[1]:.0f} GiB", next_to_build(best)])
    return table(["tokens", "GPUs", "time goes to", "most memory", "what would help"], rows)


def next_to_build(best: MeshEstimate) -> str:
    """Return what the largest exposed part of a step asks for."""
    assert best.seconds is not None, "the best was simulated"
    exposed = {
        "fewer bytes between nodes: queries or fp8 keys": best.seconds.ring_exposed,
        "parameters kept gathered, or fewer FSDP ranks": best.seconds.fsdp_exposed,
        "overlap of tensor parallel exchanges": best.seconds.tp_exposed,
    }
    name = max(exposed, key=lambda key: exposed[key])
    return name if exposed[name] > 0.1 * best.seconds.total else "faster attention kernels"


def packing() -> str:
    """Return balance and bytes of placements beside every document over all ranks."""
    rows = []
    for mix in MIXES:
        lengths = draw_lengths(mix, 400 if mix != "long-tail" else 60, longest=128 * K)
        found = list(compare(lengths, tokens=8 * 32 * K, world_size=8))[:4]
        moved = [sum(both[side].rows_moved for both in found) for side in (0, 1)]
        most = [max(both[side].imbalance for both in found) for side in (0, 1)]
        rows.append(
            [
                mix,
                f"{sum(lengths) / len(lengths):,.0f}",
                f"{most[0]:.3f}",
                f"{most[1]:.3f}",
                f"{1 - moved[0] / moved[1]:.0%}",
            ]
        )
    return table(["mix", "mean tokens", "work max/mean", "of fixed cp = 8", "fewer bytes"], rows)


SECTIONS: dict[str, Callable[[], str]] = {
    "strong scaling, 8 per node": lambda: strong((8, 64, 256, 1024), 8),
    "strong scaling, 72 per node": lambda: strong((72, 144, 576, 1008), 72),
    "rings": rings,
    "published": published,
    "bottlenecks": bottlenecks,
    "packing": packing,
}


def page() -> str:
    """Return the page with its tables."""
    text = PAGE.read_text()
    for name, make in SECTIONS.items():
        begin, end = f"<!-- {name}: written by docs/scaling.py -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{make()}\n\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    draw(estimate("llama3-8b", M, gpus=64), PICTURE)
    PAGE.write_text(page())
