"""Generation over a prompt that is split over all ranks: `torchrun --nproc_per_node 2 examples/generate.py`.

Needs `pip install '.[transformers]'` in a checkout.
A tiny random Llama, so that it runs anywhere and offline; any model of transformers'
attention interface goes the same way, with `from_pretrained`. Beside it, what one process answers.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import ringattn
from ringattn.integrations.transformers import RingCache, register


def make(attention: str, device: torch.device) -> PreTrainedModel:
    """The same random weights whatever attends."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(device).eval()


def main() -> None:
    """Answers greedily, by sampling and by beams, and asks again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=20, help="tokens to generate")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda" if cuda else "cpu")

    register()
    ring = ringattn.Ring()
    model = make("ringattn", device)
    alone = make("sdpa", device) if ring.rank == 0 else None
    ids = torch.randint(256, (1, options.prompt), device=device)
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    ways = {
        "greedy": {"do_sample": False},
        "sampled": {"do_sample": True, "temperature": 0.8},
        "3 beams": {"num_beams": 3, "do_sample": False},
    }
    most = options.prompt + options.new
    with RingCache(model, ring, max_tokens=most, batch=3) as cache:
        for name, way in ways.items():
            given = {**prompt, **way, "max_new_tokens": options.new, "eos_token_id": None, "pad_token_id": 0}
            torch.manual_seed(1)
            start = time.perf_counter()
            answer = model.generate(**given, past_key_values=cache)[0, options.prompt :]
            seconds = time.perf_counter() - start
            used = cache.kv.used_pages
            cache.reset()
            if alone is not None:
                torch.manual_seed(1)
                expected = alone.generate(**given)[0, options.prompt :]
                same = "the same" if torch.equal(answer, expected) else "DIFFERENT"
                print(
                    f"{name}: {len(answer)} tokens in {seconds:.2f} s, pages by rank {used}, one process answers {same}"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
