"""Products of which each rank makes a part: the same answers, fewer weights read, and all or nothing on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringattn.inference import PagedKVCache
from ringattn.integrations.transformers import NAME, RingCache, fuse, register
from ringattn.integrations.transformers.decoding import Decoding
from ringattn.integrations.transformers.generation import cache_sizes
from ringattn.integrations.transformers.splitting import CannotSplit, split
from ringattn.integrations.transformers.steps import rows_everywhere, run_step
from ringattn.ring import Ring
from tests.pool import Pools
from tests.transformers.models import make
from tests.transformers.test_fusing import SIZES, CountedKernels
from tests.transformers.test_generate import BEAMS, GREEDY, alone, prompts


def small(kind: str, **options: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval().requires_grad_(False)
    for name, x in model.named_parameters():
        if name.endswith("bias"):
            x.normal_()  # models begin with none
    return model


class _Counted:
    """Sees every product, and counts the numbers of weights that it reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read = 0
        for owner, name, place in ((torch.nn.functional, "linear", 1), (torch, "mm", 1)):
            monkeypatch.setattr(owner, name, self._seeing(getattr(owner, name), place))

    def _seeing(self, call: Any, place: int) -> Any:
        def seen(*given: Any, **named: Any) -> Any:
            self.read += given[place].numel()
            return call(*given, **named)

        return seen


def _answers(model: Any, ring: Ring, backend: Any = None) -> tuple[int, list[Tensor], list[int]]:
    """Parts that were split; logits of a prompt around the ring and of steps of decoding; weights read in each."""
    parts = split(model, ring, backend=backend) if backend != "whole" else 0
    sizes = dict(zip(("layers", "kv_heads", "head_dim", "v_head_dim"), cache_sizes(model), strict=True))
    cache = PagedKVCache(ring, **sizes, dtype=torch.float32, pages=16, page_size=4)
    one, two = (cache.add_request(30) for _ in range(2))
    said, read = [], []
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        counted = _Counted(context)

        def note(logits: Tensor) -> None:
            said.append(logits.clone())
            read.append(counted.read)
            counted.read = 0

        note(run_step(model, cache.extend([one, two], [13, 6], mode="prefill"), torch.arange(19)))
        decoding = Decoding(model, cache, None)
        for tokens in ([[3], [5]], [[7], [1]]):
            note(decoding.run([one, two], torch.tensor(tokens)).logits[:, -1])
        note(run_step(model, cache.extend([two], [3]), torch.arange(3)[None]))
    ring.close()
    return parts, said, read


