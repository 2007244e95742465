"""Calls of multi-head attention on whole sequences, for torch's module and for ours, and what ranks do with them.

Workers import this file, so it imports little.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ringattn import Ring, RingMultiheadAttention, Sharding, replace_multihead_attention, use_sharding

Results = dict[str, Tensor]
FP64 = torch.float64


@dataclass(frozen=True)
class Multihead:
    """One module and one call of it; kv_len None is self-attention, batch 0 is unbatched input."""

    seq_len: int = 13
    kv_len: int | None = None
    batch: int = 2
    num_heads: int = 2
    head_dim: int = 4
    bias: bool = True
    add_bias_kv: bool = False
    add_zero_attn: bool = False
    kdim: int | None = None
    vdim: int | None = None
    batch_first: bool = True
    value_is_key: bool = True
    padding: str | None = None  # bool, float
    mask: str | None = None  # bool2, float2, bool3, float3
    causal: bool = False  # ours is told is_causal, torch's is given the mask
    hint: bool = False  # both are told is_causal beside their mask
    need_weights: bool = False
    average: bool = True
    training: bool = True
    seed: int = 0

    @property
    def embed_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def is_self(self) -> bool:
        return self.kv_len is None and self.kdim is None and self.vdim is None

    @property
    def row_dim(self) -> int:
        return 1 if self.batch and self.batch_first else 0

    def module(self, cls: type[nn.MultiheadAttention], dtype: torch.dtype, **options: Any) -> nn.MultiheadAttention:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            module = cls(
                self.embed_dim,
                self.num_heads,
                bias=self.bias,
                add_bias_kv=self.add_bias_kv,
                add_zero_attn=self.add_zero_attn,
                kdim=self.kdim,
                vdim=self.vdim,
                batch_first=self.batch_first,
                dtype=torch.float64,
                **options,
            )
            if module.in_proj_bias is not None:
                nn.init.normal_(module.in_proj_bias)
                nn.init.normal_(module.out_proj.bias)
        return module.to(dtype).train(self.training)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor | None]:
        """The whole query, key, value, masks and cotangents; inputs that are one tensor are one tensor here."""
        g = torch.Generator().manual_seed(self.seed)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

        def rows(num: int, features: int) -> Tensor:
            b = max(self.batch, 1)
            x = rand(*((b, num) if self.row_dim else (num, b)), features)
            return x if self.batch else x[:, 0]

        def hidden(*shape: int) -> Tensor:
            x = torch.rand(*shape, generator=g) < 0.4
            x[..., 0] = False  # torch gives NaN to rows without keys
            return x

        def mask(kind: str | None, *shape: int) -> Tensor | None:
            if kind is None:
                return None
            found = hidden(*shape)
            return rand(*shape).masked_fill(found, float("-inf")) if kind.startswith("float") else found

        b, n, m, e = max(self.batch, 1), self.seq_len, self.kv_len or self.seq_len, self.embed_dim
        query = rows(n, e)
        key = query if self.is_self else rows(m, self.kdim or e)
        one = self.value_is_key and (self.kdim or e) == (self.vdim or e)
        kinds = {"2": (n, m), "3": (b * self.num_heads, n, m)}
        w = m + self.add_bias_kv + self.add_zero_attn
        heads = () if self.average else (self.num_heads,)
        return {
            "query": query,
            "key": key,
            "value": key if one else rows(m, self.vdim or e),
            "padding": mask(self.padding, *((b,) if self.batch else ()), m),
            "mask": None if self.mask is None else mask(self.mask, *kinds[self.mask[-1]]),
            "do": rows(n, e),
            "dweights": rand(*((b,) if self.batch else ()), *heads, n, w),
        }

    def arguments(self, x: dict[str, Tensor | None], ours: bool) -> dict[str, Any]:
        """Arguments of the call of the module."""
        mask, is_causal = x["mask"], self.hint and x["mask"] is not None
        if self.causal and ours:
            is_causal = True
        elif self.causal:
            mask = torch.ones(self.seq_len, self.kv_len or self.seq_len, dtype=torch.bool).triu(1)
        return {
            "key_padding_mask": x["padding"],
            "attn_mask": mask,
            "need_weights": self.need_weights,
            "average_attn_weights": self.average,
            "is_causal": is_causal,
        }

    def run(self, module: nn.MultiheadAttention, x: dict[str, Tensor | None], **options: Any) -> Results:
        """Outputs, and gradients of all that has any."""
        leaves: dict[int, Tensor] = {}
        for name in ("query", "key", "value", "padding", "mask"):
            tensor = x[name]
            if tensor is not None and tensor.is_floating_point():
                leaves.setdefault(id(tensor), tensor.detach().clone().requires_grad_())
        mine = {name: leaves.get(id(tensor), tensor) for name, tensor in x.items()}
        args = self.arguments(mine, isinstance(module, RingMultiheadAttention))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            o, weights = module(mine["query"], mine["key"], mine["value"], **args, **options)
        assert (weights is not None) == self.need_weights
        do, dweights = x["do"], x["dweights"]
        assert do is not None
        assert dweights is not None
        total = (o * do).sum() + (0 if weights is None else (weights * dweights).sum())
        total.backward()
        found = {"output": o.detach()} | ({} if weights is None else {"weights": weights.detach()})
        for name in ("query", "key", "value", "padding", "mask"):
            tensor = mine[name]
            # a mask that a hint takes the place of has no gradient
            if tensor is not None and tensor.grad is not None:
                found["d" + name] = tensor.grad
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            found["d" + name] = parameter.grad
        return found

    def shard(self, x: dict[str, Tensor | None], rows: Sharding, keys: Sharding) -> dict[str, Tensor | None]:
        """This rank's part of whole tensors."""
        dims = {
            "query": (rows, self.row_dim),
            "key": (keys, self.row_dim),
            "value": (keys, self.row_dim),
            "padding": (keys, -1),
            "mask": (rows, -2),
            "do": (rows, self.row_dim),
            "dweights": (rows, -2),
        }
        done: dict[int, Tensor] = {}
        for name, (sharding, dim) in dims.items():
            tensor = x[name]
            if tensor is not None:
                done.setdefault(id(tensor), sharding.shard(tensor, dim))
        return {name: None if tensor is None else done[id(tensor)] for name, tensor in x.items()}

    def unshard(self, found: Results, rows: Sharding, keys: Sharding) -> Results:
        """Return whole tensors from all ranks' results; gradients of parameters summed."""
        dims = {
            "output": (rows, self.row_dim),
            "weights": (rows, -2),
            "dquery": (rows, self.row_dim),
            "dkey": (keys, self.row_dim),
            "dvalue": (keys, self.row_dim),
            "dpadding": (keys, -1),
            "dmask": (rows, -2),
        }
        whole: Results = {}
        for name, x in found.items():
            if name in dims:
                sharding, dim = dims[name]
                whole[name] = sharding.unshard(x, dim)
            else:
                whole[name] = torch.stack(rows.ring.gather(x[None], 0, [1] * rows.world_size)).sum(0)[0]
        return whole


