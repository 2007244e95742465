"""The programs of docs/trainers.md run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening

from tests.integrations.processes import processes

PAGE = Path(__file__).parents[3] / "docs/trainers.md"


def test_every_block_of_the_page_runs(tmp_path: Path) -> None:
    trained, looped = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"folder": str(tmp_path)}
    with processes():
        exec(compile(trained, "docs/trainers.md", "exec"), names)
    assert names["trainer"].state.global_step == 2
    optimizer = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    names |= {"optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)}
    names["loader"] = DataLoader(names["documents"], batch_size=4, collate_fn=DataCollatorWithFlattening())
    with processes():
        exec(compile(looped, "docs/trainers.md", "exec"), names)
    assert names["scheduler"].get_last_lr()[0] > 0.1 / 3, "one step of the optimizer was made"
    assert any(tmp_path.iterdir())
