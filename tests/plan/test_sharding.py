"""Cutting a tensor into shards and putting it together are inverse, for any layout and dim."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn import Ring, attention_reference, masks, ring_attention
from ringattn.plan.layouts import LAYOUTS, Run, contiguous, make_shards, striped, zigzag
from ringattn.plan.sharding import Sharding
from ringattn.sizing import estimate, pack
from tests.support.pool import Pools
from tests.support.random_masks import layouts, positions
from tests.support.short_mask import ShortMask


def ring(seq_len: int, layout: str, world_size: int, documents: tuple[int, ...] | None = None) -> list[Sharding]:
    """The shardings of all ranks."""
    mask = ShortMask(seq_len, seq_len, causal=True, documents=documents)
    segments = (3, seq_len - 3) if layout == "segments" else None
    shards = make_shards(layout, seq_len, world_size, mask, segments)
    return [Sharding(seq_len, layout, shards, rank, documents) for rank in range(world_size)]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 40), st.integers(1, 8), st.integers(1, 4))
def test_assemble_undoes_shard(data: st.DataObject, seq_len: int, world_size: int, ndim: int) -> None:
    shards = data.draw(layouts(seq_len, world_size))
    dim = data.draw(st.integers(-ndim, ndim - 1))
    shape = [2, 3, 1, 2][:ndim]
    shape[dim] = seq_len
    x = torch.randn(shape)
    everyone = [Sharding(seq_len, "balanced", shards, rank) for rank in range(world_size)]
    parts = [sharding.shard(x, dim) for sharding in everyone]
    for sharding, part in zip(everyone, parts, strict=True):
        held = torch.tensor(positions(shards[sharding.rank]), dtype=torch.int64)
        assert torch.equal(sharding.positions, held)
        assert sharding.positions.dtype == torch.int64
        assert torch.equal(part, x.index_select(dim, held))
        assert part.is_contiguous()
        assert part.shape[dim] == sharding.shard_len == sharding.shard_lens[sharding.rank]
    for sharding in everyone:
        assert torch.equal(sharding.assemble(parts, dim), x)


class Neighbours:
    """A ring that hands out the parts of all ranks to the one that shows its own."""

    name = "neighbours"
    impl = "auto"
    check_inputs = False
    is_virtual = False

    def __init__(self, rank: int, parts: list[Tensor]) -> None:
        self.rank, self.world_size, self.virtual_size = rank, len(parts), len(parts)
        self.mine, self.parts = parts[rank], parts

    def gather(self, x: Tensor, dim: int, lengths: Sequence[int]) -> list[Tensor]:
        assert x is self.mine
        assert list(lengths) == [part.shape[dim] for part in self.parts]
        return self.parts

    def all_to_all(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        raise AssertionError(f"no rows are to move, got {sends} and {receives} of {x.shape}")

    def propagate_errors(self) -> AbstractContextManager[None]:
        return nullcontext()

    def raise_on_all_ranks(self, error: Exception) -> NoReturn:
        raise error

    def assert_equal_across_ranks(self, what: str, text: str, doing: str = "", fix: str = "") -> None:
        pass

    def assert_equal_once(self, what: str, text: str, doing: str = "") -> None:
        pass


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unshard_gathers_every_rank(layout: str) -> None:
    x, dim = torch.randn(2, 3, 13), -1
    everyone = ring(13, layout, 4)
    parts = [sharding.shard(x, dim) for sharding in everyone]
    for rank, mine in enumerate(parts):
        sharding = Sharding(13, layout, everyone[rank].shards, rank, ring=Neighbours(rank, parts))
        assert torch.equal(sharding.unshard(mine, dim), x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_needs_no_ring(layout: str) -> None:
    (sharding,) = ring(9, layout, 1)
    x = torch.randn(2, 9, 3)
    assert torch.equal(sharding.unshard(sharding.shard(x)), x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_come_home(layout: str) -> None:
    x = torch.randn(2, 11, 3, dtype=torch.float64, requires_grad=True)
    everyone = ring(11, layout, 3)
    whole = everyone[0].assemble([sharding.shard(x) for sharding in everyone])
    weight = torch.randn_like(whole)
    (dx,) = torch.autograd.grad((whole * weight).sum(), x)
    assert torch.equal(dx, weight)
    local = torch.randn(2, everyone[1].shard_len, 3, dtype=torch.float64)
    (dx,) = torch.autograd.grad((everyone[1].shard(x) * local).sum(), x)
    assert torch.equal(everyone[1].shard(dx), local)
    assert dx.count_nonzero() == local.numel()


def put_together(dtype: torch.dtype) -> bool:
    sharding = Ring().sharding(7)
    whole = torch.arange(42).reshape(2, 7, 3).to(dtype)
    found = sharding.unshard(sharding.shard(whole, 1), 1)
    return found.dtype == dtype and torch.equal(found.view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_rows_of_any_dtype_are_put_together(pool: Pools, dtype: torch.dtype) -> None:
    assert pool(2).run(put_together, dtype) == [True, True]


def test_shards_do_not_alias_the_whole() -> None:
    x = torch.zeros(8)
    for sharding in [*ring(8, "contiguous", 2), *ring(8, "contiguous", 1), *ring(8, "striped", 2)]:
        sharding.shard(x, 0).fill_(1)
    assert not x.any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("documents", [None, (0, 3, 3, 21)])
def test_a_spec_survives_json(layout: str, documents: tuple[int, ...] | None) -> None:
    for sharding in ring(21, layout, 3, documents):
        assert isinstance(hash(sharding.spec), int)
        twin = Sharding.from_spec(json.loads(json.dumps(sharding.spec)), sharding.rank)
        assert twin == sharding
        assert hash(twin) == hash(sharding)
        assert twin.spec == sharding.spec
        assert twin.shards == sharding.shards
        assert twin.documents == documents


def test_specs_of_named_layouts_are_compact() -> None:
    sharding = Sharding(1 << 20, "zigzag", zigzag(1 << 20, 64), 5)
    assert sharding.spec == (1 << 20, "zigzag", 64, None, None)
    unusual = Sharding(4, "striped", contiguous(4, 2), 0)
    assert Sharding.from_spec(unusual.spec, 0).shards == contiguous(4, 2)


def test_equality_is_by_content() -> None:
    one, other = ring(12, "zigzag", 2)
    assert one == Sharding(12, "zigzag", zigzag(12, 2), 0, device="cpu")
    assert one != other
    assert one != Sharding(12, "striped", striped(12, 2), 0)
    assert one != Sharding(12, "zigzag", zigzag(12, 2), 0, (0, 5, 12))
    assert one != "zigzag"
    assert len({one, other, ring(12, "zigzag", 2)[0]}) == 2
    assert repr(one) == "Sharding(12 tokens, zigzag, rank 0 of 2, 6 rows)"


def test_a_rank_that_holds_nothing_has_empty_rows() -> None:
    sharding = Sharding(2, "contiguous", contiguous(2, 3), 2)
    assert sharding.shard_len == 0
    assert sharding.positions.shape == (0,)
    assert sharding.shard(torch.randn(4, 2, 3)).shape == (4, 0, 3)


def test_wrong_tensors_and_shards_are_refused() -> None:
    one, other = ring(12, "zigzag", 2)
    with pytest.raises(ValueError, match="x must"):
        one.shard(torch.zeros(1, 6))
    with pytest.raises(ValueError, match="dim must"):
        one.shard(torch.zeros(12, 12), 2)
    with pytest.raises(ValueError, match="x_local must"):
        one.unshard(torch.zeros(1, 12))
    with pytest.raises(RuntimeError, match="unshard must"):
        one.unshard(torch.zeros(1, 6))
    with pytest.raises(ValueError, match="parts must"):
        other.assemble([torch.zeros(1, 6)])
    with pytest.raises(ValueError, match="parts must"):
        one.assemble([torch.zeros(1, 6), torch.zeros(1, 5)])
    with pytest.raises(ValueError, match="layout must"):
        Sharding(4, "ring", contiguous(4, 2), 0)
    with pytest.raises(ValueError, match="rank must"):
        Sharding(4, "zigzag", zigzag(4, 2), 2)
    with pytest.raises(ValueError, match="documents must"):
        Sharding(4, "zigzag", zigzag(4, 2), 0, (0, 3))
    with pytest.raises(ValueError, match="shards must"):
        Sharding(5, "zigzag", zigzag(4, 2), 0)
    with pytest.raises(ValueError, match="shards must"):
        Sharding(4, "balanced", ((Run(0, 1, 2),), (Run(1, 1, 2),)), 0)
    with pytest.raises(ValueError, match="shards must"):
        Sharding(4, "balanced", ((Run(0, 2, 2),), (Run(2, 1, 2),)), 0)
    for runs in ((Run(2, 1, 2), Run(0, 1, 2)), (Run(0, 2, 2), Run(1, 2, 2)), (Run(0, 1, 4), Run(4, 1, 0))):
        with pytest.raises(ValueError, match=r"ascending, non-empty runs below 4, got .* on rank 0"):
            Sharding(4, "balanced", (runs,), 0)


def test_positions_found_in_inference_mode_serve_training() -> None:
    with torch.inference_mode():
        sharding = ring(6, "zigzag", 2)[1]
        assert sharding.positions.tolist() == [2, 3, 4]
    torch.nn.Embedding(6, 4)(sharding.positions).sum().backward()


def test_parts_are_put_together_whatever_the_default_device_is() -> None:
    x = torch.arange(5)
    shards = ((Run(0, 2, 3),), (), (Run(1, 2, 2),))
    with torch.device("meta"):
        everyone = [Sharding(5, "balanced", shards, rank) for rank in range(3)]
        whole = everyone[0].assemble([sharding.shard(x, 0) for sharding in everyone], 0)
    assert whole.tolist() == [0, 1, 2, 3, 4]


LONG = 2**31
TOO_LONG: dict[str, Callable[[], object]] = {
    **{name: lambda name=name: Ring().sharding(LONG, name) for name in ("contiguous", "striped", "zigzag", "balanced")},
    "balanced chunks": lambda: Ring().sharding(LONG, "balanced", balance={"chunk_len": 4096}),
    "segments": lambda: Ring().sharding(LONG, "segments", segments=[LONG // 2, LONG // 2]),
    "spec": lambda: Sharding.from_spec((LONG, "striped", 2, None, None), 0),
    "spec of runs": lambda: Sharding.from_spec((LONG, "part", 1, None, [[[0, 2, 3]]]), 0),
    "queries": lambda: ShortMask(LONG, 8),
    "keys": lambda: ShortMask(8, LONG),
    "plan": lambda: estimate("llama3-8b", LONG),
    "packing": lambda: pack([1], tokens=LONG, cp=1),
}


@contextmanager
def peak_below(most: int) -> Iterator[None]:
    """Fail where more bytes of the host are taken inside."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", TOO_LONG)
