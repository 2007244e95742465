"""Flags of the training job, their limits, and their presets."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ringattn.launch.common.distributed import Refusal, check_installed
from ringattn.launch.common.session import check_numbers
from ringattn.launch.train.data import NUM_BYTES
from ringattn.launch.train.parallel import mesh_sizes
from ringattn.launch.train.trainer import Recipe
from ringattn.sizing.packing import PAIRS_PER_TOKEN
from ringattn.sizing.shapes import ModelShape

SHAPE = "dim num_layers num_heads num_kv_heads head_dim mlp_dim window tie_embeddings".split()
"""Flags that are the shape of the model."""


@dataclass(frozen=True)
class TrainConfig:
    """Flags of the training job. Values shown as defaults are those of the chosen preset."""

    # Where the other defaults come from: tiny (seconds), cpu (minutes on two cores), gpu, gpu-128k, gpu-1m; auto is gpu where
    # there are GPUs, else cpu.
    preset: Literal["auto", "tiny", "cpu", "gpu", "gpu-128k", "gpu-1m"] = "auto"
    # Ranks to start; by default one per GPU, or two where there are none. Under torchrun, leave it out.
    nproc: int | None = None
    # How ranks share the work, such as dp=2,cp=4: cp ranks share sequences, dp groups of them have different ones. A size that is
    # left out is what the ranks leave; by default all are on cp. Changes no result.
    mesh: str | None = None
    # Attention is computed as by a ring of this many ranks, of which each rank of cp is an equal part: it has the same bits for
    # every cp that divides this number.
    virtual_size: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto takes GPUs where there are any.
    data: str | None = None  # A file or a folder of text; by default the sources of Python's standard library.
    # Folder of the log, the loss curve, the checkpoints and the sample; by default one for each preset and --model.
    out: str = "runs/train"
    # auto continues from the newest intact checkpoint in out; never refuses a folder that has any; else the checkpoint to
    # continue from: the newest in out, or one of elsewhere with a new out.
    resume: str = "auto"
    # How often in a row, without a new checkpoint in between, a run whose rank died is started again.
    max_restarts: int = 3
    steps: int = 300  # Updates in all, counting those before a resume.
    seq_len: int = 1024  # Context in tokens; the part that is split over ranks.
    batch_size: int = 4  # Sequences per step, over all ranks and micro-batches.
    accumulate: int = 1  # Micro-batches that a step is made of; gradients are exchanged once.
    # fixed: attention stays inside documents (files), whose positions begin at 0; the sequences that a ring has at a time become
    # one. balanced: documents are also placed over all ranks such that they finish together, short ones whole on one rank. --pack
    # alone is fixed.
    pack: Literal["off", "fixed", "balanced"] = "off"
    # A folder of transformers: that causal language model with all its weights, instead of the shape below; or a
    # configuration (config.json): with random ones. Its tokenizer where there is one, also beside config.json, else bytes.
    model: str | None = None
    dim: int = 128  # Width of the residual stream.
    num_layers: int = 4  # Blocks.
    num_heads: int = 4  # Query heads.
    num_kv_heads: int = 2  # Key/value heads; divides num_heads.
    head_dim: int = 32  # Width of a head.
    mlp_dim: int = 352  # Hidden width of SwiGLU.
    window: int | None = None  # Each token sees this many tokens, itself the last of them; by default all before it.
    tie_embeddings: bool = True  # Whether the output projection is the embedding.
    lr: float = 3e-3  # Learning rate after the warm-up; falls along a cosine to a tenth.
    warmup_steps: int = 30  # Steps over which the learning rate rises.
    weight_decay: float = 0.1  # Of matrices.
    max_grad_norm: float = 1.0  # Gradients are scaled down to this norm.
    # How sequences are sharded over ranks; auto is zigzag, and balanced for packed documents.
    layout: Literal["auto", "contiguous", "striped", "zigzag", "balanced"] = "auto"
    seed: int = 0  # Of initialisation, batches and sample.
    # auto is bfloat16 on GPUs, float32 on CPUs; parameters, gradients and optimiser state are always float32.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # What the backward recomputes to save memory: selective is everything but attention.
    recompute: Literal["none", "selective", "full"] = "none"
    # Blocks whose checkpoints wait in pinned host memory, copied beside the computation: all, or the first so many.
    offload: int | Literal["all"] = 0
    mlp_rows: int = 0  # Rows of a rank that go through an MLP at a time, again in the backward; 0: all.
    # GiB that buffers of a fused ring may take; by default a quarter of the memory that is free at its first call.
    ring_gib: float | None = None
    # Whether parameters gathered for a block's forward are dropped until its backward: less memory, more traffic.
    reshard: bool = True
    compile: bool = False  # Whether blocks are compiled.
    # Whether a run on GPUs whose planned memory they cannot hold is refused before it begins, not only warned of.
    check_memory: bool = True
    eval_interval: int = 50  # Steps between validations.
    eval_batches: int = 4  # Batches of a validation.
    checkpoint_interval: int = 50  # Steps between checkpoints; the last two are kept.
    compare_steps: int = 3  # First steps of a fresh run that are also run on one rank alone, and compared; 0 for none.
    sample_len: int = 200  # Tokens of text to generate at the end; 0 for none.
    prompt_len: int = 100  # Tokens of validation text the sample begins with.
    temperature: float = 0.7  # Of the sample.
    timeout: float = 600.0  # Seconds after which ranks that wait for each other give up.

    def __post_init__(self) -> None:
        check_numbers(self)
        if isinstance(self.pack, bool):
            object.__setattr__(self, "pack", "fixed" if self.pack else "off")
        if self.pack == "balanced" and self.layout != "auto":
            raise ValueError(f"layout must be auto with --pack balanced, got {self.layout}; leave it out")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and {self.num_heads}; pass another --num-kv-heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}; rotary embedding turns pairs")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}; leave it out for full attention")
        if self.offload and self.recompute == "none":
            raise ValueError(
                f"recompute must be selective or full with --offload, got none and {self.offload}; pass --recompute selective"
            )
        if self.compile and (self.offload or self.mlp_rows):
            raise ValueError("compile must be off with --offload and --mlp-rows, got it on; drop one")
        mesh_sizes(self.mesh, None)
        self.shape()

    def shape(self) -> ModelShape:
        """Shape of the model, unless `model` names one."""
        sizes = self.dim, self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim, self.mlp_dim
        return ModelShape("the model", *sizes, NUM_BYTES, tied=self.tie_embeddings, window=self.window)

    def check_ranks(self, world_size: int) -> None:
        """Raise ValueError if the mesh or the batch cannot be divided among so many ranks."""
        dp, cp = mesh_sizes(self.mesh, world_size)
        if self.virtual_size is not None and (self.virtual_size < 1 or self.virtual_size % cp):
            raise ValueError(
                f"virtual_size must be a multiple of cp, got {self.virtual_size} and {cp}; pass another one"
            )
        if self.batch_size % (dp * self.accumulate):
            raise ValueError(
                f"batch_size must be a multiple of dp x accumulate, got {self.batch_size} and {dp} x {self.accumulate}; "
                "pass another --batch-size, --mesh or --accumulate"
            )

    def recipe(self, device: torch.device, separator: int) -> Recipe:
        """Return the training recipe for a device; `separator` is the last token of every document."""
        name = {"cpu": "float32", "cuda": "bfloat16"}[device.type] if self.dtype == "auto" else self.dtype
        same = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(Recipe) if hasattr(self, field.name)
        }
        layout = ("balanced" if self.packs else "zigzag") if self.layout == "auto" else self.layout
        own = {"layout": layout, "separator": separator if self.packs else None, "dtype": getattr(torch, name)}
        if self.pack == "balanced":
            shape = self.shape()
            weights = shape.dim * (2 * (shape.heads + shape.kv_heads) * shape.head_dim + 3 * shape.mlp_dim)
            # with a model of transformers the default of sizing.place
            own["pairs_per_token"] = PAIRS_PER_TOKEN if self.model else weights / (2 * shape.heads * shape.head_dim)
        return Recipe(**same | own)

    @property
    def packs(self) -> bool:
        """Whether attention stays inside documents."""
        return self.pack != "off"

    def lr_at(self, step: int) -> float:
        """The learning rate of the step after `step` steps: a linear warm-up, then a cosine to a tenth."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


