"""What is played back from a record is what the same call would have launched without one."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compile.test_bound_launch import Driver, copy_kernel, machine, publicly, tile_kernel

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from ringattn.kernels import record_triton
from ringattn.kernels.launch_triton import Template
from ringattn.kernels.record_triton import Tape, recorded

__all__ = ["machine"]

pytestmark = pytest.mark.compile


@dataclasses.dataclass(frozen=True, eq=False)
class Owner:
    """Compared by identity, as sides are."""

    table: Tensor


@dataclasses.dataclass(frozen=True)
class Options:
    """Compared by content, as scores are."""

    scale: float
    absent: Tensor | None = None


class Counted:
    """A launcher, and how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.template: Template | None = None
        self.run: Callable[..., None] = recorded(self.launch)

    def launch(self, tape: Tape, x: Tensor, out: Tensor, owner: Owner, options: Options, *, add: bool = False) -> None:
        """Two launches, by way of a copy and a room."""
        self.asked += 1
        n = x.shape[0]
        room = tape.room(n)
        copied = tape.call(torch.clone, x)
        constants = {"BLOCK": 16, "ADD": add}
        args = (copied, room, options.absent, n, x.stride(0), options.scale)
        tape.launch(copy_kernel, (n // 16,), args, constants, num_warps=1)
        tape.launch(copy_kernel, (n // 16,), (owner.table, out, x, n, 1, 1.0), constants, num_warps=1)


def launched(machine: Driver, run: Callable[..., None], *args: Any, **kwargs: Any) -> list[tuple[Any, ...]]:
    """What the driver was given, but for the addresses of rooms and copies."""
    seen = machine.utils.launch.seen
    seen.clear()
    run(*args, **kwargs)
    first, second = seen
    seen[:] = [second]
    last = machine.utils.launch.last()
    seen[:] = [first]
    # grid, then everything behind the two addresses that are made anew
    other = [x for x in machine.utils.launch.last() if not (isinstance(x, int) and x > 2**20)]
    return [tuple(other), last]


def numbers(n: int = 64) -> Tensor:
    return torch.zeros(n + 64)[:n]


def test_a_call_of_the_same_kind_is_played_back_with_its_own_addresses(machine: Driver) -> None:
    launcher, owner = Counted(), Owner(numbers())
    calls = [(numbers(), numbers()) for _ in range(4)]
    launched(machine, launcher.run, *calls[0], owner, Options(2.0))
    for x, out in [*calls, *calls]:
        found = launched(machine, launcher.run, x, out, owner, Options(2.0))
        assert found == launched(machine, Counted().run, x, out, owner, Options(2.0))
        assert x.data_ptr() in found[1]
        assert out.data_ptr() in found[1]
    assert launcher.asked == 1


OWNER = Owner(torch.zeros(64))
PLAIN: dict[str, Any] = {"x": torch.zeros(64), "out": torch.zeros(64), "owner": OWNER, "options": Options(2.0)}


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(128)},
        {"x": torch.zeros(128)[::2]},
        {"x": torch.zeros(64).half()},
        {"x": torch.zeros(65)[1:]},
        {"out": torch.zeros(72)[4:68]},
        {"owner": Owner(torch.zeros(64))},
        {"options": Options(3.0)},
        {"options": Options(2.0, torch.zeros(1))},
        {"add": True},
    ],
    ids=["shape", "strides", "dtype", "alignment", "half an alignment", "owner", "number", "option", "switch"],
)
def test_a_call_that_differs_is_not_played_back(machine: Driver, change: dict[str, Any]) -> None:
    launcher = Counted()
    for _ in range(2):
        launcher.run(**PLAIN)
    assert launcher.asked == 1
    other = {**PLAIN, **change}
    expected = launched(machine, Counted().run, **other)
    assert launched(machine, launcher.run, **other) == expected
    assert launcher.asked == 2
    assert launched(machine, launcher.run, **other) == expected
    assert launcher.asked == 2


def test_a_tensor_given_twice_is_never_mistaken_for_two(machine: Driver) -> None:
    launcher, x, y = Counted(), numbers(), numbers()
    launcher.run(x, x, OWNER, Options(1.0))
    for args in ((x, y), (y, x), (x, x)):
        found = launched(machine, launcher.run, *args, OWNER, Options(1.0))
        assert found == launched(machine, Counted().run, *args, OWNER, Options(1.0))


def test_records_die_with_what_they_depend_on(machine: Driver) -> None:
    launcher = Counted()
    before = sum(map(len, record_triton._records))
    for _ in range(5):
        launcher.run(numbers(), numbers(), Owner(numbers()), Options(1.0))
    gc.collect()
    assert launcher.asked == 5
    assert sum(map(len, record_triton._records)) == before


def test_descriptors_follow_addresses(machine: Driver) -> None:
    template = Template(TensorDescriptor(torch.zeros(64, 64).half(), [64, 64], [64, 1], [32, 64]))
    asked = []

    @recorded
    def run(tape: Tape, source: Tensor, target: Tensor) -> None:
        asked.append(source)
        args = (template.over(source), 3, template.over(target), template.over(source))
        tape.launch(tile_kernel, (1,), args, {"ROWS": 32, "COLUMNS": 64}, num_warps=4)

    tensors = [torch.zeros(64, 64).half() for _ in range(3)]
    made = [TensorDescriptor(x, [64, 64], [64, 1], [32, 64]) for x in tensors]
    for a, b in ((0, 1), (1, 2), (2, 0), (0, 1)):
        run(tensors[a], tensors[b])
        found = machine.utils.launch.last()
        publicly(tile_kernel, (1,), (made[a], 3, made[b], made[a]), {"ROWS": 32, "COLUMNS": 64}, num_warps=4)
        assert machine.utils.launch.last() == found
    assert len(asked) == 1


def test_tensors_that_nobody_keeps_are_refused(machine: Driver) -> None:
    @recorded
    def run(tape: Tape, x: Tensor) -> None:
        args = (x, x.view(8, 8), None, 64, 1, 1.0)
        tape.launch(copy_kernel, (1,), args, {"BLOCK": 16, "ADD": False}, num_warps=1)

    with pytest.raises(AssertionError, match="belongs to the call or is kept"):
        run(torch.zeros(64))
