"""Causal language models of transformers, as the trainer calls models.

Owns where they come from (a configuration, or a folder with weights), their vocabulary, and the way from hidden rows to a
loss. Refuses to know how attention goes around a ring: `ringattn.integrations.transformers` does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.launch.distributed import Refusal
from ringattn.launch.training.loss import cross_entropy_sum
from ringattn.launch.training.model import document_positions
from ringattn.launch.weights import has_weights, read_config, read_model

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")
NUM_BYTES = 256


def check_model(path: str) -> None:
    """Refuses what is neither a configuration nor a folder with one.

    Raises:
        Refusal: There is no such file, or no config.json in the folder.
    """
    place = Path(path).expanduser()
    if not (place.is_file() or (place / "config.json").is_file()):
        raise Refusal(f"model must be a config.json or a folder with one, got {path}; download it first")


def read_said(path: str) -> dict[str, Any]:
    """What the config.json of a model says, as it stands there; empty where that is no object."""
    place = Path(path).expanduser()
    try:
        said = json.loads((place / "config.json" if place.is_dir() else place).read_text())
    except (OSError, ValueError):
        said = None  # who makes the model says what is wrong
    return said if isinstance(said, dict) else {}


def load_tokenizer(path: str) -> Any:
    """The tokenizer in the folder of a model; None where there is none, and tokens are bytes."""
    place = Path(path).expanduser()
    if not any((place / name).is_file() for name in TOKENIZERS):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(place), local_files_only=True)


class CausalLM(nn.Module):
    """A causal language model of transformers, called as `model.Transformer` is.

    Args:
        model: The model, with ring attention.
        softcap: Of its logits; 0.0 for none.
    """

    def __init__(self, model: Any, softcap: float) -> None:
        super().__init__()
        self.model = model
        self.softcap = softcap

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder layers: the longest list of modules that the model holds."""
        lists = [module for module in self.model.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=len)

    def forward(self, tokens: Tensor, sharding: Any, targets: Tensor | None = None) -> Tensor:
        """The logits `b s vocab` of this rank's rows, or with targets `b s` the sum of their losses, fp32."""
        positions = document_positions(sharding).to(tokens.device)[None]
        decoder = self.model.base_model
        hidden = decoder(input_ids=tokens, position_ids=positions, sharding=sharding, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings().weight
        if targets is not None:
            return cross_entropy_sum(hidden, head, targets, self.softcap)
        return _logits(hidden, head, self.softcap)


def build_causal_lm(path: str, seed: int, device: torch.device, vocabulary: int = NUM_BYTES) -> CausalLM:
    """The model of a folder, with its weights, or with random ones: a function of the seed and the kind of device alone.

    Random weights are made on the device, whole; weights of a folder are read into host memory.

    Args:
        path: A folder, or a config.json.
        seed: Of random weights.
        device: Where training will be.
        vocabulary: How many different tokens the data has.

    Raises:
        Refusal: transformers cannot make the model, weights of it are missing, it has too few tokens, or makes its logits in a
            way that is not known here.
    """
    from transformers import AutoModelForCausalLM

    from ringattn.integrations.transformers import NAME, register

    register()
    place = Path(path).expanduser()
    config = read_config(path)
    tokens = getattr(config, "vocab_size", None)
    if tokens is None or tokens < vocabulary:
        raise Refusal(
            f"the model must have at least {vocabulary} tokens, got a vocab_size of {tokens} in {path}; "
            "pass the folder that has its tokenizer, or a larger vocabulary"
        )
    # the logits of a few tokens are compared first, and without a ring; then attention is the ring's
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    if has_weights(place):
        model = read_model(place, **options)
    else:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, **options)
    softcap = getattr(config, "final_logit_softcapping", None) or 0.0
    _check_logits(model, softcap, path)
    model.set_attn_implementation(NAME)
    return CausalLM(model, softcap)


def _logits(hidden: Tensor, head: Tensor, softcap: float) -> Tensor:
    logits = hidden @ head.T
    return softcap * torch.tanh(logits / softcap) if softcap else logits


@torch.no_grad()
def _check_logits(model: Any, softcap: float, path: str) -> None:
    """Refuses a model whose logits are something else than its last rows times its output embedding, softly capped."""
    model.eval()
    tokens = torch.arange(4, device=model.device)[None]
    wanted = model(input_ids=tokens, use_cache=False).logits
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    found = None if getattr(head, "bias", None) is not None else _logits(hidden, head.weight, softcap)
    if found is None or not torch.allclose(found, wanted, atol=1e-4, rtol=1e-4):
        raise Refusal(
            f"the logits of {path} must be its last rows times its output embedding, got other ones: its loss would be "
            "another; train a model without scaled logits and without a bias on them"
        )
    model.train()
