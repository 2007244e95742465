"""Blocks with ring attention inside under torch.compile: one graph, eager's numbers, no second compilation.

Inductor is asked for C++ here; what it makes of GPUs is in tests/gpu/test_compile.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ringattn import Ring, Sharding, autograd, latent_attention, ring_attention, ring_attention_with_lse
from tests.support.pool import Pools
from tests.support.transformer import CHECKPOINTS, WIDTH, Attention, Block, make_transformer

Results = list[Tensor]
SEQ_LEN = 21
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 6},
    "softcap and scale": {"causal": True, "softcap": 3.0, "softmax_scale": 0.2},
}


@contextmanager
def fresh() -> Iterator[None]:
    """Nothing compiled is left from before, nothing for afterwards."""
    torch._dynamo.reset()
    counters.clear()
    try:
        yield
    finally:
        torch._dynamo.reset()


def make_blocks(count: int, sinks: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block(sinks) for _ in range(count)))


def rows_of(sharding: Sharding, seed: int = 0, batch: int = 2) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return sharding.shard(torch.randn(batch, sharding.seq_len, WIDTH, generator=g), 1).requires_grad_()


def train(blocks: nn.Module, run: Callable[[Tensor], Any], x: Tensor) -> Results:
    """Outputs, then the gradients of x and of all parameters."""
    found = run(x)
    outputs = list(found) if isinstance(found, tuple) else [found]
    torch.stack([(o.float() * o.float().cos().detach()).sum() for o in outputs]).sum().backward()
    grads = [x.grad, *(p.grad for p in blocks.parameters())]
    results = [o.detach() for o in outputs] + [grad.clone() for grad in grads if grad is not None]
    assert len(results) == len(outputs) + len(grads)
    x.grad = None
    blocks.zero_grad()
    return results


def assert_close(found: Results, expected: Results) -> None:
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


def compile_blocks(backend: str, options: str, count: int, sinks: bool, documents: bool) -> int:
    """Compiled equals eager over three steps; the number of compilations after the first."""
    ring = Ring()
    sharding = ring.sharding(SEQ_LEN, documents=(0, 8, SEQ_LEN) if documents else None)
    blocks = make_blocks(count, sinks)

    def run(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, sharding.positions, sharding, OPTIONS[options])
        return x

    with fresh():
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(run, fullgraph=True, backend=counter)
        for step in range(3):
            x = rows_of(sharding, step)
            expected = train(blocks, run, x)
            # from the second step on a compilation is an error
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                assert_close(train(blocks, compiled, x), expected)
        assert not counters["graph_break"]
        return counter.frame_count


def compile_unshard(layout: str) -> tuple[Results, Results]:
    """Whole rows and the gradient of this rank's: compiled, and not."""
    ring = Ring()
    sharding = ring.sharding(7, layout)
    whole = torch.arange(28.0).view(2, 7, 2).sin()
    found = []
    with fresh():
        for run in (
            sharding.unshard,
            torch.compile(sharding.unshard, fullgraph=True, backend="aot_eager", dynamic=True),
        ):
            x = sharding.shard(whole).requires_grad_()
            y = run(x)
            (y * (whole + ring.rank)).sum().backward()
            found.append([y.detach(), x.grad])
    expected = [whole, sharding.shard(2 * whole + 1)]
    return [x for one in found for x in one], 2 * expected


def test_whole_rows_are_part_of_a_compiled_graph_and_their_gradients_are_returned(pool: Pools) -> None:
    for layout in ("zigzag", "striped"):
        for found, expected in pool(2, 240).run(compile_unshard, layout):
            assert_close(found, expected)


@pytest.mark.parametrize(
    ("backend", "options", "count", "sinks", "documents", "world_size"),
    [
        *(("aot_eager", "window", 2, True, True, world_size) for world_size in (1, 2)),
        *(
            pytest.param(*case, world_size, marks=pytest.mark.slow)
            for case in (("aot_eager", "softcap and scale", 1, False, False), ("inductor", "window", 2, True, True))
            for world_size in (1, 2)
        ),
    ],
    ids=lambda x: str(x),
)
def test_compiled_blocks_are_one_graph_and_equal_eager(
    pool: Pools, world_size: int, backend: str, options: str, count: int, sinks: bool, documents: bool
) -> None:
    found = pool(world_size, 240).run(compile_blocks, backend, options, count, sinks, documents)
    assert found == [1] * world_size


