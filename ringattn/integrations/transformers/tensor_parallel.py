"""Tensor parallelism of MLPs and of the output head, in calls whose rows are replicated on all ranks.

Note [Tensor parallel decode]
    In decode all ranks bring the same few rows to weights of which each has a copy, and the step takes as long as reading them
    does. So each rank reads a shard. The first products of an MLP are column-parallel, its last one is row-parallel, and an
    all-reduce sums the results in fp32 and in the order of the ranks, so all get the same bits. The output head is column-parallel
    (by tokens), and an all-gather concatenates the logits. Attention is not split: its keys and values are sharded by tokens, and
    every rank has all heads. Shards are views, so they need no memory. Prefill, where every rank has rows of its own, multiplies
    with whole weights. An MLP is assumed to be products that widen rows, something between them that treats each inner column by
    itself, and one product that ends it. Two first products may be halves of one, as in Phi 3. Each MLP is compared with itself
    before it is used: the activation may differ from layer to layer.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringattn.integrations.transformers.model_forward import (
    BoundPatch,
    describe_difference,
    describe_error,
    failure_on_any_rank,
    has_hooks,
    replicated_rows,
    replicated_rows_ring,
    untraced,
)
from ringattn.ring import Ring

ALIGNED = 16
"""Bytes of which the first column of a row-parallel shard is a multiple: matrix products read rows so."""
TRIED = (1, 5, 64)
"""Row counts with which a module is compared."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
REFUSAL = "a model must be copied or saved whole before tensor parallelism is applied, got one after; copy it before"


class TensorParallelError(RuntimeError):
    """Tensor parallelism could not be applied, and the model is unchanged; the message says why."""


@torch.no_grad()
def apply_tensor_parallel(model: nn.Module, ring: Ring) -> int:
    """Let each rank read a shard of MLPs and of the output head in decode; collective over the ring.

    For inference. Other calls, prefill included, compute as before.

    Args:
        model: Of transformers, whole on every rank, in eval mode.
        ring: All ranks that decode together.

    Returns:
        The number of modules that are parallel: 0 on a ring of one rank.

    Raises:
        TensorParallelError: A shard could not be made, or gave other numbers, on any rank; on every rank.
    """
    if ring.world_size == 1:
        return 0
    failure, modules = "", list[_Parallel]()
    try:
        for one in model.modules():
            inner = inner_columns(one)
            if inner is not None and _divides(inner, one, ring.world_size):
                modules.append(_parallel_mlp(one, inner, ring))
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if is_float_linear(head) and head.out_features % ring.world_size == 0:
            modules.append(_parallel_head(head, ring))
    except Exception as error:
        failure = describe_error(error)
    if not (failure := failure_on_any_rank(failure, ring)):
        with replicated_rows(ring):
            failure = _compare(modules, ring)
    if failure:
        raise TensorParallelError(failure)
    for one in modules:
        one.module.forward = BoundPatch(one.forward, one.module.forward, REFUSAL)
    return len(modules)


class _Parallel(NamedTuple):
    """A module, and its tensor parallel forward."""

    module: nn.Module
    columns: int
    forward: Callable[[Tensor], Tensor]


def _compare(modules: list[_Parallel], ring: Ring) -> str:
    """Return how parallel forwards differ from whole ones, or between ranks; empty when they do not. Collective over the ring."""
    failure, digest = "", blake2b(digest_size=8)
    try:
        for one in modules:
            weight, generator = next(one.module.parameters()), torch.Generator().manual_seed(0)
            for rows in TRIED:
                x = torch.randn(1, rows, one.columns, generator=generator, device="cpu").to(weight.device, weight.dtype)
                expected, found = one.module(x), one.forward(x)
                digest.update(found.cpu().contiguous().view(torch.uint8).numpy().tobytes())
                name = f"tensor parallel {type(one.module).__name__}"
                failure = failure or describe_difference(name, found, expected, one.module)
    except Exception as error:
        failure = describe_error(error)
    return failure_on_any_rank(failure, ring, "the output of tensor parallel modules", digest.hexdigest())


