"""Weights of a model that are stored once over the ranks of a ring: `shard_weights`.

Note [Sharded weights]
    Each rank stores a slice of every large weight (plan.py), and no rank a whole one. A call computes in one of two ways.
    With slices: all ranks have the same rows. Linear layers are column-parallel and their outputs are gathered, MLPs and experts
    end with a sum, embeddings and head are sliced by tokens. Decode is so, and a prefill of few rows: there attention has the rows
    that the rank stores, and its outputs are gathered.
    With gathered weights: each rank has rows of its own, and whole weights of a layer arrive while the layer before it computes
    (layer_gather.py). Only embeddings and head stay sliced. A prefill of many rows is so.
    Which of both follows from the number of rows alone (`rows_to_gather`), so it is the same on all ranks.

Note [Attention by all heads]
    In decode every rank attends with all heads to its part of the context, and each gets the merged output of all of them, so the
    output projection is column-parallel: per row a rank receives (P - 1) 4 h (dv + 2) bytes of partials and (P - 1) / P e d of
    columns, e bytes per number. With heads distributed after attention (one all-to-all of partials, then a row-parallel projection
    and its sum) it would receive (P - 1) / P 4 h (dv + 2) and (P - 1) 4 d. For 64 heads of 128, d = 8192 and 8 GPUs these are 247
    and 258 KB in two exchanges each: nothing is gained, sums of the projection would round in fp32 across ranks, and the number of
    heads would have to be divided.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ringattn.integrations.transformers.model_forward import (
    SHARDED,
    describe_difference,
    describe_error,
    failure_on_any_rank,
    replicated_rows,
)
from ringattn.integrations.transformers.sharded_weights.forwards import REFUSAL, Forwards
from ringattn.integrations.transformers.sharded_weights.layer_gather import LayerGather
from ringattn.integrations.transformers.sharded_weights.plan import Part, WeightPlan, plan_weights
from ringattn.integrations.transformers.tensor_parallel import WeightGuard
from ringattn.ring import Ring
from ringattn.sizing.memory import REPLICATED_ROWS
from ringattn.transport.copy_engine.peer_reads import PeerReads

GATHER = "RINGATTN_WEIGHT_GATHER"
"""Environment variable: how layers are gathered, one of `GATHERS`."""
GATHERS = ("auto", "all_gather", "copy_engine")
"""The first is the third where GPUs of one host reach each other, and else the second."""
FLOPS_PER_BYTE = 1700
"""Operations of matrix products that a GPU does while it receives a byte: 600 TFLOP/s over 350 GB/s."""
TRIED = (1, 5)
"""Row counts with which sliced MLPs and experts are compared with gathered ones."""


class ShardedWeights:
    """The sliced weights of a model, as forwards of its modules.

    Args:
        plan: Which weights are sliced; they already are.
        ring: The ranks that hold the slices.

    Attributes:
        rank_bytes: Bytes of the weights that this rank stores.
        gather: The buffers of gathered layers.
    """

    def __init__(self, plan: WeightPlan, ring: Ring) -> None:
        self.ring, self._parts = ring, plan.parts
        self.rank_bytes = sum(x.numel() * x.element_size() for x in plan.model.parameters())
        layers = plan.layers()
        self.gather = LayerGather(layers, ring, choose_reads(ring, plan.model.device))
        places = {slot: (i, j) for i, slots in enumerate(layers) for j, slot in enumerate(slots)}
        forwards = Forwards(ring, self.gather, places)
        for part in plan.parts:
            forwards.install(part)
        self._least_rows = rows_to_gather(plan)
        self._guards = [
            WeightGuard((slot.module for slot in part.slots), part.module if part.kind == "mlp" else None)
            for part in plan.parts
        ]

    def gathers(self, rows: int) -> bool:
        """See `StepWeights`."""
        return rows >= self._least_rows

    def check_unchanged(self) -> None:
        """See `StepWeights`."""
        if not all(guard.is_valid() for guard in self._guards):
            raise RuntimeError(
                "a model with sharded weights must keep its layers and its weights, got others since; add adapters, and change "
                "dtypes or sizes, before its weights are sharded"
            )

    @contextmanager
    def gather_ahead(self) -> Iterator[None]:
        """See `StepWeights`."""
        with self.gather.gather_ahead():
            yield

    def compare(self) -> str:
        """Return how sliced MLPs and experts, one of each kind, differ from gathered ones; empty when they do not. Collective."""
        failure, digest, kinds = "", blake2b(digest_size=8), set[Any]()
        try:
            for part in self._parts:
                kind = (type(part.module), *(tuple(slot.weight.shape) for slot in part.slots))
                if part.kind not in ("mlp", "experts") or kind in kinds:
                    continue
                kinds.add(kind)
                for rows in TRIED:
                    inputs = _drawn_inputs(part, rows)
                    with self.gather_ahead():
                        expected = part.module(*inputs)
                    with replicated_rows(self.ring):
                        found = part.module(*inputs)
                    digest.update(found.cpu().contiguous().view(torch.uint8).numpy().tobytes())
                    name = f"sliced {type(part.module).__name__}"
                    failure = failure or describe_difference(name, found, expected, part.module)
        except Exception as error:
            failure = describe_error(error)
        return failure_on_any_rank(failure, self.ring, "the output of sliced modules", digest.hexdigest())


def _drawn_inputs(part: Part, rows: int) -> tuple[Tensor, ...]:
    """Return rows for an MLP, or rows, chosen experts and their weights for experts; equal on all ranks."""
    weight, generator = part.slots[0].weight, torch.Generator().manual_seed(0)
    module: Any = part.module
    experts = part.kind == "experts"
    width = weight.shape[1 if experts and module.is_transposed else -1]
    x = torch.randn(rows, width, generator=generator, device="cpu").to(weight.device, weight.dtype)
    if not experts:
        return (x[None],)
    order = torch.rand(rows, module.num_experts, generator=generator, device="cpu").argsort(-1)
    chosen = order[:, : min(2, module.num_experts)]
    scores = torch.rand(chosen.shape, generator=generator, device="cpu")
    return x, chosen.to(weight.device), scores.to(weight.device, weight.dtype)


@torch.no_grad()
def shard_weights(model: PreTrainedModel, ring: Ring) -> int:
    """Store the weights of a model once over the ranks of a ring; collective over the ring.

    Each rank keeps its slice, and the memory of the rest is free afterwards. The model then answers in a `RingCache` of this ring,
    or in `run_step`, as with whole weights up to rounding; other calls raise, and so does saving it. To load a checkpoint without
    ever having the whole, use `load_sharded_model`. Add adapters before, call `compile_for_decode` and make a cache after;
    `apply_tensor_parallel` is not needed.

    Args:
        model: Of transformers with `attn_implementation="ringattn"`, the same on every rank, in eval mode.
        ring: All ranks that compute together.

    Returns:
        The bytes of weights that this rank stores.

    Raises:
        NotImplementedError: A module with much of the weights cannot be sliced, or gives other numbers when it is; it is named.
            Raised on every rank.
        ValueError: The weights are sharded already.
    """
    with ring.propagate_errors():
        if model in SHARDED:
            raise ValueError(
                f"a model must have whole weights to be sharded, got a {type(model).__name__} that is sharded already"
            )
        plan = plan_weights(model, ring.world_size)
    ring.assert_equal_across_ranks("a model to shard", describe_plan(plan))
    if ring.world_size > 1:
        slice_weights(plan, ring.rank)
    return use_slices(plan, ring)


def slice_weights(plan: WeightPlan, rank: int) -> None:
    """Replace the whole weights of a model by a rank's slices."""
    for slot in plan.slots:
        slot.weight.data = slot.slice.cut(slot.weight.data, rank)


