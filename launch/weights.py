"""Models of transformers from a folder of weights, whole or not at all.

Owns what is said of weights that are not there or cannot be read. Refuses to know what the model is for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ringattn.launch.distributed import Refusal


def read_model(folder: Path, **options: Any) -> Any:
    """The causal language model of a folder, all of whose weights are there.

    Args:
        folder: Where it is. Nothing is fetched, and no code in it is run.
        options: Of transformers' `from_pretrained`.

    Raises:
        Refusal: Weights of the model are not in the folder: transformers would draw them at random, and go on.
    """
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False, output_loading_info=True, **options
    )
    if missing := sorted(found["missing_keys"]):
        raise Refusal(
            f"the folder must have all weights of {type(model).__name__}, got {folder} without {len(missing)} of them, such as "
            f"{missing[0]}, which would be random; fetch the checkpoint again, or correct its config.json"
        )
    return model
