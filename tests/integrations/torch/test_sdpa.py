"""scaled_dot_product_attention is torch's: arguments, masks and gradients, on one process and on ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from ringattn import Ring, attention_reference, scaled_dot_product_attention, use_sharding
from tests.support.budget import assert_within_budget
from tests.support.pool import Pools

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Call:
    """One call on whole tensors; mask is its shape with letters of `b h s n` or 1."""

    seq_len: int = 13
    kv_len: int | None = None
    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    v_head_dim: int = 8
    mask: str | None = None
    kind: str = "bool"
    is_causal: bool = False
    scale: float | None = None
    seed: int = 0

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        b, s, n = self.batch, self.seq_len, self.kv_len or self.seq_len

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

        found = {
            "query": rand(b, self.heads, s, self.head_dim),
            "key": rand(b, self.kv_heads, n, self.head_dim),
            "value": rand(b, self.kv_heads, n, self.v_head_dim),
            "do": rand(b, self.heads, s, self.v_head_dim),
        }
        if self.mask is not None:
            sizes = {"b": b, "h": self.heads, "s": s, "n": n, "1": 1}
            shape = [sizes[letter] for letter in self.mask]
            visible = torch.rand(shape, generator=g) < 0.6
            visible[..., 0] = True  # torch gives NaN to rows without keys, or 0
            found["attn_mask"] = visible if self.kind == "bool" else rand(*shape).masked_fill(~visible, float("-inf"))
        return found

    @property
    def options(self) -> dict[str, Any]:
        return {"is_causal": self.is_causal, "scale": self.scale, "enable_gqa": self.heads != self.kv_heads}

    def run(self, fn: Any, x: dict[str, Tensor], **options: Any) -> Results:
        leaves = {k: t.clone().requires_grad_() if t.is_floating_point() else t for k, t in x.items() if k != "do"}
        o = fn(**leaves, **self.options, **options)
        (o * x["do"]).sum().backward()
        return {"o": o.detach()} | {"d" + name: t.grad for name, t in leaves.items() if t.grad is not None}


def run_on_ranks(calls: list[Call], layout: str, dtype: torch.dtype, whole_masks: bool = False) -> list[Results]:
    ring, results = Ring(), []
    for call in calls:
        rows = ring.sharding(call.seq_len, layout)
        keys = rows if call.kv_len is None else ring.sharding(call.kv_len, layout)
        sides = {"query": rows, "key": keys, "value": keys, "do": rows, "attn_mask": rows}
        whole = call.tensors(dtype)
        # a mask without rows is for all of them
        local = {name: sides[name].shard(x, -2) if x.dim() > 1 and x.shape[-2] > 1 else x for name, x in whole.items()}
        if call.seq_len == 1:
            local |= {name: sides[name].shard(whole[name], -2) for name in ("query", "do")}
        if (call.kv_len or call.seq_len) == 1:
            local |= {name: sides[name].shard(whole[name], -2) for name in ("key", "value")}
        if whole_masks:
            local["attn_mask"] = whole["attn_mask"]
        with use_sharding(rows, None if keys is rows else keys):
            found = call.run(scaled_dot_product_attention, local)
        done: Results = {}
        for name, x in found.items():
            side = {"o": rows, "dquery": rows, "dkey": keys, "dvalue": keys}.get(name)
            if side is not None or (not whole_masks and whole["attn_mask"].shape[-2] > 1):
                done[name] = (side or rows).unshard(x, -2)
            else:
                done[name] = torch.stack(ring.gather(x[None], 0, [1] * ring.world_size)).sum(0)[0]
        results.append(done)
    return results


def answer(call: Call, tensors: dict[str, Tensor]) -> Results:
    """The definition, in the widest numbers of numpy: torch's fp64 was off by 8 times as much as ours where terms cancel."""
    x = {
        name: t.numpy() if t.dtype == torch.bool else t.double().numpy().astype(np.longdouble)
        for name, t in tensors.items()
    }
    q, k, v, do = (x[name] for name in ("query", "key", "value", "do"))
    group, mask = call.heads // call.kv_heads, x.get("attn_mask")
    k, v = (side.repeat(group, 1) for side in (k, v))
    scale = np.longdouble(call.scale or q.shape[-1] ** -0.5)
    s = q @ k.swapaxes(-1, -2) * scale
    if call.is_causal:
        s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, -np.inf)
    if mask is not None:
        s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask
    largest = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isinf(largest), 0, largest))
    total = p.sum(-1, keepdims=True)
    p = p / np.where(total == 0, 1, total)  # a row that sees nothing is zero
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    found = {
        "o": p @ v,
        "dquery": ds @ k * scale,
        "dkey": ds.swapaxes(-1, -2) @ q * scale,
        "dvalue": p.swapaxes(-1, -2) @ do,
    }
    for name in ("dkey", "dvalue"):
        b, _, n, d = found[name].shape
        found[name] = found[name].reshape(b, call.kv_heads, group, n, d).sum(2)
    if mask is not None and mask.dtype != bool:
        wide = ds.reshape((1,) * max(0, mask.ndim - ds.ndim) + ds.shape)
        wide = wide.sum(tuple(range(wide.ndim - mask.ndim)))
        found["dattn_mask"] = wide.sum(tuple(i for i, n in enumerate(mask.shape) if n == 1), keepdims=True)
    return {name: torch.from_numpy(one.astype(np.float64)) for name, one in found.items()}