@cache
def run_torch(case: Multihead, dtype: torch.dtype) -> Results:
    """Torch's module on one process."""
    return case.run(case.module(nn.MultiheadAttention, dtype), case.tensors(dtype))


def run_on_ranks(cases: list[Multihead], layout: str, dtype: torch.dtype, whole_masks: bool = False) -> list[Results]:
    """One rank: every case by ring attention, results made whole; whole_masks: the module cuts the masks."""
    ring, results = Ring(), []
    for case in cases:
        rows = ring.sharding(case.seq_len, layout)
        keys = rows if case.kv_len is None else ring.sharding(case.kv_len, layout)
        module = case.module(RingMultiheadAttention, dtype, ring=ring)
        whole = case.tensors(dtype)
        local = case.shard(whole, rows, keys)
        if whole_masks:
            local |= {name: whole[name] for name in ("padding", "mask")}
        found = case.run(module, local, sharding=rows, kv_sharding=None if keys is rows else keys)
        # each rank has the gradient of its own rows in a whole mask
        masks = {name: ring.sum(found.pop(name)) for name in ("dpadding", "dmask") if whole_masks and name in found}
        results.append(case.unshard(found, rows, keys) | masks)
    return results


MODES: dict[str, tuple[bool, Callable[[], Any]]] = {
    "train": (True, torch.enable_grad),
    "eval": (False, torch.enable_grad),
    "no_grad": (False, torch.no_grad),
    "inference": (False, torch.inference_mode),
}


def encoder(norm_first: bool = False, dtype: torch.dtype = FP64) -> nn.TransformerEncoder:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=norm_first, dtype=dtype)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def decoder() -> nn.TransformerDecoder:
    torch.manual_seed(2)
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=True, dtype=FP64), 2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def ringed(model: nn.Module, ring: Ring | None = None) -> nn.Module:
    model = copy.deepcopy(model)
    assert len(replace_multihead_attention(model, ring)) >= 2
    return model


