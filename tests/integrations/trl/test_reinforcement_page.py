"""The programs of docs/reinforcement.md run on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.integrations.processes import processes
from tests.support.pool import Pools

PAGE = Path(__file__).parents[3] / "docs/reinforcement.md"


def run_page() -> list[int]:
    """Run the blocks of the page in one namespace; the steps that trainers have made."""
    names: dict[str, Any] = {}
    with patch.object(dist, "init_process_group"):
        for title, code in re.findall(
            r'^```python title="(\w+)\.py"\n(.*?)^```', PAGE.read_text(), re.MULTILINE | re.DOTALL
        ):
            with processes():
                exec(compile(code, title, "exec"), names)
    assert names["head"].weight.grad.norm() > 0
    return [names[trainer].state.global_step for trainer in ("trainer", "kto", "orpo")]


@pytest.mark.models
def test_every_block_of_the_page_runs_on_two_ranks(pool: Pools) -> None:
    assert pool(2).run(run_page) == [[2, 2, 2], [2, 2, 2]]
