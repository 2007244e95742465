"""Ring attention as an attention implementation of Hugging Face transformers: `attn_implementation="ringattn"`.

Owns the name under which transformers finds ring attention, and what users of it import. Refuses to patch transformers: only
its public interfaces for attention and masks are used, the same on the 4.57 and 5.x releases.

    register()                                     once, before models are made
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ringattn")
    loss = model(**shard_batch(batch, ring)).loss  the whole batch in, this rank's part of it out

Importing registers nothing: a program says so by calling `register`. With `Trainer`, see `trainer.RingTrainer`.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from ringattn.integrations.transformers.attention import attend
from ringattn.integrations.transformers.batch import RingCollator, shard_batch
from ringattn.integrations.transformers.fusing import CannotFuse, fuse
from ringattn.integrations.transformers.generation import RingCache
from ringattn.integrations.transformers.masks import RingMask, describe_mask
from ringattn.integrations.transformers.splitting import CannotSplit, split
from ringattn.integrations.transformers.steps import run_step

NAME = "ringattn"

__all__ = [
    "NAME",
    "CannotFuse",
    "CannotSplit",
    "RingCache",
    "RingCollator",
    "RingMask",
    "attend",
    "describe_mask",
    "fuse",
    "register",
    "run_step",
    "shard_batch",
    "split",
]


def register() -> None:
    """Lets transformers find ring attention under the name "ringattn"; calling it again changes nothing.

    Call it before a model is made with `attn_implementation="ringattn"`, or before `model.set_attn_implementation("ringattn")`.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, describe_mask)