def cross_attention_and_lse() -> int:
    """Keys of another sequence; lse and sinks are part of what is differentiated."""
    ring = Ring()
    sharding, keys = ring.sharding(SEQ_LEN), ring.sharding(13, layout="striped")
    block = make_blocks(1, sinks=True)[0]
    attention = block.get_submodule("attention")
    assert isinstance(attention, Attention)
    memory = rows_of(keys, 5)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        b, s, _ = x.shape
        q = attention.wq(x).view(b, s, -1, 8)
        k, v = (w(memory).view(b, memory.shape[1], -1, 8) for w in (attention.wk, attention.wv))
        o, lse = ring_attention_with_lse(q, k, v, sharding, kv_sharding=keys, sinks=attention.sinks)
        return attention.wo(o.flatten(2)), lse.square()

    with fresh():
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(run, fullgraph=True, backend=counter)
        for step in range(2):
            x = rows_of(sharding, step)
            assert_close(train(attention, compiled, x), train(attention, run, x))
        assert attention.sinks is not None
        assert attention.sinks.grad is None, "train has taken it"
        return counter.frame_count


@pytest.mark.parametrize("world_size", [1, 2])
def test_cross_attention_with_lse_in_the_loss_compiles(pool: Pools, world_size: int) -> None:
    assert pool(world_size, 200).run(cross_attention_and_lse) == [1] * world_size


@pytest.mark.parametrize("dynamic", [None, True])
def test_each_length_is_compiled_once(dynamic: bool | None) -> None:
    # the text of the sharding is a constant of the graph, so dynamic shapes save nothing; torch traces twice before it makes
    # constants of floats that were symbols
    ring = Ring()
    attention = make_blocks(1)[0].get_submodule("attention")
    seen = []

    def run(x: Tensor, sharding: Sharding) -> Tensor:
        return attention(x, sharding.positions, sharding, OPTIONS["causal"])

    with fresh():
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(run, fullgraph=True, backend=counter, dynamic=dynamic)
        for seq_len in (21, 21, 30, 21):
            # equal, but made anew each time, as a data loader does; nothing has looked at it before the compiler
            sharding = ring.sharding(seq_len)
            x = rows_of(sharding)
            found = train(attention, lambda x, s=sharding: compiled(x, s), x)
            assert_close(found, train(attention, lambda x, s=sharding: run(x, s), x))
            seen.append(counter.frame_count)
    first = 2 if dynamic else 1
    assert seen == [first, first, first + 1, first + 1]


CHANGING = {
    "window": 5,
    "prefix_len": 3,
    "chunk_len": 7,
    "lengths": ((0, 13),),
    "softcap": 4.5,
    "softmax_scale": 0.3,
    "dropout_p": 0.25,
}


def test_an_option_that_changes_is_compiled_once_for_each_value() -> None:
    # after the first change dynamo makes a symbol of it, and of the width of heads
    sharding = Ring().sharding(SEQ_LEN)

    def run(q: Tensor, **options: Any) -> Tensor:
        return ring_attention(q * 2, q, q, sharding, dropout_seed=3, **options)

    def twice(value: Any) -> Any:
        return ((1, value[0][1]),) if isinstance(value, tuple) else 2 * value

    calls = [(16, {}), (24, {}), (16, {})]
    for name, value in CHANGING.items():
        causal = {"causal": name in ("window", "prefix_len")}
        calls += [(16, {name: x, **causal}) for x in (value, twice(value), value)]
    with fresh(), torch._dynamo.config.patch(recompile_limit=32):
        compiled = torch.compile(run, fullgraph=True, backend="eager")
        for i, (d, options) in enumerate(calls):
            q = torch.linspace(-1, 1, SEQ_LEN * d).view(1, SEQ_LEN, 1, d).sin()
            with torch._dynamo.config.patch(error_on_recompile=i % 3 == 2):
                torch.testing.assert_close(compiled(q, **options), run(q, **options), rtol=0, atol=0)


def test_a_sharding_is_made_beside_a_graph_and_refused_in_a_whole_one() -> None:
    ring = Ring()

    def run(q: Tensor) -> Tensor:
        return ring_attention(q * 2, q, q, ring.sharding(q.shape[1])).cos()

    q = torch.linspace(-1, 1, SEQ_LEN * 16).view(1, SEQ_LEN, 1, 16).sin()
    with fresh():
        torch.testing.assert_close(torch.compile(run, backend="eager", dynamic=True)(q), run(q), rtol=0, atol=0)
    with fresh(), pytest.raises(Unsupported, match="must be made outside of compiled code"):
        torch.compile(run, backend="eager", fullgraph=True)(q)


def test_a_call_of_latents_takes_symbols_for_sizes() -> None:
    sharding = Ring().sharding(SEQ_LEN)

    def run(x: Tensor) -> Tensor:
        return latent_attention(x[:, :, None, :12], x[..., 4:], x[..., :4], x[:, :8, 4:], x[:, :6, 4:], sharding)

    with fresh():
        x = torch.linspace(-1, 1, SEQ_LEN * 20).view(1, SEQ_LEN, 20).sin()
        compiled = torch.compile(run, fullgraph=True, backend="eager", dynamic=True)
        torch.testing.assert_close(compiled(x), run(x), rtol=0, atol=0)


