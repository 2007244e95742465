"""Tensors that move together are one message, and tensors that already form one are not copied."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.schedule.kv_rotation import add_rows_, make_message, message_bytes, pack_, view_as_message
from ringattn.transport.base import Buffers

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@st.composite
def moving_tensors(draw: st.DrawFn) -> list[tuple[Tensor, int]]:
    rows = draw(st.integers(1, 9))
    found = []
    for seed in range(draw(st.integers(1, 4))):
        shape, dim = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 4)))], 0
        dim = draw(st.integers(0, len(shape) - 1))
        shape[dim] = rows
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(draw(st.sampled_from(DTYPES)))
        found.append((x, dim))
    return found


@settings(max_examples=100, deadline=None)
@given(moving_tensors(), st.data())
def test_a_message_holds_the_rows_of_every_tensor(moving: list[tuple[Tensor, int]], data: st.DataObject) -> None:
    x, dim = moving[0]
    picked = sorted(data.draw(st.sets(st.integers(0, x.shape[dim] - 1), min_size=1)))
    rows = tuple((i, 1) for i in picked)
    sent = make_message(moving, len(picked), Buffers(), "sent")
    sent.message.fill_(255)
    pack_(moving, rows, sent)
    received = make_message(moving, len(picked), Buffers(), "received")
    received.message.copy_(sent.message)
    assert sent.message.numel() == message_bytes(moving, len(picked))
    for (whole, along), part in zip(moving, received.parts, strict=True):
        torch.testing.assert_close(part, whole.index_select(along, torch.tensor(picked)), rtol=0, atol=0)
        assert part.is_contiguous()
        assert (part.data_ptr() - received.message.data_ptr()) % 16 == 0
        back = torch.zeros_like(whole)
        add_rows_(back, along, rows, part)
        expected = torch.zeros_like(whole).index_copy_(along, torch.tensor(picked), part)
        torch.testing.assert_close(back, expected, rtol=0, atol=0)


@settings(max_examples=50, deadline=None)
@given(moving_tensors())
def test_tensors_that_form_a_message_in_memory_are_not_copied(moving: list[tuple[Tensor, int]]) -> None:
    x, dim = moving[0]
    bundle = make_message(moving, x.shape[dim], Buffers(), "own")
    bundle.message.zero_()
    pack_(moving, ((0, x.shape[dim]),), bundle)
    message = view_as_message([(part, along) for part, (_, along) in zip(bundle.parts, moving, strict=True)])
    assert message is not None
    assert message.data_ptr() == bundle.message.data_ptr()
    assert torch.equal(message, bundle.message)


def test_keys_and_values_of_one_tensor_are_a_message_and_separate_ones_are_not() -> None:
    both = torch.randn(2, 1, 8, 2, 16)
    message = view_as_message([(both[0], 1), (both[1], 1)])
    assert message is not None
    assert message.data_ptr() == both.data_ptr()
    assert message.numel() == both.numel() * 4
    assert view_as_message([(both[1], 1), (both[0], 1)]) is None
    assert view_as_message([(both[0], 1), (both[1].clone(), 1)]) is None
    assert view_as_message([(both[0][..., :8], 1), (both[1], 1)]) is None


def test_rows_with_gaps_and_rows_of_two_storages_are_no_message() -> None:
    both, others = torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
    assert view_as_message([(both[0].narrow(1, 2, 4), 1)]) is None
    assert view_as_message([(both[0].transpose(0, 1), 0)]) is None
    # the second lies where it would in the storage of the first
    assert view_as_message([(both[0], 1), (others[1], 1)]) is None
