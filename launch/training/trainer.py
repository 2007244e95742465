"""One model, its optimiser and its ring: a step, a validation, a sample, and the comparison with one rank.

Owns the arithmetic that makes a sharded run equal a single process. Refuses to know files, flags and progress bars.

Note [Exact gradient]
    Every rank holds all parameters and some rows of every sequence; some ranks may hold none. The loss of a step is the
    sum over all tokens divided by their number, both global. So each rank differentiates the *sum* over its own rows
    divided by the *global* number of tokens, and gradients are added over ranks: the result is the gradient of one
    process, whatever the lengths of the shards. (An average over ranks, as in data parallelism, would weigh the tokens
    of short shards more.) All gradients, the loss and a few numbers that ranks tell each other live in one buffer, so a
    step is one all-reduce.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ringattn.launch.training.model import ModelConfig, Transformer


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, apart from its data.

    Attributes:
        seed: Of the initialisation.
        layout: How sequences are sharded.
        dtype: float32, or bfloat16 for autocast; parameters and gradients are always float32.
        recompute: What the backward recomputes (see Transformer).
        compile: Whether blocks are compiled.
        weight_decay: Of matrices.
        max_grad_norm: Gradients are scaled down to this norm.
    """

    seed: int = 0
    layout: str = "zigzag"
    dtype: torch.dtype = torch.float32
    recompute: str = "none"
    compile: bool = False
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class StepResult:
    """What every rank knows after a step.

    Attributes:
        loss: Mean over all tokens, natural log, before the update.
        grad_norm: Of the whole gradient, before clipping.
        said: The numbers ranks told each other, added over ranks.
    """

    loss: float
    grad_norm: float
    said: list[float]


