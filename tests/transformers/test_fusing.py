"""Compiled and joined parts: the same numbers within rounding, and all or nothing on all ranks."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

from ringattn.integrations.transformers import fusing
from ringattn.integrations.transformers.fusing import CannotFuse, fuse
from ringattn.integrations.transformers.products import Product, find_gate
from ringattn.integrations.transformers.replacing import Replacement, is_product, replace
from ringattn.kernels import few_rows
from ringattn.kernels import rotate as turning
from ringattn.ring import Ring
from tests.pool import Pools
from tests.transformers.models import CONFIGS, make

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 60}


def small(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **options)).eval()


@torch.no_grad()
@pytest.mark.parametrize(("kind", "norms"), [("llama", 2), ("qwen3", 4), ("gemma2", 4)])
def test_a_model_with_fused_parts_gives_the_same(kind: str, norms: int):
    model, ids = small(kind), torch.arange(14).view(2, 7)
    expected = model(ids).logits
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        del inputs

        def run(*arguments: Any) -> Any:
            calls.append(1)
            return graph.forward(*arguments)

        return run

    compiled = 2 * (norms + 2) + 1  # an MLP and a rotation in each layer, and the last norm
    assert fuse(model, Ring(), backend=backend) == compiled + 2 * 3
    calls.clear()
    torch.testing.assert_close(model(ids).logits, expected)
    assert len(calls) == compiled


def test_a_model_with_fused_parts_is_not_copied(tmp_path: Path):
    """A copy would run the weights of the first one."""
    model = small("llama")
    fuse(model, Ring(), backend="eager")
    for way in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="copied or saved whole before parts of it are fused"):
            way(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(x.equal(y) for x, y in zip(model.parameters(), again.parameters(), strict=True))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["mistral", "gemma3", "gpt_oss", "llama4", "phi3", "glm", "starcoder2"])
def test_every_kind_of_model_can_be_fused(kind: str):
    """Rotations by half as many angles as a head has, of a part of each head, of complex numbers; products that are one already."""
    torch._dynamo.reset()
    if kind in CONFIGS:
        model, ids = make(kind, "eager", torch.float32, head_dim=32).eval(), torch.arange(14).view(2, 7)
    else:
        model, ids = small(kind, pad_token_id=0, eos_token_id=2), torch.arange(14).view(2, 7)
    expected = model(ids).logits
    assert fuse(model, Ring(), backend="eager") > 2
    torch.testing.assert_close(model(ids).logits, expected)


class CountedKernels:
    """Says that there are kernels for few rows, and counts the calls; a CPU computes them in plain torch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = {"multiply": 0, "gate": 0}
        monkeypatch.setattr(few_rows, "has_kernel", lambda *weights: all(one.dim() == 2 for one in weights))
        for name in self.calls:
            monkeypatch.setattr(few_rows, name, self._seeing(name, getattr(few_rows, name)))

    def _seeing(self, name: str, call: Any) -> Any:
        def seen(*given: Any, **named: Any) -> Any:
            self.calls[name] += 1
            return call(*given, **named)

        return seen

    def since(self) -> dict[str, int]:
        """Calls since the last look."""
        found = dict(self.calls)
        self.calls.update(multiply=0, gate=0)
        return found


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen2"])
def test_few_rows_take_kernels_and_many_do_not(kind: str, monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    counted, model = CountedKernels(monkeypatch), small(kind)
    few, many = torch.arange(14).view(2, 7), torch.arange(60).view(2, 30).remainder(50)
    expected = [model(ids).logits for ids in (few, many)]
    # norms (of two layers and the last one), rotations, MLPs, q, k and v, and what is left: o and the head
    norms = 2 * (4 if kind == "gemma2" else 2) + 1
    assert fuse(model, Ring(), backend="eager") == norms + 2 * (1 + 1 + 3) + 2 + 1
    counted.since()
    torch.testing.assert_close(model(few).logits, expected[0])
    assert counted.since() == {"multiply": 2 * (1 + 1 + 1) + 1, "gate": 2}  # qkv, o, down; gate and up
    torch.testing.assert_close(model(many).logits, expected[1])
    assert counted.since() == {"multiply": 0, "gate": 2}  # 60 rows


@torch.no_grad()
@pytest.mark.parametrize("kernels", [False, True])
def test_a_row_by_itself_is_multiplied_as_torch_does(kernels: bool, monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    counted, model = CountedKernels(monkeypatch), small("llama")
    if not kernels:
        monkeypatch.setattr(few_rows, "has_kernel", lambda *_: False)
    layer, x = model.model.layers[0], torch.randn(model.config.hidden_size)
    parts = [layer.input_layernorm, layer.mlp, *(getattr(layer.self_attn, f"{name}_proj") for name in "qkv")]
    expected = [part(x) for part in parts]
    fuse(model, Ring(), backend="eager")
    counted.since()
    for part, y in zip(parts, expected, strict=True):
        torch.testing.assert_close(part(x), y)
    assert counted.since() == {"multiply": 2 * kernels, "gate": 1 * kernels}


@torch.no_grad()
@pytest.mark.parametrize(("kind", "by_halves"), [("llama", True), ("qwen3", True), ("glm", False)])
def test_rotations_by_halves_take_a_kernel(kind: str, by_halves: bool, monkeypatch: pytest.MonkeyPatch):
    """A rotation of neighbours in a head does not."""
    torch._dynamo.reset()
    model, ids, calls = small(kind, pad_token_id=0, eos_token_id=2), torch.arange(14).view(2, 7), []
    expected = model(ids).logits

    def rotate(*given: torch.Tensor) -> Any:
        calls.append(1)
        return turning.rotate_eager(*given)

    monkeypatch.setattr(turning, "has_kernel", lambda *given: len(given) == 4)
    monkeypatch.setattr(turning, "rotate", rotate)
    fuse(model, Ring(), backend="eager")
    calls.clear()
    torch.testing.assert_close(model(ids).logits, expected)
    assert len(calls) == (2 if by_halves else 0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["self_attn", "mlp"])
def test_what_somebody_has_wrapped_around_a_forward_stays_there(name: str, monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    model, ids = small("llama"), torch.arange(14).view(2, 7)
    kind = type(getattr(model.model.layers[0], name))
    CountedKernels(monkeypatch)
    plain, factor = kind.forward, [1.0]

    @functools.wraps(plain)
    def steered(*given: Any, **named: Any) -> Any:
        found = plain(*given, **named)
        return factor[0] * found if name == "mlp" else (factor[0] * found[0], *found[1:])

    monkeypatch.setattr(kind, "forward", steered)
    fuse(model, Ring(), backend="eager")
    factor[0] = 3.0
    found = model(ids).logits
    monkeypatch.undo()
    other = small("llama")
    for layer in other.model.layers:
        last = layer.self_attn.o_proj if name == "self_attn" else layer.mlp.down_proj
        last.weight *= 3
    torch.testing.assert_close(found, other(ids).logits)


def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any) -> Any:
    """Of the code that comes with some models: it needs one argument more."""
    return q * cos[position_ids], k * sin[position_ids]


class _OtherAttention(nn.Module):
    """An attention that rotates otherwise."""

    head_dim = 8

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Any, cos: Any, sin: Any, position_ids: Any) -> Any:
        return apply_rotary_pos_emb(self.q_proj(x), self.k_proj(x), cos, sin, position_ids)


def test_a_rotation_by_more_than_angles_stays_as_it_is():
    attention = _OtherAttention()
    assert fuse(nn.ModuleList([attention]), Ring(), backend="eager") == 3
    assert "forward" not in vars(attention)


class _GatedMLP(nn.Module):
    """A gate between products."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False)
        self.down_proj, self.act_fn = nn.Linear(48, 32, bias=False), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class _ClampedMLP(_GatedMLP):
    """Does something more, which shows in large numbers alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=1e9) * self.up_proj(x))