# the values of a flag in each preset
_PRESETS: dict[str, Sequence[Any]] = {
    "preset": ("tiny", "cpu", "gpu", "gpu-128k", "gpu-1m"),
    "out": ("runs/train/tiny", "runs/train/cpu", "runs/train/gpu", "runs/train/gpu-128k", "runs/train/gpu-1m"),
    "steps": (20, 300, 1000, 200, 20),
    "seq_len": (64, 1024, 32_768, 131_072, 1_048_576),
    "batch_size": (2, 4, 4, 1, 1),
    "dim": (32, 128, 768, 1024, 1024),
    "num_layers": (2, 4, 12, 12, 12),
    "num_heads": (4, 4, 12, 8, 8),
    "num_kv_heads": (2, 2, 4, 2, 2),
    "head_dim": (8, 32, 64, 128, 128),
    "mlp_dim": (64, 352, 2048, 2816, 2816),
    "lr": (3e-3, 3e-3, 1e-3, 6e-4, 6e-4),
    "warmup_steps": (5, 30, 100, 20, 20),
    "recompute": ("none", "none", "none", "selective", "selective"),
    "eval_interval": (10, 50, 100, 50, 20),
    "eval_batches": (2, 4, 4, 2, 1),
    "checkpoint_interval": (5, 50, 100, 50, 50),
    "compare_steps": (3, 3, 3, 3, 0),
    "sample_len": (16, 200, 400, 400, 400),
    "prompt_len": (16, 100, 100, 100, 100),
}
PRESETS = {
    values[0]: TrainConfig(**dict(zip(_PRESETS, values, strict=True)))
    for values in zip(*_PRESETS.values(), strict=True)
}
PACKAGES = ("tyro", "tqdm", "matplotlib", "psutil")  # packages that every run imports beside those of the library