def describe_plan(plan: WeightPlan) -> str:
    """Return a text of what is sliced, equal on ranks that slice the same."""
    facts = repr(
        [(part.kind, part.layer, [(tuple(s.weight.shape), s.slice) for s in part.slots]) for part in plan.parts]
    )
    name = type(plan.model).__name__
    return f"{name} with {len(plan.slots)} weights, digest {blake2b(facts.encode(), digest_size=8).hexdigest()}"


def use_slices(plan: WeightPlan, ring: Ring) -> int:
    """Let a model whose weights are sliced compute with them; collective. See `shard_weights`."""
    model = plan.model
    model.requires_grad_(False)
    if ring.world_size == 1:
        return sum(x.numel() * x.element_size() for x in model.parameters())
    weights = ShardedWeights(plan, ring)
    if model.device.type == "cuda":
        # before a cache takes what is left
        weights.gather.allocate()
    if failure := weights.compare():
        raise NotImplementedError(
            f"the weights of {type(model).__name__} must give the same numbers when they are sliced, got: {failure}; use whole "
            "weights"
        )
    model.register_state_dict_pre_hook(_refuse_to_save)
    SHARDED[model] = weights
    return weights.rank_bytes


def _refuse_to_save(*_: Any) -> NoReturn:
    """Hook of `state_dict`, by which models are saved: a checkpoint of a rank's slices has the names of a whole one."""
    raise RuntimeError(REFUSAL)