class _OtherMLP(_GatedMLP):
    """Names the same, and computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)


def test_only_mlps_that_are_a_gate_and_nothing_else_are_taken_for_one():
    torch.manual_seed(0)
    assert find_gate(_GatedMLP()) is not None
    assert find_gate(_ClampedMLP()) is None
    assert find_gate(_OtherMLP()) is None
    other = _GatedMLP()
    other.act_fn = nn.Sigmoid()  # pyright: ignore[reportAttributeAccessIssue]
    assert find_gate(other) is None
    other = _GatedMLP()
    other.up_proj.bias = nn.Parameter(torch.ones(48))
    assert find_gate(other) is None, "a bias of one of two"
    other = _GatedMLP()
    other.up_proj.register_forward_hook(lambda *given: given[-1] + 1)
    assert find_gate(other) is None, "somebody else looks on"
    other = _GatedMLP()
    other.act_fn.register_forward_hook(lambda *given: None)
    assert find_gate(other) is None, "between the products, too"
    other = _GatedMLP()
    other.up_proj = nn.Linear(32, 24, bias=False)
    assert find_gate(other) is None, "of other columns"


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "known"),
    [("relu", True), ("gelu_new", True), ("gelu_python", True), ("relu6", False), ("gelu_10", False)],
)
def test_activations_that_are_cut_off_far_out_are_none_of_a_gate(name: str, known: bool):
    mlp = _GatedMLP()
    mlp.act_fn = ACT2FN[name]
    assert (find_gate(mlp) is not None) == known


@torch.no_grad()
@pytest.mark.parametrize(("kind", "joined"), [("llama", False), ("qwen2", False), ("phi3", True), ("glm", True)])
def test_gates_of_slices_end_in_what_the_whole_gives(kind: str, joined: bool):
    mlp, x = small(kind, pad_token_id=0, eos_token_id=2).model.layers[0].mlp, torch.randn(2, 3, 32)
    parts = [find_gate(mlp, mine) for mine in (slice(0, 16), slice(16, 48))]
    assert parts[0] is not None
    assert parts[1] is not None
    assert parts[0].joined == joined
    found = torch.cat([part(x) for part in parts if part is not None], -1)
    torch.testing.assert_close(mlp.down_proj(found), mlp(x))


def test_what_is_differentiated_or_cast_takes_no_kernel(monkeypatch: pytest.MonkeyPatch):
    counted = CountedKernels(monkeypatch)
    product, x = Product(torch.randn(4, 8)), torch.randn(2, 8, requires_grad=True)
    product(x).sum().backward()
    assert x.grad is not None
    assert counted.since()["multiply"] == 0
    product(x.detach())
    assert counted.since()["multiply"] == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert Product(torch.randn(4, 8).bfloat16())(x.detach()).dtype == torch.bfloat16
    assert counted.since()["multiply"] == 0


@pytest.mark.parametrize("kernels", [True, False])
def test_a_model_with_fused_parts_learns_what_it_learnt(kernels: bool, monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    if kernels:
        CountedKernels(monkeypatch)
    model, other, ids = small("qwen2"), small("qwen2"), torch.arange(14).view(2, 7)
    fuse(model, Ring(), backend="eager")
    for one in (model, other):
        one.model.embed_tokens.requires_grad_(False)  # so that the first rows have no gradient
        one(ids, labels=ids).loss.backward()
    for (name, x), y in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (x.grad is None) == (y.grad is None), name
        torch.testing.assert_close(x.grad, y.grad, msg=lambda text, name=name: f"{name}: {text}")


class _Adapted(nn.Module):
    """A product and something more, as adapters are put in."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.base(x)


