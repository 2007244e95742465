"""Checkpoints in host memory and MLPs by chunks: the same numbers, and the memory that is counted for them."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ringattn
from ringattn.launch.train.model import Mlp, Transformer
from ringattn.sizing.shapes import ModelShape
from ringattn.training import checkpoint_layers_, chunk_rows_, chunked_rows, offload, row_chunks, save_memory_
from ringattn.training.memory import decoder_layers
from ringattn.training.offload import Copier, Offloader

TOKENS = 48
SHAPE = ModelShape("x", 16, 4, 4, 2, 8, 40, vocab_size=64)
OFFLOADS: tuple[Any, ...] = (True, 2, (0, 3))


def make_model(layers: int = 4) -> Transformer:
    model = Transformer(ModelShape("x", 16, layers, 4, 2, 8, 40, vocab_size=64))
    model.initialise_(0)
    return model


def run(prepare: Callable[[Transformer], object], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The loss and the gradients of a rank's rows."""
    model, ring = make_model().to(dtype), ringattn.Ring(dist.group.WORLD if dist.is_initialized() else None)
    prepare(model)
    sharding = ring.sharding(TOKENS)
    tokens = torch.randint(64, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(2):  # host buffers are used again in the second step
        model.zero_grad()
        loss = model(*(sharding.shard(tokens, dim=1), sharding), targets=sharding.shard(tokens, dim=1))
        loss.backward()
        found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return found


def same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def compare_offloads() -> list[tuple[str, Any]]:
    """The ways in which the numbers of a rank differ from those without offload."""
    expected = run(lambda model: None)
    ways = [(how, chosen) for how in ("selective", "full") for chosen in OFFLOADS]
    return [
        way
        for way in ways
        if not same_bits(run(lambda model, way=way: save_memory_(model, recompute=way[0], offload=way[1])), expected)
    ]


# offload


def test_offload_changes_no_bit_of_losses_and_gradients(pool) -> None:
    assert pool(2).run(compare_offloads) == [[], []]


class LateCopier:
    """A side stream that copies at the last moment, from and to addresses, and refuses memory that was freed before."""

    def __init__(self) -> None:
        self.queue: list[tuple[int, list[Any]]] = []
        self.log: list[str] = []
        self.events = 0

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> int:
        self.events += 1
        places = [
            (to.data_ptr(), x.data_ptr(), x.nbytes, *(StorageWeakRef(y.untyped_storage()) for y in (to, x)))
            for to, x in pairs
        ]
        self.queue.append((self.events, places))
        self.log.append(f"copy {self.events}")
        return self.events

    def wait(self, event: int) -> None:
        self.log.append(f"wait {event}")
        while self.queue and self.queue[0][0] <= event:
            for to, x, num_bytes, *storages in self.queue.pop(0)[1]:
                assert not any(storage.expired() for storage in storages), "memory was freed before its copy"
                ctypes.memmove(to, x, num_bytes)


@pytest.fixture
def late(monkeypatch) -> LateCopier:
    """The copier of all offloaders of a test."""
    copier = LateCopier()
    monkeypatch.setattr(Offloader, "make_copier", lambda self, device: copier)
    monkeypatch.setattr(offload, "CHUNK_BYTES", 256)
    return copier


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("chosen", OFFLOADS)
def test_copies_that_run_as_late_as_events_allow_change_no_bit(late: LateCopier, recompute: str, chosen: Any) -> None:
    expected = run(lambda model: None)
    assert same_bits(run(lambda model: save_memory_(model, recompute=recompute, offload=chosen)), expected)
    assert late.events > 0


def test_memory_that_is_freed_before_its_copy_would_be_found(late: LateCopier, monkeypatch) -> None:
    monkeypatch.setattr(LateCopier, "wait", lambda self, event: None)
    assert not same_bits(
        run(lambda model: save_memory_(model, recompute="full", offload=True)), run(lambda model: None)
    )


def test_the_backward_of_a_layer_starts_the_copies_of_the_one_before(late: LateCopier) -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for i, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, i=i: late.log.append(f"layer {i}"))
        layer.forward = (  # the hook does not see the second run
            lambda x, i=i, forward=layer.forward: (late.log.append(f"run {i}"), forward(x))[1]
        )
    checkpoint_layers_(list(layers), "full", offload=True)
    loss = layers(torch.ones(2, 4, requires_grad=True)).sum()
    # a layer's input is copied while it runs, and its memory is given back when the next one begins
    assert late.log[:5] == ["copy 1", "run 0", "layer 0", "wait 1", "copy 2"]
    late.log.clear()
    loss.backward()
    # the last input is still there; each second run comes after the copy for the next
    assert late.log == [
        *("copy 5", "run 3", "wait 4"),
        *("copy 6", "wait 5", "run 2"),
        *("copy 7", "wait 6", "run 1"),
        *("wait 7", "run 0"),
    ]


