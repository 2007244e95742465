"""A job of torchtitan on CPU ranks: prints the loss and the norm of gradients of each step, as JSON.

    torchrun --nproc_per_node 2 job.py llama3_debugmodel ring parallelism.context_parallel_degree=2

torchtitan knows no CPUs: its device is replaced before its modules read it, and its own attention ("own", the reference), which has
no backward there, computes all pairs under torchtitan's masks. Nothing else of it is changed.
"""

# pyright: reportMissingImports=false, reportOptionalMemberAccess=false

from __future__ import annotations

import functools
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torchtitan.tools import utils

_numbers = dict.fromkeys(("active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms"), 0)
_nothing = lambda *_: None  # noqa: E731
utils.device_type = "cpu"
utils.device_module = SimpleNamespace(
    current_device=lambda: 0,
    device_count=lambda: 1,
    empty_cache=_nothing,
    get_device_name=lambda *_: "CPU",
    get_device_properties=lambda *_: SimpleNamespace(total_memory=2**30),
    memory_stats=lambda *_: _numbers,
    reset_peak_memory_stats=_nothing,
    set_device=_nothing,
    synchronize=_nothing,
)

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils as trainer_utils  # noqa: E402
from torchtitan.models.common import attention, decoder  # noqa: E402

from ringattn.autograd import num_forwards  # noqa: E402
from ringattn.integrations.torchtitan import with_ring  # noqa: E402

DOCUMENTS = ((0, 17, 64), (0, 1, 40, 41))
"""First tokens of the documents of each row of a batch."""


class Documents(BaseDataLoader):
    """Random rows, the same of each step in every job, that are packed documents."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, **_: Any) -> None:
        self.seq_len, self.parts = seq_len, slice(dp_rank, None, dp_world_size)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            tokens = torch.randint(2048, (len(DOCUMENTS), self.seq_len + 1), generator=generator)
            index = torch.arange(self.seq_len)
            starts = [torch.tensor(edges) for edges in DOCUMENTS]
            positions = torch.stack([index - x[torch.searchsorted(x, index, right=True) - 1] for x in starts])
            labels = tokens[:, 1:].clone()
            # a last token of a document predicts nothing
            labels[:, :-1][positions[:, 1:] == 0] = -100
            yield {"input": tokens[self.parts, :-1], "positions": positions[self.parts]}, labels[self.parts]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


def all_pairs(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, scale: float | None, **_: Any) -> Any:
    """Attention of `b h s d` rows under the function of a block mask."""
    b, h, s, d = q.shape
    k, v = (x.repeat_interleave(h // x.shape[1], 1) for x in (k, v))
    index = torch.arange(s)
    pairs = block_mask.mask_mod(
        torch.arange(b)[:, None, None, None], torch.arange(h)[:, None, None], index[:, None], index
    )
    scores = (q @ k.mT * (d**-0.5 if scale is None else scale)).masked_fill(~pairs, float("-inf"))
    return scores.softmax(-1) @ v, SimpleNamespace(lse=scores.logsumexp(-1))


def _sum_gradients(self: FSDPModule, factor: float) -> None:
    """Set the divisor 1 of torchtitan, for which FSDP takes a reduction that gloo does not have."""
    assert factor == 1
    self.set_force_sum_reduction_for_comms(True)
    _divide(self, factor)


_divide = FSDPModule.set_gradient_divide_factor


def main(name: str, kind: str, *flags: str) -> None:
    module = importlib.import_module(f"torchtitan.models.{name.split('_debug')[0]}.config_registry")
    config = getattr(module, name)()
    config.dataloader, config.tokenizer = Documents.Config(), NoTokenizer.Config()
    config.validator.enable = config.checkpoint.enable = False
    config.dump_folder = tempfile.mkdtemp()
    options: dict[str, Any] = {
        "training.local_batch_size": len(DOCUMENTS),
        "training.seq_len": 96,
        "training.steps": 5,
        "training.mixed_precision_param": "float32",
        "parallelism.spmd_backend": "full_dtensor",
        "debug.seed": 3,
    }
    options |= {path: json.loads(value) for path, value in (flag.split("=") for flag in flags)}
    for path, value in options.items():
        *parents, last = path.split(".")
        setattr(functools.reduce(getattr, parents, config), last, value)
    config.training.disable_cuda_graphs = True
    if kind == "ring":
        config = with_ring(config)
    else:
        attention.FlexAttention.compiled_flex_attn = staticmethod(all_pairs)
        decoder.create_attention_mask = create_block_mask
    FSDPModule.set_gradient_divide_factor = _sum_gradients
    if not hasattr(torch.distributed, "set_timeout"):  # torch 2.13
        trainer_utils.set_pg_timeouts = lambda **_: None
    trainer = config.build()
    fill(trainer.model_parts[0])
    losses, norms = [], []

    def forward_backward(*args: Any) -> Tensor:
        loss = trainer._forward_backward_body(*args)
        # what torchtitan logs counts it once per rank on torch 2.13
        losses.append(float(loss.full_tensor() if isinstance(loss, DTensor) else loss))
        return loss

    def clip(parameters: list[Tensor], *args: Any, **options: Any) -> Tensor:
        # in fp64: torch sums the squares of each rank in fp32
        gradients = (x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad for x in parameters)
        norms.append(float(sum(x.double().square().sum() for x in gradients)) ** 0.5)
        return clip_grad_norm_(parameters, *args, **options)

    clip_grad_norm_ = trainer_utils.clip_grad_norm_
    trainer.fwd_bwd_fn, trainer_utils.clip_grad_norm_ = forward_backward, clip
    trainer.train()
    trainer.close()
    if kind == "ring":  # activation checkpointing does not run it again
        assert num_forwards() == len(losses) * len(trainer.model_parts[0].layers), num_forwards()
    sys.stdout.write(json.dumps([losses, norms]) + "\n")
    torch.distributed.destroy_process_group()


def fill(model: torch.nn.Module) -> None:
    """Set weights to the same numbers on any ranks: torch draws those of a sharded tensor by shard on CPUs."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for x in model.parameters():
            whole = 0.05 * torch.randn(x.shape, generator=generator) + (x.dim() == 1)
            if isinstance(x, DTensor):
                whole = distribute_tensor(whole, x.device_mesh, x.placements)
            x.copy_(whole)


if __name__ == "__main__":
    main(*sys.argv[1:])
