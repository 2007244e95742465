"""Configurations and weights of transformers' models, read whole or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ringattn.launch.runtime.distributed import Refusal

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")


def check_place(path: str, what: str = "a config.json or a folder with one") -> None:
    """Raise Refusal for a path that is neither a configuration nor a folder with one."""
    place = Path(path).expanduser()
    if not (place.is_file() or (place / "config.json").is_file()):
        raise Refusal(f"model must be {what}, got {path}; download it first")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZERS)


def read_config(path: str) -> Any:
    """Return the configuration at a config.json, or in a folder with one; nothing is fetched, and no code is run."""
    from transformers import AutoConfig

    place = str(Path(path).expanduser())
    try:
        return AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each model has exceptions of its own for a wrong file
        raise Refusal(
            f"model must be a configuration that transformers can read, got {path}: {type(error).__name__}: {error}"
        ) from None


def has_weights(place: Path) -> bool:
    """Whether a folder has weights, or an index of weights; a configuration by itself has none."""
    return place.is_dir() and any(any(place.glob(f"*.{kind}")) for kind in ("safetensors", "bin", "index.json"))


def read_model(folder: Path, **options: Any) -> Any:
    """Return the causal language model of a folder; raise Refusal if it cannot be read or lacks weights.

    transformers would draw missing weights at random. `options` are those of `from_pretrained`.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        read: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, output_loading_info=True, **options
        )
    except torch.OutOfMemoryError:
        raise
    except (SafetensorError, OSError, TypeError, ValueError, RuntimeError) as error:
        raise Refusal(
            f"the weights in {folder} must be whole and of the model in its config.json, got {type(error).__name__}: {error}"
        ) from None
    model, found = read
    if missing := sorted(found["missing_keys"]):
        raise Refusal(
            f"the folder must have all weights of {type(model).__name__}, got {folder} without {len(missing)} of them, such as "
            f"{missing[0]}, which would be random; fetch the checkpoint again, or correct its config.json"
        )
    return model
