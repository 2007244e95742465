"""Inputs that differ between the ranks of a ring are refused before they are cut; labels are shifted before that."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import Tensor

from ringattn.tensor_checks import digest_bits

DTYPES = [torch.uint8, torch.int64, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64]
SECOND = timedelta(seconds=1)


def whole(dtype: torch.dtype) -> Tensor:
    return torch.arange(2 * 9 * 3).remainder(2).reshape(2, 9, 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_digest_is_that_of_the_numbers_wherever_they_lie(dtype: torch.dtype) -> None:
    x = whole(dtype)
    turned = x.transpose(0, 2).contiguous().transpose(0, 2)
    within = torch.cat([x[:1, :1], x.flatten(0, 1)[None]], 1)[:, 1:].view(x.shape)  # begins at no multiple of 8 bytes
    assert not turned.is_contiguous()
    assert digest_bits(turned) == digest_bits(within) == digest_bits(x)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.bfloat16])
def test_tensors_that_differ_in_one_place_have_different_digests(dtype: torch.dtype) -> None:
    changed = torch.zeros(1025, 1024, dtype=torch.bool)
    changed[torch.arange(1024), torch.arange(1024)] = True
    assert len({int(digest_bits(x.to(dtype))) for x in changed}) == 1025


def test_the_digest_of_a_lazy_conjugate_is_that_of_its_numbers() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    assert digest_bits(x.conj()) == digest_bits(x.conj().resolve_conj()) != digest_bits(x)
