"""A training loop with accelerate, every sequence split over the ranks: `accelerate launch examples/accelerate_loop.py`.

Needs `pip install '.[transformers]'` in a checkout. A tiny random Llama learns the bytes of a text, packed documents and all.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, LlamaConfig

from ringattn.integrations.accelerate import context_parallel

TEXT = Path(__file__).parents[1] / "LICENSE"
MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def main() -> None:
    """Trains for 20 steps on the GPUs or CPUs that were launched."""
    text = list(TEXT.read_bytes())
    documents = [{"input_ids": text[start : start + 100 + start % 157]} for start in range(0, 10000, 250)]
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    plugin = context_parallel(accelerator)  # size=4: four consecutive ranks share a sequence

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **MODEL), attn_implementation="ringattn")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(documents, batch_size=8, shuffle=True, generator=order, collate_fn=DataCollatorWithFlattening())
    model, optimizer, loader = plugin.prepare(model, optimizer, loader)

    losses: list[float] = []
    while len(losses) < 40:
        for batch in loader:  # this rank's rows
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())  # of the whole batch
    if accelerator.is_main_process:
        quarters = [sum(losses[start : start + 10]) / 10 for start in range(0, 40, 10)]
        print(f"{accelerator.num_processes} process(es)")
        print("loss of steps 1-5, 6-10, 11-15, 16-20:", " ".join(f"{loss:.4f}" for loss in quarters))


if __name__ == "__main__":
    main()
    if dist.is_initialized():  # when the model is gone: its replicas must not outlive the group
        dist.destroy_process_group()