class Trainer:
    """A replica of the model and the rows of this rank.

    Args:
        config: The shape of the model.
        recipe: How it is trained.
        ring: The ring that sequences are sharded over.
        device: Where this rank computes.
        num_said: How many numbers ranks tell each other at each step.
    """

    def __init__(self, config: ModelConfig, recipe: Recipe, ring: Any, device: torch.device, num_said: int = 0) -> None:
        self.recipe, self.ring, self.device = recipe, ring, device
        self.model = Transformer(config, recipe.recompute)
        self.model.initialise_(recipe.seed)
        self.model.to(device)
        parameters = list(self.model.parameters())
        self.num_parameters = sum(parameter.numel() for parameter in parameters)
        self._buffer = torch.zeros(self.num_parameters + 1 + num_said, device=device)
        self._gradient = self._buffer[: self.num_parameters]
        self._said = self._buffer[self.num_parameters :]  # the loss, then what ranks tell
        with torch.no_grad():
            if ring.world_size > 1:
                # hosts may round the initialisation differently: rank 0's counts
                start = torch.cat([parameter.flatten() for parameter in parameters])
                dist.broadcast(start, src=0)
                for parameter, value in zip(
                    parameters, start.split([parameter.numel() for parameter in parameters]), strict=True
                ):
                    parameter.copy_(value.view_as(parameter))
        offset = 0
        for parameter in parameters:
            # autograd adds into a gradient that is there, so gradients are born in the buffer
            parameter.grad = self._gradient[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        decayed = [parameter for parameter in parameters if parameter.ndim > 1]
        others = [parameter for parameter in parameters if parameter.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=0.0,
            betas=(0.9, 0.95),
            fused=True,
        )
        if recipe.compile:
            for block in self.model.blocks:
                block.compile()

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.recipe.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.recipe.dtype)

    def _loss_sum(self, windows: Tensor) -> Tensor:
        """The loss of this rank's rows of `b s+1` bytes: a sum, fp32; 0 where the rank holds nothing."""
        windows = windows.to(self.device)
        tokens, targets = windows[:, :-1], windows[:, 1:]
        sharding = self.ring.sharding(tokens.shape[1], layout=self.recipe.layout)
        with self._precision():
            logits = self.model(sharding.shard(tokens, dim=1), sharding)
        return F.cross_entropy(logits.float().flatten(0, 1), sharding.shard(targets, dim=1).flatten(), reduction="sum")

    def _add_over_ranks_(self, values: Tensor) -> None:
        if self.ring.world_size > 1:
            dist.all_reduce(values)

    def step(self, windows: Tensor, lr: float, told: Sequence[float] = ()) -> StepResult:
        """One update from a batch that every rank is given whole (Note [Exact gradient]).

        Args:
            windows: `b s+1` bytes, the same on every rank.
            lr: Learning rate of this step.
            told: What this rank tells; `num_said` numbers.

        Returns:
            The same result on every rank.

        Raises:
            FloatingPointError: The loss or the gradient is not finite. Raised on every rank; nothing was updated.
        """
        num_tokens = windows.shape[0] * (windows.shape[1] - 1)
        self._buffer.zero_()
        loss_sum = self._loss_sum(windows)
        (loss_sum / num_tokens).backward()
        self._said.copy_(torch.tensor([loss_sum.item() / num_tokens, *told]))
        self._add_over_ranks_(self._buffer)
        norm = self._gradient.norm()
        loss, *said = self._said.tolist()
        grad_norm = norm.item()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise FloatingPointError(
                f"loss and gradient norm must be finite, got {loss} and {grad_norm}; "
                "pass a smaller --lr, and start again: the run continues from the last checkpoint"
            )
        if grad_norm > self.recipe.max_grad_norm:
            self._gradient.mul_(self.recipe.max_grad_norm / grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return StepResult(loss, grad_norm, said)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Tensor]) -> float:
        """The mean loss over batches of `b s+1` bytes, natural log; the same on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        count = 0
        for windows in batches:
            total += self._loss_sum(windows)
            count += windows.shape[0] * (windows.shape[1] - 1)
        self._add_over_ranks_(total)
        return total.item() / count

    @torch.no_grad()
    def generate(self, prompt: Tensor, length: int, temperature: float, seed: int) -> Tensor:
        """Continues a text, each byte from one forward of the whole ring over prompt and continuation.

        Args:
            prompt: At least one byte, 1-dimensional, the same on every rank.
            length: Bytes to add.
            temperature: Of the logits; 0 takes the likeliest byte.
            seed: Of the draws.

        Returns:
            Prompt and continuation, int64 on the CPU, the same on every rank.
        """
        generator = torch.Generator().manual_seed(seed)
        text = F.pad(prompt.long(), (0, length))
        sharding = self.ring.sharding(text.numel(), layout=self.recipe.layout)
        positions = sharding.positions.cpu()
        for at in range(prompt.numel(), text.numel()):
            # bytes from here on are still zero; no earlier row sees them
            with self._precision():
                logits = self.model(sharding.shard(text[None].to(self.device), dim=1), sharding)
            row = torch.zeros(logits.shape[-1], device=self.device)
            for held in (positions == at - 1).nonzero().flatten().tolist():
                row.copy_(logits[0, held])
            self._add_over_ranks_(row)  # one rank holds the row, the others add zero: exact
            scores = row.double().cpu()
            if temperature == 0:
                text[at] = scores.argmax()
            else:
                text[at] = torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)[0]
        return text

    def check_replicas(self) -> None:
        """Raises on every rank when the ranks no longer hold the same parameters.

        Raises:
            RuntimeError: They differ: a rank computed or received something else.
        """
        if self.ring.world_size == 1:
            return
        # bits, not values: equal replicas are equal exactly
        bits = [
            parameter.detach().flatten().view(torch.int32).sum(dtype=torch.int64)
            for parameter in self.model.parameters()
        ]
        low = torch.stack(bits)
        high = low.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        if not torch.equal(low, high):
            raise RuntimeError(
                f"parameters must be the same on all {self.ring.world_size} ranks, got different ones; "
                "start again: the run continues from the last checkpoint, which was written while they agreed"
            )

    def state(self) -> dict[str, Any]:
        """Parameters and optimiser state, by name of parameter, independent of the world size."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_(self, state: dict[str, Any]) -> None:
        """Continues from what `state` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def steps_on_one_rank(
    config: ModelConfig,
    recipe: Recipe,
    ring: Any,
    device: torch.device,
    batches: Sequence[Tensor],
    lrs: Sequence[float],
) -> list[StepResult]:
    """Trains a fresh replica in this process alone.

    Args:
        config: The shape of the model.
        recipe: How it is trained.
        ring: A ring of this rank only.
        device: Where this rank computes.
        batches: One batch per step.
        lrs: One learning rate per step.

    Returns:
        One result per step.
    """
    trainer = Trainer(config, recipe, ring, device)
    return [trainer.step(windows, lr) for windows, lr in zip(batches, lrs, strict=True)]


def rounding_band(value: float, dtype: torch.dtype) -> float:
    """How far two orders of the same sums may put a loss or a norm.

    64 rounding units of float32, or a quarter of one of bfloat16, whose runs still add in float32: each several times
    what is seen over the first steps of a run.
    """
    units = 64 if dtype == torch.float32 else 0.25
    return units * torch.finfo(dtype).eps * abs(value)