def assert_equal_to_torch(call: Call, found: Results, dtype: torch.dtype) -> None:
    tensors = call.tensors(dtype)
    exact = answer(call, tensors)
    # of fp64, which torch does not exceed, what fp32 makes of the same numbers says how hard they are (Note [Budget])
    low = call.run(F.scaled_dot_product_attention, {k: _cast(x, torch.float32) for k, x in tensors.items()})
    assert found.keys() == exact.keys()
    for name, x in exact.items():
        if name.startswith("d") and x.numel() and not x.any():
            # every query sees one key: each of many terms cancels but for a rounding, where torch's order of operations leaves none
            terms = call.seq_len * call.heads
            noise = 16 * min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
            assert found[name].abs().max() <= noise * terms**0.5, f"{name} of {call}"
            continue
        assert_within_budget(found[name], x, low[name], f"{name} of {call}", dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


@st.composite
def calls(draw: st.DrawFn) -> Call:
    kv_heads = draw(st.integers(1, 2))
    mask = draw(st.sampled_from([None, "bhsn", "11sn", "sn", "b11n", "bh1n", "1hsn", "1n"]))
    return Call(
        seq_len=draw(st.integers(2, 9)),
        kv_len=draw(st.none() | st.integers(2, 9)),
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.sampled_from([1, 3])),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 9)),
        v_head_dim=draw(st.integers(1, 9)),
        mask=mask,
        kind=draw(st.sampled_from(["bool", "float"])),
        is_causal=mask is None and draw(st.booleans()),
        scale=draw(st.none() | st.sampled_from([0.1, 1.0])),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=60, deadline=None)