def test_sequences_whose_positions_are_no_int32_are_refused_before_memory_is_taken(kind: str) -> None:
    with (
        peak_below(2**26),
        pytest.raises(ValueError, match=r"(seq_len|kv_len|tokens) must be from 1 to 2147483647, got"),
    ):
        TOO_LONG[kind]()


def test_the_longest_sequence_is_checked_without_memory_for_its_tokens() -> None:
    with peak_below(2**20):
        for layout in ("striped", "zigzag"):
            assert Sharding(LONG - 1, layout, make_shards(layout, LONG - 1, 64), 3).shard_len == LONG // 64


@pytest.mark.parametrize("mask", [lambda n: ShortMask(n, n, chunk_len=64), lambda n: masks.chunks(64).pairs(n)])
def test_masks_of_very_many_chunks_are_refused_before_memory_is_taken(mask: Callable[[int], object]) -> None:
    with (
        peak_below(2**20),
        pytest.raises(NotImplementedError, match="chunks must be at most 1,048,576, got 33,554,432"),
    ):
        mask(LONG - 1)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.builds(Run, *[st.integers(a, b) for a, b in ((0, 20), (1, 7), (1, 6))]), min_size=1, max_size=5))
def test_shards_that_share_a_position_are_refused(runs: list[Run]) -> None:
    held = [position for run in runs for position in range(run.start, run.last + 1, run.stride)]
    shards = [(run,) for run in runs]
    if len(set(held)) == len(held):
        Sharding(64, "part", shards, 0)
        return
    with pytest.raises(ValueError, match="shards must hold each of 64 positions once"):
        Sharding(64, "part", shards, 0)


