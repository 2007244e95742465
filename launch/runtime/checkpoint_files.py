"""Configurations and weights of transformers' models, read whole or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ringattn.launch.runtime.distributed import Refusal


def read_config(path: str) -> Any:
    """The configuration of a model."""
    from transformers import AutoConfig

    place = str(Path(path).expanduser())
    try:
        return AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what a file says wrongly, each model finds in a way of its own
        raise Refusal(
            f"model must be a configuration that transformers can read, got {path}: {type(error).__name__}: {error}"
        ) from None


def has_weights(place: Path) -> bool:
    """Whether a folder has weights, or says by an index that it should; a configuration by itself has none."""
    return place.is_dir() and any(any(place.glob(f"*.{kind}")) for kind in ("safetensors", "bin", "index.json"))


def read_model(folder: Path, **options: Any) -> Any:
    """The causal language model of a folder, all of whose weights are there."""
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