@given(call=calls(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_any_call_on_one_process_is_torchs(call: Call, dtype: torch.dtype) -> None:
    ring = Ring()
    keys = None if call.kv_len is None else ring.sharding(call.kv_len)
    found = call.run(
        scaled_dot_product_attention, call.tensors(dtype), sharding=ring.sharding(call.seq_len), kv_sharding=keys
    )
    assert_equal_to_torch(call, found, dtype)


CALLS = [
    Call(is_causal=True),
    Call(heads=4, kv_heads=2, mask="11sn"),
    Call(seq_len=11, kv_len=6, is_causal=True, v_head_dim=5),
    Call(seq_len=5, kv_len=9, mask="bhsn", kind="float", scale=0.3),
    Call(seq_len=3, mask="b11n", kind="float"),  # a shard is empty on 4 ranks
    Call(seq_len=1, is_causal=True),
]


@pytest.mark.parametrize(("world_size", "layout"), [(2, "zigzag"), (2, "contiguous"), (4, "zigzag"), (4, "striped")])
def test_ranks_together_are_torchs_function(pool: Pools, world_size: int, layout: str) -> None:
    for results in pool(world_size).run(run_on_ranks, CALLS, layout, torch.float32):
        for call, found in zip(CALLS, results, strict=True):
            assert_equal_to_torch(call, found, torch.float32)


WHOLE = [
    Call(mask="sn"),
    Call(mask="b1sn", kind="float"),
    Call(seq_len=5, kv_len=9, mask="bhsn", kind="float"),
    Call(seq_len=2, mask="11sn"),
]


@pytest.mark.parametrize(("world_size", "layout"), [(2, "zigzag"), (4, "contiguous")])
def test_whole_masks_are_cut(pool: Pools, world_size: int, layout: str) -> None:
    for results in pool(world_size).run(run_on_ranks, WHOLE, layout, torch.float64, whole_masks=True):
        for call, found in zip(WHOLE, results, strict=True):
            assert_equal_to_torch(call, found, torch.float64)


@settings(max_examples=15, deadline=None)
@given(some=st.lists(calls(), min_size=1, max_size=4), world_size=st.sampled_from([2, 4]))
def test_any_call_on_ranks_is_torchs(pool: Pools, some: list[Call], world_size: int) -> None:
    for results in pool(world_size).run(run_on_ranks, some, "zigzag", torch.float64):
        for call, found in zip(some, results, strict=True):
            assert_equal_to_torch(call, found, torch.float64)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_without_keys_are_zero(kind: str) -> None:
    x = torch.randn(2, 2, 4, 8, requires_grad=True)
    visible = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    visible[1, :, 2] = False
    mask = visible if kind == "bool" else torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
    o = scaled_dot_product_attention(x, x, x, mask, sharding=Ring().sharding(4))
    assert (o[1, :, 2] == 0).all()
    assert (o[0] != 0).all()
    o.square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


CAUSAL_BIASES = [("upper", 9, 9), ("upper", 9, 5), ("upper", 5, 9), ("lower", 9, 9), ("lower", 5, 9), ("lower", 1, 9)]
BIASES = {"upper": causal_upper_left, "lower": causal_lower_right}


def causal_biases(compiled: bool) -> list[list[Tensor]]:
    """Return whole o, dq, dk and dv for each of them."""
    ring, results = Ring(), []
    attend = torch.compile(scaled_dot_product_attention, backend="eager") if compiled else scaled_dot_product_attention
    for corner, n, m in CAUSAL_BIASES:
        rows, keys = ring.sharding(n), ring.sharding(m)
        whole = tensors_of_lengths(n, m)
        local = [side.shard(x, 2).requires_grad_() for x, side in zip(whole, (rows, keys, keys), strict=True)]
        q, k, v = local
        o = attend(q, k, v, BIASES[corner](n, m), sharding=rows, kv_sharding=keys)
        grads = torch.autograd.grad(o.square().sum(), local)
        results.append(
            [rows.unshard(o.detach(), 2), *(s.unshard(x, 2) for x, s in zip(grads, (rows, keys, keys), strict=True))]
        )
    return results


def tensors_of_lengths(n: int, m: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(n + 10 * m)
    return [torch.randn(2, 2, rows, 8, dtype=torch.float64, generator=g) for rows in (n, m, m)]


def assert_causal(found: list[list[Tensor]]) -> None:
    for (corner, n, m), results in zip(CAUSAL_BIASES, found, strict=True):
        leaves = [x.requires_grad_() for x in tensors_of_lengths(n, m)]
        visible = torch.ones(n, m, dtype=torch.bool).tril(0 if corner == "upper" else m - n)
        q, k, v = leaves
        o = F.scaled_dot_product_attention(q, k, v, visible)
        expected = [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]
        torch.testing.assert_close(results, expected, msg=lambda text, at=(corner, n, m): f"{at}: {text}")


@pytest.mark.parametrize("compiled", [False, True])
def test_causal_biases_of_torch_are_the_masks_that_they_name(compiled: bool) -> None:
    assert_causal(causal_biases(compiled))


def test_causal_biases_of_torch_mean_the_whole_sequences_on_ranks(pool: Pools) -> None:
    for found in pool(2).run(causal_biases, False):
        assert_causal(found)


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_biases_that_do_not_fit_are_refused() -> None:
    x, sharding, longer = torch.randn(1, 2, 4, 8), Ring().sharding(4), Ring().sharding(6)
    y = torch.randn(1, 2, 6, 8)
    for bias in (causal_upper_left(2, 4), causal_lower_right(4, 6)):
        refuse(r"attn_mask must be a causal bias of the whole sequences, \(4, 4\)", ValueError, x, x, x, attn_mask=bias)
    refuse("must be None when is_causal", RuntimeError, x, x, x, attn_mask=causal_upper_left(4, 4), is_causal=True)
    options = {"sharding": longer, "kv_sharding": sharding, "attn_mask": causal_lower_right(6, 4)}
    refuse("at least as many keys as queries, got", NotImplementedError, y, x, x, **options)


def drop(spread: int) -> tuple[Tensor, int]:
    ring = Ring()
    sharding = ring.sharding(9)
    x = sharding.shard(torch.linspace(-1, 1, 2 * 9 * 8).view(1, 2, 9, 8).sin(), 2)
    torch.manual_seed(7 + spread * ring.rank)
    o = scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True, sharding=sharding)
    torch.manual_seed(7 + spread * ring.rank)
    return sharding.unshard(o, 2), int(torch.randint(0, 2**63 - 1, ()))


def test_equal_seeds_drop_the_same_weights_at_any_world_size(pool: Pools) -> None:
    one, seed = drop(0)
    x = torch.linspace(-1, 1, 2 * 9 * 8).view(1, 2, 9, 8).sin().transpose(1, 2)
    expected = attention_reference(x, x, x, causal=True, dropout_p=0.5, dropout_seed=seed)
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(one, expected.transpose(1, 2))
    for world_size in (2, 4):
        for found, _ in pool(world_size).run(drop, 0):
            torch.testing.assert_close(found, one)
    assert not torch.allclose(pool(2).run(drop, 1)[0][0], one)


def refuse(match: str, error: type[Exception], *inputs: Tensor, **options: Any) -> None:
    given: dict[str, Any] = {"sharding": Ring().sharding(4), **options}
    q, k, v = inputs
    with pytest.raises(error, match=match):
        scaled_dot_product_attention(q, k, v, **given)


def test_errors_name_the_remedy() -> None:
    x, ones = torch.randn(2, 4, 4, 8), torch.ones(4, 4)
    refuse("pass sharding=, or call it inside", RuntimeError, x, x, x, sharding=None)
    refuse("attn_mask must be None when is_causal=True", RuntimeError, x, x, x, attn_mask=ones, is_causal=True)
    refuse("Expected attn_mask dtype to be bool or float", RuntimeError, x, x, x, attn_mask=ones.int())
    refuse("Expected attn_mask dtype to be bool or float", RuntimeError, x, x, x, attn_mask=ones.double())
    refuse(r"broadcastable to \(2, 4, 4, 4\)", ValueError, x, x, x, attn_mask=torch.ones(4, 3))
    refuse(r"broadcastable to \(2, 4, 4, 4\)", ValueError, x, x, x, attn_mask=torch.ones(1, 1, 1, 4, 4))
    refuse("pass enable_gqa=True", ValueError, x, x[:, :2], x[:, :2])
    refuse("must be a multiple of the key heads", ValueError, x, x[:, :3], x[:, :3], enable_gqa=True)
    refuse("query must be 4-dimensional", ValueError, x[0], x, x)
    refuse("q must have the 4 rows", ValueError, x[:, :, :3], x, x)
    refuse(r"dropout_p must be in \[0, 1\)", ValueError, x, x, x, dropout_p=1.0)


def odd_mask() -> None:
    ring = Ring()
    sharding = ring.sharding(8)
    x = torch.randn(1, 2, sharding.shard_len, 8)
    scaled_dot_product_attention(x, x, x, torch.ones(sharding.shard_len, 8 if ring.rank else 9), sharding=sharding)


def test_errors_of_one_rank_are_errors_on_all(pool: Pools) -> None:
    with pytest.raises(ValueError, match="must be broadcastable") as caught:
        pool(2).run(odd_mask)
    assert "ring rank 0 refused: ValueError: attn_mask must be broadcastable" in str(caught.value.__cause__)


@pytest.mark.parametrize("is_causal", [True, False])
def test_virtual_ranks_of_one_process_are_torchs_function(is_causal: bool) -> None:
    q, k, v = (torch.randn(2, 2, 11, 8, dtype=torch.float64) for _ in range(3))
    sharding = Ring(virtual_size=4).sharding(11)
    mine = [sharding.shard(x, 2) for x in (q, k, v)]
    o = scaled_dot_product_attention(mine[0], mine[1], mine[2], is_causal=is_causal, sharding=sharding)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    torch.testing.assert_close(sharding.unshard(o, 2), expected)
    mask = torch.ones(11, 11, dtype=torch.bool)
    with pytest.raises(
        ValueError, match="a mask of 11 rows must be whole or this rank's, got one where they cannot be"
    ):
        scaled_dot_product_attention(q, k, v, attn_mask=mask, sharding=sharding)
