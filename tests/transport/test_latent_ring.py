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
from tests.support.pool import Pools
from tests.support.random_calls import Attention
from tests.support.ring_calls import ROW_DIMS, Standard, assert_bits, attend, simulate
from tests.transport import test_ring

# with tensors in lists, whose length type checkers do not know
attention: Any = latent_attention
LATENT, ROTARY = 20, 6
NAMES = ("latents", "rotary_keys", "k_up", "v_up")


def expand(latents: Tensor, rotary_keys: Tensor, k_up: Tensor, v_up: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of keys and values."""
    k = torch.einsum("btr,hdr->bthd", latents, k_up)
    rotary = rotary_keys[:, :, None].expand(*k.shape[:3], -1)
    return torch.cat([k, rotary], -1), torch.einsum("btr,hdr->bthd", latents, v_up)


class LatentAttention(Attention):
    """A call with latents and weights in place of k and v."""

    def tensors(self) -> dict[str, Tensor]:
        found = super().tensors()
        b, m, hk, d = found.pop("k").shape
        dv = found.pop("v").shape[-1]
        g = torch.Generator().manual_seed(self.seed + 7)
        shapes = ((b, m, LATENT), (b, m, ROTARY), (hk, d - ROTARY, LATENT), (hk, dv, LATENT))
        made = [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes]
        made[2:] = [x / LATENT**0.5 for x in made[2:]]
        return {"q": found.pop("q"), **{name: x.to(self.dtype) for name, x in zip(NAMES, made, strict=True)}, **found}

    def on_ring(self, tensors: dict[str, Tensor], sharding: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return latent_attention_with_lse(sharding=sharding, **tensors, **options)

    def on_simulated_ring(self, tensors: dict[str, Tensor], **options: Any) -> Any:
        latents: Any = tuple(tensors.pop(name) for name in NAMES)
        return simulate_ring(k=None, v=None, latents=latents, **tensors, **options)

    def reference(self, tensors: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
        """Keys expanded and attended to by plain torch."""
        k, v = expand(*(tensors[name] for name in NAMES))
        others = {name: x for name, x in tensors.items() if name not in NAMES}
        return attention_reference(k=k, v=v, return_lse=True, **others, **options)


CASES = {name: LatentAttention(**vars(case)) for name, case in test_ring.CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_mask_and_option_stays_within_the_budget(name: str) -> None:
    case = CASES[name]
    backward = "keys" if "bias" in case.features or case.options.get("dropout_p") else "queries"
    standard = Standard(case)
    for options in ({"expand": "reader"}, {"expand": "reader", "backward": backward}, {"expand": "owner"}):
        standard.check(simulate(case, "zigzag", 3, **options))


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
    case = LatentAttention(
        seq_len, None, 2, *heads, *dims, dtype=dtype, mask={"causal": causal, "window": (9, 4)}, seed=seq_len
    )
    with pytest.MonkeyPatch.context() as patch:
        # shards of more rows are expanded piece by piece
        patch.setattr(ringattn.schedule.latents.Latents, "rows_at_once", lambda _: rows)
        Standard(case).check(simulate(case, layout, world_size, expand=expand))


RANKED = {
    "causal": replace(CASES["causal"], dtype=torch.bfloat16),
    "cross": CASES["cross"],
    "everything": replace(CASES["everything"], seq_len=37, documents=(0, 10, 37)),
    "union": replace(CASES["global tokens"], dtype=torch.float64),
    # a row is no multiple of a cache line, on which the bits of a narrow product depend
    "narrow": LatentAttention(37, None, 1, 3, 3, 40, 3, mask={"causal": True}),
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", RANKED)
def test_ranks_equal_the_simulated_ring(pool: Pools, name: str, world_size: int) -> None:
    case = RANKED[name]
    for options in ({"expand": "reader"}, {"expand": "owner"}, {"backward": "keys"}):
        simulated = simulate(case, "zigzag", world_size, **options)
        for found in pool(world_size).run(attend, case, "zigzag", options):
            assert_bits(found, simulated, str(options))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", RANKED)
def test_virtual_ranks_equal_the_simulated_ring(pool: Pools, name: str, processes: int) -> None:
    for options in ({"expand": "reader"}, {"expand": "owner"}):
        simulated = simulate(RANKED[name], "zigzag", 4, **options)
        for found in pool(processes).run(attend, RANKED[name], "zigzag", options, virtual_size=4):
            assert_bits(found, simulated, str(options))


def test_two_levels_of_a_ring_carry_latents(pool: Pools) -> None:
    case = LatentAttention(61, None, 1, 4, 4, 16, 12, mask={"causal": True})
    simulated = simulate(case, "zigzag", 4, nodes=2)
    Standard(case).check(simulated)
    for found in pool(4).run(attend, case, "zigzag", nodes=2):
        assert_bits(found, simulated, "two nodes")


def compiled(case: Attention) -> bool:
    """Whether a compiled call with gradients has the bits of an eager one."""
    sharding, found = Ring().sharding(case.seq_len), case.tensors()
    torch._dynamo.reset()

    def run(attend: Any) -> list[Tensor]:
        leaves = [sharding.shard(x, 1) if name in ROW_DIMS else x for name, x in found.items()]
        leaves = [x.clone().requires_grad_() for x in leaves]
        o = attend(*leaves, sharding, causal=True)
        return [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]

    results = run(latent_attention), run(torch.compile(latent_attention, fullgraph=True, backend="aot_eager"))
    return all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_a_compiled_call_has_the_same_bits(pool: Pools) -> None:
    assert pool(2).run(compiled, LatentAttention(37, None, 1, 4, 4)) == [True, True]


def refuse(world_size: int) -> list[str]:
    """The refusals of calls that are wrong on rank 1 only."""
    ring, rank, case = Ring(), dist.get_rank(), LatentAttention(24, None, 1, 4, 2)
    sharding, found = ring.sharding(case.seq_len), case.tensors()
    main = [sharding.shard(x, 1) if name in ROW_DIMS else x for name, x in found.items()]
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
    ring, case = Ring(), LatentAttention(24, None, 1, 4, 2)
    sharding = ring.sharding(case.seq_len)
    main = [sharding.shard(x, 1) if name in ROW_DIMS else x for name, x in case.tensors().items()]
    with pytest.raises(ValueError, match=r"differ|equal|rank") as error:
        attention(*main, sharding, expand=("reader", "owner")[dist.get_rank()])
    return str(error.value)


def test_options_of_no_call_are_refused() -> None:
    sharding, main = Ring().sharding(24), LatentAttention(24, None, 1, 4, 2).tensors()
    with pytest.raises(TypeError, match="windows"):
        attention(*main.values(), sharding, windows=3)
    with pytest.raises(ValueError, match="mask"):
        attention(*main.values(), sharding, causal=True, mask=masks.causal())
