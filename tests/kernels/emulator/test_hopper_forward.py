from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ringattn.kernels.attention.eager import EagerKernels, eager_delta
from ringattn.kernels.attention.hopper import launcher
from ringattn.kernels.attention.hopper.api import HopperKernels
from ringattn.kernels.attention.hopper.configs import ForwardConfig
from ringattn.kernels.interface import BackwardStep, CallShape, Grads, KernelSet, Step
from tests.kernels.emulator import gluon as machine
from tests.kernels.emulator.progress import keep_pace_always, split_always
from tests.support.kernel_conformance import CASES, Case, run_case
from tests.support.request_isolation import BAD, SPOILT, assert_kernels_isolate
from tests.support.term_masks import blocks_and_window, tree

CAUSAL: dict[str, Any] = {"causal": True}
SPLIT = [
    case
    for case in CASES
    if case.name
    in ("hidden_rows", "every_mask", "right_padding_and_nothing", "padded_ring", "zigzag", "many_runs", "gqa_3")
]
TILES = Case("tiles", seq_len=300, mask=CAUSAL, heads=4, kv_heads=2)  # several tiles per program
CARRIES = Case(
    "carries", seq_len=400, q_runs=((200, 1, 100),), ring_steps=(((200, 1, 100),), ((0, 1, 200),)), mask=CAUSAL,
    heads=2, kv_heads=1, sinks=True,
)  # fmt: skip
FEW_ROWS = Case(
    "few_rows", seq_len=300, q_runs=((295, 1, 5),), ring_steps=(((0, 1, 300),),), mask=CAUSAL, heads=8, kv_heads=1,
    sinks=True,
)  # fmt: skip
SCORES = replace(CARRIES, name="scores", softcap=2.0, alibi=True, key_bias=True)
WIDTHS = {"192_128": (192, 128), "192": (192, 192), "96": (96, 96), "192_v_40": (192, 40)}
"""Head dims whose tiles are several panels, of q and k alone or also of v."""
OF_PANELS = [
    replace(case, name=f"{case.name}_{name}", head_dim=d, v_head_dim=dv)
    for name, (d, dv) in WIDTHS.items()
    for case in (TILES, CARRIES)
]
PANELS_OF_FEW_ROWS = replace(FEW_ROWS, name="few_rows_192", head_dim=192, v_head_dim=136)
PANELS_OF_SCORES = replace(SCORES, name="scores_192_128", head_dim=192, v_head_dim=128)
OF_TERMS = [replace(TILES, name=make.__name__, mask={}, terms=make) for make in (tree, blocks_and_window)]
PACKED_TERMS = replace(FEW_ROWS, name="few_rows_of_terms", mask={}, terms=blocks_and_window)


class ForwardKernels(HopperKernels):
    """The forward under test beside a backward that is right."""

    def __init__(self, call: CallShape, *, config: ForwardConfig | None = None, pack: int | None = None) -> None:
        super().__init__(call)
        self.bound.forward, self.bound.pack = config or self.bound.forward, pack

    def delta(self, o: Tensor, do: Tensor, dlse: Tensor | None, out: Tensor | None = None) -> Tensor:
        return eager_delta(o, do, dlse, out)

    def backward(self, step: BackwardStep, grads: Grads) -> None:
        if step.rows.terms == 1 and step.rows.patterns is None:
            EagerKernels(self.call).backward(step, grads)
        else:
            super().backward(step, grads)


class RecordingKernels(ForwardKernels):
    """Appends a copy of what each step has written."""

    def __init__(self, call: CallShape, *, written: list[Tensor], **options: Any) -> None:
        super().__init__(call, **options)
        self.written = written

    def forward(self, step: Step) -> None:
        super().forward(step)
        assert step.carry is not None
        self.written += [x.clone() for x in (step.carry.m, step.carry.l, step.carry.acc, step.o, step.lse)]


def hopper_forward(**options: Any) -> Callable[[CallShape], KernelSet]:
    return partial(ForwardKernels, **options)


@pytest.mark.emulated
@pytest.mark.parametrize("consumers", [1, 2, 3])
@pytest.mark.parametrize("case", [TILES, CARRIES, SCORES, *OF_TERMS], ids=str)
def test_any_number_of_consumers_computes_the_same_attention(case: Case, consumers: int):
    config = ForwardConfig(consumers, 32, 3)
    run_case(hopper_forward(config=config), case, torch.bfloat16, "cpu")


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_any_number_of_stages_computes_the_same_attention(stages: int):
    config = ForwardConfig(2, 32, stages)
    run_case(hopper_forward(config=config), TILES, torch.bfloat16, "cpu")


