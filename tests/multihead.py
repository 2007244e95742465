"""Random calls of multi-head attention on whole sequences, for torch's module and for ours, on one process and on ranks."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from ringattn import Ring, RingMultiheadAttention, Sharding

Results = dict[str, Tensor]


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
        """What the module is called with."""
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
            if tensor is not None and tensor.requires_grad and args.get("attn_mask") is not None or name != "mask":
                if tensor is not None and tensor.grad is not None:
                    found["d" + name] = tensor.grad
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            found["d" + name] = parameter.grad
        return found

    def run_torch(self, dtype: torch.dtype) -> Results:
        return self.run(self.module(nn.MultiheadAttention, dtype), self.tensors(dtype))

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
        """Whole tensors from all ranks' results; gradients of parameters summed."""
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


def run_on_ranks(cases: list[Multihead], layout: str, dtype: torch.dtype) -> list[Results]:
    """One rank: every case by ring attention, results made whole."""
    ring, results = Ring(), []
    for case in cases:
        rows = ring.sharding(case.seq_len, layout)
        keys = rows if case.kv_len is None else ring.sharding(case.kv_len, layout)
        module = case.module(RingMultiheadAttention, dtype, ring=ring)
        local = case.shard(case.tensors(dtype), rows, keys)
        found = case.run(module, local, sharding=rows, kv_sharding=None if keys is rows else keys)
        results.append(case.unshard(found, rows, keys))
    return results


@st.composite
def multiheads(draw: st.DrawFn, max_len: int = 9) -> Multihead:
    """Any module and any call, but for rows without keys, of which torch makes NaN."""
    num_heads, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    dims = st.sampled_from([None, num_heads * head_dim, 5])
    kdim, vdim = draw(dims), draw(dims)
    flag = st.booleans()
    extra = draw(flag), draw(flag)
    padding = draw(st.sampled_from([None, "bool", "float"]))
    need_weights = draw(flag)
    mask = draw(st.sampled_from([None, "bool2", "float2", "bool3", "float3"]))
    # torch hides its added columns from a causal hint that it follows, and from no other
    hint = mask is not None and draw(flag) and (need_weights or padding is not None or not any(extra))
    return Multihead(
        seq_len=draw(st.integers(1, max_len)),
        kv_len=draw(st.none() | st.integers(1, max_len)),
        batch=draw(st.integers(0, 2)),
        num_heads=num_heads,
        head_dim=head_dim,
        bias=draw(flag),
        add_bias_kv=extra[0],
        add_zero_attn=extra[1],
        kdim=kdim,
        vdim=vdim,
        batch_first=draw(flag),
        value_is_key=draw(flag),
        padding=padding,
        mask=mask,
        causal=mask is None and draw(flag),
        hint=hint,
        need_weights=need_weights,
        average=draw(flag),
        training=draw(flag),
        seed=draw(st.integers(0, 1000)),
    )
