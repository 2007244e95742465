"""The operator is a good citizen: opcheck, compile, checkpointing, autocast, FLOP counts, clean exits."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from ringattn import Ring, attention_reference, autograd, ring_attention, ring_attention_with_lse
from tests.support.pool import Pools

ROOT = Path(__file__).parent.parent


def qkv(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    q = torch.randn(1, rows, 4, 16, generator=g, requires_grad=True)
    k, v = (torch.randn(1, rows, 2, 16, generator=g, requires_grad=True) for _ in range(2))
    return q, k, v


def opcheck() -> None:
    ring = Ring()
    sharding = ring.sharding(13)
    recorded: list[tuple[Any, ...]] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.ringattn.forward.default:
                recorded.append(args)
            return func(*args, **(kwargs or {}))

    q, k, v = qkv(sharding.shard_len)
    with Record():
        ring_attention(
            q, k, v, sharding, causal=True, sinks=torch.zeros(4), key_bias=torch.zeros(1, sharding.shard_len)
        )
    _, _, _, *rest = recorded[0]
    torch.library.opcheck(torch.ops.ringattn.forward.default, (q, k, v, *rest))


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_operator_passes_opcheck(pool: Pools, world_size: int) -> None:
    pool(world_size).run(opcheck)


def compiled_equals_eager() -> None:
    torch._dynamo.reset()
    ring = Ring()
    sharding = ring.sharding(21, documents=(0, 5, 21))

    def block(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = ring_attention_with_lse(q * 2, k, v, sharding, causal=True, window=(9, 0), softcap=5.0)
        return o.tanh(), lse

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    results = []
    for fn in (block, compiled, compiled):
        leaves = qkv(sharding.shard_len)
        o, lse = fn(*leaves)
        (o.square().sum() + lse.sum()).backward()
        results.append([o.detach(), lse.detach(), *(x.grad for x in leaves)])
    for found in results[1:]:
        torch.testing.assert_close(found, results[0])


@pytest.mark.parametrize("world_size", [1, 2])
def test_compiling_a_block_with_the_ring_in_one_graph_changes_nothing(pool: Pools, world_size: int) -> None:
    pool(world_size).run(compiled_equals_eager)


def test_compiled_calls_of_equal_shape_do_not_compile_again() -> None:
    torch._dynamo.reset()
    sharding = Ring().sharding(12)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v: ring_attention(q, k, v, sharding, causal=True), fullgraph=True, backend=counter
    )
    for _ in range(3):
        compiled(*qkv(12)).sum().backward()
    assert counter.frame_count == 1


def count_forwards(run: Any) -> int:
    count = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal count
            count += func is torch.ops.ringattn.forward.default
            return func(*args, **(kwargs or {}))

    with Count():
        run()
    return count


def test_checkpointing_recomputes_and_selective_checkpointing_keeps_the_ring() -> None:
    sharding = Ring().sharding(12)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q.sin(), k, v, sharding, causal=True).cos()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op is torch.ops.ringattn.forward.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    grads = []
    counts = []
    for options in (None, {}, {"context_fn": partial(create_selective_checkpoint_contexts, policy)}):
        leaves = qkv(12)

        def run(leaves: tuple[Tensor, Tensor, Tensor] = leaves, options: dict[str, Any] | None = options) -> None:
            out = block(*leaves) if options is None else checkpoint(block, *leaves, use_reentrant=False, **options)
            assert isinstance(out, Tensor)
            out.sum().backward()

        counts.append(count_forwards(run))
        grads.append([x.grad for x in leaves])
    assert counts == [1, 2, 1]
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)
    torch.testing.assert_close(grads[2], grads[0], rtol=0, atol=0)


def test_autocast_lowers_the_inputs_and_nothing_inside() -> None:
    sharding = Ring().sharding(12)
    leaves = qkv(12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, lse = ring_attention_with_lse(*leaves, sharding, causal=True)
    q, k, v = (x.detach().bfloat16() for x in leaves)
    expected = ring_attention_with_lse(q, k, v, sharding, causal=True)
    assert o.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    torch.testing.assert_close((o, lse), expected, rtol=0, atol=0)
    o.float().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in leaves)


def test_flops_count_visible_pairs() -> None:
    sharding = Ring().sharding(12)
    leaves = qkv(12)
    with FlopCounterMode(display=False) as counter:
        ring_attention(*leaves, sharding, causal=True).sum().backward()
    pairs = 12 * 13 // 2
    assert counter.get_total_flops() == (4 + 10) * pairs * 4 * 16


def test_frozen_inputs_get_no_gradient() -> None:
    sharding = Ring().sharding(12)
    q, k, v = qkv(12)
    sinks = torch.zeros(4)
    ring_attention(q, k.detach(), v.detach(), sharding, sinks=sinks).sum().backward()
    assert q.grad is not None
    assert k.grad is None
    assert sinks.grad is None


@pytest.mark.parametrize(
    ("name", "shape"), [("sinks", (4,)), ("alibi_slopes", (4,)), ("key_bias", (1, 12)), ("bias", (1, 4, 12, 12))]
)
def test_an_option_alone_gets_its_gradient(name: str, shape: tuple[int, ...]) -> None:
    sharding = Ring().sharding(12)
    q, k, v = (x.detach() for x in qkv(12))
    grads = []
    calls: list[Callable[..., Any]] = [
        partial(ring_attention, q, k, v, sharding),
        partial(attention_reference, q, k, v),
    ]
    for attend in calls:
        option = torch.full(shape, 0.5, requires_grad=True)
        grads += torch.autograd.grad(attend(**{name: option}).square().sum(), option)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


def test_a_dropped_ring_lives_until_backward() -> None:
    leaves = qkv(12)
    o = ring_attention(*leaves, Ring().sharding(12), causal=True)
    o.sum().backward()
    assert leaves[0].grad is not None


def test_processes_exit_cleanly_with_living_rings(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from ringattn import Ring, ring_attention\n"
        "dist.init_process_group('gloo')\n"
        "ring = Ring(); sharding = ring.sharding(10)\n"
        "x = torch.randn(1, sharding.shard_len, 2, 16, requires_grad=True)\n"
        "ring_attention(x, x, x, sharding, causal=True).sum().backward()\n"
        "print('done', flush=True)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(
        command, cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class _Counting:
    """An operator whose calls from outside are counted."""

    def __init__(self, op: Any) -> None:
        self._op = op
        self.calls = 0
        self.redispatch = op.redispatch

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self._op(*args)


class _Subclass(torch.Tensor):
    """A tensor with ideas of its own."""


@contextlib.contextmanager
def _function_mode() -> Iterator[None]:
    with torch.device("cpu"):
        yield


@pytest.mark.parametrize(
    ("watcher", "seen"),
    [
        (contextlib.nullcontext, (0, 0)),
        (torch.profiler.profile, (1, 1)),
        (FlopCounterMode, (1, 1)),
        (_function_mode, (1, 0)),  # torch leaves such modes while it differentiates
    ],
)
def test_operators_are_called_where_somebody_looks(monkeypatch: pytest.MonkeyPatch, watcher: Any, seen: Any) -> None:
    called = [_Counting(autograd.ring_attention_op), _Counting(autograd.ring_attention_backward_op)]
    monkeypatch.setitem(autograd._OPERATORS, 10, called)
    sharding = Ring().sharding(9)
    leaves = [torch.randn(1, 9, 2, 8, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3)]

    def step() -> list[Tensor]:
        o = ring_attention(leaves[0], leaves[1], leaves[2], sharding, causal=True)
        return [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]

    expected = step()
    assert [one.calls for one in called] == [0, 0]
    with watcher(display=False) if watcher is FlopCounterMode else watcher():
        found = step()
    assert tuple(one.calls for one in called) == seen
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_seed_of_64_bits_is_the_same_signed_and_unsigned() -> None:
    x, sharding = torch.randn(1, 9, 2, 8), Ring().sharding(9)

    def step(seed: int) -> Tensor:
        return ring_attention(x, x, x, sharding, dropout_p=0.5, dropout_seed=seed)

    with torch.profiler.profile():
        found = step(2**64 - 3)
    assert torch.equal(found, step(2**64 - 3))
    torch.testing.assert_close(found, attention_reference(x, x, x, dropout_p=0.5, dropout_seed=2**64 - 3))


def test_a_seed_of_64_bits_is_the_same_compiled() -> None:
    x, sharding = torch.randn(1, 9, 2, 8), Ring().sharding(9)

    def step(seed: int) -> Tensor:
        return ring_attention(x, x, x, sharding, dropout_p=0.5, dropout_seed=seed)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    # the first is a constant of the graph, others are symbols
    for seed in (2**64 - 3, 2**64 - 5, 2**63, 5, -3, 2**63 - 1):
        assert torch.equal(compiled(seed), step(seed))


def test_subclasses_of_tensors_see_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    sharding, op = Ring().sharding(9), _Counting(autograd.ring_attention_op)
    monkeypatch.setitem(autograd._OPERATORS, 10, (op, autograd.ring_attention_backward_op))
    x = torch.randn(1, 9, 2, 8)
    parameter = torch.nn.Parameter(x.clone())
    ring_attention(parameter, parameter, parameter, sharding)
    assert not op.calls
    ring_attention(x.as_subclass(_Subclass), x, x, sharding)
    assert op.calls
