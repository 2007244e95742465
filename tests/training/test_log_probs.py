"""Log-probabilities and entropies by chunks are those of log_softmax of all logits, in value and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from ringattn.training import IGNORED, cross_entropy_sum, token_log_probs, token_log_probs_and_entropy

VOCAB, DIM = 35, 6


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((2, 9, DIM), (VOCAB, DIM), (VOCAB,))
    )
    targets = torch.randint(VOCAB, (2, 9), generator=generator)
    targets[0, :2] = targets[1, 8] = IGNORED
    return hidden, weight, bias, targets


def whole(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The same from all logits at once."""
    logits = F.linear(hidden, weight, bias) * options.get("scale", 1.0)
    if cap := options.get("softcap", 0.0):
        logits = cap * torch.tanh(logits / cap)
    logs = (logits / options.get("temperature", 1.0)).log_softmax(-1)
    counts = targets != IGNORED
    picked = logs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return picked * counts, -(logs.exp() * logs).sum(-1) * counts


HEADS = [{}, {"softcap": 2.0}, {"temperature": 0.7}, {"scale": 0.25, "softcap": 0.5, "temperature": 1.3}]


@pytest.mark.parametrize("options", HEADS, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_elements", [1, 3 * VOCAB, 1 << 20])
def test_chunks_give_the_numbers_and_gradients_of_all_logits(options, with_bias, chunk_elements):
    hidden, weight, bias, targets = inputs(torch.float64)
    given = bias if with_bias else None
    wrt = [hidden, weight, bias] if with_bias else [hidden, weight]
    towards = torch.randn(2, 2, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, expected = (
        (x, *torch.autograd.grad((towards * torch.stack(x)).sum(), wrt))
        for x in (
            token_log_probs_and_entropy(hidden, weight, targets, bias=given, chunk_elements=chunk_elements, **options),
            whole(hidden, weight, given, targets, options),
        )
    )
    for mine, theirs in zip((*found[0], *found[1:]), (*expected[0], *expected[1:]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    alone = token_log_probs(hidden, weight, targets, bias=given, chunk_elements=chunk_elements, **options)
    assert torch.equal(alone, found[0][0])
    expected_alone = whole(hidden, weight, given, targets, options)[0]
    for mine, theirs in zip(
        *(torch.autograd.grad((towards[0] * x).sum(), wrt) for x in (alone, expected_alone)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("softcap", "chunk_elements"), [(0.0, 100), (0.0, 1 << 27), (2.0, 100)])
def test_cross_entropy_by_chunks_is_cross_entropy(softcap, chunk_elements):
    hidden, weight, _, targets = inputs()

    def plain(dtype: torch.dtype) -> list[Tensor]:
        loss = -whole(hidden.to(dtype), weight.to(dtype), None, targets, {"softcap": softcap})[0].sum()
        return [loss, *torch.autograd.grad(2.5 * loss, [hidden, weight])]

    loss = cross_entropy_sum(hidden, weight, targets, softcap, chunk_elements)
    got = [loss, *torch.autograd.grad(2.5 * loss, [hidden, weight])]
    for mine, one, exact in zip(got, plain(torch.float32), plain(torch.float64), strict=True):
        band = 8 * torch.finfo(torch.float32).eps * exact.abs().max()
        assert (mine - exact).abs().max() <= 2 * (one - exact).abs().max() + band


def test_bf16_rows_have_statistics_in_fp32_and_gradients_within_rounding():
    hidden, weight, _, targets = inputs(torch.bfloat16)
    found = token_log_probs(hidden, weight, targets, chunk_elements=VOCAB)
    assert found.dtype == torch.float32
    expected = whole(hidden.double(), weight.double(), None, targets, {})[0]
    # products are rounded to bf16, whose eps is 2^-8
    assert (found - expected).abs().max() <= 2**-8 * 8
    mine, theirs = (torch.autograd.grad(x.sum(), weight)[0].double() for x in (found, expected))
    assert mine.dtype == torch.float64
    assert (mine - theirs).norm() <= 2**-7 * theirs.norm()


def test_the_gradient_of_a_nearly_certain_token_keeps_its_digits():
    hidden = torch.tensor([[8.0, 0, 0, 0]], dtype=torch.bfloat16, requires_grad=True)
    token_log_probs(hidden, torch.eye(4, dtype=torch.bfloat16), torch.tensor([0])).sum().backward()
    expected = torch.tensor([[1.0, 0, 0, 0]]) - hidden.detach().double().softmax(-1)  # 0.001, where p rounds to 1
    assert hidden.grad is not None
    assert ((hidden.grad - expected) / expected).abs().max() <= 2**-8


def test_autocast_gives_the_products_of_a_model_and_gradients_in_the_dtype_of_parameters():
    hidden, weight, _, targets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        found = token_log_probs(hidden, weight, targets)
        logits = F.linear(hidden, weight)
    expected = logits.float().log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != IGNORED)
    torch.testing.assert_close(found, expected)
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(found.sum(), [hidden, weight]))


def test_a_frozen_weight_and_an_unused_entropy_get_no_gradient():
    hidden, weight, _, targets = inputs()
    _, entropy = token_log_probs_and_entropy(hidden, weight.detach(), targets)
    (only,) = torch.autograd.grad(entropy.sum(), hidden)
    (expected,) = torch.autograd.grad(whole(hidden, weight.detach(), None, targets, {})[1].sum(), hidden)
    torch.testing.assert_close(only, expected)


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operator has returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_the_logits_of_all_rows_never_exist():
    hidden, weight = torch.randn(500, 4, requires_grad=True), torch.randn(300, 4, requires_grad=True)
    with LargestTensor() as largest:
        found = token_log_probs_and_entropy(hidden, weight, torch.zeros(500, dtype=torch.int64), chunk_elements=3000)
        torch.stack(found).sum().backward()
    assert largest.elements == 3000  # and not 150,000


def test_no_rows_have_no_loss_and_zero_gradients():
    weight = torch.randn(VOCAB, DIM, requires_grad=True)
    loss = cross_entropy_sum(torch.zeros(1, 0, DIM, requires_grad=True), weight, torch.zeros(1, 0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("hidden", {"hidden": torch.zeros(2, 9, DIM + 1)}),
        ("hidden", {"weight": torch.zeros(VOCAB, DIM, 1)}),
        ("targets", {"targets": torch.zeros(2, 8, dtype=torch.int64)}),
        ("targets", {"targets": torch.zeros(2, 9)}),
        ("bias", {"bias": torch.zeros(VOCAB + 1)}),
        ("temperature", {"temperature": 0.0}),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(named, changes):
    hidden, weight, _, targets = inputs()
    with pytest.raises(ValueError, match=f"^{named}"):
        token_log_probs(**{"hidden": hidden, "weight": weight, "targets": targets, **changes})


@pytest.mark.parametrize("target", [-1, VOCAB])
def test_a_target_that_is_no_token_is_an_error_and_not_another_token(target):
    hidden, weight, _, targets = inputs()
    with pytest.raises(RuntimeError, match="out of bounds"):
        token_log_probs(hidden, weight, torch.full_like(targets, target))


def test_a_sharded_weight_is_refused(pool):
    assert pool(1).run(sharded_weight) == [True]


def sharded_weight() -> bool:
    mesh = init_device_mesh("cpu", (1,))
    weight = DTensor.from_local(torch.zeros(4, DIM), mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"^weight must be a whole tensor"):
        token_log_probs(torch.zeros(3, DIM), weight, torch.zeros(3, dtype=torch.int64))
    return True
