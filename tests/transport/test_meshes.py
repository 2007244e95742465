"""The ring beside FSDP2, DDP and tensor parallel: loss and gradients of a whole model equal one process's.

Every model here holds fp64 parameters unless it says otherwise, so that a factor, a missing sum or a row that is counted
twice stands far above rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ringattn import Ring, Sharding, attention_reference, ring_attention
from tests.support.pool import Pools
from tests.support.transformer import (
    IGNORED,
    Operators,
    Transformer,
    loss_sum,
    make_batch,
    make_transformer,
    one_process,
)

ROOT = Path(__file__).parents[2]
SEQ_LEN = 21  # divided by nothing: shards differ in length
Batches = list[tuple[Tensor, Tensor]]
Gradients = dict[str, Tensor]


def make_mesh(dp: int, cp: int, tp: int = 1) -> DeviceMesh:
    """Dims dp, cp and tp, and dp x cp as one more, `dp_cp`."""
    mesh = init_device_mesh("cpu", (dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))
    mesh["dp", "cp"]._flatten("dp_cp")
    return mesh


def local_rows(mesh: DeviceMesh, batch: tuple[Tensor, Tensor], sharding: Sharding) -> tuple[Tensor, Tensor]:
    """This dp rank's sequences and this cp rank's rows of them."""
    tokens, labels = (x.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for x in batch)
    return sharding.shard(tokens, 1), sharding.shard(labels, 1)


def count_labels(batches: Batches) -> int:
    return sum(int((labels != IGNORED).sum()) for _, labels in batches)


def whole_gradients(model: nn.Module) -> Gradients:
    """What lies on other ranks is fetched."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad
        found[name.removeprefix("module.")] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def shard_heads(model: Transformer, mesh: DeviceMesh) -> None:
    """Tensor parallel: each rank has some of the heads, and some of the hidden units."""
    plan = {
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def shard_parameters(model: Transformer, mesh: DeviceMesh, **options: Any) -> list[FSDPModule]:
    """FSDP2, block by block."""
    modules = [fully_shard(module, mesh=mesh, **options) for module in (*model.blocks, model)]
    assert all(isinstance(module, FSDPModule) for module in modules)
    return modules


def accumulate(
    model: nn.Module, mesh: DeviceMesh, batches: Batches, factor: float, sync: Callable[[bool], Any]
) -> Tensor:
    """Backward through all batches, gradients reduced in the last; the loss, summed over ranks."""
    sharding = Ring(mesh["cp"]).sharding(SEQ_LEN)
    count = count_labels(batches)
    total = torch.zeros((), dtype=torch.float64)
    for i, batch in enumerate(batches):
        sync(i == len(batches) - 1)
        tokens, labels = local_rows(mesh, batch, sharding)
        loss = loss_sum(model(tokens, sharding.positions, sharding), labels) / count
        (loss * factor).backward()
        total += loss.detach()
    dist.all_reduce(total, group=mesh["dp_cp"].get_group())
    return total


def with_fsdp(shape: tuple[int, int, int], batches: Batches, recipe: str = "scaled loss") -> tuple[Tensor, Gradients]:
    mesh = make_mesh(*shape)
    model = make_transformer()
    if mesh["tp"].size() > 1:
        shard_heads(model, mesh["tp"])
    modules = shard_parameters(model, mesh["dp", "cp"] if recipe == "replicated over dp" else mesh["dp_cp"])
    factor = float(mesh["dp_cp"].size())
    if recipe == "divide factor":
        factor = 1.0
        for module in modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def sync(last: bool) -> None:
        modules[-1].set_requires_gradient_sync(last)
        modules[-1].set_is_last_backward(last)

    return accumulate(model, mesh, batches, factor, sync), whole_gradients(model)


def with_ddp(shape: tuple[int, int, int], batches: Batches) -> tuple[Tensor, Gradients]:
    mesh = make_mesh(*shape)
    model = DistributedDataParallel(make_transformer(), process_group=mesh["dp_cp"].get_group())

    def sync(last: bool) -> None:
        model.require_backward_grad_sync = last  # what no_sync() sets

    loss = accumulate(model, mesh, batches, float(mesh["dp_cp"].size()), sync)
    return loss, whole_gradients(model)


def assert_equal_to_one_process(results: list[tuple[Tensor, Gradients]], batches: Batches) -> None:
    loss, grads = one_process(batches)
    for found_loss, found in results:
        torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=1e-12)
        assert found.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "shape", [(2, 2, 1), (1, 4, 1), (4, 1, 1), (1, 2, 2), (2, 1, 2)], ids=lambda s: "dp{} cp{} tp{}".format(*s)
)
def test_fsdp_over_dp_and_cp_gives_the_gradients_of_one_process(pool: Pools, shape: tuple[int, int, int]) -> None:
    batches = [make_batch(0, 4, SEQ_LEN)]
    assert_equal_to_one_process(pool(4).run(with_fsdp, shape, batches), batches)


