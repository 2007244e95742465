"""The page about loops of one's own: its program goes on with other ranks, and prints the losses of one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.pool import Pools
from tests.support.scripts import run_script
from tests.test_docs import blocks


def losses(printed: str) -> list[float]:
    return [float(line.rpartition(": ")[2]) for line in printed.splitlines() if line.startswith("step ")]


def block_of(title: str) -> str:
    """The program of that title on the page."""
    return next(code for named, code, _ in blocks("loops.md") if title in named)


def test_the_loop_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    code = block_of("loop.py")
    script = tmp_path / "loop.py"
    script.write_text(code)
    alone = losses(run_script(script, str(tmp_path / "alone"), "1", "4", ranks=1))
    first = losses(run_script(script, str(tmp_path / "run"), "2", "2", ranks=2))
    then = losses(run_script(script, str(tmp_path / "run"), "2", "2", ranks=4))
    assert first + then == pytest.approx(alone, abs=2e-4)
    page = (Path(__file__).parents[3] / "docs/loops.md").read_text()
    assert losses(page) == pytest.approx(alone, abs=0.02)


def numbers_of(title: str, sizes: tuple[int, int]) -> tuple[float, ...]:
    """The numbers of a program on a mesh of these sizes, in place of those that the page has."""
    found: dict[str, Any] = {"__name__": title}
    exec(block_of(title).replace("(2, 2)", str(sizes)), found)
    return found["numbers"]


@pytest.mark.parametrize("title", ["pipeline.py", "vocabulary.py"])
def test_a_ring_beside_another_split_has_the_loss_and_gradients_of_one_process(pool: Pools, title: str) -> None:
    page = (Path(__file__).parents[3] / "docs/loops.md").read_text()
    shown = re.search("```text\n(loss.*)", page[page.index(f"    torchrun --nproc_per_node 4 {title}") :])
    assert shown is not None
    (alone,) = pool(1).run(numbers_of, title, (1, 1))
    assert [float(x) for x in re.findall(r"\d+\.\d+", shown[1])] == pytest.approx(alone, abs=1e-4)
    for found in pool(4).run(numbers_of, title, (2, 2)):
        assert found == pytest.approx(alone, rel=1e-5)


def quantized_steps(folder: str) -> list[float]:
    """Losses of three steps of adapters of a model in four bits."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from ringattn import Ring
    from ringattn.integrations.transformers import register, shard_batch

    register()
    ring = Ring(dist.group.WORLD if dist.is_initialized() else None)
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=four, dtype=torch.float32, device_map="cpu", attn_implementation="ringattn"
    )
    torch.manual_seed(0)
    layers = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(prepare_model_for_kbit_training(model, use_gradient_checkpointing=False), layers)
    assert type(model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")).__name__ == "Linear4bit"
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(3):
        ids = torch.randint(3, 60, (2, 21), generator=torch.Generator().manual_seed(step))
        loss = model(**shard_batch({"input_ids": ids, "labels": ids}, ring)).loss
        loss.backward()
        for gradient in [p.grad for p in model.parameters() if p.grad is not None and ring.world_size > 1]:
            dist.all_reduce(gradient.div_(ring.world_size))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(
            sum(x.item() for x in ring.gather(loss.detach().reshape(1), 0, [1] * ring.world_size)) / ring.world_size
        )
    return losses


def test_adapters_of_a_quantized_model_train_as_on_one_process(pool: Pools, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64)).save_pretrained(tmp_path)
    alone = quantized_steps(str(tmp_path))
    assert alone[0] != pytest.approx(alone[2], abs=1e-3)
    for found in pool(2).run(quantized_steps, str(tmp_path)):
        assert found == pytest.approx(alone, rel=1e-5)
