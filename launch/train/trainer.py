"""Trainer of one model on a mesh: training step, validation, text generation, and the first steps on one rank.

Note [Exact gradient]
    The loss of a step is the sum over all tokens that are to be predicted divided by their number, both global. So each rank
    differentiates the *sum* over its own rows divided by the *global* number, and gradients are added over ranks and
    micro-batches: the result is the gradient of one process, whatever the mesh, the lengths of the shards and of the
    documents, even if a rank has no rows. (An average over ranks or micro-batches would weigh the tokens of short ones
    more.) FSDP2 adds gradients as it sends them to their owners; the loss, the norm and a few values of each rank are
    summed in one small all-reduce.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import get_total_norm

from ringattn.launch.train.data import Rows, count_targets, make_rows
from ringattn.launch.train.parallel import Parallel, shard_model_
from ringattn.plan.mask import short_mask
from ringattn.plan.sharding import Sharding
from ringattn.sizing.packing import place
from ringattn.training import save_memory_

CHECKED_STEPS = 3
"""First steps of a trainer in which the ranks of a ring compare their tokens and targets (`Ring.check_inputs`)."""


@dataclass(frozen=True)
class Recipe:
    """Training options of a model, without its data."""

    seed: int = 0
    layout: str = "zigzag"
    # the last token of each document, when attention stays inside documents; None: it does not
    separator: int | None = None
    accumulate: int = 1
    dtype: torch.dtype = torch.float32
    recompute: str = "none"  # activations that the backward recomputes, as in `checkpoint_layers_`
    offload: int | Literal["all"] = 0  # first blocks whose checkpoints wait in host memory
    mlp_rows: int = 0  # rows that go through an MLP at a time; 0: all
    reshard: bool = True
    compile: bool = False
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    window: int | None = None  # tokens that each token sees, for balancing work and counting it; None: all before it
    # documents of a micro-batch are placed over all ranks (`sizing.place`), where so many visible pairs cost as much as all
    # else of a token; None: each ring has the documents of its sequences
    pairs_per_token: float | None = None


@dataclass(frozen=True)
class StepResult:
    """Result of a step, the same on every rank: loss and norm before update and clipping, and sums of the values passed."""

    loss: float
    grad_norm: float
    sums: list[float]


class Trainer:
    """Model sharded over the ranks; `build` makes it, equal on every rank, with the interface of `Transformer`."""

    def __init__(self, build: Callable[[], nn.Module], recipe: Recipe, parallel: Parallel) -> None:
        self.recipe, self.parallel = recipe, parallel
        self.ring, self.device = parallel.ring, parallel.device
        self.model: Any = build().train()
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        blocks = list(self.model.blocks)
        offload = recipe.offload == "all" or int(recipe.offload)
        rows = recipe.mlp_rows or None
        self.checkpoints = save_memory_(self.model, recompute=recipe.recompute, offload=offload, mlp_rows=rows)
        if recipe.compile:
            for block in blocks:
                block.forward = torch.compile(block.forward)
        shard_model_(self.model, blocks, parallel.all_ranks, recipe.dtype, recipe.reshard)
        self.model.to(self.device)  # buffers: parameters are there
        groups = [
            {"params": chosen, "weight_decay": recipe.weight_decay if matrices else 0.0}
            for matrices in (True, False)
            if (chosen := [x for x in self.model.parameters() if (x.ndim > 1) == matrices])
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)
        self._num_steps, self._check_inputs = 0, self.ring.check_inputs

    def sharding(self, rows: Rows) -> Any:
        """Return the sharding of some rows over this ring."""
        n, layout = rows.tokens.shape[1], self.recipe.layout
        if rows.shards is not None:
            return Sharding(n, "balanced", rows.shards, self.ring.rank, rows.documents, ring=self.ring)
        balance = _mask(self.recipe.window) if layout == "balanced" else None
        return self.ring.sharding(n, layout, rows.documents, balance=balance)

    def micro_batches(self, windows: Tensor) -> Iterator[Rows]:
        """Yield the rows of this rank's ring, one micro-batch at a time: windows are split by micro-batch, then by dp rank."""
        split = windows.unflatten(0, (self.recipe.accumulate, self.parallel.dp, -1))
        for micro in range(self.recipe.accumulate):
            placed = None if self.recipe.pairs_per_token is None else self._place(split[micro].flatten(0, 1))
            yield placed or make_rows(split[micro, self.parallel.dp_rank], self.recipe.separator)

    def _place(self, windows: Tensor) -> Rows | None:
        """Return the documents of all rings that are placed on this one; None: there are fewer of them than rings."""
        rows, pairs_per_token = make_rows(windows, self.recipe.separator), self.recipe.pairs_per_token
        assert rows.documents is not None, "documents are placed where there are any"
        assert pairs_per_token is not None, "the cost of a token is known where documents are placed"
        bounds = list(pairwise(rows.documents))
        if len(bounds) < self.parallel.dp:
            return None
        batch = place(
            [end - start for start, end in bounds],
            cp=self.ring.virtual_size,
            dp=self.parallel.dp,
            pairs_per_token=pairs_per_token,
            window=self.recipe.window,
            keep_order=True,
        )
        mine = batch.sequences[self.parallel.dp_rank]
        chosen = [slice(*bounds[index]) for index in mine.indices]
        tokens, targets = (torch.cat([x[:, part] for part in chosen], 1) for x in (rows.tokens, rows.targets))
        return Rows(tokens, targets, mine.documents, mine.shards)

    def loss_sum(self, rows: Rows) -> Tensor:
        """The loss of this rank's rows: a sum, fp32; 0 if the rank has none."""
        sharding = self.sharding(rows)
        tokens, targets = (sharding.shard(x.to(self.device), dim=1) for x in (rows.tokens, rows.targets))
        return self.model(tokens, sharding, targets)

    def pairs(self, windows: Tensor) -> int:
        """Visible (query, key) pairs of a whole batch, of one layer and head: causal, within documents and the window."""
        parts = windows.split(windows.shape[0] // (self.recipe.accumulate * self.parallel.dp))
        return sum(_pairs(make_rows(part, self.recipe.separator), self.recipe.window) for part in parts)

    def step(self, windows: Tensor, lr: float, values: Sequence[float] = ()) -> StepResult:
        """Update from a batch `b n+1` that every rank is given whole (Note [Exact gradient]); `values` are summed over ranks.

        Raises:
            FloatingPointError: The loss or the gradient is not finite. Raised on every rank; nothing was updated.
        """
        self.ring.check_inputs = self._check_inputs or self._num_steps < CHECKED_STEPS
        self._num_steps += 1
        num_targets = max(1, count_targets(windows, self.recipe.separator))
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for micro, rows in enumerate(self.micro_batches(windows), start=1):
            last = micro == self.recipe.accumulate
            self.model.set_is_last_backward(last)
            self.model.set_requires_gradient_sync(last)
            loss_sum = self.loss_sum(rows)
            (loss_sum / num_targets).backward()
            total += loss_sum.detach() / num_targets
        gradients = [parameter.grad.to_local() for parameter in self.model.parameters() if parameter.grad is not None]
        numbers = torch.tensor([0.0, 0.0, *values], dtype=torch.float64, device=self.device)
        numbers[0], numbers[1] = total, get_total_norm(gradients).square()
        loss, square, *sums = self.parallel.all_reduce_(numbers).tolist()
        grad_norm = math.sqrt(square) if square >= 0 else square
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise FloatingPointError(
                f"loss and gradient norm must be finite, got {loss} and {grad_norm}; "
                "pass a smaller --lr, and start again: the run continues from the last checkpoint"
            )
        if grad_norm > self.recipe.max_grad_norm:
            for gradient in gradients:
                gradient.mul_(self.recipe.max_grad_norm / grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return StepResult(loss, grad_norm, sums)

    def seed_dropout(self, step: int) -> None:
        """Seed the generators from seed, step and dp rank; all ranks of a ring get the same seed."""
        torch.manual_seed(random.Random(f"{self.recipe.seed} {step} {self.parallel.dp_rank}").getrandbits(63))

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Tensor]) -> float:
        """The mean loss over batches of `b n+1` tokens, natural log; the same on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        count = 0
        self.model.eval()
        for windows in batches:
            for rows in self.micro_batches(windows):
                total += self.loss_sum(rows)
            count += count_targets(windows, self.recipe.separator)
        self._end_evaluation()
        return self.parallel.all_reduce_(total).item() / max(1, count)

    @torch.no_grad()
    def generate(self, prompt: Tensor, length: int, temperature: float, seed: int) -> Tensor:
        """Continue a prompt by `length` tokens, each from one forward of the ring; temperature 0 takes the likeliest."""
        generator = torch.Generator().manual_seed(seed)
        text = F.pad(prompt.long(), (0, length))
        sharding = self.ring.sharding(text.numel())
        positions = sharding.positions.cpu()
        self.model.eval()
        for at in range(prompt.numel(), text.numel()):
            # tokens from here on are still zero, and masked for earlier rows
            logits = self.model(sharding.shard(text[None].to(self.device), dim=1), sharding)
            row = torch.zeros(logits.shape[-1], device=self.device)
            for held in (positions == at - 1).nonzero().flatten().tolist():
                row.copy_(logits[0, held])
            # one rank of each ring has the row, the others add zero: exact
            scores = self.parallel.all_reduce_(row).double().cpu() / self.parallel.dp
            if temperature == 0:
                text[at] = scores.argmax()
            else:
                # the largest becomes 0, so that no temperature overflows
                weights = ((scores - scores.max()) / temperature).softmax(0)
                text[at] = torch.multinomial(weights, 1, generator=generator)[0]
        self._end_evaluation()
        return text

    def _end_evaluation(self) -> None:
        """Free the parameters that forwards without a backward have gathered, and return to training mode."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self.model.train()

    def state(self) -> dict[str, Any]:
        """Parameters and optimiser state by name of parameter, as sharded tensors: independent of the mesh."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_(self, state: dict[str, Any]) -> None:
        """Set parameters and optimiser from a result of `state` with other values; the weight decay stays that of the recipe."""
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay


def _mask(window: int | None) -> dict[str, Any]:
    return {"causal": True, "window": None if window is None else (window - 1, 0)}


def _pairs(rows: Rows, window: int | None) -> int:
    batch, n = rows.tokens.shape
    return batch * short_mask(n, documents=rows.documents, **_mask(window)).pairs(0, n)


def rounding_tolerance(value: float, dtype: torch.dtype) -> float:
    """Return the rounding error allowed for a loss or a norm whose sums are ordered differently.

    64 rounding units of float32, or a quarter of one of bfloat16, whose runs still add in float32: each several times
    the difference seen over the first steps of a run.
    """
    units = 64 if dtype == torch.float32 else 0.25
    return units * torch.finfo(dtype).eps * abs(value)
