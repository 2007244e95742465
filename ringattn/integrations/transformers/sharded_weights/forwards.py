"""Forwards of modules whose weights are sliced: with slices where all ranks have the same rows, else with gathered weights.

Legend: n rows, d the model's width, w columns of a rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringattn.integrations.transformers.model_forward import (
    BoundPatch,
    PrefillRows,
    prefill_rows,
    replicated_rows_ring,
    untraced,
)
from ringattn.integrations.transformers.sharded_weights.layer_gather import LayerGather
from ringattn.integrations.transformers.sharded_weights.plan import Part, Slot
from ringattn.integrations.transformers.tensor_parallel import RowParallelLinear
from ringattn.ring import Ring

EMBEDDED_ROWS = 512
"""Rows of each rank whose embeddings are exchanged at a time in a prefill."""
REFUSAL = "a model must be copied or saved whole before its weights are sharded, got one after; copy it before"


class Exchange:
    """Sums and concatenations over ranks that have the same rows: in one kernel in decode, in few bytes in prefill."""

    def __init__(self, ring: Ring) -> None:
        self.ring, self.rank, self.ranks = ring, ring.rank, ring.world_size

    def columns(self, x: Tensor, widths: Sequence[int], columns: Sequence[int]) -> list[Tensor]:
        """Return `n columns` of each of several products, of all ranks, from this rank's `n sum(widths)`."""
        rows, wide = len(x), [self.ranks * width for width in widths]
        if prefill_rows() is not None:
            stack = torch.stack(self.ring.gather(x, 1, [x.shape[1]] * self.ranks), 1)
            parts = [part.flatten(1) for part in stack.split(list(widths), 2)]
        else:
            whole = x.new_empty(self.ranks * x.numel())
            self.ring.partial_reducer(x.device).all_gather_columns(x, whole, tuple(widths))
            parts = [part.view(rows, n) for part, n in zip(whole.split([rows * n for n in wide]), wide, strict=True)]
        return [part[:, :count].contiguous() for part, count in zip(parts, columns, strict=True)]

    def total(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum `n d` of all ranks' addends, in rank order and fp32, rounded once: the same bits on every rank."""
        if prefill_rows() is None:
            out = torch.empty(x.shape, dtype=dtype, device=x.device)
            self.ring.partial_reducer(x.device).all_reduce(x.contiguous(), out)
            return out
        # each rank sums its share of the rows: reduce-scatter and all-gather
        ends = [len(x) * place // self.ranks for place in range(self.ranks + 1)]
        sizes = [end - begin for begin, end in pairwise(ends)]
        addends = self.ring.all_to_all(x, sizes, [sizes[self.rank]] * self.ranks)
        first, *others = addends.view(self.ranks, sizes[self.rank], x.shape[1])
        first = first.float()
        for other in others:
            first = first + other
        return torch.cat(self.ring.gather(first.to(dtype), 0, sizes))


class Forwards:
    """Makes the forwards of the parts of one model, and replaces those of its modules.

    Args:
        ring: The ranks that hold the slices.
        gather: Gathers layers.
        places: Layer and place in it of each sliced weight, as `gather` counts them.
    """

    def __init__(self, ring: Ring, gather: LayerGather, places: dict[Slot, tuple[int, int]]) -> None:
        self._ring, self._gather, self._places = ring, gather, places
        self._exchange = Exchange(ring)

    def install(self, part: Part) -> None:
        """Replace the forwards of a part's modules."""
        make = {
            "linears": self._linears,
            "mlp": self._mlp,
            "experts": self._experts,
            "embedding": self._embedding,
            "head": self._head,
        }
        make[part.kind](part)

    def _replicated(self, module: nn.Module) -> bool:
        """Return whether all ranks have the same rows; raise where weights are neither sliced nor gathered."""
        if replicated_rows_ring() is self._ring:
            return True
        if prefill_rows() is None and not self._gather.active:
            raise RuntimeError(
                "a model with sharded weights must be called with a step of a cache of its ring, by RingCache or run_step, got "
                f"another call of {type(module).__name__}; use whole weights for others"
            )
        return False

    def _whole(self, slot: Slot) -> Tensor:
        return self._gather.whole(*self._places[slot])

    def _patch(self, module: nn.Module, forward: Callable[..., Any], *, nested: bool = True) -> None:
        module.forward = BoundPatch(untraced(forward, nested=nested), module.forward, REFUSAL)

    def _patch_gathered(self, slots: Sequence[Slot]) -> None:
        """Let linear layers multiply with gathered weights."""
        for slot in slots:
            linear: Any = slot.module
            self._patch(linear, lambda x, slot=slot, linear=linear: F.linear(x, self._whole(slot), linear.bias))

    def _linears(self, part: Part) -> None:
        """Linear layers of one input: the first that is called computes the columns of all, which one exchange gathers."""
        slots, linears = part.slots, [slot.module for slot in part.slots]
        widths, columns = [s.slice.width for s in slots], [s.slice.columns for s in slots]
        packed, bias = _pack(slots, self._ring.rank)
        found: dict[int, Tensor] = {}
        given: list[Tensor] = []

        def compute(x: Tensor, place: int) -> Tensor:
            if not (given and given[0] is x and place in found):
                rows = x.reshape(-1, x.shape[-1])
                given[:] = [x]
                found.update(enumerate(self._exchange.columns(F.linear(rows, packed, bias), widths, columns)))
            out = found.pop(place)
            if not found:
                given.clear()
            return out.view(*x.shape[:-1], -1)

        for place, (slot, linear) in enumerate(zip(slots, linears, strict=True)):

            def forward(x: Tensor, place: int = place, slot: Slot = slot, linear: Any = linear) -> Tensor:
                if self._replicated(linear):
                    return compute(x, place)
                return F.linear(x, self._whole(slot), linear.bias)

            self._patch(linear, forward)

    def _mlp(self, part: Part) -> None:
        """An MLP: column-parallel products, a row-parallel one, and a sum (Note [Tensor parallel decode])."""
        mlp, rank, whole = part.module, self._ring.rank, part.module.forward
        *first, last = part.slots
        linears = {id(slot.module): slot for slot in part.slots}
        names = {linears[id(one)]: name for name, one in mlp.named_children() if id(one) in linears}
        row_parallel = RowParallelLinear(last.weight.data, _bias(last), with_bias=rank == 0)
        shard = copy.copy(mlp)
        shard._modules = {
            **mlp._modules,
            **{names[slot]: one for slot, one in zip(first, _column_parallel(first, rank), strict=True)},
            names[last]: row_parallel,
        }
        width = row_parallel.out_features

        def forward(x: Tensor) -> Tensor:
            if not self._replicated(mlp):
                return whole(x)
            return self._total(shard.forward(x.reshape(1, -1, width))[0], x.dtype).view(x.shape)

        # compiled decoder layers call it as it is, and compile the shard
        self._patch(mlp, forward, nested=False)
        self._patch_gathered(part.slots)

    @untraced
    def _total(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self._exchange.total(x, dtype)

    def _experts(self, part: Part) -> None:
        """All experts of a layer, each by its inner columns (Note [Experts by inner columns] of plan.py)."""
        experts: Any = part.module
        whole, shard = copy.copy(experts), copy.copy(experts)
        first, last = part.slots
        own = dict(experts._parameters)
        if experts.has_bias:
            sliced = first.slice._replace(dim=1)
            own["gate_up_proj_bias"] = _frozen(sliced.cut(experts.gate_up_proj_bias.data, self._ring.rank))
            if self._ring.rank:
                own["down_proj_bias"] = _frozen(torch.zeros_like(experts.down_proj_bias))
        shard._parameters = own

        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            if self._replicated(experts):
                found = type(experts).forward(shard, hidden_states, top_k_index, top_k_weights)
                return self._exchange.total(found, hidden_states.dtype)
            gathered = {slot.name: self._whole(slot) for slot in (first, last)}
            whole._parameters = {**experts._parameters, **gathered}
            try:
                return type(experts).forward(whole, hidden_states, top_k_index, top_k_weights)
            finally:
                whole._parameters = experts._parameters

        self._patch(experts, forward)

    def _embedding(self, part: Part) -> None:
        """Embeddings: each rank looks up its tokens, and a sum, in which one addend is not zero, or an exchange, gives all."""
        [slot] = part.slots
        embedding: Any = slot.module
        shard = copy.copy(embedding)
        shard.padding_idx = None  # of the gradient alone; it may be no row of the slice
        first, end = slot.slice.bounds(self._ring.rank)

        def look_up(tokens: Tensor) -> Tensor:
            held = (tokens >= first) & (tokens < end)
            rows = type(embedding).forward(shard, (tokens - first).clamp(0, slot.slice.width - 1))
            return rows.masked_fill_(~held[..., None], 0)

        def forward(input: Tensor) -> Tensor:
            rows = prefill_rows()
            if self._replicated(embedding) or (rows is not None and rows.whole_tokens):
                found = look_up(input.reshape(-1))
                return self._exchange.total(found, found.dtype).view(*input.shape, -1)
            assert rows is not None, "a call that is not replicated is a prefill"
            return self._embed_own(input, rows, look_up)

        self._patch(embedding, forward)

    def _embed_own(self, tokens: Tensor, rows: PrefillRows, look_up: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the embeddings `b s d` of this rank's rows: every rank sends those of its tokens."""
        assert rows.step.sharding is not None, "a prefill has a sharding"
        lengths, rank, ranks = rows.step.sharding.shard_lens, self._ring.rank, self._ring.world_size
        of_ranks = self._ring.gather(tokens[:, : lengths[rank]].contiguous(), 1, lengths)
        b, found = len(tokens), list[Tensor]()
        for begin in range(0, max(lengths), EMBEDDED_ROWS):
            pieces = [one[:, begin : begin + EMBEDDED_ROWS] for one in of_ranks]
            sends = [one.numel() for one in pieces]
            embedded = look_up(torch.cat([one.flatten() for one in pieces]))
            received = self._ring.all_to_all(embedded, sends, [sends[rank]] * ranks)
            # one of them is not zero, so the sum is exact
            found.append(received.view(ranks, *pieces[rank].shape, embedded.shape[-1]).sum(0))
        own = torch.cat(found, 1)
        # a rank without rows runs its layers on one of padding
        return own if own.shape[1] else own.new_zeros(b, 1, own.shape[2])

    def _head(self, part: Part) -> None:
        """The output head: column-parallel by tokens; rows that a rank alone has are given to all."""
        [slot] = part.slots
        head: Any = slot.module
        [shard] = _column_parallel([slot], self._ring.rank)
        tokens = slot.slice.columns

        def forward(x: Tensor) -> Tensor:
            if not self._replicated(head):
                rows = prefill_rows()
                assert rows is not None, "a call that is not replicated is a prefill"
                whole = x.new_zeros(x.shape[0], rows.wanted, x.shape[2])
                whole[:, rows.places] = x
                x = self._ring.sum(whole)
            if not x.numel():
                return x.new_empty(*x.shape[:-1], tokens)
            columns = shard(x.reshape(-1, x.shape[-1]))
            [logits] = self._exchange.columns(columns, [slot.slice.width], [tokens])
            return logits.view(*x.shape[:-1], tokens)

        self._patch(head, forward)


def _frozen(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x, requires_grad=False)


def _bias(slot: Slot) -> Tensor | None:
    return slot.module._parameters.get("bias")


class _PackedLinear(nn.Module):
    """A rank's columns `first` to `end` of the product of several linear layers, which compiled code makes once for all of them.

    See Note [Packed products] of decode_compile.py.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, first: int, end: int) -> None:
        super().__init__()
        self.weight, self.bias, self.first, self.end = weight, bias, first, end

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return F.linear(x, self.weight, self.bias)[..., self.first : self.end]
        bias = None if self.bias is None else self.bias[self.first : self.end]
        return F.linear(x, self.weight[self.first : self.end], bias)


def _column_parallel(slots: Sequence[Slot], rank: int) -> list[_PackedLinear]:
    """Return the columns of a rank of each of some linear layers of one input, and of all of its parts."""
    packed, bias = _pack(slots, rank)
    weight, biases = _frozen(packed), None if bias is None else _frozen(bias)
    ends = accumulate((len(slot.weight) for slot in slots), initial=0)
    return [_PackedLinear(weight, biases, *columns) for columns in pairwise(ends)]


def _pack(slots: Sequence[Slot], rank: int) -> tuple[Tensor, Tensor | None]:
    """Store the slices of linear layers one behind the other; return all of them, and their biases, as one."""
    packed, before = _packed([slot.weight.data for slot in slots]), slots[0].weight.data_ptr()
    for slot, mine in zip(slots, packed.split([len(slot.weight) for slot in slots]), strict=True):
        slot.weight.data = mine
    if packed.is_cuda and packed.data_ptr() != before:
        # slices that are too small for the next matrix
        torch.cuda.empty_cache()
    return packed, _packed_bias(slots, rank)


def _packed(slices: Sequence[Tensor]) -> Tensor:
    """Return matrices with equally many columns as one: a view where they lie one behind the other, as where peers read them."""
    first, rows = slices[0], sum(len(x) for x in slices)
    ends = accumulate((x.nbytes for x in slices), initial=first.data_ptr())
    storage = first.untyped_storage().data_ptr()
    for x, begin in zip(slices, ends, strict=False):
        if x.untyped_storage().data_ptr() != storage or x.data_ptr() != begin:
            return torch.cat(list(slices))
    return first.as_strided((rows, first.shape[1]), first.stride())


def _packed_bias(slots: Sequence[Slot], rank: int) -> Tensor | None:
    """Return the biases of a rank's columns of several linear layers, zeros where one has none; None where none has."""
    biases = [_bias(slot) for slot in slots]
    if all(bias is None for bias in biases):
        return None
    parts = [
        slot.weight.new_zeros(len(slot.weight)) if bias is None else slot.slice.cut(bias.data, rank)
        for slot, bias in zip(slots, biases, strict=True)
    ]
    return torch.cat(parts)