def test_more_lengths_than_eight_compile_under_a_larger_limit() -> None:
    # as docs/meshes.md says: no mark of lengths helps, because the text of the sharding is a guard
    ring = Ring()

    def run(q: Tensor, sharding: Sharding) -> Tensor:
        return ring_attention(q * 2, q, q, sharding, causal=True)

    def lengths_that_compile() -> int:
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(run, fullgraph=True, backend=counter)
        for seq_len in range(2, 12):
            compiled(torch.ones(1, seq_len, 1, 16), ring.sharding(seq_len))
        return counter.frame_count

    with fresh(), pytest.raises(FailOnRecompileLimitHit, match="fullgraph=True"):
        lengths_that_compile()
    with fresh(), torch._dynamo.config.patch(recompile_limit=10):
        assert lengths_that_compile() == 10


@contextmanager
def counted_rings() -> Iterator[Counter[str]]:
    """Counts what the operators run; a dispatch mode, as elsewhere, would keep dynamo from compiling at all."""
    runs: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        run = getattr(autograd, f"run_{name}")

        def counted(*args: Any, **kwargs: Any) -> Any:
            runs[name] += 1
            return run(*args, **kwargs)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "backward"):
            patch.setattr(autograd, f"run_{name}", counting(name))
        yield runs


def recompute_inside(recompute: str) -> tuple[int, int]:
    """Runs of the operators in a compiled region that checkpoints its block."""
    ring = Ring()
    sharding = ring.sharding(SEQ_LEN)
    block = make_blocks(1)[0]

    def run(x: Tensor) -> Any:
        return checkpoint(block, x.sin(), sharding.positions, sharding, OPTIONS["causal"], **CHECKPOINTS[recompute])

    with fresh():
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        x = rows_of(sharding)
        expected = train(block, run, x)
        train(block, compiled, x)
        with counted_rings() as runs:
            found = train(block, compiled, x)
        assert_close(found, expected)
    return runs["forward"], runs["backward"]


@pytest.mark.parametrize(
    ("recompute", "runs"), [pytest.param("full", (2, 1), marks=pytest.mark.slow), ("selective", (1, 1))]
)
def test_selective_checkpointing_inside_a_compiled_region_keeps_the_ring(recompute: str, runs: tuple[int, int]) -> None:
    assert recompute_inside(recompute) == runs


def under_autocast(where: str) -> tuple[Results, Results]:
    sharding = Ring().sharding(SEQ_LEN)
    block = make_blocks(1)[0]
    lowered = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731

    def run(x: Tensor) -> Tensor:
        with lowered() if where == "inside" else nullcontext():
            return block(x, sharding.positions, sharding, OPTIONS["causal"])

    with fresh():
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        x = rows_of(sharding)
        results = []
        for fn in (run, compiled):
            with lowered() if where == "outside" else nullcontext():
                results.append(train(block, fn, x))
    return results[0], results[1]


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_autocast_lowers_a_compiled_block_as_it_does_an_eager_one(where: str) -> None:
    expected, found = under_autocast(where)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        error = (x.double() - y.double()).norm() / y.double().norm()
        assert error < 0.01, error  # both round to bf16, in places of their own


def fsdp_with_compiled_blocks(compiled: bool) -> tuple[Results, int]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    sharding = Ring(mesh["cp"]).sharding(SEQ_LEN)
    with fresh():
        model = make_transformer(torch.float32)
        if compiled:
            for block in model.blocks:
                block.compile(fullgraph=True, backend="aot_eager")
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["cp"])
        tokens = sharding.shard(torch.arange(SEQ_LEN)[None] % 23, 1)
        results: Results = []
        for step in range(3):
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                logits = model(tokens, sharding.positions, sharding)
                logits.logsumexp(-1).sum().backward()
            results = [logits.detach()]
            for parameter in model.parameters():
                assert isinstance(parameter.grad, DTensor)
                results.append(parameter.grad.full_tensor())
            model.zero_grad()
        return results, counters["stats"]["unique_graphs"]


def test_fsdp_with_compiled_blocks_equals_fsdp(pool: Pools) -> None:
    expected = pool(2, 200).run(fsdp_with_compiled_blocks, False)
    found = pool(2, 200).run(fsdp_with_compiled_blocks, True)
    for (x, graphs), (y, _) in zip(found, expected, strict=True):
        assert graphs == 1, "both blocks share one graph"
        assert_close(x, y)


def test_compilers_leave_the_operators_out_of_their_cuda_graphs() -> None:
    """Note [Beside compiled graphs] of autograd.py; on GPUs the test of tests/gpu/test_compile.py shows it at work."""
    for op in (torch.ops.ringattn.forward.default, torch.ops.ringattn.backward.default):
        assert torch.Tag.cudagraph_unsafe in op.tags
