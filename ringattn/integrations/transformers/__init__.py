"""Ring attention as an attention implementation of Hugging Face transformers: `attn_implementation="ringattn"`.

Owns the name under which transformers finds ring attention, and what users of it import. Refuses to patch transformers: only
its public interfaces for attention and masks are used, the same on the 4.57 and 5.x releases.

    register()                                     once, before models are made
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ringattn")
    loss = model(**shard_batch(batch, ring)).loss  the whole batch in, the loss of this rank's shard out

Importing registers nothing: a program calls `register`. With `Trainer`, see `trainer.RingTrainer`.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from ringattn.integrations.linear.transformers_layers import replace_recurrent_layers
from ringattn.integrations.transformers.attention import attend
from ringattn.integrations.transformers.batch import RingCollator, labels_per_ring, shard_batch
from ringattn.integrations.transformers.decode_compile import compile_for_decode
from ringattn.integrations.transformers.heads import last_positions, take_rows
from ringattn.integrations.transformers.masks import RingMask, describe_mask
from ringattn.integrations.transformers.model_forward import run_step
from ringattn.integrations.transformers.model_hooks import watch_models
from ringattn.integrations.transformers.positions import use_long_factors
from ringattn.integrations.transformers.ring_cache import RingCache
from ringattn.integrations.transformers.sharded_weights.load import load_sharded_model
from ringattn.integrations.transformers.sharded_weights.shard import shard_weights
from ringattn.integrations.transformers.support import NAME
from ringattn.integrations.transformers.tensor_parallel import TensorParallelError, apply_tensor_parallel
from ringattn.integrations.transformers.trees import pack_answers

__all__ = [
    "NAME",
    "RingCache",
    "RingCollator",
    "RingMask",
    "TensorParallelError",
    "apply_tensor_parallel",
    "attend",
    "compile_for_decode",
    "describe_mask",
    "labels_per_ring",
    "last_positions",
    "load_sharded_model",
    "pack_answers",
    "register",
    "replace_recurrent_layers",
    "run_step",
    "shard_batch",
    "shard_weights",
    "take_rows",
    "use_long_factors",
]


def register() -> None:
    """Register ring attention with transformers under the name "ringattn"; calling it again changes nothing.

    Call it before a model is made with `attn_implementation="ringattn"`, or before `model.set_attn_implementation("ringattn")`.
    Models of this process then have two hooks, which do nothing unless a model is called with a sharding (model_hooks.py).
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, describe_mask)
    watch_models()