WRONG = {
    "seq_len": "seq_len and kv_len must",
    "documents": "documents must",
    "rows": "x must",
    "buffer": "no device",
    "buffer's sharding": "sharding must be what ring.sharding(seq_len) gives, got int",
    "rank": "the sharding must be that of rank 1 of 2",
    "spec": "layout must be one of",
}


def _make_wrongly(kind: str) -> list[str]:
    """What each rank hears where rank 1 asks a ring for what cannot be, and then of the right call."""
    ring, said = Ring(timeout=timedelta(seconds=20)), []
    for wrong in (kind if ring.rank == 1 else "", ""):
        try:
            documents = [0, 4, 10 if wrong == "documents" else 9]
            sharding = ring.sharding(0 if wrong == "seq_len" else 9, documents=documents)
            x = sharding.shard(torch.ones(1, 8 if wrong == "rows" else 9, 2, 16))
            spec = (9, "ring" if wrong == "spec" else "zigzag", 2, None, None)
            Sharding.from_spec(spec, 0 if wrong == "rank" else ring.rank, ring=ring)
            device = "no device" if wrong == "buffer" else "cpu"
            where: Any = 12 if wrong == "buffer's sharding" else sharding
            k, v = ring.kv_buffer(where, 1, 2, 16, dtype=x.dtype, name="a", device=device)
            ring_attention(x, k.copy_(x), v.copy_(x), sharding)
            said.append("")
        except (ValueError, RuntimeError, TypeError) as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("kind", WRONG)