@pytest.mark.emulated
@pytest.mark.parametrize("switch", ["early", "store", "ahead", "lazy"])
@pytest.mark.parametrize(("case", "seed"), [(TILES, None), (TILES, 1), (SCORES, 2)], ids=str)
def test_no_switch_changes_what_is_computed(case: Case, switch: str, seed: int | None):
    config = ForwardConfig(2, 32, 2, **{switch: True})
    with machine.mode(seed=seed):
        run_case(hopper_forward(config=config), case, torch.bfloat16, "cpu")


@pytest.mark.emulated
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("case", [TILES, CARRIES, OF_TERMS[1], *OF_PANELS], ids=str)
def test_all_switches_together_compute_the_same_attention(case: Case, seed: int | None):
    config = ForwardConfig(2, 32, 2, early=True, store=True, ahead=True, lazy=True)
    with machine.mode(seed=seed):
        run_case(hopper_forward(config=config), case, torch.bfloat16, "cpu")


@pytest.mark.emulated
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("pack", [1, 2])
@pytest.mark.parametrize("head_dim", [40, 128])
def test_a_carry_has_the_same_bits_on_every_way_through_memory(head_dim: int, pack: int, seed: int | None):
    steps = (((200, 1, 100),), ((0, 1, 90),), ((90, 1, 110),))
    sizes: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_dim": head_dim, "batch": 2}  # several tiles per program
    case = replace(CARRIES, name=f"carries_{head_dim}", ring_steps=steps, **sizes)
    found = []
    for store in (False, True):
        config, written = ForwardConfig(2, 32, 2, early=True, store=store), list[Tensor]()
        with machine.mode(seed=seed):
            run_case(partial(RecordingKernels, written=written, config=config, pack=pack), case, torch.bfloat16, "cpu")
        found.append(written)
    assert len(found[0]) == 15
    assert all(torch.equal(x.view(torch.int8), y.view(torch.int8)) for x, y in zip(*found, strict=True))


@pytest.mark.emulated
@pytest.mark.parametrize("switches", [{}, {"early": True, "store": True, "ahead": True, "lazy": True}], ids=["", "all"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_is_not_finite_stays_with_its_request(spoilt: str, bad: float, switches: dict[str, Any]):
    kernels = hopper_forward(config=ForwardConfig(2, 32, 2, **switches))
    assert_kernels_isolate(kernels, (150, 61, 80), spoilt, bad, torch.bfloat16, "cpu")


@pytest.mark.emulated
@pytest.mark.parametrize("pack", [1, 2, 8])
@pytest.mark.parametrize(
    "case",
    [FEW_ROWS, replace(FEW_ROWS, name="few_rows_scores", alibi=True, softcap=2.0), PACKED_TERMS, PANELS_OF_FEW_ROWS],
    ids=str,
)
def test_packing_heads_computes_the_same_attention(case: Case, pack: int):
    run_case(hopper_forward(pack=pack), case, torch.bfloat16, "cpu")


@pytest.mark.emulated
@pytest.mark.parametrize(
    "case",
    [*SPLIT, TILES, CARRIES, FEW_ROWS, SCORES, PANELS_OF_SCORES, *OF_TERMS, PACKED_TERMS, *OF_PANELS[1:4:2]],
    ids=str,
)
def test_splitting_tiles_computes_the_same_attention(case: Case, monkeypatch: pytest.MonkeyPatch):
    plans = split_always(monkeypatch, launcher)
    run_case(hopper_forward(config=ForwardConfig(1, 16, 2)), case, torch.float16, "cpu")
    if case not in (*SPLIT, PACKED_TERMS):
        assert any(plan.slots for plan in plans), "nothing was split"


@pytest.mark.parametrize("case", [replace(TILES, name="dim_20_v_12", head_dim=20, v_head_dim=12, batch=2)], ids=str)
def test_rows_of_any_width_are_served(case: Case):
    run_case(hopper_forward(), case, torch.bfloat16, "cpu")


def test_heads_are_packed_when_that_saves_tiles():
    assert launcher.choose_pack(5, 8, 128) == 8
    assert launcher.choose_pack(5, 6, 128) == 2
    assert launcher.choose_pack(1, 128, 128) == 64
    assert launcher.choose_pack(40, 4, 128) == 2
    assert launcher.choose_pack(128, 4, 128) == 1
    assert launcher.choose_pack(16385, 8, 128) == 1


def test_programs_that_keep_pace_compute_the_same_and_each_ends_every_epoch_once(monkeypatch: pytest.MonkeyPatch):
    boards = keep_pace_always(monkeypatch, launcher)
    run_case(hopper_forward(config=ForwardConfig(2, 32, 2)), CARRIES, torch.bfloat16, "cpu")
    assert boards, "nobody kept pace"
    for board, programs in boards:
        assert board.tolist() == [programs] * len(board)