@pytest.mark.parametrize("recipe", ["scaled loss", "divide factor", "replicated over dp"])
def test_accumulated_batches_with_uneven_token_counts_are_one_batch(pool: Pools, recipe: str) -> None:
    batches = [make_batch(seed, 2, SEQ_LEN) for seed in range(3)]
    counts = {int((labels != IGNORED).sum()) for _, labels in batches}
    assert len(counts) > 1, "the counts must differ, or a mean of means would do"
    assert_equal_to_one_process(pool(4).run(with_fsdp, (2, 2, 1), batches, recipe), batches)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ddp_over_dp_and_cp_gives_the_gradients_of_one_process(pool: Pools, world_size: int) -> None:
    batches = [make_batch(seed, 2, SEQ_LEN) for seed in range(2)]
    assert_equal_to_one_process(pool(world_size).run(with_ddp, (world_size // 2, 2, 1), batches), batches)


def fp32_divide_factor() -> Gradients:
    """Fp32 takes another path of FSDP: reduce operations that multiply, which gloo lacks."""
    mesh = make_mesh(1, 2)
    model = make_transformer(torch.float32)
    modules = shard_parameters(model, mesh["dp_cp"])
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    accumulate(model, mesh, [make_batch(0, 2, SEQ_LEN)], 1.0, lambda last: None)
    return whole_gradients(model)


def test_the_divide_factor_is_exact_in_fp32_too(pool: Pools) -> None:
    _, expected = one_process([make_batch(0, 2, SEQ_LEN)])
    for found in pool(2).run(fp32_divide_factor):
        for name, grad in found.items():
            torch.testing.assert_close(grad.double(), expected[name], rtol=1e-4, atol=1e-6)


def in_bf16() -> tuple[Tensor, Gradients, set[torch.dtype]]:
    mesh = make_mesh(2, 2)
    model = make_transformer(torch.float32)
    seen: set[torch.dtype] = set()
    for block in model.blocks:
        attention = block.get_submodule("attention")
        attention.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    modules = shard_parameters(model, mesh["dp_cp"], mp_policy=policy)
    loss = accumulate(model, mesh, [make_batch(0, 4, SEQ_LEN)], 4.0, modules[-1].set_requires_gradient_sync)
    return loss, whole_gradients(model), seen


def test_bf16_parameters_with_fp32_gradients_stay_near_one_process(pool: Pools) -> None:
    loss, expected = one_process([make_batch(0, 4, SEQ_LEN)])
    for found_loss, found, seen in pool(4).run(in_bf16):
        assert seen == {torch.bfloat16}
        torch.testing.assert_close(found_loss, loss, rtol=1e-2, atol=0)
        for name, grad in found.items():
            assert grad.dtype == torch.float32
            error = (grad.double() - expected[name]).norm() / expected[name].norm()
            assert error < 0.05, f"{name}: {error}"  # a bf16 step is 0.004; a lost factor would be 0.5 or more


def count_with_recomputation(recompute: str | None) -> tuple[int, int, Gradients]:
    mesh = make_mesh(2, 1)
    model = make_transformer(recompute=recompute)
    modules = shard_parameters(model, mesh["dp_cp"])
    with Operators() as operators:
        accumulate(model, mesh, [make_batch(0, 2, SEQ_LEN)], 2.0, modules[-1].set_requires_gradient_sync)
    return operators.forwards, operators.backwards, whole_gradients(model)


@pytest.mark.parametrize(("recompute", "forwards"), [(None, 2), ("full", 4), ("selective", 2)])
def test_selective_checkpointing_under_fsdp_runs_each_ring_once(
    pool: Pools, recompute: str | None, forwards: int
) -> None:
    _, expected = one_process([make_batch(0, 2, SEQ_LEN)])
    for found_forwards, found_backwards, grads in pool(2).run(count_with_recomputation, recompute):
        assert (found_forwards, found_backwards) == (forwards, 2)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-12)


def interleaved() -> float:
    """A ring over cp, one over everything and one over dp; layers of different rings follow each other."""
    mesh = make_mesh(2, 2)
    rings = [Ring(mesh["cp"]), Ring(mesh["dp_cp"]), Ring(mesh["dp"]), Ring()]
    worst = 0.0
    for turn in range(2):
        kept = []
        for i, ring in enumerate(rings):
            # the ranks of a ring have one sequence; two rings over the same dim have two
            dim = ("cp", None, "dp", None)[i]
            other = 0 if dim is None else dist.get_rank() // 2 if dim == "cp" else dist.get_rank() % 2
            g = torch.Generator().manual_seed(100 * turn + 10 * i + other)
            whole = torch.randn(4, 1, SEQ_LEN + i, 2, 8, dtype=torch.float64, generator=g)
            sharding = ring.sharding(SEQ_LEN + i)
            leaves = [sharding.shard(x, 1).requires_grad_() for x in whole[:3]]
            q, k, v = leaves
            kept.append((sharding, leaves, ring_attention(q, k, v, sharding, causal=True), whole))
        for sharding, leaves, o, whole in kept[::-1] if turn else kept:  # backwards in either order
            *inputs, do = whole
            inputs = [x.requires_grad_() for x in inputs]
            expected = attention_reference(*inputs, causal=True)
            grads = torch.autograd.grad(o, leaves, sharding.shard(do, 1))
            wanted = torch.autograd.grad(expected, inputs, do)
            for x, y in zip((o, *grads), (expected, *wanted), strict=True):
                worst = max(worst, float((x - sharding.shard(y, 1)).abs().max()))
    return worst


def test_rings_over_different_dims_take_turns_in_one_process(pool: Pools) -> None:
    assert max(pool(4).run(interleaved)) < 1e-13


def rings_of_meshes() -> list[tuple[int, int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    with pytest.raises(ValueError, match=r"a mesh must have one dimension, got 2; pass a slice such as mesh\['cp'\]"):
        Ring(mesh)
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    found = [Ring(m) for m in (mesh["cp"], flat, mesh["dp_cp"], mesh["dp"])]
    return [(ring.rank, ring.world_size) for ring in found]


def test_a_ring_spans_one_dim_of_a_mesh(pool: Pools) -> None:
    for rank, found in enumerate(pool(4).run(rings_of_meshes)):
        assert found == [(rank % 2, 2), (rank, 4), (rank, 4), (rank // 2, 2)]


NAMES = ("q", "k", "v", "sinks", "alibi_slopes", "key_bias", "bias")
ADVICE = (
    "must be a plain tensor, got a DTensor; wrap the call in torch.distributed.tensor.experimental.local_map, or pass"
)


def refused(call: Callable[[], Any], by: type[Exception] = NotImplementedError) -> str:
    with pytest.raises(by) as caught:
        call()
    return str(caught.value)


def refuse_dtensors() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    ring = Ring(mesh["cp"])
    sharding = ring.sharding(12)
    rows, x = sharding.shard_len, torch.ones
    plain = {"sinks": x(2), "alibi_slopes": x(2), "key_bias": x(1, rows), "bias": x(1, 2, rows, 12)}
    plain |= dict.fromkeys("qkv", x(1, rows, 2, 16))
    found = {}
    for name in NAMES:
        for placement in (Shard(1 if plain[name].ndim == 4 else 0), Replicate()):
            given = {**plain, name: DTensor.from_local(plain[name], mesh, [placement], run_check=False)}
            found[f"{name} {placement}"] = refused(lambda given=given: ring_attention(sharding=sharding, **given))
    whole = distribute_tensor(x(1, 12, 2, 16), mesh, [Shard(1)])
    found["x"] = refused(lambda: sharding.shard(whole))
    found["x_local"] = refused(lambda: sharding.unshard(whole))
    for fullgraph in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(lambda q: ring_attention(q, q, q, sharding), backend="aot_eager", fullgraph=fullgraph)
        by = Unsupported if fullgraph else NotImplementedError  # what dynamo makes of any raise
        text = refused(lambda compiled=compiled: compiled(whole), by)
        found[f"q compiled {fullgraph}"] = text.partition("NotImplementedError('")[2].partition("')")[0] or text
    # nothing was sent and nothing is left behind: the ring still works
    q = torch.randn(1, rows, 2, 16)
    assert ring_attention(q, q, q, sharding).shape == q.shape
    return found


def test_dtensors_are_refused_and_the_message_names_the_alternative(pool: Pools) -> None:
    for found in pool(2).run(refuse_dtensors):
        assert len(found) == 2 * len(NAMES) + 4
        for case, message in found.items():
            name = case.partition(" ")[0]
            assert message == f"{name} {ADVICE} {name}.to_local()", case


def refuse_on_one_rank() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    ring = Ring(mesh["cp"])
    sharding = ring.sharding(12)
    q = torch.ones(1, sharding.shard_len, 2, 16)
    given = DTensor.from_local(q, mesh, [Shard(1)], run_check=False) if ring.rank == 1 else q
    try:
        ring_attention(given, q, q, sharding)
    except (NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_a_dtensor_on_one_rank_is_refused_on_all(pool: Pools) -> None:
    other, own = pool(2).run(refuse_on_one_rank)
    assert own.startswith(f"NotImplementedError: q {ADVICE} q.to_local()")
    assert other.startswith(f"ValueError: ring rank 1 refused: NotImplementedError: q {ADVICE} q.to_local()")


def through_local_map(compiled: bool) -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    ring = Ring(mesh["cp"])
    sharding = ring.sharding(12, layout="contiguous")  # the order in which Shard(1) cuts
    rows = [Shard(1)]
    attend = local_map(
        lambda q, k, v: ring_attention(q, k, v, sharding, causal=True),
        out_placements=rows,
        in_placements=(rows, rows, rows),
        device_mesh=mesh["cp"],
    )
    run = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    whole = [torch.randn(1, 12, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    do = torch.randn(1, 12, 2, 8, dtype=torch.float64)
    leaves = []
    for x in whole:
        leaf = distribute_tensor(x.detach(), mesh["cp"], rows)
        leaf.requires_grad_()
        leaves.append(leaf)
    o = run(*leaves)
    assert isinstance(o, DTensor)
    assert o.placements == (Shard(1),)
    grads = torch.autograd.grad(o, leaves, distribute_tensor(do, mesh["cp"], rows))
    expected = attention_reference(*whole, causal=True)
    wanted = torch.autograd.grad(expected, whole, do)
    # and by hand, as the message says too
    q, k, v = (x.to_local() for x in leaves)
    assert torch.equal(ring_attention(q, k, v, sharding, causal=True), o.to_local())
    worst = 0.0
    for x, y in zip((o, *grads), (expected, *wanted), strict=True):
        assert isinstance(x, DTensor)
        worst = max(worst, float((x.full_tensor() - y).abs().max()))
    return worst


@pytest.mark.parametrize("compiled", [False, True])
def test_local_map_is_the_alternative_of_the_message(pool: Pools, compiled: bool) -> None:
    assert max(pool(2).run(through_local_map, compiled)) < 1e-14


BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "meshes.md").read_text(), re.DOTALL)


def run_page(blocks: list[str]) -> list[Gradients]:
    """The page's code in one namespace; gradients after the first recipe, its micro-batches and DDP's."""
    tokens, labels = make_batch(0, 4, SEQ_LEN)
    names: dict[str, Any] = {"device": "cpu", "backend": "aot_eager", "tokens": tokens, "labels": labels}
    names |= {"model": make_transformer(), "make_model": lambda: make_transformer(torch.float32)}
    found = []
    for block in blocks:
        exec(compile(block, "docs/meshes.md", "exec"), names)
        if ".backward()" in block and len(found) < 3:
            found.append(whole_gradients(names["copies"] if "copies" in names else names["model"]))
    assert isinstance(names["o"], DTensor)
    assert names["block"].attention.wq.weight.grad is not None
    return found


@pytest.mark.slow
def test_the_page_about_meshes_runs_and_its_recipes_are_exact(pool: Pools) -> None:
    _, expected = one_process([make_batch(0, 4, SEQ_LEN)])
    for found in pool(4, 120).run(run_page, BLOCKS):
        for grads, tolerance in zip(found, (1e-10, 1e-10, 1e-4), strict=True):
            for name, grad in grads.items():
                torch.testing.assert_close(grad.double(), expected[name], rtol=tolerance, atol=tolerance * 1e-2)
