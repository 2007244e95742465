"""On a GPU a row gives the same token whatever is beside it, and that of the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from ringattn.launch.serve.sampling import Sampling, draw, sample_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def samplings() -> list[Sampling]:
    """Some of every kind."""
    return [
        Sampling(
            temperature=(0.0, 1.0, 0.6, 2.0)[row % 4],
            top_p=(1.0, 0.9, 0.999)[row % 3],
            seed=row,
            logprobs=row % 5 or None,
            top_k=(0, 50, 3)[row // 4 % 3],
            min_p=0.05 * (row % 7 == 0),
            repetition_penalty=1.0 + 0.2 * (row % 6 == 1),
            frequency_penalty=0.5 * (row % 8 == 2),
            logit_bias=((row, 3.0),) if row % 9 == 0 else (),
        )
        for row in range(48)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [257, 128256])
def test_a_row_gives_the_token_that_it_gives_alone_and_on_the_cpu(dtype: torch.dtype, vocab: int) -> None:
    steps = [torch.randn(48, vocab, generator=torch.Generator().manual_seed(x)).mul(3).to(dtype) for x in range(3)]
    prompts = [list(range(row)) for row in range(48)]
    how = samplings()
    together = [sample_tokens(x.cuda(), how, prompts).tokens.tolist() for x in steps]
    for row in range(0, 48, 5):
        alone = samplings()[row]
        tokens = [sample_tokens(x[row : row + 1].cuda(), [alone], [prompts[row]]).tokens.item() for x in steps]
        assert tokens == [one[row] for one in together], row
    here = samplings()
    assert [sample_tokens(x, here, prompts).tokens.tolist() for x in steps] == together


def test_nothing_waits_for_the_device() -> None:
    how, prompts = samplings(), [[1, 2]] * 48
    logits = torch.randn(48, 1000, device="cuda")
    sample_tokens(logits, how, prompts).on_host()
    torch.cuda.set_sync_debug_mode("error")
    try:
        chosen = sample_tokens(logits, how, prompts).on_host()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert len(chosen.read()) == 48


def test_rows_without_a_largest_number_have_no_token() -> None:
    x = torch.randn(4, 1000, device="cuda")
    x[0, 3], x[1, 999], x[2] = math.nan, math.inf, -math.inf
    settings = torch.tensor([[1.0, 0, 0.9, 0, 0.5]] * 4, dtype=torch.float64, device="cuda")
    found = draw(x, settings, torch.arange(4, device="cuda")).tolist()
    assert found[:3] == [-1] * 3
    assert found[3] >= 0
