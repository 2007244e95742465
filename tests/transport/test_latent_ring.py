"""Latent attention: equal to expanded keys within the budget, and on ranks equal to the simulated ring to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringattn.schedule.latents
from ringattn import Ring, attention_reference, latent_attention, latent_attention_with_lse, masks, simulate_ring
from tests.support.budget import assert_within_budget
from tests.support.pool import Pools
from tests.support.random_calls import Attention
from tests.transport.test_ring import CASES

# with tensors in lists, whose length type checkers do not know
attention: Any = latent_attention
attention_with_lse: Any = latent_attention_with_lse
LATENT, ROTARY = 20, 6
NAMES = ("latents", "rotary_keys", "k_up", "v_up")
ROWS = {"q": 1, "latents": 1, "rotary_keys": 1, "key_bias": 1, "bias": 2}


def tensors_of(case: Attention) -> dict[str, Tensor]:
    """The tensors of a case, with latents and weights in place of k and v."""
    found = case.tensors()
    b, m, hk, d = found.pop("k").shape
    dv = found.pop("v").shape[-1]
    g = torch.Generator().manual_seed(case.seed + 7)
    shapes = ((b, m, LATENT), (b, m, ROTARY), (hk, d - ROTARY, LATENT), (hk, dv, LATENT))
    made = [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes]
    made[2:] = [x / LATENT**0.5 for x in made[2:]]
    return {"q": found.pop("q"), **{name: x.to(case.dtype) for name, x in zip(NAMES, made, strict=True)}, **found}


def expand(latents: Tensor, rotary_keys: Tensor, k_up: Tensor, v_up: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of keys and values."""
    k = torch.einsum("btr,hdr->bthd", latents, k_up)
    rotary = rotary_keys[:, :, None].expand(*k.shape[:3], -1)
    return torch.cat([k, rotary], -1), torch.einsum("btr,hdr->bthd", latents, v_up)


