"""A training loop with accelerate makes the steps of one process, when what it prepares goes through the plugin."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from torch.utils.data import DataLoader, IterableDataset
from transformers import DataCollatorWithFlattening

from ringattn import Ring
from ringattn.integrations.accelerate import context_parallel
from tests.integrations.processes import assert_same, processes
from tests.integrations.transformers.models import make
from tests.integrations.transformers.test_trainer_models import samples
from tests.support.pool import Pools
from tests.support.scripts import run_on_ranks


def loop(folder: str, cp: int, fsdp: bool = False, resumed: bool = False) -> Any:
    """Losses, norms and learning rates of six steps of two batches, and how far parameters moved."""
    with processes() as world_size:
        if fsdp:
            PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        replicas = world_size // max(cp, 1)
        accelerator: Any = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2 // replicas,
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
            if fsdp
            else None,
        )
        model = make("llama", "ringattn" if cp else "sdpa", torch.float32, use_cache=False)
        start = {name: x.detach().clone() for name, x in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)
        loader = DataLoader(samples(), batch_size=2, collate_fn=DataCollatorWithFlattening())  # pyright: ignore[reportArgumentType]
        prepare = context_parallel(accelerator, cp).prepare if cp else accelerator.prepare
        model, optimizer, scheduler, loader = prepare(model, optimizer, scheduler, loader)
        history = []
        while len(history) < 6:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0) if accelerator.sync_gradients else None
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if norm is not None and len(history) < 6:
                    mean = accelerator.reduce(loss.detach(), "mean").item()
                    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                    history.append({"loss": mean, "norm": float(norm), "rate": scheduler.get_last_lr()[0]})
                if len(history) == 4 and resumed:
                    resumed = False
                    accelerator.save_state(folder)
                    accelerator.wait_for_everyone()
                    with torch.no_grad():
                        for x in model.parameters():
                            x.zero_()
                    accelerator.load_state(folder)
        state = accelerator.get_state_dict(model)
        moved = {name: state[name].double() - x.double() for name, x in start.items() if name in state}
        if replicas > 1:
            # the loss of the last batch of a ring, of which each step has one and not two
            history = [{**row, "loss": 0.0} for row in history]
        return history, moved


@pytest.mark.models
@pytest.mark.parametrize(("ranks", "resumed"), [(1, False), (2, True), (4, False)])
def test_a_loop_makes_the_steps_of_one_process(pool: Pools, tmp_path: Path, ranks: int, resumed: bool) -> None:
    expected = loop(str(tmp_path), 0)
    for found in pool(ranks).run(loop, str(tmp_path), ranks, resumed=resumed):
        assert_same(found, expected)


def test_two_rings_under_fsdp_make_the_steps_of_one_process(pool: Pools, tmp_path: Path) -> None:
    history, moved = loop(str(tmp_path), 0)
    found = pool(4).run(loop, str(tmp_path), 2, fsdp=True)
    # rank 0 has the whole state
    assert_same(found[0], ([{**row, "loss": 0.0} for row in history], moved))


def sources(folder: str) -> list[str]:
    """What is refused on each rank."""
    del folder
    told = []
    with processes():
        accelerator = Accelerator(cpu=True)
        plugin = context_parallel(accelerator, 2)
        assert context_parallel(accelerator, ring=plugin.ring).ring is plugin.ring
        for refused in (
            lambda: context_parallel(accelerator, 3),
            lambda: context_parallel(accelerator, 2, ring=plugin.ring),
            lambda: plugin.prepare(DataLoader(Stream())),
        ):
            with pytest.raises((ValueError, NotImplementedError)) as raised:
                refused()
            told.append(str(raised.value))
    return told


class Stream(IterableDataset[dict[str, list[int]]]):
    def __iter__(self) -> Any:
        return iter(samples())


def test_what_cannot_be_shared_is_refused_on_every_rank(pool: Pools, tmp_path: Path) -> None:
    for told in pool(2).run(sources, str(tmp_path)):
        assert [text.partition(", got ")[0] for text in told] == [
            "context_parallel_size must divide the number of processes, 2",
            "a ring must be given, or a size",
            "a dataset must have a length and be read by every rank",
        ]


def test_context_parallelism_of_accelerate_is_refused_with_the_argument_to_change() -> None:
    class Configured:
        parallelism_config = ParallelismConfig(cp_size=2)
        num_processes, process_index = 1, 0

    accelerator: Any = Configured()
    with pytest.raises(
        NotImplementedError, match=r"must leave cp_size at 1, got 2: .* pass size=2 to context_parallel$"
    ):
        context_parallel(accelerator, ring=Ring())


def test_deepspeed_under_accelerate_is_refused() -> None:
    accelerator: Any = SimpleNamespace(parallelism_config=None, distributed_type=DistributedType.DEEPSPEED)
    with pytest.raises(NotImplementedError, match="must be plain, with DDP or with FSDP2, got DEEPSPEED"):
        context_parallel(accelerator, ring=Ring())


@pytest.mark.models
def test_the_example_learns_on_two_ranks_what_one_process_learns() -> None:
    printed = run_on_ranks("accelerate_loop")
    assert "2 process(es)" in printed
    losses = printed.splitlines()[-1].rpartition(": ")[2].split()
    assert [float(x) for x in losses] == pytest.approx([5.0143, 3.7898, 3.1223, 2.8435], abs=2e-3)
