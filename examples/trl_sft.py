"""TRL's SFTTrainer with LoRA and packing, every sequence split over the ranks: `accelerate launch examples/trl_sft.py`.

Needs `pip install '.[trl,peft]'` in a checkout.
A tiny random Llama learns words of a text; for your model, change `MODEL` and the data.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig

from ringattn.integrations.transformers import register
from ringattn.integrations.trl import RingSFTTrainer  # was: from trl import SFTTrainer

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
    words = TEXT.read_text().split()
    names = {word: index for index, word in enumerate(["<pad>", "<eos>", *dict.fromkeys(words)])}
    made = Tokenizer(models.WordLevel(names, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
    texts = [" ".join(words[start : start + 20 + start % 37]) for start in range(0, len(words) - 60, 12)]

    register()
    cpu = not torch.cuda.is_available()
    processes = PartialState(cpu=cpu).num_processes
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(names), **MODEL)
    with tempfile.TemporaryDirectory() as folder:
        trainer = RingSFTTrainer(
            AutoModelForCausalLM.from_config(config, attn_implementation="ringattn"),
            context_parallel_size=processes,  # fewer: rings are data parallel replicas
            args=SFTConfig(
                folder,
                max_length=128,
                packing=True,
                max_steps=20,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                learning_rate=5e-3,
                bf16=not cpu,
                use_cpu=cpu,
                logging_steps=5,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=8, target_modules="all-linear"),
        )
        trainer.train()
    if trainer.accelerator.is_main_process:
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        print(f"{processes} process(es)")
        print("loss of steps 1-5, 6-10, 11-15, 16-20:", " ".join(f"{float(loss):.4f}" for loss in losses))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