def test_host_memory_is_used_again_and_returned(monkeypatch) -> None:
    monkeypatch.setattr(offload, "CHUNK_BYTES", 256)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    host = checkpoint_layers_(list(layers), "full", offload=True)
    assert host is not None
    sizes = []
    for _ in range(3):
        layers(torch.ones(8, 64, requires_grad=True)).sum().backward()
        sizes.append(host.host_bytes)
    # three inputs of 8 x 64 fp32 are 24 buffers; 16 are allocated at once
    assert sizes == [32 * 256] * 3


def test_two_backwards_of_one_forward_are_equal() -> None:
    for recompute in ("full", "selective"):
        model, sharding = make_model(), ringattn.Ring().sharding(TOKENS)
        save_memory_(model, recompute=recompute, offload=True)
        loss = model(torch.arange(TOKENS)[None], sharding, torch.arange(TOKENS)[None])
        first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
        assert same_bits(list(first), list(second))


@pytest.mark.parametrize("make", [lambda x: x.mT, lambda x: x[:, :3], lambda x: x.expand(2, -1, -1)])
def test_strides_come_back_as_they_were_and_values_always(make: Callable[[Tensor], Tensor]) -> None:
    x = make(torch.arange(20.0).view(1, 4, 5).squeeze(0)[None])
    group = Offloader().begin()
    saved = group.save(x)
    saved.release()
    found = saved.get()
    assert torch.equal(found, x)
    assert found.stride() == x.stride() or not x.mT.is_contiguous()


def test_an_activation_that_is_changed_in_place_is_refused() -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    checkpoint_layers_(layers, "full", offload=True)
    x = torch.ones(2, 4, requires_grad=True) * 1
    y = layers[0](x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        layers[1](y)


def test_a_sharding_of_outside_is_current_in_the_second_run() -> None:
    for recompute in ("full", "selective"):
        for chosen in (False, True):
            x, layer = torch.randn(1, 2, 6, 8, requires_grad=True), nn.Identity()
            layer.forward = lambda input: ringattn.scaled_dot_product_attention(input, input, input, is_causal=True)
            checkpoint_layers_([layer], recompute, offload=chosen)
            with ringattn.use_sharding(ringattn.Ring().sharding(6)):
                loss = layer(x).sum()
            loss.backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": "some"}, "recompute must be one of"),
        ({"recompute": "none", "offload": True}, "offload must come with recompute"),
        ({"recompute": "full", "offload": 5}, "offload must be at most the number of layers, 4, got 5"),
        ({"recompute": "full", "offload": (1, 4)}, r"offload must name layers from 0 to 3, got \[4\]"),
        ({"mlp_rows": 0}, "rows must be at least 1, got 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        save_memory_(make_model(), **options)


def test_models_without_layers_or_mlps_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"^a model must have its layers in an nn.ModuleList"):
        save_memory_(nn.Linear(2, 2), recompute="full")
    with pytest.raises(NotImplementedError, match=r"^a layer must have an MLP of one tensor"):
        save_memory_(nn.ModuleList([nn.Linear(2, 2)]), mlp_rows=2)


def test_lists_of_experts_and_of_image_encoders_that_are_longer_are_not_the_layers() -> None:
    layers = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))}) for _ in "ab")
    encoder = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(5))
    assert decoder_layers(nn.ModuleDict({"vision": encoder, "text": layers})) == [*layers]


def test_chunks_are_refused_where_routers_return_their_logits() -> None:
    model: Any = make_model()
    model.config = SimpleNamespace(output_router_logits=True)
    with pytest.raises(NotImplementedError, match="got output_router_logits=True: set it to False"):
        save_memory_(model, mlp_rows=2)
    save_memory_(model, recompute="full")