def _with_pack(arguments: Sequence[str]) -> list[str]:
    """Return arguments in which --pack has a value: fixed where it stands alone.

    Example:
        >>> _with_pack(["--pack", "--steps", "3"]), _with_pack(["--pack", "balanced"])
        (['--pack', 'fixed', '--steps', '3'], ['--pack', 'balanced'])
    """
    found: list[str] = []
    for word, following in zip(arguments, (*arguments[1:], "--"), strict=False):
        found += ["--pack", "off"] if word == "--no-pack" else [word]
        if word == "--pack" and following.startswith("-"):
            found.append("fixed")
    return found


def parse(arguments: Sequence[str], prog: str, description: str | None) -> TrainConfig:
    """Return the flags, with the defaults of the preset that they choose; raise Refusal for contradictions or a missing package."""
    check_installed(PACKAGES, "train", "launch")
    import tyro

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="auto")
    first.add_argument("--device", default="auto")
    early, _ = first.parse_known_args(list(arguments))
    preset = early.preset
    if preset == "auto":
        preset = "gpu" if early.device != "cpu" and torch.cuda.is_available() else "cpu"
    # the defaults are of the preset, and tyro refuses an unknown one
    default = replace(PRESETS.get(preset, PRESETS["cpu"]), preset="auto")
    parsed = tyro.cli(TrainConfig, args=_with_pack(arguments), default=default, prog=prog, description=description)
    if parsed.model is not None:
        check_installed(("transformers",), "train", "transformers")
        for name in SHAPE:
            if getattr(parsed, name) != getattr(default, name):
                flag = "--" + name.replace("_", "-")
                raise Refusal(f"{name} must be left to the configuration in --model, got {flag}; leave it out")
        if parsed.out == default.out:
            # a checkpoint of another model cannot be continued
            path = Path(parsed.model).resolve()
            parsed = replace(parsed, out=f"{default.out}-{path.parent.name if path.suffix == '.json' else path.name}")
    return replace(parsed, preset=preset)  # type: ignore[arg-type]
