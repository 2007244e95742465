from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.emulator import emulated_devices
from tests.kernels.emulator import gluon as machine

# what jit makes of a function has a type that says neither [grid] nor that constants are plain values
kernels: Any = emulated_devices

MODES = [{}, {"eager": True}, {"seed": 0}, {"seed": 1, "eager": True}, {"seed": 2}]
BUGS = [
    ("producer's phase", machine.EmulationError, "(deadlock|not ordered after)"),
    ("consumer's phase", machine.Race, r"wgmma read of b_s.*(\n.*)*bulk load of b_s"),
    ("no wait for full", machine.Race, r"wgmma read of b_s.*(\n.*)*bulk load of b_s"),
    ("no wait for empty", machine.EmulationError, r"(bulk load of b_s.*(\n.*)*wgmma read|too many)"),
    ("early release", machine.Race, r"bulk load of b_s.*(\n.*)*wgmma read of b_s"),
    ("no arrival", machine.Deadlock, r"partition 0 \(consumer\) waits for.* full\[0\](.*\n)*.*\(producer\) waits for.* empty\[0\]"),
    ("too many arrivals", machine.BarrierError, r"2 arrivals at empty\[0\]"),
    ("arrives twice", machine.EmulationError, r"(empty|not ordered)"),
    ("too few bytes", machine.Deadlock, "-16 bytes missing"),
    ("no bytes", machine.EmulationError, "(too few bytes|not ordered)"),
    ("too many bytes", machine.Deadlock, "16 bytes missing"),
    ("barrier not made", machine.BarrierError, r"empty\[0\] is used .* not initialised"),
    ("accumulator in flight", machine.NotWaitedFor, "accumulator of the wgmma .* in flight"),
    ("result in flight", machine.NotWaitedFor, "result of the wgmma .* without warpgroup_mma_wait"),
    ("waits for too few", machine.NotWaitedFor, "still in flight after the wait"),
    ("product left in flight", machine.NotWaitedFor, r"consumer\) ends with the wgmma"),
    ("no fence", machine.Race, "needs a fence_async_shared"),
    ("late fence", machine.Race, "needs a fence_async_shared"),
    ("buffer not awaited", machine.EmulationError, r"(store of o_s.*(\n.*)*bulk store of o_s|barrier 8 .* round before)"),
    ("no wait for the result", machine.EmulationError, r"(bulk store of o_s.*(\n.*)*store of o_s|round before)"),
    ("named barrier of one warp", machine.EmulationError, r"(named barrier|not ordered after)"),
    ("no wait for the store", machine.Race, r"store of o_s.*(\n.*)*bulk store of o_s"),
    ("store left in flight", machine.NotWaitedFor, r"storer\) ends with 1 bulk stores"),
    ("a copy nobody waits for", machine.NotWaitedFor, "nobody waited for the bulk load of b_s"),
    ("an error of its own", machine.EmulationError, "of its own"),
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_correct_kernel_gives_its_result_in_every_mode(mode: dict, blocks: int):
    with machine.mode(**mode):
        found, wanted = emulated_devices.run_pipeline(blocks=blocks)
    assert torch.allclose(found.float(), wanted, atol=2e-2, rtol=2e-3)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("bug", "error", "match"), BUGS, ids=[bug for bug, _, _ in BUGS])
def test_every_bug_is_caught_in_every_order_of_events(bug: str, error: type, match: str, mode: dict):
    with machine.mode(**mode), pytest.raises(error, match=match):
        emulated_devices.run_pipeline(bug)


def test_a_failed_kernel_leaves_the_machine_usable():
    with pytest.raises(machine.Deadlock):
        emulated_devices.run_pipeline("no arrival")
    found, wanted = emulated_devices.run_pipeline()
    assert torch.allclose(found.float(), wanted, atol=2e-2, rtol=2e-3)


def test_a_seed_fixes_the_order_of_events(capsys: pytest.CaptureFixture[str]):
    traces = []
    for seed in (None, None, 1, 1, 2):
        with machine.mode(seed=seed, trace=True):
            emulated_devices.run_pipeline(blocks=3)
        traces.append(capsys.readouterr().err)
    assert traces[0] == traces[1]
    assert traces[2] == traces[3]
    assert len(set(traces)) == 3


def shifted_block(x: torch.Tensor, row: int, head: int, column: int) -> torch.Tensor:
    """What a copy of block [1, 1, 4, 16] at (0, head, row, column) leaves in zeros like x."""
    y = torch.zeros_like(x)
    if 0 <= head < x.shape[1]:
        rows = slice(max(row, 0), max(row + 4, 0))
        columns = slice(max(column, 0), max(column + 16, 0))
        y[0, head, rows, columns] = x[0, head, rows, columns]
    return y


@pytest.mark.parametrize("head", [-1, 0, 2, 3])
@pytest.mark.parametrize("row", [-5, -2, 0, 3, 8, 9, 10, 40])
@pytest.mark.parametrize("column", [-8, 0, 16])
def test_copies_read_zeros_outside_and_write_nothing_there(row: int, head: int, column: int):
    x = torch.randn(1, 3, 10, 24).half()
    whole = torch.full((1, 3, 12, 24), 7.0).half()  # rows beyond the described 10 are not the descriptor's
    y = whole[:, :, :10]
    y.zero_()
    block = [1, 1, 4, 16]
    kernels.copy_block[(1,)](
        emulated_devices.descriptor(x, block),
        emulated_devices.descriptor(y, block),
        row,
        head,
        column,
        block,
        num_warps=4,
    )
    assert torch.equal(y, shifted_block(x, row, head, column))
    assert (whole[:, :, 10:] == 7).all()