def choose_reads(ring: Ring, device: torch.device) -> PeerReads | None:
    """Return the reads of slices; None: all-gather, wanted or the only way. Collective, and raises on every rank."""
    wanted = os.environ.get(GATHER, "") or GATHERS[0]
    ring.assert_equal_across_ranks(GATHER, wanted)
    if wanted not in GATHERS:
        raise ValueError(f"{GATHER} must be one of {GATHERS}, got {wanted!r}; unset it for 'auto'")
    reads = None if wanted == "all_gather" else ring.peer_reads(device)
    if wanted == "copy_engine" and isinstance(reads, str):
        raise RuntimeError(
            f"{GATHER}=copy_engine must have GPUs of one host that reach each other and the copy engine as transport, got: "
            f"{reads}; unset it for all-gather"
        )
    return None if isinstance(reads, str) else reads


def rows_to_gather(plan: WeightPlan) -> int:
    """Return the rows of a prefill, of all ranks, from which on gathered weights take less time than slices.

    Gathered weights arrive beside the products of a layer: the longer of both counts. With slices the products take the same time,
    and outputs of linear layers, and addends and sums of MLPs, are received in between. So slices are faster as long as products
    and exchanged outputs of all rows take less time than the whole weights of a layer take to arrive. They serve at most
    REPLICATED_ROWS rows, whose hidden states every rank holds.

    Example: a layer of Llama 3 70B is 1.7 GB in bf16, of which one of 8 ranks receives 1.5 GB. A row costs it 0.2 GFLOP of
    products, as long as it receives 126 KB, and 75 KB of outputs: 7,446 rows.
    """
    products, received, weights = 0.0, 0.0, 0.0
    for part in plan.parts:
        if part.layer is None:
            continue
        numbers = [
            slot.weight.numel() * _ratio(slot.slice.columns, slot.slice.width, slot.weight, slot) for slot in part.slots
        ]
        item = part.slots[0].weight.element_size()
        products += part.share * 2 * sum(numbers) / plan.ranks
        weights += item * sum(numbers)
        if part.kind == "linears":
            received += item * sum(slot.slice.columns for slot in part.slots)
        else:
            received += (4 + item) * _model_width(part)
    share = (plan.ranks - 1) / plan.ranks
    rows = int(share * weights / (products / FLOPS_PER_BYTE + share * received)) if plan.ranks > 1 else 1
    return min(max(rows, 1), REPLICATED_ROWS)


def _ratio(columns: int, width: int, weight: Tensor, slot: Any) -> float:
    """Return the numbers of a whole weight over those that are there: 1 where it is whole."""
    sliced = weight.shape[slot.slice.dim] == slot.slice.parts * width
    return columns / width if sliced else 1.0


def _model_width(part: Part) -> int:
    """Return the width of what an MLP or experts return."""
    last = part.slots[-1]
    others = [length for dim, length in enumerate(last.weight.shape) if dim != last.slice.dim]
    return others[-1]
