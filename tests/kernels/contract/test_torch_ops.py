"""The kernel set `torch`, through torch's CPU operator: arithmetic, refusals, and the ring over it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Ring, attention_reference, masks, ring_attention, ring_attention_with_lse, simulate_ring
from ringattn.kernels.attention.torch_ops import api, operators
from ringattn.kernels.attention.torch_ops.api import TorchKernels
from ringattn.kernels.attention.torch_ops.bands import Line, calls
from ringattn.kernels.attention.torch_ops.delta_output import output_for, rest_for
from ringattn.kernels.interface import CallShape, Score, SoftmaxState, Step
from ringattn.kernels.registry import select_kernels
from ringattn.numerics.reference import visible_pairs
from tests.support.budget import assert_within_budget
from tests.support.flash_operator import flash_operator
from tests.support.kernel_conformance import (
    CASES,
    LONG_CASES,
    SMALL_WEIGHT_CASES,
    TERM_CASES,
    Case,
    make_side,
    run_case,
    torch_serves,
)
from tests.support.pool import Pools
from tests.support.request_isolation import BAD, SPOILT, assert_kernels_isolate

CPU = torch.device("cpu")
STREAMING = masks.causal() & (masks.sinks(2) | masks.window(4))
TREE = masks.tree([None, 0, 1, 0], [8, 5, 4, 7])
SERVED = [case for case in (*CASES, *SMALL_WEIGHT_CASES, *TERM_CASES) if torch_serves(case)]
ROCM = (
    "gqa_4", "head_dim_96_v_128", "head_dim_128", "window_left", "documents", "zigzag_window", "left_padding",
    "two_visits",
)  # fmt: skip
FEW_TILES = [
    case for case in LONG_CASES if torch_serves(case) and "window" not in case.name and "runs" not in case.name
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_forward_and_backward_stay_within_budget(case: Case, dtype: torch.dtype) -> None:
    run_case(TorchKernels, case, dtype, "cpu")


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU whose flash operators have windows and variable lengths, in plain torch."""
    operators.check_signatures("flash_cpu")  # kept: the selection asks for operators that the stand-in lacks
    monkeypatch.setattr(operators, "operator", flash_operator)
    monkeypatch.setattr(operators, "preferred", lambda device, faster=None: ("flash",))
    monkeypatch.setattr(operators, "can_run", lambda *args: True)


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", [case for case in (*SERVED, *FEW_TILES) if case.name != "long_runs"], ids=str)
def test_calls_with_windows_and_variable_lengths_stay_within_budget(case: Case, dtype: torch.dtype) -> None:
    run_case(TorchKernels, case, dtype, "cpu")


def test_adjacent_documents_are_one_call_of_variable_lengths() -> None:
    found = calls([Line(0, 3, 0, 0, 1, 1), Line(3, 8, 3, 0, 4, 1)])
    launch = operators.launch_of_call(found[0], (0, 1), CPU)
    assert len(found) == 1
    assert launch.causal
    assert launch.cu_seqlens is not None
    assert [x.tolist() for x in launch.cu_seqlens] == [[0, 3, 8], [0, 3, 8]]
    assert launch.max_seqlens == (5, 5)


