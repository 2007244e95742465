"""Configurations and weights of transformers' models, read whole or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ringattn.launch.common.distributed import Refusal

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")


WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files of which transformers reads the first that is there; an index names further files."""
ADAPTER = "adapter_config.json"


def check_place(path: str, what: str = "a config.json or a folder with one") -> None:
    """Raise Refusal for a path that is neither a configuration nor a folder with one and with all files of its weights."""
    place = Path(path).expanduser()
    if not (place.is_file() or (place / "config.json").is_file()):
        raise Refusal(f"model must be {what}, got {path}; download it first")
    if place.is_dir():
        check_files(place)


def check_files(folder: Path) -> None:
    """Raise Refusal for a folder that lacks files of its weights, or has an adapter, which only some installations would apply."""
    if (folder / ADAPTER).is_file():
        raise Refusal(
            f"model must be a folder without an adapter, got {folder} with {ADAPTER}; keep the adapter in a folder of its own "
            "and merge it into the model, or serve it with --adapter"
        )
    first = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if first is None:
        others = [path.name for kind in ("safetensors", "gguf") for path in sorted(folder.glob(f"*.{kind}"))]
        raise Refusal(
            f"the weights in {folder} must be {WEIGHTS[0]}, or the files that {WEIGHTS[1]} names, got "
            f"{', '.join(others[:4]) or 'none of them'}; fetch or convert the checkpoint, or pass the path of its config.json for "
            "random weights"
        )
    if first.suffix == ".json":
        try:
            names = set(json.loads(first.read_text())["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Refusal(
                f"{first} must map weights to files, got {type(error).__name__}: {error}; fetch it again"
            ) from None
        if missing := sorted(name for name in names if not (folder / name).is_file()):
            raise Refusal(
                f"the weights in {folder} must be whole, got {len(missing)} of {len(names)} files missing, such as {missing[0]}; "
                "fetch the checkpoint again"
            )


def tokenizer_folder(path: str) -> Path | None:
    """Return the folder of a model's tokenizer, which may be beside a configuration; None where there is no tokenizer."""
    place = Path(path).expanduser()
    folder = place if place.is_dir() else place.parent
    return folder if any((folder / name).is_file() for name in TOKENIZERS) else None


def read_config(path: str) -> Any:
    """Return the configuration of a causal language model, at a config.json or in its folder; no code is run or fetched."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    place = str(Path(path).expanduser())
    try:
        config = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each model has exceptions of its own for a wrong file
        raise Refusal(
            f"model must be a configuration that transformers can read, got {path}: {type(error).__name__}: {error}"
        ) from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Refusal(
            f"model must be a causal language model of transformers, got {path} of model_type {config.model_type!r}"
        )
    return config


def read_model(folder: Path, **options: Any) -> Any:
    """Return the causal language model of a folder; raise Refusal if it cannot be read or lacks weights.

    transformers would draw missing weights at random. `options` are those of `from_pretrained`.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    check_files(folder)
    try:
        read: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, output_loading_info=True, **options
        )
    except torch.OutOfMemoryError:
        raise
    except NotImplementedError as error:  # the integration refuses the model
        raise Refusal(str(error)) from None
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
