"""Every block of code of the page runs, and the example does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

from ringattn import Ring
from ringattn.integrations.transformers import register
from tests.integrations.transformers import test_images as images
from tests.integrations.transformers.models import make, tokens
from tests.support.pool import Pools
from tests.support.scripts import run_on_ranks

ROOT = Path(__file__).parents[3]


def program(section: str = "") -> str:
    """The blocks of the page, or of a section, one after the other, with its differences applied."""
    lines = []
    text = (ROOT / "docs/transformers.md").read_text()
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    for kind, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S):
        assert kind in ("diff", "python"), f"the page has a block that is not run: {kind}"
        for line in block.splitlines():
            if kind == "python" or line[:1] in (" ", "+"):
                lines.append(line[kind == "diff" :])
    return "\n".join(lines)


def run_page(folder: str) -> dict[str, Any]:
    torch._dynamo.reset()
    ids = tokens(21)
    batch = {"input_ids": ids, "labels": ids}
    documents = [{"input_ids": tokens(5 + 3 * i, seed=i)[0].tolist()} for i in range(4)]
    arguments = TrainingArguments(
        folder,
        max_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    # layers compile without a compiler of C++, which not every machine has
    source = program().replace("fullgraph=True", "fullgraph=True, backend='aot_eager'")
    names: dict[str, Any] = {"name": folder, "batch": batch, "documents": documents, "arguments": arguments}
    names |= {"image_model": images.make("llava", "ringattn"), "image_batch": images.with_images("llava")}
    names |= {"inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, "torch": torch}
    exec(compile(source, "docs/transformers.md", "exec"), names)
    return {"logits": names["logits"].detach(), "documents": names["part"]["sharding"].documents}


def test_every_block_of_the_page_runs(tmp_path: Path) -> None:
    make("llama", "sdpa", torch.float32).save_pretrained(tmp_path)
    found = run_page(str(tmp_path))
    assert found["documents"] == (0, 5, 13, 24)
    assert found["logits"].shape[:2] == (1, 21)


def run_loop(folder: str) -> torch.Tensor:
    """The first two blocks, which need no Trainer, on ranks."""
    names: dict[str, Any] = {"name": folder, "batch": {"input_ids": tokens(21), "labels": tokens(21)}}
    exec(
        compile(
            program().split("from ringattn.integrations.transformers.trainer import RingTrainer")[0], "page", "exec"
        ),
        names,
    )
    return names["logits"].detach()


def test_the_page_prints_the_same_on_two_ranks(pool: Pools, tmp_path: Path) -> None:
    model = make("llama", "sdpa", torch.float32)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model.eval()(tokens(21)).logits
    for found in pool(2).run(run_loop, str(tmp_path)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def run_generation(folder: str) -> list[list[Any]]:
    """The section on generation, after what stands above of the model."""
    register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="ringattn")
    ids = tokens(21)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    names: dict[str, Any] = {"model": model, "ring": Ring(), "inputs": inputs, "torch": torch}
    exec(compile(program("Generation"), "page", "exec"), names)
    return [names[name].tolist() for name in ("answer", "ids", "beams", "lasts")]


def test_the_page_generates_the_same_on_two_ranks(pool: Pools, tmp_path: Path) -> None:
    make("llama", "sdpa", torch.float32).save_pretrained(tmp_path)
    alone, (one, other) = pool(1).run(run_generation, str(tmp_path))[0], pool(2).run(run_generation, str(tmp_path))
    assert one == other
    assert one[:3] == alone[:3]
    torch.testing.assert_close(torch.tensor(one[3]), torch.tensor(alone[3]), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_example_prints_its_losses_on_two_ranks() -> None:
    printed = run_on_ranks("transformers_trainer")
    line = next(line for line in printed.splitlines() if line.startswith("loss of steps"))
    first, *_, last = map(float, line.partition(": ")[2].split())
    assert 4.9 < first < 5.3
    assert 3.2 < last < 3.7