def is_float_linear(module: Any) -> TypeGuard[nn.Linear]:
    """Return whether a module is a linear layer with float weights, and nothing else."""
    if type(module) is not nn.Linear or has_hooks(module) or "forward" in vars(module):
        return False
    # subclasses of Tensor, quantised ones say, report the dtype that they are read as
    return type(module.weight) in (Tensor, nn.Parameter) and module.weight.dtype in FLOATS


def _divides(inner: int, mlp: nn.Module, ranks: int) -> bool:
    """Return whether ranks get equal shards of the inner columns, which begin where matrix products read rows."""
    return inner % ranks == 0 and inner // ranks * next(mlp.parameters()).element_size() % ALIGNED == 0


def inner_columns(mlp: nn.Module) -> int | None:
    """Return the inner columns of an MLP, which treats each by itself; None for other modules."""
    if not type(mlp).__name__.endswith("MLP") or "forward" in vars(mlp):
        return None
    _, *inputs = inspect.signature(type(mlp).forward).parameters.values()
    if [one.kind for one in inputs] != [inspect.Parameter.POSITIONAL_OR_KEYWORD]:
        return None
    weighty = [one for one in mlp.children() if any(True for _ in one.parameters())]
    linears = [one for one in weighty if is_float_linear(one)]
    if len(linears) < 2 or len(linears) < len(weighty) or any(has_hooks(one) for one in mlp.children()):
        return None
    *first, last = linears
    inner, sizes = last.in_features, [one.out_features for one in first]
    # both products of a gate may be one
    widens = set(sizes) == {inner} or sizes == [2 * inner]
    square = all(one.in_features == last.out_features for one in first)
    own = any(True for _ in mlp.parameters(recurse=False))
    return inner if widens and square and not own else None


def _parallel_mlp(mlp: nn.Module, inner: int, ring: Ring) -> _Parallel:
    """Return an MLP of which this rank computes its inner columns (Note [Tensor parallel decode])."""
    mine = _shard_of(inner, ring)
    *first, last = [name for name, one in mlp.named_children() if isinstance(one, nn.Linear)]
    row_parallel = RowParallelLinear(
        getattr(mlp, last).weight[:, mine], getattr(mlp, last).bias, with_bias=ring.rank == 0
    )
    columns = {name: _column_parallel(getattr(mlp, name), inner, mine) for name in first}
    shard, whole = copy.copy(mlp), mlp.forward
    shard._modules = mlp._modules | columns | {last: row_parallel}
    guard = WeightGuard((one for one in mlp.children() if isinstance(one, nn.Linear)), mlp)
    width = row_parallel.out_features
    # what can fail on one rank fails before ranks wait for each other
    shard.forward(row_parallel.weight.new_zeros(1, 1, width))

    def forward(x: Tensor) -> Tensor:
        if replicated_rows_ring() is not ring or not x.numel() or not guard.is_valid():
            return whole(x)
        return _all_reduce(shard.forward(x.reshape(1, -1, width)), x.dtype, ring).view(x.shape)

    # compiled decoder layers call it as it is, and compile the shard
    return _Parallel(mlp, width, untraced(forward, nested=False))


def _parallel_head(head: nn.Linear, ring: Ring) -> _Parallel:
    """Return an output head of which this rank computes the logits of its tokens (Note [Tensor parallel decode])."""
    shard, whole = _column_parallel(head, head.out_features, _shard_of(head.out_features, ring)), head.forward
    guard = WeightGuard([head])

    def forward(x: Tensor) -> Tensor:
        if replicated_rows_ring() is not ring or not x.numel() or not guard.is_valid():
            return whole(x)
        columns = shard(x.reshape(-1, x.shape[-1]))
        return _all_gather(columns, head.out_features, ring).view(*x.shape[:-1], -1)

    return _Parallel(head, head.in_features, forward)