class Routed(nn.Module):
    """A model that takes the option of a call."""

    def __init__(self) -> None:
        super().__init__()
        layer: Any = nn.ModuleDict({"mlp": nn.Linear(2, 2)})
        self.layers = nn.ModuleList([layer])

    def forward(self, x: Tensor, *, output_router_logits: bool | None = None) -> Tensor:
        mlp: Any = self.layers[0].mlp
        return mlp(x)


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: nn.ModuleDict({"inner": model})])
def test_chunks_are_refused_where_a_call_asks_for_the_logits_of_routers(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, x = Routed(), torch.ones(1, 3, 2)
    save_memory_(wrap(model), mlp_rows=2)
    with pytest.raises(NotImplementedError, match=r"got output_router_logits=True: .* leave it out of calls"):
        model(x, output_router_logits=True)
    assert model(x, output_router_logits=False).shape == x.shape


# chunks of rows


@pytest.mark.parametrize("rows", [7, 47])
def test_chunks_have_the_values_and_gradients_of_the_whole(rows: int) -> None:
    expected = run(lambda model: None, torch.float64)
    for recompute in ("none", "selective"):
        found = run(lambda model, how=recompute: save_memory_(model, recompute=how, mlp_rows=rows), torch.float64)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_rows_are_held_by_a_tensor_until_the_backward(monkeypatch) -> None:
    """On torch 2.11 a node frees what it has saved when the tensors that it made are gone."""
    made: list[weakref.ref[Tensor]] = []
    apply = row_chunks._SaveRows.apply

    def record(*inputs: Any) -> Any:
        result = apply(*inputs)
        made.append(weakref.ref(result))
        return result

    monkeypatch.setattr(row_chunks._SaveRows, "apply", record)
    loss = chunked_rows(torch.exp, torch.ones(1, 6, 2, requires_grad=True), 2).sum()
    assert made[0]() is not None
    loss.backward()
    del loss
    assert made[0]() is None


def test_gradients_of_parameters_do_not_lose_digits_to_the_number_of_chunks() -> None:
    torch.manual_seed(0)
    mlp, x = Mlp(SHAPE), torch.randn(1, 4096, 16)
    grad = torch.randn(1, 4096, 16)
    exact = torch.autograd.grad((mlp.double()(x.double()) * grad).sum(), list(mlp.parameters()))
    mlp.bfloat16()

    def error() -> float:
        loss = (mlp(x.bfloat16()) * grad.bfloat16()).sum()
        found = torch.autograd.grad(loss, list(mlp.parameters()))
        return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True))

    whole = error()
    chunk_rows_([mlp], 16)
    assert error() < 1.1 * whole


def test_frozen_weights_inputs_without_gradients_and_no_grad_work() -> None:
    torch.manual_seed(0)
    mlp, x = Mlp(SHAPE).double(), torch.randn(2, 9, 16, dtype=torch.float64)
    mlp.up.requires_grad_(False)
    y = mlp(x)
    wanted = torch.autograd.grad(y.square().sum(), [mlp.gate.weight, mlp.down.weight])
    chunk_rows_([mlp], 4)
    found = torch.autograd.grad(mlp(x).square().sum(), [mlp.gate.weight, mlp.down.weight])
    torch.testing.assert_close(found, wanted)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), y)
    flat = x.flatten(0, 1).requires_grad_()
    torch.testing.assert_close(
        torch.autograd.grad(mlp(flat).sum(), flat)[0].view_as(x),
        torch.autograd.grad(Mlp.forward(mlp, flat).sum(), flat)[0].view_as(x),
    )


def test_dropout_drops_the_same_in_both_passes() -> None:
    x = torch.ones(1, 64, 8, requires_grad=True)
    y = chunked_rows(nn.Dropout(0.5), x, 5)
    torch.rand(3)
    y.sum().backward()
    assert 0 < y.sum() < 2 * x.numel()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


def test_autocast_of_the_forward_is_that_of_the_second_run() -> None:
    mlp, x = Mlp(SHAPE), torch.randn(1, 9, 16)
    chunk_rows_([mlp], 4)
    dtypes = []
    mlp.gate.register_forward_hook(lambda *args: dtypes.append(args[2].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        y = mlp(x)
    y.float().sum().backward()
    assert dtypes == [torch.bfloat16] * 6


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_chunk_is_computed_twice_also_in_a_layer_that_is_recomputed(recompute: str) -> None:
    model, sharding = make_model(), ringattn.Ring().sharding(TOKENS)
    save_memory_(model, recompute=recompute, mlp_rows=16)
    runs = []
    for block in model.blocks:
        block.mlp.gate.register_forward_hook(lambda *args: runs.append(args[2].shape[1]))  # type: ignore[union-attr]
    model(torch.arange(TOKENS)[None], sharding, torch.arange(TOKENS)[None]).backward()
    assert runs == [16] * 2 * 3 * 4


def test_a_second_backward_without_retain_graph_is_refused_and_with_it_equal() -> None:
    mlp, x = Mlp(SHAPE), torch.randn(1, 9, 16, requires_grad=True)
    chunk_rows_([mlp], 4)
    loss = mlp(x).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, x)[0], first)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(loss, x)


