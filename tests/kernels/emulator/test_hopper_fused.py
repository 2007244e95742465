"""All visits in one Hopper launch, while rows of other ranks are still on their way."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("GLUON_EMULATOR") != "1":
    pytest.skip("the kernels must not be imported before the emulator is there", allow_module_level=True)

from ringattn import masks
from ringattn.kernels.attention.hopper import launcher
from ringattn.kernels.attention.hopper.configs import ForwardConfig
from ringattn.kernels.attention.hopper.tile_scheduler import WorkPlan
from ringattn.kernels.interface import Step
from ringattn.kernels.runtime.table_cache import find
from ringattn.plan.device_tables import step_tables
from ringattn.plan.layouts import Run
from tests.kernels.emulator.emulated_arrivals import Gathering, assert_right, make_scene, run
from tests.kernels.emulator.progress import split_always

HOLES = (
    (Run(0, 1, 20), Run(90, 1, 7)),
    (Run(20, 1, 30), Run(70, 2, 10), Run(120, 1, 17)),
    (Run(50, 1, 20), Run(71, 2, 10), Run(97, 1, 23), Run(137, 1, 13)),
)  # fmt: skip
DOCUMENTS = (0, 7, 61, 62, 120, 150)
TABLE = [[(i * i + 3 * j) % 5 < 2 or i == j for j in range(10)] for i in range(10)]
CASES = [
    Gathering("zigzag"),
    Gathering("zigzag_first_rank", rank=0),
    Gathering("zigzag_last_rank", rank=2),
    Gathering("contiguous", layout="contiguous"),
    Gathering("contiguous_first_rank_sees_nobody", layout="contiguous", rank=0),
    Gathering("striped", layout="striped"),
    Gathering("full", mask={}, layout="contiguous", world_size=4),
    Gathering("documents", layout="balanced", mask={"causal": True, "documents": DOCUMENTS}),
    Gathering("window", layout="contiguous", mask={"causal": True, "window": (17, 0)}),
    Gathering("two_sided_window", mask={"window": (9, 30)}, world_size=4),
    Gathering("lengths", mask={"causal": True, "lengths": ((0, 150), (33, 90), (0, 0))}, batch=3),
    Gathering("holes", layout=HOLES),
    Gathering("holes_window", layout=HOLES, mask={"causal": True, "window": (60, 0)}, rank=2),
    Gathering("groups", heads=8, kv_heads=4, groups=4, batch=2),
    Gathering("groups_of_two", heads=4, kv_heads=4, groups=2, rank=2, seq_len=97),
    Gathering("packed", seq_len=40, heads=16, kv_heads=2, groups=2, world_size=4, rank=3),
    Gathering("scores", options={"softcap": 2.0, "alibi": True, "sinks": True}, heads=4, groups=2),
    Gathering("key_bias", options={"key_bias": True}, heads=4, groups=2, batch=2, rank=2),
    Gathering("every_term", options={"softcap": 2.0, "alibi": True, "key_bias": True}, layout="striped"),
    Gathering("sinks_fp16", options={"sinks": True}, dtype=torch.float16),
    Gathering("widths", head_dim=24, v_head_dim=8),
    Gathering("wide", head_dim=200, v_head_dim=256, seq_len=97),
    Gathering("panels_of_keys", head_dim=192, v_head_dim=128, heads=4, kv_heads=2, groups=2, seq_len=97),
    Gathering("panels", head_dim=160, v_head_dim=192, seq_len=97),
    Gathering("sinks_and_window", mask={"mask": masks.causal() & (masks.sinks(4) | masks.window(30))}),
    Gathering("tree", mask={"mask": masks.tree([None, 0, 1, 1, 0], [70, 20, 15, 25, 20])}, world_size=2, batch=2),
    Gathering("blocks", mask={"mask": masks.causal() & masks.blocks(TABLE, 16)}, layout="striped", heads=4, groups=2),
]  # fmt: skip
SMALL = ForwardConfig(1, 16, 2)
EVERY_SWITCH = ForwardConfig(2, 32, 2, early=True, store=True, ahead=True, lazy=True)


def named(name: str) -> Gathering:
    return next(case for case in CASES if case.name == name)


@pytest.mark.emulated
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_visits_in_one_launch_are_attention(case: Gathering):
    scene = make_scene(case)
    assert_right(scene, *run(scene))
    assert int(scene.error) == 0
    assert_right(scene, *run(scene, awaited=False))


@pytest.mark.emulated
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_moment_of_arrival_changes_a_bit(case: Gathering):
    scene = make_scene(case)
    scene.finish()
    expected = run(scene, SMALL)
    assert_right(scene, *expected)
    for seed in (None, 1, 2):
        scene = make_scene(case)
        found = run(scene, SMALL, seed=seed)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        assert int(scene.error) == 0


@pytest.mark.emulated
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("name", ["zigzag", "groups", "holes", "two_sided_window"])
def test_no_switch_needs_rows_before_their_flag(name: str, seed: int | None):
    scene = make_scene(named(name))
    assert_right(scene, *run(scene, EVERY_SWITCH, seed=seed, eager=seed == 2))


@pytest.mark.parametrize("name", ["full", "groups"])
def test_one_launch_equals_one_visit_that_meets_the_same_blocks(name: str):
    case = replace(named(name), layout="contiguous", mask={}, world_size=2, rank=0, seq_len=96)
    scene = make_scene(case)
    o, lse = run(scene, SMALL)
    call, x = case.call, scene.whole
    alone = replace(case, world_size=1, rank=0).call
    device = torch.device("cpu")
    rows, keys = step_tables(call, "keys", device).stationary, step_tables(alone, "keys", device).moving[0]
    assert keys is not None
    other_o, other_lse = torch.empty_like(o), torch.empty_like(lse)
    step = Step(scene.q, x["k"], x["v"], find(rows), find(keys), scene.score, other_o, other_lse)
    scene.kernels(SMALL).forward(step)
    assert torch.equal(o, other_o)
    assert torch.equal(lse, other_lse)


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> list[WorkPlan]:
    """The plans of launches that split tiles."""
    return split_always(monkeypatch, launcher)


@pytest.mark.parametrize("name", ["zigzag", "full", "packed", "scores", "key_bias", "holes"])
def test_parts_of_tiles_wait_for_their_own_rows(name: str, split: list[WorkPlan]):
    scene = make_scene(named(name))
    assert_right(scene, *run(scene, SMALL))
    assert split[0].slots > 0, "nothing was split"


def assert_no_number_is_wrong(case: Gathering, o: torch.Tensor, lse: torch.Tensor) -> int:
    """Every row is what it would be, or NaN in all its columns; how many are NaN."""
    whole = make_scene(case)
    whole.finish()
    right_o, right_lse = run(whole, SMALL)
    lost = lse.isnan()
    assert torch.equal(o.isnan().any(-1).transpose(1, 2), lost)
    assert torch.equal(o.isnan().all(-1).transpose(1, 2), lost)
    assert torch.equal(lse[~lost], right_lse[~lost])
    assert torch.equal(o.transpose(1, 2)[~lost], right_o.transpose(1, 2)[~lost])
    return int(lost.sum())


@pytest.mark.emulated
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("kind", ["lost", "refused"])
@pytest.mark.parametrize("name", ["zigzag", "full", "groups_of_two", "scores", "key_bias"])
def test_rows_that_never_come_leave_no_number_behind(name: str, kind: str, seed: int | None):
    case = named(name)
    recvs = len(case.call.gather_plan().recvs) * case.groups
    for number in range(recvs):
        scene = make_scene(case, **{kind: number})
        found = run(scene, SMALL, seed=seed)
        assert int(scene.error) == 1
        assert assert_no_number_is_wrong(case, *found) > 0


@pytest.mark.parametrize("config", [None, EVERY_SWITCH], ids=["table", "switched"])
@pytest.mark.parametrize("name", ["full", "packed"])
def test_what_every_row_sees_and_never_comes_makes_every_row_nan(name: str, config: ForwardConfig | None):
    case = replace(named(name), mask={})
    for kind in ({"lost": 0}, {"refused": 0}):
        scene = make_scene(case, **kind)
        o, lse = run(scene, config)
        assert int(scene.error) == 1
        assert o.isnan().all()
        assert lse.isnan().all()


def test_parts_of_tiles_that_waited_in_vain_are_not_numbers(split: list[WorkPlan]):
    for kind in ({"lost": 0}, {"refused": 0}):
        scene = make_scene(named("full"), **kind)
        o, lse = run(scene, SMALL)
        assert split[-1].slots > 0, "nothing was split"
        assert int(scene.error) == 1
        assert o.isnan().all()
        assert lse.isnan().all()
