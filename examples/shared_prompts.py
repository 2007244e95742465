"""Several answers to one prompt, the prompt stored and computed once: the loss of the answers one by one, with fewer tokens.

    torchrun --nproc_per_node 2 examples/shared_prompts.py        # GPUs, or CPUs without them

Makes a small Llama with random weights, draws a prompt of 160 tokens and eight answers of 24, and takes two steps of training on
each side. Expect equal losses, and 359 tokens per step instead of 1,472.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import ringattn
from ringattn.integrations.transformers import pack_answers, register, shard_batch

PROMPT, ANSWERS, ANSWER, STEPS = 160, 8, 24, 2
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def model_of(attention: str, device: torch.device) -> torch.nn.Module:
    """A small Llama; its weights are the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, num_key_value_heads=2, max_position_embeddings=512, **SIZES)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(device)


def one_by_one(model: torch.nn.Module, prompt: Tensor, answers: list[Tensor]) -> Tensor:
    """The loss of the answers, each behind a copy of the prompt."""
    total = prompt.new_zeros((), dtype=torch.float32)
    for answer in answers:
        ids = torch.cat([prompt, answer])[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        total = total + torch.nn.functional.cross_entropy(logits, answer, reduction="sum")
    return total / sum(map(len, answers))


def main() -> None:
    """Train both ways and compare."""
    dist.init_process_group()
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    register()
    ring = ringattn.Ring()
    torch.manual_seed(1)
    prompt = torch.randint(128, (PROMPT,)).to(device)
    answers = [torch.randint(128, (ANSWER,)).to(device) for _ in range(ANSWERS)]
    batch, tree = pack_answers([(prompt, answers)])
    part = shard_batch(batch, ring, "balanced", tree=tree)
    shared, alone = model_of("ringattn", device), model_of("sdpa", device)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (shared, alone)]
    for step in range(STEPS):
        loss = shared(**part).loss
        loss.backward()
        for x in (loss.detach(), *(p.grad for p in shared.parameters() if p.grad is not None)):
            dist.all_reduce(x)
            x /= ring.world_size
        expected = one_by_one(alone, prompt, answers)
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.5f} shared, {expected.item():.5f} one by one")
    if dist.get_rank() == 0:
        print(f"{tree.starts[-1]} tokens per step instead of {ANSWERS * (PROMPT + ANSWER)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
