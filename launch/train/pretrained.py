"""Causal language models of transformers with the interface of the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.launch.common.checkpoint_files import read_config, read_model, tokenizer_folder
from ringattn.launch.common.distributed import Refusal
from ringattn.launch.train.data import NUM_BYTES
from ringattn.launch.train.model import cross_entropy_sum, document_positions


def read_config_json(path: str) -> dict[str, Any]:
    """Return the config.json of a model as a dict; empty when it is not a JSON object."""
    place = Path(path).expanduser()
    try:
        content = json.loads((place / "config.json" if place.is_dir() else place).read_text())
    except (OSError, ValueError):
        return {}  # building the model raises the error
    return content if isinstance(content, dict) else {}


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer in the folder of a model; None where there is none, and tokens are bytes."""
    folder = tokenizer_folder(path)
    if folder is None:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


class CausalLM(nn.Module):
    """Causal language model of transformers with the interface of `model.Transformer`; logits have a softcap, or 0.0."""

    def __init__(self, model: Any, softcap: float) -> None:
        super().__init__()
        self.model = model
        self.softcap = softcap

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder layers: the longest list of modules in the model."""
        return max((module for module in self.model.modules() if isinstance(module, nn.ModuleList)), key=len)

    def forward(self, tokens: Tensor, sharding: Any, targets: Tensor | None = None) -> Tensor:
        """Return the logits `b s vocab` of this rank's rows, or with targets `b s` the sum of their losses, fp32."""
        positions = document_positions(sharding).to(tokens.device)[None]
        decoder = self.model.base_model
        hidden = decoder(input_ids=tokens, position_ids=positions, sharding=sharding, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings().weight
        if targets is not None:
            return cross_entropy_sum(hidden, head, targets, self.softcap)
        return _logits(hidden, head, self.softcap)


def build_causal_lm(path: str, seed: int, device: torch.device, vocabulary: int = NUM_BYTES) -> CausalLM:
    """Build the model of a folder with its weights, or that of a config.json with random ones.

    Random weights depend on the seed and the device type only, and are made on the device, whole; weights of a folder are read into
    host memory.
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
    if place.is_dir():
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
    """Raise Refusal for a model whose logits are not its last rows times its output embedding, softly capped."""
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