def test_modules_that_mix_or_drop_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="must make"):
        chunked_rows(lambda x: x[:, :1], torch.ones(1, 4, 2), 2)
    with pytest.raises(ValueError, match="rows must be"):
        chunked_rows(lambda x: x, torch.ones(4), 2)


# memory


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operators have made and that still exist, now and at most."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = {x.untyped_storage()._cdata for x in model.parameters()}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and x.dtype != torch.uint8:
                storage = x.untyped_storage()
                if storage._cdata in self.parameters:
                    continue
                self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, self.now())
        return found

    def now(self) -> int:
        self.made = {key: x for key, x in self.made.items() if not x[0].expired()}
        return sum(num_bytes for _, num_bytes in self.made.values())


def bytes_when_the_backward_begins(layers: int, **options: Any) -> int:
    model, sharding = make_model(layers), ringattn.Ring().sharding(TOKENS)
    save_memory_(model, **options)
    gc.collect()
    with LiveBytes(model) as live:
        loss = model(torch.arange(TOKENS)[None], sharding, torch.arange(TOKENS)[None])
        found = live.now()
    del loss
    return found


@pytest.mark.parametrize(
    ("options", "counted"),
    [
        # per row of a layer: the stream, and with it what attention returned
        ({"recompute": "full"}, 16 * 4),
        ({"recompute": "selective"}, (16 + 4 * 8 + 4) * 4),
        ({"recompute": "full", "offload": True}, 0),
        ({"recompute": "selective", "offload": True}, 0),
        ({"recompute": "full", "offload": 2}, 16 * 4),
    ],
)
def test_a_layer_more_holds_what_is_counted_until_its_backward(options: dict[str, Any], counted: int) -> None:
    few, many = (bytes_when_the_backward_begins(layers, **options) for layers in (3, 7))
    assert many - few == 4 * TOKENS * counted


def peak_of_mlp(rows: int, tokens: int = 512) -> int:
    mlp, x = Mlp(SHAPE), torch.randn(1, tokens, 16, requires_grad=True)
    chunk_rows_([mlp], rows)
    with LiveBytes(mlp) as live:
        mlp(x).sum().backward()
    return live.most


def test_an_mlp_holds_tensors_of_one_chunk() -> None:
    width = 40 * 4
    growth = [(peak_of_mlp(2 * rows) - peak_of_mlp(rows)) / (rows * width) for rows in (64, 128)]
    # gate, up, their product and gradients: the planner counts six; one row of the stream may come with them
    assert all(6 <= x <= 6 + 16 / 40 for x in growth), growth


def test_gradients_of_weights_of_one_chunk_exist_at_a_time() -> None:
    mlp = Mlp(ModelShape("x", 64, 1, 4, 2, 8, 256, vocab_size=64)).bfloat16()
    chunk_rows_([mlp], 2)
    with LiveBytes(mlp) as live:
        mlp(torch.randn(1, 8, 64, dtype=torch.bfloat16)).sum().backward()
    # sums in fp32, and one gradient in bf16 of each
    assert live.most < 6.5 * sum(p.numel() for p in mlp.parameters())


@contextmanager
def counting() -> Iterator[list[int]]:
    """Count the bytes that are saved for the backward."""
    found = [0]

    def pack(x: Tensor) -> Tensor:
        found[0] += x.nbytes
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        yield found


def test_an_mlp_by_chunks_saves_its_rows_alone() -> None:
    mlp, x = Mlp(SHAPE), torch.randn(1, 512, 16, requires_grad=True)
    with counting() as whole:
        mlp(x)
    chunk_rows_([mlp], 64)
    with counting() as chunked:
        mlp(x)
    assert chunked == [x.nbytes]
    assert whole[0] > 10 * x.nbytes


def test_a_copier_is_what_an_offloader_makes() -> None:
    copier: Copier = Offloader().make_copier(torch.device("cpu"))
    to, x = torch.zeros(3), torch.ones(3)
    copier.wait(copier.copy([(to, x)]))
    assert torch.equal(to, x)