@pytest.mark.parametrize("case", FEW_TILES, ids=str)
def test_long_steps_of_few_tiles_stay_within_budget(case: Case) -> None:
    run_case(TorchKernels, case, torch.float32, "cpu")


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_is_not_finite_stays_with_its_request(spoilt: str, bad: float) -> None:
    assert_kernels_isolate(TorchKernels, (300, 170, 90), spoilt, bad, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_output_made_for_delta_has_it_as_its_product_with_do(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    do, delta = torch.randn(2, 40, 3, 64, generator=generator).to(dtype), torch.randn(2, 3, 40, generator=generator)
    do[:, ::4] = 0.0
    do[:, 1::4] *= 1e-5
    delta[:, :, ::8] = 0.0
    delta[:, 0] *= 1e3
    o, used = output_for(do, delta)
    assert o.dtype == used.dtype == dtype
    found = (o.double() * used.double()).sum(-1).transpose(1, 2)
    rest = rest_for(o, used, delta)
    assert (rest is None) == (dtype != torch.float16)
    if rest is not None:
        found += (rest[0].double() * rest[1].double()).sum(-1).transpose(1, 2)
    torch.testing.assert_close(found, delta.double(), rtol=4 * torch.finfo(dtype).eps, atol=0)
    change = (used.double() - do.double()).norm(dim=-1).transpose(1, 2)
    assert (change <= delta.double().abs() * 1e-15 * (dtype != torch.float16)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lse_alone_has_gradients(dtype: torch.dtype) -> None:
    ring, n = Ring(), 24
    sharding = ring.sharding(n)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 16, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    found: dict[str, list[Tensor]] = {}
    for impl in ("torch", "eager"):
        _, lse = ring_attention_with_lse(q, k, v, sharding, causal=True, impl=impl)
        found[impl] = list(torch.autograd.grad((lse * torch.arange(n)).sum(), (q, k, v)))
    for x, y in zip(found["torch"], found["eager"], strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=0.02, atol=4 * torch.finfo(dtype).eps * n)


@pytest.mark.parametrize("mean", [0.0, 100.0, 3000.0])
@pytest.mark.parametrize("backend", ["flash", "flash_cpu"])
@pytest.mark.parametrize("dlse", [1e-6, 1.0, 1e3])
@pytest.mark.parametrize("rows", ["zero", "tiny", "mixed"])
def test_lse_has_exact_gradients_in_float16_whatever_the_values_are(
    rows: str, dlse: float, backend: str, mean: float, request: pytest.FixtureRequest
) -> None:
    if backend == "flash":
        request.getfixturevalue("flash")
    n, generator = 24, torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, n, 2, 16, generator=generator) for _ in range(4))
    dlse_of = torch.randn(1, 2, n, generator=generator) * dlse
    do *= {"zero": 0.0, "tiny": 2.0**-22, "mixed": torch.tensor([0.0, 2.0**-22, 1.0]).repeat(n // 3)[:, None, None]}[
        rows
    ]
    given = [x.half() for x in (q, k, v + mean * torch.tensor([1.0, -1.0]).repeat(8), do)]

    def gradients(*given: Tensor, impl: str) -> tuple[Tensor, ...]:
        q, k, v = (x.clone().requires_grad_() for x in given[:3])
        o, lse = ring_attention_with_lse(q, k, v, Ring().sharding(n), causal=True, impl=impl)
        return torch.autograd.grad((o, lse), (q, k, v), (given[3].to(o.dtype), dlse_of.to(lse.dtype)))

    exact = gradients(*(x.double() for x in given), impl="eager")
    # delta is of the rounded o, as in every kernel: that is off by this much, where do is not zero
    low = gradients(*given, impl="eager")
    for name, x, wanted, plain in zip(("dq", "dk", "dv"), gradients(*given, impl="torch"), exact, low, strict=True):
        size = wanted.abs().max().item()
        error = max(2**-9 * size, 4 * (plain - wanted).abs().max().item(), 2.0**-23)
        assert (x - wanted).abs().max().item() <= error, name


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("backward", ["keys", "queries"])
def test_a_simulated_ring_is_attention_within_budget(layout: str, backward: str) -> None:
    generator = torch.Generator().manual_seed(0)
    n, mask = 53, {"causal": True, "window": 20}
    q, do = (torch.randn(1, n, 4, 16, generator=generator) for _ in range(2))
    k, v = (torch.randn(1, n, 2, 16, generator=generator) for _ in range(2))
    ring = simulate_ring(q, k, v, world_size=4, layout=layout, do=do, impl="torch", backward=backward, **mask)
    wide, plain = (_reference(x, mask) for x in ([x.double() for x in (q, k, v, do)], [q, k, v, do]))
    assert ring.grads is not None
    found = [ring.o, *(ring.grads[name] for name in ("q", "k", "v"))]
    for name, x, exact, low in zip(("o", "dq", "dk", "dv"), found, wide, plain, strict=True):
        assert_within_budget(x, exact, low, name, torch.float32)


def test_rows_that_a_step_does_not_compute_are_left_alone_until_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    untouched, finished = [], []

    def merge(carry: SoftmaxState | None, partial: tuple[Tensor, Tensor] | None, out: Any) -> None:
        if partial is None and carry is not None:
            if not isinstance(out, SoftmaxState):
                finished.append(carry)
            elif out.acc.data_ptr() == carry.acc.data_ptr():
                untouched.append(carry)
        partials_merge(carry, partial, out)

    partials_merge = api.partials.merge
    monkeypatch.setattr(api.partials, "merge", merge)
    q, k, v = (torch.randn(1, 32, 2, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    mask: dict[str, Any] = {"documents": (0, 14, 32), "causal": True}
    found = simulate_ring(q, k, v, world_size=4, layout="zigzag", impl="torch", **mask)
    torch.testing.assert_close(found.o, attention_reference(q, k, v, **mask))
    assert not untouched
    assert finished, "keys of the last step that only later rows see"


@pytest.mark.parametrize(("world_size", "most", "groups"), [(4, 2**28, [4]), (6, 2**28, [4, 2]), (3, 0, [1, 1, 1])])
def test_partials_of_ring_steps_wait_to_be_merged_together(
    world_size: int, most: int, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    merged, added = list[tuple[bool, int]](), list[tuple[bool, int]]()
    merge_parts, add_rows = api.partials.merge_parts, api.partials.add_rows

    def merge(carry: SoftmaxState | None, parts: Any, out: Any) -> None:
        merged.append((carry is not None, len(parts)))
        merge_parts(carry, parts, out)

    def add(parts: Any, target: Tensor, *, accumulate: bool) -> None:
        if target.shape[2] == q.shape[2]:  # of queries
            added.append((accumulate, len(parts)))
        add_rows(parts, target, accumulate=accumulate)

    monkeypatch.setattr(api.partials, "merge_parts", merge)
    monkeypatch.setattr(api.partials, "add_rows", add)
    monkeypatch.setattr(api, "MOST_HELD", most)
    q, do = (torch.randn(2, 48, 2, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    k, v = (torch.randn(2, 48, 1, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    found = simulate_ring(
        q, k, v, world_size=world_size, layout="zigzag", do=do, impl="torch", causal=True, backward="keys"
    )
    assert found.grads is not None
    exact = _reference([q, k, v, do], {"causal": True})
    for x, y in zip((found.o, *(found.grads[name] for name in "qkv")), exact, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert sorted(merged) == sorted(added) == sorted([(i > 0, n) for i, n in enumerate(groups)] * world_size)


@pytest.mark.parametrize("backward", ["keys", "queries"])
def test_an_output_is_made_for_delta_only_where_queries_move(backward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Tensor]()
    monkeypatch.setattr(api, "output_for", lambda *given: (made.extend(given), output_for(*given))[1])
    q, k, v, do = (torch.randn(1, 24, 2, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(4))
    simulate_ring(q, k, v, world_size=3, layout="zigzag", do=do, impl="torch", causal=True, backward=backward)
    assert bool(made) == (backward == "queries")


def _reference(given: list[Tensor], mask: dict[str, Any]) -> list[Tensor]:
    q, k, v, do = given
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = attention_reference(*leaves, **mask)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def _attend(layout: str, backward: str) -> list[Tensor]:
    ring = Ring()
    sharding = ring.sharding(45, layout, documents=(0, 20, 45))
    whole = [torch.randn(1, 45, 4, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    q, k, v, do = (sharding.shard(x, 1) for x in whole)
    for x in (q, k, v):
        x.requires_grad_()
    o = ring_attention(q, k, v, sharding, causal=True, sinks=torch.zeros(4), impl="torch", backward=backward)
    return [sharding.unshard(x, 1) for x in (o.detach(), *torch.autograd.grad(o, (q, k, v), do))]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("layout", "backward"), [("zigzag", "keys"), ("striped", "queries")])
def test_ranks_equal_the_simulated_ring_to_the_bit(pool: Pools, world_size: int, layout: str, backward: str) -> None:
    q, k, v, do = (torch.randn(1, 45, 4, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(4))
    expected = simulate_ring(
        q, k, v, world_size=world_size, layout=layout, documents=(0, 20, 45), do=do, causal=True, sinks=torch.zeros(4),
        impl="torch", backward=backward,
    )  # fmt: skip
    assert expected.grads is not None
    for found in pool(world_size).run(_attend, layout, backward):
        for x, y in zip(found, (expected.o, *(expected.grads[name] for name in ("q", "k", "v"))), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
@pytest.mark.parametrize("mask", [STREAMING, TREE], ids=["streaming", "tree"])
def test_masks_of_several_intervals_are_served_term_by_term(layout: str, mask: masks.Mask) -> None:
    q, k, v, do = (torch.randn(2, 24, 2, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(4))
    found, wanted = (
        simulate_ring(q, k, v, 3, layout=layout, mask=mask, do=do, impl=impl) for impl in ("torch", "eager")
    )
    assert found.grads is not None
    assert wanted.grads is not None
    torch.testing.assert_close(found.o, wanted.o, rtol=1e-5, atol=1e-5)
    for name in "qkv":
        torch.testing.assert_close(found.grads[name], wanted.grads[name], rtol=1e-4, atol=1e-5)


def _refuse(impl: str) -> str:
    ring = Ring()
    n = 4 * 80 * ring.world_size
    # a window of one key on rows that follow each other is one tile for each row
    x = ring.sharding(n, "contiguous").shard(torch.zeros(1, n, 1, 8), 1)
    try:
        ring_attention(x, x, x, ring.sharding(n, "contiguous"), window=(0, 0), impl=impl)
    except NotImplementedError as refusal:
        return str(refusal)
    return "served"


def test_a_mask_of_too_many_tiles_is_refused_on_every_rank_and_left_to_others_by_auto(pool: Pools) -> None:
    for said in pool(2).run(_refuse, "torch"):
        assert "the visible pairs of a ring step must be at most 64 rectangles" in said
        assert 'use impl="eager" or "auto"' in said
    assert pool(2).run(_refuse, "auto") == ["served", "served"]


@pytest.mark.parametrize(
    ("feature", "options"),
    [
        ("softcap", {"softcap": 2.0}),
        ("dropout", {"dropout_p": 0.5, "dropout_seed": 1}),
        ("alibi", {"alibi_slopes": torch.ones(2)}),
        ("key_bias", {"key_bias": torch.zeros(1, 4)}),
        ("bias", {"bias": torch.zeros(1, 2, 4, 4)}),
        ("block_pattern", {"mask": masks.blocks(torch.eye(2).bool(), 2)}),
    ],
)
def test_scores_that_the_operators_lack_are_refused(feature: str, options: dict[str, Any]) -> None:
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(
        NotImplementedError, match=rf'impl="torch" cannot serve .*{feature} is no part.*use impl="eager"'
    ):
        ring_attention(x, x, x, Ring().sharding(4), impl="torch", **options)


def test_a_step_of_too_many_tiles_is_refused_by_the_kernels() -> None:
    side = make_side(((0, 1, 80),), visible_pairs(80, window=(0, 0)), "cpu")
    x, score = torch.zeros(1, 80, 1, 8), Score(1.0)
    step = Step(x, x, x, side, side, score, x, torch.zeros(1, 1, 80))
    with pytest.raises(NotImplementedError, match="got none among flash_cpu that does"):
        TorchKernels(CallShape.of(x, x, x, score)).forward(step)


@pytest.mark.parametrize("backend", sorted(operators.OPERATORS))
def test_torch_has_the_operators_by_their_known_arguments(backend: str) -> None:
    assert operators.check_signatures(backend) is None


def test_an_operator_with_other_arguments_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    operators.check_signatures.cache_clear()
    known = operators.SIGNATURES["_scaled_dot_product_flash_attention_for_cpu"]
    monkeypatch.setitem(operators.SIGNATURES, "_scaled_dot_product_flash_attention_for_cpu", (*known, "sink"))
    with pytest.raises(NotImplementedError, match=r"must take .*, sink, got query, key, .* in torch"):
        select_kernels(CPU, torch.float32, 64, 64, impl="torch")
    monkeypatch.setitem(operators.OPERATORS, "flash_cpu", ("_no_such_operator",))
    operators.check_signatures.cache_clear()
    with pytest.raises(NotImplementedError, match=r"must have the operator aten::_no_such_operator, got "):
        select_kernels(CPU, torch.float32, 64, 64, impl="torch")
    operators.check_signatures.cache_clear()


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Activated FlashAttention-4 on a GPU, which is a CPU here; torch and cuDNN would run everything."""
    monkeypatch.setattr(operators, "active_flash", lambda: "FA4")
    monkeypatch.setattr(operators, "_torch_runs", lambda *args: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(operators, "operator", flash_operator)
    operators._try.cache_clear()
    yield
    operators._try.cache_clear()


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("broken", ["call", "lse"])
def test_an_activated_kernel_that_fails_is_left_out_in_words(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    assert operators.can_run("flash", x, x, x)

    def fails(name: str) -> Any:
        def call(*args: Any, **options: Any) -> tuple[Tensor, ...]:
            if broken == "call":
                raise ValueError("too many values to unpack (expected 2)")
            o, lse, *rest = flash_operator(name)(*args, **options)
            return o, lse * 1.4427, *rest

        return call

    operators._try.cache_clear()
    monkeypatch.setattr(operators, "operator", fails)
    assert not operators.can_run("flash", x, x, x)
    assert operators.can_run("cudnn", x, x, x)
    why = operators.why_not_tried("flash", x, x)
    said = "ValueError: too many values" if broken == "call" else "AssertionError: Tensor-likes are not close"
    assert why is not None
    assert f"FA4 must run and return lse `b h s` in natural log, got {said}" in why


def _rocm_operator(name: str) -> Any:
    """Return a stand-in for flash operators on ROCm, which serve full and causal squares alone as on CUDA."""
    forward = name.endswith("forward")

    def call(*given: Any, **options: Any) -> Any:
        q, k, v = given[:3] if forward else given[1:4]
        if q.shape[-1] != v.shape[-1]:
            raise RuntimeError("v must have shape of k")
        assert options["window_size_left"] is options["window_size_right"] is None
        assert given[3 if forward else 6] is None, "lse of variable lengths is another one"
        assert not given[8 if forward else 11] or q.shape[1] == k.shape[1], (
            "causal rectangles are aligned to the first row"
        )
        assert forward or all(x.dtype == torch.int64 and x.dim() == 0 for x in given[12:14])
        return flash_operator(name)(*given, **options)

    return call


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A ROCm device, which is a CPU here, on which torch would run everything."""
    monkeypatch.setattr(operators, "preferred", lambda device, faster=None: ("aotriton",))
    monkeypatch.setattr(operators, "_torch_runs", lambda *args: True)
    monkeypatch.setattr(operators, "operator", _rocm_operator)
    operators._try.cache_clear()
    yield
    operators._try.cache_clear()


@pytest.mark.usefixtures("rocm")
@pytest.mark.parametrize("case", [case for case in SERVED if case.name in ROCM], ids=str)
def test_rocm_serves_squares_and_rectangles_alone_and_stays_within_budget(case: Case) -> None:
    run_case(TorchKernels, case, torch.float32, "cpu")


@pytest.mark.usefixtures("rocm")
@pytest.mark.parametrize("wrong", [(False, True), (True, False)], ids=["squares", "rectangles"])
def test_a_rocm_whose_lse_is_another_is_refused_in_words(
    wrong: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def operator(name: str) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            found = _rocm_operator(name)(*given, **options)
            if name.endswith("forward") and wrong[given[0].shape[1] == given[1].shape[1]]:
                return found[0], found[1] * 1.4427, *found[2:]
            return found

        return call

    x = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    assert operators.can_run("aotriton", x, x, x)
    assert not operators.can_run("aotriton", x, x, x[..., :32])
    operators._try.cache_clear()
    monkeypatch.setattr(operators, "operator", operator)
    assert not operators.can_run("aotriton", x, x, x)
    said = operators.why_not_tried("aotriton", x, x)
    assert said is not None
    assert "torch's flash attention on ROCm must run and return lse `b h s` in natural log, got AssertionError" in said
    assert 'use impl="portable"' in said


def test_rocm_promises_no_gradients_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(operators, "_repeats", lambda: True)
    assert operators.preferred(torch.device("cuda", 0)) == ("aotriton",)
    found, why = operators.available(torch.device("cuda", 0), torch.bfloat16, 64, 64, deterministic=True)
    assert not found
    assert "repeat to the bit, got AOTriton" in why


def test_head_dims_that_differ_are_refused_on_a_cpu() -> None:
    with pytest.raises(NotImplementedError, match=r"v_head_dim must be head_dim, got 32 and 64"):
        select_kernels(CPU, torch.float32, 64, 32, impl="torch")