def define(case: Attention, dtype: torch.dtype) -> dict[str, Tensor]:
    """Keys expanded and attended to by plain torch in the given dtype."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in tensors_of(case).items()}
    others = {name: x for name, x in leaves.items() if name not in ("q", *NAMES)}
    k, v = expand(*(leaves[name] for name in NAMES))
    options = {**case.mask, **case.options, **others}
    o, lse = attention_reference(leaves["q"], k, v, documents=case.documents, return_lse=True, **options)
    do, dlse = case.cotangents()
    grads = torch.autograd.grad((o, lse), list(leaves.values()), (do.to(o.dtype), dlse.to(lse.dtype)))
    return {"o": o.detach(), "lse": lse.detach()} | {"d" + name: g for name, g in zip(leaves, grads, strict=True)}


def simulate(
    case: Attention, world_size: int, layout: str = "zigzag", device: str = "cpu", **given: Any
) -> dict[str, Tensor]:
    found = {name: x.to(device) for name, x in tensors_of(case).items()}
    do, dlse = (x.to(device) for x in case.cotangents())
    latents = tuple(found.pop(name) for name in NAMES)
    options = {**case.mask, **case.options, **found, **given, "layout": layout, "documents": case.documents}
    q = options.pop("q")
    result = simulate_ring(q, None, None, world_size, latents=latents, do=do, dlse=dlse, **options)  # pyright: ignore[reportArgumentType]
    assert result.grads is not None
    return {"o": result.o, "lse": result.lse} | {"d" + name: grad for name, grad in result.grads.items()}


def attend(
    case: Attention, layout: str, nodes: int = 1, device: str = "cpu", virtual_size: int | None = None, **given: Any
) -> dict[str, Tensor]:
    """One rank: whole outputs and gradients of its ring."""
    ring = Ring(nodes=nodes, virtual_size=virtual_size)
    sharding = ring.sharding(case.seq_len, layout, case.documents)
    keys = sharding if case.kv_len is None else ring.sharding(case.kv_len, layout)

    def side(name: str) -> Any:
        return sharding if name in ("q", "bias") else keys

    whole = {name: x.to(device) for name, x in tensors_of(case).items()}
    leaves = {
        name: (side(name).shard(x, ROWS[name]) if name in ROWS else x).detach().clone().requires_grad_()
        for name, x in whole.items()
    }
    main = [leaves[name] for name in ("q", *NAMES)]
    extras: dict[str, Any] = {name: x for name, x in leaves.items() if name not in ("q", *NAMES)}
    options = {**case.mask, **case.options, **extras, **given, "kv_sharding": None if keys is sharding else keys}
    o, lse = attention_with_lse(*main, sharding, **options)
    do, dlse = (x.to(device) for x in case.cotangents())
    grads = torch.autograd.grad((o, lse), list(leaves.values()), (sharding.shard(do, 1), sharding.shard(dlse, 2)))
    found = {"o": sharding.unshard(o.detach(), 1), "lse": sharding.unshard(lse.detach(), 2)}
    for name, grad in zip(leaves, grads, strict=True):
        if name in ROWS:
            found["d" + name] = side(name).unshard(grad, ROWS[name])
        else:
            parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, grad.contiguous())
            found["d" + name] = torch.stack(parts).sum(0).to(grad.dtype)
    return found


def check(case: Attention, found: dict[str, Tensor]) -> None:
    exact, low = define(case, torch.float64), define(case, min(case.dtype, torch.float32, key=lambda x: x.itemsize))
    assert found.keys() == exact.keys()
    for name, x in exact.items():
        unit = case.seq_len if name == "dalibi_slopes" else 1
        assert_within_budget(found[name] / unit, x / unit, low[name] / unit, f"{name} of {case}", case.dtype)


@pytest.mark.parametrize("name", CASES)
def test_every_mask_and_option_stays_within_the_budget(name: str) -> None:
    case = CASES[name]
    backward = "keys" if "bias" in case.features or case.options.get("dropout_p") else "queries"
    for options in ({"expand": "reader"}, {"expand": "reader", "backward": backward}, {"expand": "owner"}):
        check(case, simulate(case, 3, **options))


@settings(deadline=None, max_examples=25)
@given(
    seq_len=st.integers(1, 50),
    world_size=st.integers(1, 4),
    layout=st.sampled_from(["contiguous", "striped", "zigzag", "balanced"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    dims=st.sampled_from([(16, 16), (7, 24), (40, 8)]),
    causal=st.booleans(),
    rows=st.sampled_from([3, 8, 1000]),
    expand=st.sampled_from(["auto", "reader", "owner"]),
)
def test_any_shape_stays_within_the_budget(
    seq_len: int,
    world_size: int,
    layout: str,
    dtype: torch.dtype,
    heads: Any,
    dims: Any,
    causal: bool,
    rows: int,
    expand: str,
) -> None:
    case = Attention(
        seq_len, None, 2, *heads, *dims, dtype=dtype, mask={"causal": causal, "window": (9, 4)}, seed=seq_len
    )
    with pytest.MonkeyPatch.context() as patch:
        # shards of more rows are expanded piece by piece
        patch.setattr(ringattn.schedule.latents.Latents, "rows_at_once", lambda _: rows)
        check(case, simulate(case, world_size, layout, expand=expand))


RANKED = {
    "causal": replace(CASES["causal"], dtype=torch.bfloat16),
    "cross": CASES["cross"],
    "everything": replace(CASES["everything"], seq_len=37, documents=(0, 10, 37)),
    "union": replace(CASES["global tokens"], dtype=torch.float64),
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", RANKED)
def test_ranks_equal_the_simulated_ring(pool: Pools, name: str, world_size: int) -> None:
    case = RANKED[name]
    for options in ({"expand": "reader"}, {"expand": "owner"}, {"backward": "keys"}):
        simulated = simulate(case, world_size, **options)
        for found in pool(world_size).run(attend, case, "zigzag", **options):
            for what, x in simulated.items():
                assert torch.equal(found[what], x), f"{what} with {options}"


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", RANKED)
def test_virtual_ranks_equal_the_simulated_ring(pool: Pools, name: str, processes: int) -> None:
    for options in ({"expand": "reader"}, {"expand": "owner"}):
        simulated = simulate(RANKED[name], 4, **options)
        for found in pool(processes).run(attend, RANKED[name], "zigzag", virtual_size=4, **options):
            for what, x in simulated.items():
                assert torch.equal(found[what], x), f"{what} with {options}"


def test_two_levels_of_a_ring_carry_latents(pool: Pools) -> None:
    case = Attention(61, None, 1, 4, 4, 16, 12, mask={"causal": True})
    simulated = simulate(case, 4, nodes=2)
    check(case, simulated)
    for found in pool(4).run(attend, case, "zigzag", 2):
        assert all(torch.equal(found[what], x) for what, x in simulated.items())


def compiled(case: Attention) -> bool:
    """Whether a compiled call with gradients has the bits of an eager one."""
    sharding, found = Ring().sharding(case.seq_len), tensors_of(case)
    torch._dynamo.reset()

    def run(attend: Any) -> list[Tensor]:
        leaves = [sharding.shard(x, 1) if name in ROWS else x for name, x in found.items()]
        leaves = [x.clone().requires_grad_() for x in leaves]
        o = attend(*leaves, sharding, causal=True)
        return [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]

    results = run(latent_attention), run(torch.compile(latent_attention, fullgraph=True, backend="aot_eager"))
    return all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_a_compiled_call_has_the_same_bits(pool: Pools) -> None:
    assert pool(2).run(compiled, Attention(37, None, 1, 4, 4)) == [True, True]


def refuse(world_size: int) -> list[str]:
    """The refusals of calls that are wrong on rank 1 only."""
    ring, rank, case = Ring(), dist.get_rank(), Attention(24, None, 1, 4, 2)
    sharding, found = ring.sharding(case.seq_len), tensors_of(case)
    main = [sharding.shard(x, 1) if name in ROWS else x for name, x in found.items()]
    wrong: list[tuple[int, Any]] = [
        (0, main[0][..., 1:]), (1, main[1][:, 1:]), (2, main[2].double()), (3, main[3][:1]), (3, main[3][:, :, 1:]),
        (4, main[4][0]), (4, main[4][:, :0]), (1, "latents"),
    ]  # fmt: skip
    seen = []
    for at, x in wrong:
        given = [x if i == at and rank == world_size - 1 else y for i, y in enumerate(main)]
        with pytest.raises((ValueError, TypeError)) as error:
            attention(*given, sharding)
        seen.append(str(error.value))
    with pytest.raises((ValueError, TypeError)) as error:
        attention(*main, sharding, expand="everywhere" if rank else "auto")
    seen.append(str(error.value))
    attention(*main, sharding)
    return seen


def test_wrong_tensors_are_refused_on_every_rank(pool: Pools) -> None:
    words = ["head_dim", "latents", "rotary_keys", "v_up", "latents", "v_up", "v_up", "latents", "expand"]
    for seen in pool(2).run(refuse, 2):
        assert all(word in text for word, text in zip(words, seen, strict=True)), seen


def test_ranks_that_expand_at_different_places_are_refused(pool: Pools) -> None:
    for text in pool(2).run(differ):
        assert "latents" in text


def differ() -> str:
    """The refusal of ranks that choose different readers."""
    ring, case = Ring(), Attention(24, None, 1, 4, 2)
    sharding = ring.sharding(case.seq_len)
    main = [sharding.shard(x, 1) if name in ROWS else x for name, x in tensors_of(case).items()]
    with pytest.raises(ValueError, match=r"differ|equal|rank") as error:
        attention(*main, sharding, expand=("reader", "owner")[dist.get_rank()])
    return str(error.value)


def test_options_of_no_call_are_refused() -> None:
    sharding, main = Ring().sharding(24), tensors_of(Attention(24, None, 1, 4, 2))
    with pytest.raises(TypeError, match="windows"):
        attention(*main.values(), sharding, windows=3)
    with pytest.raises(ValueError, match="mask"):
        attention(*main.values(), sharding, causal=True, mask=masks.causal())