def _shard_of(columns: int, ring: Ring) -> slice:
    """Return the columns of this rank."""
    size = columns // ring.world_size
    return slice(ring.rank * size, (ring.rank + 1) * size)


def _column_parallel(linear: nn.Linear, columns: int, mine: slice) -> ColumnParallelLinear:
    """Return this rank's columns of a linear layer, or of each of its parts of so many columns, with views of its weights."""
    biases = () if linear.bias is None else linear.bias.split(columns)
    return ColumnParallelLinear([x[mine] for x in linear.weight.split(columns)], [x[mine] for x in biases])


class ColumnParallelLinear(nn.Module):
    """This rank's columns of a linear layer, or of each of its parts.

    Args:
        weights: `columns in` of each part.
        biases: `columns` of each part; empty: there are none.
    """

    def __init__(self, weights: Iterable[Tensor], biases: Iterable[Tensor]) -> None:
        super().__init__()
        self.weights, self.biases = (
            nn.ParameterList(nn.Parameter(x, requires_grad=False) for x in given) for given in (weights, biases)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the columns of this rank, parts behind each other."""
        biases = self.biases or [None] * len(self.weights)
        parts = [F.linear(x, w, b) for w, b in zip(self.weights, biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class RowParallelLinear(nn.Module):
    """Contribution of this rank's inner columns to a linear layer, in fp32 where the device can.

    Args:
        weight: `out inner`: this rank's inner columns.
        bias: `out`, or None.
        with_bias: This rank adds it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, with_bias: bool) -> None:
        super().__init__()
        self.out_features = weight.shape[0]
        self.weight = nn.Parameter(weight, requires_grad=False)
        added = bias if with_bias else None
        self.bias = None if added is None else nn.Parameter(added.float(), requires_grad=False)

    @untraced  # not all compilers support out_dtype
    def forward(self, x: Tensor) -> Tensor:
        """Return the contribution to `... out` fp32 of x `... inner`."""
        rows = x.reshape(-1, x.shape[-1])
        if x.is_cuda and x.dtype != torch.float32:
            found = torch.mm(rows, self.weight.t(), out_dtype=torch.float32)
        else:
            found = torch.mm(rows, self.weight.t()).float()
        if self.bias is not None:
            found += self.bias
        return found.view(*x.shape[:-1], found.shape[-1])


@untraced
def _all_reduce(contributions: Tensor, dtype: torch.dtype, ring: Ring) -> Tensor:
    out = torch.empty(contributions.shape, dtype=dtype, device=contributions.device)
    ring.partial_reducer(out.device).all_reduce(contributions, out)
    return out


@untraced
def _all_gather(columns: Tensor, total: int, ring: Ring) -> Tensor:
    out = torch.empty(columns.shape[0], total, dtype=columns.dtype, device=columns.device)
    ring.partial_reducer(out.device).all_gather_columns(columns, out)
    return out


class WeightGuard:
    """Check that weights of layers, and optionally the children of their parent, are still those that shards were made of."""

    def __init__(self, layers: Iterable[nn.Module], owner: nn.Module | None = None) -> None:
        self._children = {} if owner is None else owner._modules
        self._were = tuple(self._children.values())
        self._weights = [
            (one._parameters, name, x, x.data_ptr())
            for one in layers
            for name, x in one._parameters.items()
            if x is not None
        ]

    @untraced  # Dynamo of torch 2.11 cannot compare addresses
    def is_valid(self) -> bool:
        """Return whether no weight or child was replaced, and no gradient of a weight is wanted."""
        return (
            all(own.get(name) is x and x.data_ptr() == address for own, name, x, address in self._weights)
            and tuple(self._children.values()) == self._were
            and not (torch.is_grad_enabled() and any(x.requires_grad for _, _, x, _ in self._weights))
        )