@torch.no_grad()
@pytest.mark.parametrize("kernels", [True, False])
def test_weights_and_products_that_are_put_in_later_count(kernels: bool, monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    if kernels:
        CountedKernels(monkeypatch)
    model, other, ids = small("llama"), small("llama"), torch.arange(14).view(2, 7)
    fuse(model, Ring(), backend="eager")
    for x in other.parameters():
        x.mul_(1.5)
    model.load_state_dict({name: x.clone() for name, x in other.state_dict().items()}, assign=True)
    torch.testing.assert_close(model(ids).logits, other(ids).logits)
    for one in (model, other):
        for layer in one.model.layers:
            layer.mlp.gate_proj, layer.self_attn.q_proj = (
                _Adapted(layer.mlp.gate_proj),
                _Adapted(layer.self_attn.q_proj),
            )
    torch.testing.assert_close(model(ids).logits, other(ids).logits)
    torch.testing.assert_close(model.double()(ids).logits, other.double()(ids).logits)


def _wrong(graph: Any, inputs: Any) -> Any:
    del inputs
    return lambda *arguments: tuple(x * 1.01 if x.is_floating_point() else x for x in graph.forward(*arguments))


def _failing(graph: Any, inputs: Any) -> Any:
    raise OSError("no compiler")


@torch.no_grad()
@pytest.mark.parametrize(
    ("backend", "why"), [(_wrong, "(MLP|Norm|Attention) fused differs by"), (_failing, "no compiler")]
)
def test_parts_that_are_wrong_or_do_not_compile_stay_as_they_were(backend: Any, why: str):
    model, ids = small("llama"), torch.arange(14).view(2, 7)
    expected = model(ids).logits
    with pytest.raises(CannotFuse, match=why):
        fuse(model, Ring(), backend=backend)
    assert model(ids).logits.equal(expected)
    assert not any("forward" in vars(part) for part in model.modules())
    assert _have_memory_of_their_own(model)


def _have_memory_of_their_own(model: nn.Module) -> bool:
    return all(x.untyped_storage().nbytes() == x.nbytes for x in model.parameters())


@torch.no_grad()
def test_weights_have_memory_of_their_own_where_parts_can_not_be_found(monkeypatch: pytest.MonkeyPatch):
    model, ids = small("qwen2"), torch.arange(14).view(2, 7)  # with biases
    expected, made = model(ids).logits, []

    def joined(products: Any) -> Any:
        if made:
            raise torch.OutOfMemoryError("no memory")
        made.append(real(products))
        return made[-1]

    real = fusing._Joined
    monkeypatch.setattr(fusing, "_Joined", joined)
    with pytest.raises(CannotFuse, match="no memory"):
        fuse(model, Ring(), backend="eager")
    assert len(made) == 1
    assert _have_memory_of_their_own(model)
    assert model(ids).logits.equal(expected)


def test_long_sums_in_another_order_are_no_error_and_wrong_ones_are():
    """As a library of products makes them for other shapes: sums of 4,096 products, here one after the other."""
    torch.manual_seed(0)
    part = nn.Linear(4096, 64, bias=False)
    rows = [(torch.randn(5, 4096),)]

    def one_by_one(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        total = torch.zeros(len(x), len(part.weight))
        for a, w in zip(x.unbind(1), part.weight.unbind(1), strict=True):
            total += a[:, None] * w
        return factor * total

    with torch.no_grad():
        assert replace([Replacement(part, "order", one_by_one, rows)], Ring(), "cut") == ""
        wrong = replace([Replacement(part, "wrong", lambda x: one_by_one(x, 1.0001), rows)], Ring(), "cut")
    assert "Linear cut differs by" in wrong


def _fuse_on(fault: str) -> tuple[str, bool]:
    """What a rank is told whose neighbour fails, has no memory, or gets other bits."""
    torch._dynamo.reset()
    model = small("llama")

    def no_memory(*given: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    def backend(graph: Any, inputs: Any) -> Any:
        del inputs
        if dist.get_rank() == 1 and fault == "fails":
            raise OSError("no compiler")
        if dist.get_rank() == 1 and fault == "bits":
            return lambda *arguments: tuple(x + 1e-7 * x for x in graph.forward(*arguments))
        return graph.forward

    try:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1 and fault == "memory":
                patch.setattr(fusing, "_Joined", no_memory)
            fuse(model, Ring(), backend=backend)
    except CannotFuse as error:
        return str(error), any("forward" in vars(part) for part in model.modules())
    return "", True


def test_a_rank_that_fails_or_gets_other_bits_stops_all(pool: Pools):
    assert pool(2).run(_fuse_on, "none") == [("", True)] * 2
    for fault, why in (("fails", "no compiler"), ("memory", "no memory")):
        here, there = pool(2).run(_fuse_on, fault)
        assert here == ("another rank could not", False)
        assert why in there[0]
    for said, fused in pool(2).run(_fuse_on, "bits"):
        assert "what fused parts give" in said
        assert not fused


class _TwoMLP(nn.Module):
    """Takes more than rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x) * gate)


def test_parts_that_take_more_than_rows_or_have_other_weights_are_left_alone():
    packed = small("llama").model.layers[0].mlp
    packed.up_proj.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    assert fuse(nn.ModuleList([_TwoMLP(), nn.LayerNorm(4), nn.RMSNorm(4), packed]), Ring(), backend="eager") == 0


class _Quantised(Tensor):
    """Integers and a scale that look like the floats which they stand for, as packages for quantisation have them."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, whole: Tensor, scale: float) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=torch.float32)  # pyright: ignore[reportAttributeAccessIssue]

    def __init__(self, whole: Tensor, scale: float) -> None:
        self.whole, self.scale = whole, scale

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if call.overloadpacket.__name__ == "detach":
            return cls(args[0].whole, args[0].scale)
        return call(*(x.whole * x.scale if isinstance(x, cls) else x for x in args), **(kwargs or {}))


@torch.no_grad()
def test_weights_that_only_look_like_floats_are_left_alone():
    torch._dynamo.reset()
    model, ids = small("llama"), torch.arange(14).view(2, 7)
    for part in model.model.layers.modules():
        if isinstance(part, nn.Linear):
            whole = (part.weight * 1000).round().to(torch.int8)
            part.weight = nn.Parameter(_Quantised(whole, 0.001), requires_grad=False)
    expected = model(ids).logits
    assert not any(map(is_product, model.model.layers.modules()))
    assert fuse(model, Ring(), backend="eager") > 0
    torch.testing.assert_close(model(ids).logits, expected)


class _BrokenNorm(nn.Module):
    """Does not take rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(3, 3)


def test_a_part_that_can_not_be_tried_is_no_crash():
    with pytest.raises(CannotFuse, match="shape"):
        fuse(nn.ModuleList([_BrokenNorm()]), Ring(), backend="eager")