def _compare(kind: str, ranks: int, **options: Any) -> list[tuple[int, float, list[int], list[int]]]:
    """On a rank: how many parts were split, how far logits are from those of whole products, and what was read."""
    del ranks
    whole = _answers(small(kind, **options), Ring(), "whole")
    parts, said, read = _answers(small(kind, **options), Ring())
    for x in said:
        alike = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(alike, x)
        assert all(torch.equal(x, y) for y in alike), "all ranks hold the same bits"
    apart = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(said, whole[1], strict=True))
    return [(parts, apart, whole[2], read)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_split_parts_give_the_same_and_read_a_slice_in_decoding_only(pool: Pools, ranks: int):
    mlp, head = 3 * SIZES["hidden_size"] * 48, SIZES["hidden_size"] * SIZES["vocab_size"]
    for [(parts, apart, whole, read)] in pool(ranks).run(_compare, "llama", ranks):
        assert parts == 3
        assert apart < 2e-6
        spared = (2 * mlp + head) * (ranks - 1) // ranks
        assert [x - y for x, y in zip(whole, read, strict=True)] == [0, spared, spared, spared]


@pytest.mark.parametrize("kind", ["gemma2", "starcoder2", "phi3"])
def test_other_models_answer_as_before(pool: Pools, kind: str):
    """One with an activation of its own, a soft cap behind its head and one table for both ends; with biases; with joined gates."""
    mlps = SIZES["hidden_size"] * 48 * 2 * (2 if kind == "starcoder2" else 3)
    tokens = {"pad_token_id": 0, "eos_token_id": 2} if kind == "phi3" else {}
    for [(parts, apart, whole, read)] in pool(2).run(_compare, kind, 2, **tokens):
        assert parts == 3
        assert apart < 2e-6
        assert all(x - y >= mlps // 2 for x, y in list(zip(whole, read, strict=True))[1:]), "each rank reads half"


def _with_kernels(kind: str) -> tuple[int, float, dict[str, int]]:
    """On a rank: parts that were split, how far logits are from those without kernels, and calls of these in a step."""
    ring = Ring()

    def decode(count: CountedKernels | None) -> tuple[int, Tensor, dict[str, int]]:
        model = small(kind)
        parts = split(model, ring)
        sizes = dict(zip(("layers", "kv_heads", "head_dim", "v_head_dim"), cache_sizes(model), strict=True))
        cache = PagedKVCache(ring, **sizes, dtype=torch.float32, pages=16, page_size=4)
        if count is not None:
            count.since()
        found = Decoding(model, cache, None).run([cache.add_request(30)], torch.tensor([[3, 4, 5]]), last=3).logits
        return parts, found, {} if count is None else count.since()

    _, expected, _ = decode(None)
    with pytest.MonkeyPatch().context() as patch:
        parts, found, calls = decode(CountedKernels(patch))
    ring.close()
    return parts, float((found - expected).abs().max() / expected.abs().max()), calls


@pytest.mark.parametrize(("kind", "gates"), [("llama", 2), ("gemma2", 2), ("starcoder2", 0)])
def test_slices_of_few_rows_take_kernels(pool: Pools, kind: str, gates: int):
    """Of each layer the gated slice and the addends, where a product is between them, and of the head its slice."""
    for parts, apart, calls in pool(2).run(_with_kernels, kind):
        assert parts == 3
        assert apart < 2e-6
        assert calls == {"multiply": 2 + 1, "gate": gates}


def _generate(calls: list[dict[str, Any]]) -> tuple[int, list[Tensor]]:
    """What a rank generates with a model that is fused and split."""
    ring = Ring()
    model = make("llama", "ringattn", torch.float32).eval().requires_grad_(False)
    fuse(model, ring, backend="eager")
    parts = split(model, ring)
    torch.manual_seed(ring.rank)
    found = []
    for call in calls:
        with RingCache(model, ring, max_tokens=64, batch=6, page_size=4) as cache:
            found.append(model.generate(**call, past_key_values=cache).clone())
    ring.close()
    return parts, found


def test_what_is_generated_is_what_one_process_generates(pool: Pools):
    calls = [{**prompts(), **GREEDY}, {**prompts(rows=2, padding=3), **BEAMS}]
    expected = [alone("llama", [call])[0] for call in calls]
    for parts, found in pool(2).run(_generate, calls):
        assert parts == 2
        assert [x.tolist() for x in found] == [x.tolist() for x in expected]


def _unfit(model: nn.Module) -> int:
    ring = Ring()
    try:
        return split(model, ring)
    finally:
        ring.close()


class _MixingMLP(nn.Module):
    """What is between its products is of all inner columns together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(-1))


class _OddMLP(_MixingMLP):
    """Its inner columns are not twice a multiple of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 10), nn.Linear(10, 8)


def _try_others() -> list[Any]:
    found: list[Any] = [_unfit(nn.ModuleList([_OddMLP(), nn.Linear(4, 4)]))]
    mixing = nn.ModuleList([_MixingMLP()])
    try:
        found.append(_unfit(mixing))
    except CannotSplit as error:
        found.append(str(error))
    found.append("forward" in vars(mixing[0]))
    failing = nn.ModuleList([_PlainMLP() if dist.get_rank() else _FailingMLP()])
    try:
        found.append(_unfit(failing))
    except CannotSplit as error:
        found.append(str(error))
    return found


class _PlainMLP(_MixingMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class _FailingMLP(_MixingMLP):
    def forward(self, x: Tensor) -> Tensor:
        raise OSError("not on this rank")


def test_what_can_not_be_split_stays_whole_on_all_ranks(pool: Pools):
    here, there = pool(2).run(_try_others)
    for found in (here, there):
        assert found[0] == 0
        assert "_MixingMLP split differs by" in found[1]
        assert found[2] is False
    assert "not on this rank" in here[3]
    assert there[3] == "another rank could not"


class _SometimesMixingMLP(_MixingMLP):
    """As layers of Gemma 3n, of which the first ones keep the largest columns only."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        return self.down(inner.softmax(-1) if self.mixes else inner.relu())


def _split_two_kinds() -> str:
    with pytest.raises(CannotSplit) as said:
        _unfit(nn.ModuleList([_SometimesMixingMLP(True), _SometimesMixingMLP(False)]))
    return str(said.value)


def test_every_mlp_is_tried(pool: Pools):
    assert all("_SometimesMixingMLP split differs by" in said for said in pool(2).run(_split_two_kinds))


class _WatchedMLP(_PlainMLP):
    """Somebody looks on between its products."""

    def __init__(self) -> None:
        super().__init__()
        self.between, self.seen = nn.ReLU(), list[Tensor]()
        self.between.register_forward_hook(lambda *given: self.seen.append(given[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


def test_who_looks_on_sees_all_columns(pool: Pools):
    assert pool(2).run(_unfit, nn.ModuleList([_PlainMLP()])) == [1, 1]
    assert pool(2).run(_split_watched) == [0, 0]


def _split_watched() -> int:
    return _unfit(nn.ModuleList([_WatchedMLP()]))


def test_one_rank_splits_nothing():
    assert split(small("llama"), Ring()) == 0


def _beside_another_ring() -> bool:
    """Rows of another ring are not this one's."""
    model, x = small("llama").model.layers[0].mlp, torch.ones(1, 2, 32)
    ring, other = Ring(), Ring()
    whole = model(x)
    split(nn.ModuleList([model]), ring)
    with torch.no_grad(), rows_everywhere(other):
        alike = torch.equal(model(x), whole)
    with torch.no_grad(), rows_everywhere(ring):
        found = model(x)
    torch.testing.assert_close(found, whole)
    ring.close()
    other.close()
    return alike


def _with_other_weights() -> None:
    """On a rank: an MLP that is split, and then another one's weights, and somebody between its products."""
    mlp, other, x = *(small("llama").model.layers[0].mlp for _ in range(2)), torch.ones(1, 2, 32)
    ring = Ring()
    assert split(nn.ModuleList([mlp]), ring) == 1
    for weight in other.parameters():
        weight.mul_(1.5)
    mlp.load_state_dict(other.state_dict(), assign=True)
    with torch.no_grad(), rows_everywhere(ring):
        torch.testing.assert_close(mlp(x), other(x))
        mlp.act_fn = other.act_fn = nn.Tanh()
        torch.testing.assert_close(mlp(x), other(x))
    ring.close()


def test_weights_that_are_put_in_later_count(pool: Pools):
    pool(2).run(_with_other_weights)


def test_rows_of_another_ring_are_multiplied_with_all_weights(pool: Pools):
    assert pool(2).run(_beside_another_ring) == [True, True]