def test_what_one_rank_asks_a_ring_for_wrongly_is_refused_on_all(pool: Pools, kind: str) -> None:
    for refused, after in pool(2).run(_make_wrongly, kind):
        assert WRONG[kind] in refused
        assert after == ""


def _settle_wrongly() -> tuple[str, str]:
    """What a rank hears that settles how rows move, or over how many nodes, where rank 1 does something else."""
    said = []
    ring = Ring(timeout=timedelta(seconds=20), transport="copy_engine")
    try:
        ring.sharding(9 - 9 * ring.rank)
        ring.init_transport(torch.device("cpu"))
    except ValueError as error:
        said.append(str(error))
    try:
        ring = Ring(timeout=timedelta(seconds=20), nodes=1 if ring.rank else "auto")
        ring.all_reduce_min(1)
    except ValueError as error:
        said.append(str(error))
    refused, differing = said
    return refused, differing


def test_ranks_that_settle_how_rows_move_hear_of_one_that_refuses(pool: Pools) -> None:
    for refused, differing in pool(2).run(_settle_wrongly):
        assert "seq_len and kv_len must be from 1 to 2147483647, got 0" in refused
        assert (
            "got Ring(nodes='auto') on ring ranks [0] and the least of all ranks' numbers on ring ranks [1]"
            in differing
        )


def _attend_as_sent_by_rank_0() -> tuple[int, float]:
    """The rank whose rows a sharding has that rank 0 has sent, and how far attention with it is off."""
    ring = Ring()
    sent: list[Any] = [(ring.sharding(13), ring.sharding(9)) if ring.rank == 0 else None]
    dist.broadcast_object_list(sent, 0)
    sharding, kv_sharding = sent[0]
    q, k = torch.randn(1, 13, 2, 16, dtype=torch.float64), torch.randn(1, 9, 2, 16, dtype=torch.float64)
    mine, keys = sharding.shard(q), kv_sharding.shard(k)
    o = ring_attention(mine, keys, keys, sharding, kv_sharding=kv_sharding, window=(4, 2))
    expected = attention_reference(q, k, k, window=(4, 2))
    return sharding.rank, float((sharding.unshard(o) - expected).abs().max())


def test_a_sharding_that_another_rank_sent_is_that_of_this_rank(pool: Pools) -> None:
    for rank, (found, off) in enumerate(pool(3).run(_attend_as_sent_by_rank_0)):
        assert found == rank
        assert off < 1e-12


def test_a_sharding_of_another_job_comes_without_a_ring() -> None:
    here = Ring()

    class Gone(Neighbours):
        name = here.name

    lost = pickle.loads(pickle.dumps(Sharding(4, "contiguous", contiguous(4, 2), 1, ring=Gone(1, [torch.ones(2)] * 2))))
    assert (lost.rank, lost.shard_lens) == (1, (2, 2))
    with pytest.raises(RuntimeError, match="must be made by a ring to attend with it, got one without"):
        _ = lost.ring


def _refuse_in_a_fork() -> str:
    ring = Ring()
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            ring.sharding(0)
        except Exception as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    os.wait()
    with os.fdopen(read) as said:
        return said.read()


def test_a_process_that_was_forked_says_what_it_refuses(pool: Pools) -> None:
    """It cannot tell the other ranks, and must not hide what is wrong behind that."""
    for said in pool(2).run(_refuse_in_a_fork):
        assert said.startswith("ValueError: seq_len and kv_len must be from 1 to 2147483647, got 0")


@pytest.mark.parametrize("virtual_size", [None, 2])
def test_unshard_leaves_out_padding_on_one_process(virtual_size: int | None) -> None:
    sharding = Ring(virtual_size=virtual_size).sharding(8).with_padding(3)
    assert sharding.unshard(sharding.shard(torch.arange(8), 0), 0).tolist() == [0, 1, 2, 3, 4]
