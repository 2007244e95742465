"""One GPU: checkpoints that wait in pinned host memory, copied by a side stream, change no bit.

python -m pytest -m gpu tests/gpu/test_offload.py
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import ringattn
from ringattn.launch.train.model import Block, Transformer
from ringattn.sizing.shapes import ModelShape
from ringattn.training import save_memory_
from ringattn.training.checkpoints import Offload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPE = ModelShape("x", 2048, 6, 16, 4, 128, 4096, vocab_size=1024)


def gradients(recompute: str, offload: Offload, n: int = 32768, device: str = "cuda") -> list[Tensor]:
    """Loss and gradients of the second of two equal steps, in which host memory and device memory are used again."""
    model, sharding = Transformer(SHAPE), ringattn.Ring().sharding(n)
    model.initialise_(0)
    model.to(device, torch.bfloat16)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.attend = functools.partial(ringattn.ring_attention, deterministic=True)
    save_memory_(model, recompute=recompute, offload=offload)
    tokens = torch.randint(1024, (1, n), generator=torch.Generator().manual_seed(1)).to(device)
    loss = torch.zeros(())
    for _ in range(2):
        model.zero_grad()
        loss = model(tokens, sharding, tokens.roll(-1))
        loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("offload", [True, 3])
def test_offload_changes_no_bit_on_a_gpu(recompute: str, offload: Offload) -> None:
    assert all(map(torch.equal, gradients(recompute, offload), gradients(recompute, False)))
