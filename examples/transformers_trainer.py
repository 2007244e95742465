"""Hugging Face Trainer, every sequence split over all ranks: `torchrun --nproc_per_node 2 examples/transformers_trainer.py`.

Needs `pip install '.[transformers]'` in a checkout. A tiny random Llama learns the bytes of a text, packed documents and all.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, LlamaConfig, TrainingArguments

import ringattn
from ringattn.integrations.transformers import RingCollator, register
from ringattn.integrations.transformers.trainer import RingTrainer

TEXT = Path(__file__).parents[1] / "LICENSE"


def main() -> None:
    """Trains for 20 steps on the GPUs or CPUs that torchrun was told of."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    text = list(TEXT.read_bytes())
    # documents of different lengths, which a batch packs into one sequence
    documents = [{"input_ids": text[start : start + 100 + start % 157]} for start in range(0, 10000, 250)]

    register()
    ring = ringattn.Ring()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = RingTrainer(
            model=AutoModelForCausalLM.from_config(config, attn_implementation="ringattn"),
            args=TrainingArguments(
                folder,
                max_steps=20,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=2,
                gradient_checkpointing=True,
                learning_rate=3e-3,
                logging_steps=5,
                save_strategy="no",
                report_to=[],
                use_cpu=not cuda,
                disable_tqdm=True,
            ),
            data_collator=RingCollator(DataCollatorWithFlattening(), ring),
            train_dataset=documents,
        )
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if ring.rank == 0:
        print("loss of steps 1-5, 6-10, 11-15, 16-20:", " ".join(f"{float(loss):.2f}" for loss in losses))
        print("expected: from about 5.1 down to about 3.5, the same numbers on any number of ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