def models_on_ranks(layout: str) -> dict[str, Results]:
    ring, results = Ring(), {}
    n, m, b = 13, 9, 3
    g = torch.Generator().manual_seed(5)
    source = torch.randn(b, n, 16, generator=g, dtype=FP64)
    target = torch.randn(b, m, 16, generator=g, dtype=FP64)
    padding = torch.arange(n) >= torch.tensor([n, 6, 2])[:, None]
    rows, targets = ring.sharding(n, layout), ring.sharding(m, layout)
    one = ring.world_size == 1
    for mode, (training, context) in MODES.items():
        sides = [encoder().train(training), decoder().train(training)]
        if not one:
            sides = [ringed(x, ring) for x in sides]
        for x in sides:
            x.zero_grad()
        local = rows.shard(source)
        with context():
            with use_sharding(rows):
                memory = sides[0](local, src_key_padding_mask=padding)
            # torch's own layers do not know that causal needs no mask
            causal = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(m, dtype=FP64)} if one else {}
            with use_sharding(targets, kv_sharding=rows):
                o = sides[1](
                    targets.shard(target),
                    memory,
                    tgt_is_causal=True,
                    memory_key_padding_mask=rows.shard(padding),
                    **causal,
                )
            found = {
                "memory": rows.unshard(memory.masked_fill(rows.shard(padding)[..., None], 0)),
                "o": targets.unshard(o),
            }
        if torch.is_grad_enabled() and context is torch.enable_grad:
            o.square().sum().backward()
            for name, p in itertools.chain(*(x.named_parameters() for x in sides)):
                assert p.grad is not None
                whole = torch.stack(ring.gather(p.grad[None], 0, [1] * ring.world_size)).sum(0)[0]
                found[name] = found.get(name, 0) + whole
        results[mode] = {name: x.detach().clone() for name, x in found.items()}
    return results


def drop_on_ranks(case: Multihead, layout: str, spread: int) -> tuple[Results, int]:
    ring = Ring()
    rows = ring.sharding(case.seq_len, layout)
    module = case.module(RingMultiheadAttention, FP64, dropout=0.4)
    torch.manual_seed(11 + spread * ring.rank)
    found = case.run(module, case.shard(case.tensors(FP64), rows, rows), sharding=rows)
    torch.manual_seed(11 + spread * ring.rank)
    return case.unshard(found, rows, rows), int(torch.randint(0, 2**63 - 1, ()))


def compile_on_ranks() -> None:
    torch._dynamo.reset()
    ring = Ring()
    sharding = ring.sharding(7)
    model = encoder(dtype=torch.float32).layers[0]
    replace_multihead_attention(model, ring)
    x = sharding.shard(torch.randn(2, 7, 16))
    results = []
    for fn in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        with use_sharding(sharding):
            o = fn(leaf, is_causal=True)
        o.square().sum().backward()
        results.append((o.detach(), leaf.grad))
    torch.testing.assert_close(results[1], results[0])


def compile_cases_on_ranks(cases: list[Multihead]) -> list[tuple[Results, Results]]:
    """Every case in one graph, and without a compiler."""
    torch._dynamo.reset()
    ring, found = Ring(), []
    for case in cases:
        rows = ring.sharding(case.seq_len)
        local = case.shard(case.tensors(torch.float32), rows, rows)
        module = case.module(RingMultiheadAttention, torch.float32, ring=ring)
        eager = case.run(module, local, sharding=rows)
        eager = {name: x.clone() for name, x in eager.items()}
        module.zero_grad()
        module.compile(fullgraph=True, backend="aot_eager")
        found.append((case.run(module, local, sharding=rows), eager))
    return found


def shard_parameters() -> Results:
    from torch.distributed.fsdp import fully_shard  # takes a second to import: only where it is used

    ring = Ring()
    n = 8
    sharding = ring.sharding(n)
    model = encoder(dtype=torch.float32)
    if ring.world_size > 1:
        replace_multihead_attention(model, ring)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    torch.manual_seed(0)
    x = sharding.shard(torch.randn(2, n, 16))
    with use_sharding(sharding):
        o = model(x)
    o.square().mean().backward()
    grads: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}


def attend_without_sharding() -> None:
    x = torch.randn(4, 1, 8)
    RingMultiheadAttention(8, 2)(x, x, x)


def odd_mask() -> None:
    ring = Ring()
    sharding = ring.sharding(8)
    x = torch.randn(sharding.shard_len, 1, 8)
    mask = torch.zeros(sharding.shard_len, 8 if ring.rank else 9)
    RingMultiheadAttention(8, 2)(x, x, x, attn_mask=mask, sharding=sharding)
