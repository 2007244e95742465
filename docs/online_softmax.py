"""Print the tables of `online_softmax.md`.

python docs/online_softmax.py
"""

from __future__ import annotations

import math
import random
import struct
import sys
from collections.abc import Callable

import torch

from ringattn.numerics.partial import Partial, finalize, reduce_partials
from ringattn.numerics.softmax import online_softmax

SHARED_MEMORY = 227 * 1024  # bytes that one program can have on an H100, H200 or B200


class Memory:
    """Row in slow memory that counts its reads and writes."""

    def __init__(self, values: list[float]) -> None:
        self.values = values
        self.reads = 0
        self.writes = 0

    def read(self, start: int, stop: int) -> list[float]:
        """Load values[start:stop]."""
        self.reads += stop - start
        return self.values[start:stop]

    def write(self, start: int, values: list[float]) -> None:
        """Store values from start on."""
        self.writes += len(values)
        self.values[start : start + len(values)] = values


def blocks(n: int, size: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each block of a row."""
    return [(i, min(i + size, n)) for i in range(0, n, size)]


def three_pass(x: Memory, y: Memory, block: int) -> int:
    """Read for the maximum, the sum and the result; return the bytes on chip (fp32)."""
    n = len(x.values)
    m = max(max(x.read(*b)) for b in blocks(n, block))
    l = sum(sum(math.exp(s - m) for s in x.read(*b)) for b in blocks(n, block))  # noqa: E741
    for b in blocks(n, block):
        y.write(b[0], [math.exp(s - m) / l for s in x.read(*b)])
    return 4 * (block + 2)


def fused(x: Memory, y: Memory, block: int) -> int:  # noqa: ARG001
    """Hold the whole row on chip and read it once."""
    n = len(x.values)
    row = x.read(0, n)
    m = max(row)
    e = [math.exp(s - m) for s in row]
    l = sum(e)  # noqa: E741
    y.write(0, [v / l for v in e])
    return 4 * n


def online(x: Memory, y: Memory, block: int) -> int:
    """Compute maximum and sum in one pass and the result in a second."""
    n = len(x.values)
    m, l = -math.inf, 0.0  # noqa: E741
    for b in blocks(n, block):
        chunk = x.read(*b)
        m_new = max(m, *chunk)
        l = l * math.exp(m - m_new) + sum(math.exp(s - m_new) for s in chunk)  # noqa: E741
        m = m_new
    for b in blocks(n, block):
        y.write(b[0], [math.exp(s - m) / l for s in x.read(*b)])
    return 4 * (block + 2)


def logits(n: int = 1024) -> list[float]:
    """Return the row that all tables use."""
    generator = random.Random(0)
    return [round(generator.uniform(-8.0, 8.0), 3) for _ in range(n)]


def naive(x: list[float]) -> list[float]:
    """Return the definition, with an exactly rounded sum and no shift: fine for small logits only."""
    e = [math.exp(s) for s in x]
    return [v / math.fsum(e) for v in e]


def traffic_table() -> str:
    """Return the counted reads and writes of the three ways."""
    x = logits()
    want = naive(x)
    lines = ["way          reads  writes  bytes on chip  max difference from naive"]
    ways: list[tuple[str, Callable[[Memory, Memory, int], int]]] = [
        ("three-pass", three_pass),
        ("fused", fused),
        ("online", online),
    ]
    for name, way in ways:
        source, target = Memory(list(x)), Memory([math.nan] * len(x))
        chip = way(source, target, 128)
        error = max(abs(a - b) for a, b in zip(target.values, want, strict=True))
        lines.append(f"{name:11} {source.reads:6} {target.writes:7} {chip:14,} {error:26.1e}")
    return "\n".join(lines)


def chip_table() -> str:
    """Return bytes on chip by row length, and whether a whole row fits."""
    lines = ["logits in a row   fused: bytes on chip            online, block 1024"]
    for n in (1024, 32768, SHARED_MEMORY // 4, 65536, 131072, 1048576):
        fits = "fits" if 4 * n <= SHARED_MEMORY else "does not fit"
        lines.append(f"{n:15,} {4 * n:16,}  {fits:12} {4 * (1024 + 2):18,}  fits")
    return "\n".join(lines)


def worked_example() -> str:
    """Return every intermediate value of s = [1, 2, 3, 10] in two chunks."""
    chunks = [[1.0, 2.0], [3.0, 10.0]]
    m, l = -math.inf, 0.0  # noqa: E741
    lines = ["chunk      m before  m after  e^(m - m')  l before    terms of the chunk    l after"]
    for chunk in chunks:
        m_new = max(m, *chunk)
        factor = math.exp(m - m_new)
        terms = [math.exp(s - m_new) for s in chunk]
        l_new = l * factor + sum(terms)
        shown = " + ".join(f"{t:.6f}" for t in terms)
        name = "[" + ", ".join(f"{s:.0f}" for s in chunk) + "]"
        lines.append(f"{name:10} {m:8.0f} {m_new:8.0f} {factor:11.6f} {l:9.6f}  {shown:>20} {l_new:10.6f}")
        m, l = m_new, l_new  # noqa: E741
    lines.append(f"lse = {m:.0f} + ln {l:.6f} = {m + math.log(l):.6f}")
    probabilities = [math.exp(s - m) / l for chunk in chunks for s in chunk]
    lines.append("softmax = " + ", ".join(f"{p:.6f}" for p in probabilities) + f"; sum {sum(probabilities):.6f}")
    return "\n".join(lines)


def value_example() -> str:
    """Return every intermediate value of s = [0, 5], V = [2, 3]."""
    m, l, o = -math.inf, 0.0, 0.0  # noqa: E741
    lines = ["key        m  e^(m - m')         l         o     o / l"]
    for s, v in zip([0.0, 5.0], [2.0, 3.0], strict=True):
        m_new = max(m, s)
        factor, weight = math.exp(m - m_new), math.exp(s - m_new)
        m, l, o = m_new, l * factor + weight, o * factor + weight * v  # noqa: E741
        lines.append(f"s={s:.0f} v={v:.0f} {m:5.0f} {factor:11.6f} {l:9.6f} {o:9.6f} {o / l:9.6f}")
    direct = naive([0.0, 5.0])
    lines.append(f"directly: {direct[0]:.6f} * 2 + {direct[1]:.6f} * 3 = {direct[0] * 2 + direct[1] * 3:.6f}")
    return "\n".join(lines)


def block_table() -> str:
    """Return the block-size sweep against the naive softmax."""
    x = torch.tensor(logits(), dtype=torch.float64)
    want = torch.tensor(naive(logits()), dtype=torch.float64)
    lines = ["block size  max difference  total probability"]
    for block in (1, 2, 8, 32, 128, 512, 1024):
        y = online_softmax(x, block_size=block, impl="eager")
        lines.append(f"{block:10} {(y - want).abs().max().item():15.1e} {y.sum().item():18.12f}")
    return "\n".join(lines)


def order_table() -> str:
    """Return the results of eight partials merged in five orders."""
    x = torch.tensor(logits(), dtype=torch.float64)
    v = torch.linspace(-1, 1, 1024, dtype=torch.float64).unsqueeze(-1)
    parts = [Partial.from_scores(a, b) for a, b in zip(x.split(128), v.split(128), strict=True)]
    orders = {
        "as they come": list(range(8)),
        "backwards": list(range(7, -1, -1)),
        "largest maximum first": sorted(range(8), key=lambda i: -parts[i].m.item()),
        "smallest maximum first": sorted(range(8), key=lambda i: parts[i].m.item()),
        "shuffled": random.Random(1).sample(range(8), 8),
    }
    first, _ = finalize(reduce_partials(parts, "sequential"))
    lines = ["order of the 8 blocks     lse        o          difference of o from the first line"]
    for name, order in orders.items():
        o, lse = finalize(reduce_partials([parts[i] for i in order], "sequential"))
        lines.append(f"{name:22} {lse.item():10.6f} {o.item():10.6f} {abs(o - first).item():25.1e}")
    return "\n".join(lines)


def _fp32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


def underflow_table() -> str:
    """Return the contribution of a rescaled old sum to a new one in fp32."""
    lines = ["m_new - m_old  factor in fp32  1 + factor  1 + 1,000,000 * factor"]
    for gap in (1, 5, 10, 20, 32, 80, 104, 800):
        factor = _fp32(math.exp(-gap))
        lines.append(f"{gap:13} {factor:15.4g} {_fp32(1 + factor):11.9g} {_fp32(1 + 1e6 * factor):23.9g}")
    return "\n".join(lines)


def tree_table() -> str:
    """Return the results of P workers whose shares are merged as a tree."""
    x = torch.tensor(logits(), dtype=torch.float64)
    want = torch.tensor(naive(logits()), dtype=torch.float64)
    lines = ["workers  logits each  merges in a row         lse  max difference  total probability"]
    for workers in (1, 2, 4, 8, 16, 64):
        parts = [Partial.from_scores(s, s.new_ones(len(s), 1)) for s in x.chunk(workers)]
        _, lse = finalize(reduce_partials(parts, "tree"))
        y = torch.exp(x - lse)
        depth = math.ceil(math.log2(workers))
        lines.append(
            f"{workers:7} {1024 // workers:12} {depth:16} {lse.item():11.6f} {(y - want).abs().max().item():15.1e}"
            f" {y.sum().item():18.12f}"
        )
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "traffic": traffic_table, "chip": chip_table, "worked": worked_example, "values": value_example,
    "blocks": block_table, "order": order_table, "underflow": underflow_table, "tree": tree_table,
}  # fmt: skip


def main() -> None:
    """Print every table under its name."""
    for name, table in TABLES.items():
        sys.stdout.write(f"{name}\n\n{table()}\n\n")


if __name__ == "__main__":
    main()