def test_copies_of_numbers_begin_at_multiples_of_sixteen_bytes():
    x = torch.arange(100, dtype=torch.float32)
    o = torch.empty(64)
    for at in (0, 4, 60, 96):
        kernels.load_numbers[(1,)](emulated_devices.descriptor(x, [64]), o, at, 64, num_warps=4)
        wanted = torch.zeros(164)
        wanted[:100] = x
        assert torch.equal(o, wanted[at : at + 64])
    with pytest.raises(machine.EmulationError, match="multiple of 16 bytes"):
        kernels.load_numbers[(1,)](emulated_devices.descriptor(x, [64]), o, 2, 64, num_warps=4)


def test_integers_divide_towards_zero():
    o = torch.zeros(5, dtype=torch.int32)
    kernels.scalars[(1,)](o, -7, 4, num_warps=4)
    assert o.tolist() == [-1, -3, -7, 0, -1 + 0 + 0 + 1]


@pytest.mark.parametrize("vector", [False, True])
def test_integers_of_32_bits_must_not_overflow(vector: bool):
    o = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(machine.Overflow, match="cast to int64"):
        kernels.product[(1,)](o, 2**20, 2**11, False, vector, num_warps=4)
    kernels.product[(1,)](o, 2**20, 2**11, True, vector, num_warps=4)
    assert o.tolist() == ([0, 2**31, 2**32, 3 * 2**31] if vector else [2**31, 0, 0, 0])


def test_addresses_outside_a_tensor_are_refused_also_inside_its_storage():
    storage = torch.arange(32, dtype=torch.float32)
    x, o = storage[8:20], torch.zeros(8)
    kernels.take[(1,)](x, o, 4, 0, False, num_warps=4)
    assert o.tolist() == list(range(12, 20))
    for first in (-1, 5):
        with pytest.raises(machine.OutOfBounds, match="spans 12"):
            kernels.take[(1,)](x, o, first, 0, False, num_warps=4)
    kernels.take[(1,)](x, o, 8, 12, True, num_warps=4)
    assert o[:4].tolist() == [16, 17, 18, 19]
    assert o[4:].isnan().all(), "what is masked away and has no default is undefined"


@pytest.mark.parametrize(
    ("asm", "error", "match"),
    [
        ("brkpt;", machine.EmulationError, "no meaning is known"),
        ("bar.sync 3, 128; mov.u32 $0, 0;", machine.BarrierError, "must be 8 to 15"),
        ("bar.sync 8, 100; mov.u32 $0, 0;", machine.BarrierError, "whole warps"),
        ("bar.sync 8, 256; mov.u32 $0, 0;", machine.Deadlock, r"named barrier 8 \(128 of 256 threads\)"),
    ],
)
def test_assembly_is_understood_or_refused(asm: str, error: type, match: str):
    with pytest.raises(error, match=match):
        kernels.assemble[(1,)](asm, num_warps=4)


def test_a_named_barrier_that_is_complete_lets_its_warps_through():
    kernels.assemble[(1,)]("bar.sync 8, 128; mov.u32 $0, 0;", num_warps=4)


def watch(flags: list[int], ready_flags: list[int], mode: dict) -> tuple[list[int], list[int], int]:
    """What a warp copies behind flags that an engine beside it sets in the order of `ready_flags`, the flags, the error word."""
    n = len(flags)
    x, o = torch.full((n,), -7, dtype=torch.int32), torch.full((n,), -8, dtype=torch.int32)
    words, error = torch.tensor(flags, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for i, word in enumerate(flags):
        if word > 0:
            x[i] = i
    # the numbers come before their flags
    coming = iter([step for i in ready_flags for step in ((x, i, i), (words, i, 1))])

    def outside() -> bool:
        for into, i, value in coming:
            into[i] = value
            return True
        return False

    with machine.mode(**mode, outside=outside):
        kernels.watch[(1,)](x, o, torch.zeros(1, dtype=torch.int32), words, error, 1, n, num_warps=4)
    return o.tolist(), words.tolist(), int(error)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("ready_flags", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]], ids=str)
def test_a_flag_is_waited_for_whenever_it_comes(ready_flags: list[int], mode: dict):
    assert watch([0, 0, 0, 0], ready_flags, mode) == ([0, 1, 2, 3], [1, 1, 1, 1], 0)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("flags", [[1, -1, 1], [1, 0, 1], [1, -(2**31), 1]], ids=str)
def test_a_wait_in_vain_ends_and_sets_the_error_word(flags: list[int], mode: dict):
    assert watch(flags, [], mode) == ([0, -1, 2], flags, 1)


def test_values_in_registers_do_not_change():
    o = torch.zeros(4)
    kernels.values_stay[(1,)](o, num_warps=4)
    assert o.tolist() == [1.0] * 4


def test_operands_of_different_rank_are_refused():
    with pytest.raises(machine.EmulationError, match="ranks must match"):
        kernels.mixed_ranks[(1,)](torch.zeros(1), num_warps=4)


def test_a_launch_can_be_repeated_with_other_arguments():
    o = torch.zeros(4, dtype=torch.int64)
    compiled = kernels.product[(1,)](o, 3, 5, False, False, num_warps=4)
    other = torch.zeros(4, dtype=torch.int64)
    compiled[(1, 1, 1)](other, 4, 6, False, False, 4)
    assert (o[0].item(), other[0].item()) == (15, 24)


def test_poison_is_not_a_number():
    assert math.isnan(machine._Allocation("x", 4, machine.tl.float16).memory[0].item())
