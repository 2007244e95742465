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
from ringattn.training import cross_entropy_sum
from ringattn.training.memory import decoder_layers


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
    """Causal language model of transformers with the interface of `model.Transformer`; options are those of its head."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.options = options

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers."""
        return decoder_layers(self.model)

    def forward(self, tokens: Tensor, sharding: Any, targets: Tensor | None = None) -> Tensor:
        """Return the logits `b s vocab` of this rank's rows, or with targets `b s` the sum of their losses, fp32."""
        positions = sharding.document_positions.to(tokens.device)[None]
        call = {"input_ids": tokens, "position_ids": positions, "sharding": sharding, "use_cache": False}
        if targets is None:
            return self.model(**call).logits
        head = self.model.get_output_embeddings()
        return cross_entropy_sum(
            self.model.base_model(**call).last_hidden_state, head.weight, targets, bias=head.bias, **self.options
        )


def build_causal_lm(path: str, seed: int, device: torch.device, vocabulary: int = NUM_BYTES) -> CausalLM:
    """Build the model of a folder with its weights, or that of a config.json with random ones.

    Random weights depend on the seed and the device type only, and are made on the device, whole; weights of a folder are read into
    host memory.
    """
    from transformers import AutoModelForCausalLM

    from ringattn.integrations.transformers import NAME, register
    from ringattn.integrations.transformers.chunked_loss import head_options

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
    try:
        options = head_options(model)
    except NotImplementedError as error:
        raise Refusal(f"{error}, got {path}") from None
    model.set_attn_implementation(NAME)
    return CausalLM(model, options)
