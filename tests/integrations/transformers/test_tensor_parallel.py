"""Tensor parallel MLPs and output heads: the same answers, fewer weights read, and all or nothing on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringattn.inference import PagedKVCache
from ringattn.integrations.transformers import (
    NAME,
    RingCache,
    TensorParallelError,
    apply_tensor_parallel,
    compile_for_decode,
    register,
)
from ringattn.integrations.transformers.cuda_graph_runner import CUDAGraphRunner
from ringattn.integrations.transformers.model_forward import replicated_rows, run_step
from ringattn.integrations.transformers.support import cache_sizes
from ringattn.ring import Ring
from tests.integrations.transformers.models import make
from tests.integrations.transformers.test_decode_compile import SIZES, CountingBackend, compare_little, decode
from tests.integrations.transformers.test_ring_cache import BEAMS, alone, prompts
from tests.support.pool import Pools


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


def _answers(model: Any, ring: Ring, whole: bool = False) -> tuple[int, list[Tensor], list[int]]:
    """Modules that are parallel; logits of a prompt around the ring and of steps of decoding; weights read in each."""
    parts = 0 if whole else apply_tensor_parallel(model, ring)
    sizes = cache_sizes(model)
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
        runner = CUDAGraphRunner(model, cache, None)
        for tokens in ([[3], [5]], [[7], [1]]):
            note(runner.run([one, two], torch.tensor(tokens)).logits[:, -1])
        note(run_step(model, cache.extend([two], [3]), torch.arange(3)[None]))
    ring.close()
    return parts, said, read


def _compare(kind: str, ranks: int, **options: Any) -> list[tuple[int, float, list[int], list[int]]]:
    """On a rank: how many parts were split, how far logits are from those of whole products, and what was read."""
    del ranks
    whole = _answers(small(kind, **options), Ring(), whole=True)
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


def _generate(calls: list[dict[str, Any]]) -> tuple[int, list[Tensor]]:
    """Tokens that a rank generates with a model that is tensor parallel and compiled."""
    ring = Ring()
    model = make("llama", "ringattn", torch.float32).eval().requires_grad_(False)
    torch._dynamo.reset()
    parts = apply_tensor_parallel(model, ring)
    with pytest.MonkeyPatch.context() as patched:
        compare_little(patched, (4,), 200)
        assert compile_for_decode(model, ring, backend="eager") == 3
    torch.manual_seed(ring.rank)
    found = []
    for call in calls:
        with RingCache(model, ring, max_tokens=64, batch=6, page_size=4) as cache:
            found.append(model.generate(**call, past_key_values=cache).clone())
    ring.close()
    return parts, found


@pytest.mark.models
def test_generation_with_tensor_parallelism_equals_one_process(pool: Pools):
    calls = [{**prompts(rows=2, padding=3), **BEAMS}]
    expected = [alone("llama", [call])[0] for call in calls]
    for parts, found in pool(2).run(_generate, calls):
        assert parts == 2
        assert [x.tolist() for x in found] == [x.tolist() for x in expected]


def _unfit(model: nn.Module) -> int:
    ring = Ring()
    try:
        return apply_tensor_parallel(model, ring)
    finally:
        ring.close()


class _MixingMLP(nn.Module):
    """Between its products all inner columns interact."""

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
    except TensorParallelError as error:
        found.append(str(error))
    found.append("forward" in vars(mixing[0]))
    failing = nn.ModuleList([_PlainMLP() if dist.get_rank() else _FailingMLP()])
    try:
        found.append(_unfit(failing))
    except TensorParallelError as error:
        found.append(str(error))
    return found


class _PlainMLP(_MixingMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class _FailingMLP(_MixingMLP):
    def forward(self, x: Tensor) -> Tensor:
        raise OSError("not on this rank")


def test_modules_that_cannot_be_split_stay_whole_on_all_ranks(pool: Pools):
    here, there = pool(2).run(_try_others)
    for found in (here, there):
        assert found[0] == 0
        assert "tensor parallel _MixingMLP differs by" in found[1]
        assert found[2] is False
    assert "not on this rank" in here[3]
    assert there[3] == "another rank failed"


class _SometimesMixingMLP(_MixingMLP):
    """As layers of Gemma 3n, of which the first ones keep the largest columns only."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        return self.down(inner.softmax(-1) if self.mixes else inner.relu())


def _split_two_kinds() -> str:
    with pytest.raises(TensorParallelError) as said:
        _unfit(nn.ModuleList([_SometimesMixingMLP(True), _SometimesMixingMLP(False)]))
    return str(said.value)


def test_every_mlp_is_tried(pool: Pools):
    assert all("tensor parallel _SometimesMixingMLP differs by" in said for said in pool(2).run(_split_two_kinds))


class _WatchedMLP(_PlainMLP):
    """Somebody looks on between its products."""

    def __init__(self) -> None:
        super().__init__()
        self.between, self.seen = nn.ReLU(), list[Tensor]()
        self.between.register_forward_hook(lambda *given: self.seen.append(given[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


def test_hooks_see_all_columns(pool: Pools):
    assert pool(2).run(_unfit, nn.ModuleList([_PlainMLP()])) == [1, 1]
    assert pool(2).run(_split_watched) == [0, 0]


def _split_watched() -> int:
    return _unfit(nn.ModuleList([_WatchedMLP()]))


def test_one_rank_splits_nothing():
    assert apply_tensor_parallel(small("llama"), Ring()) == 0


def _beside_another_ring() -> bool:
    """Rows of another ring are not this one's."""
    model, x = small("llama").model.layers[0].mlp, torch.ones(1, 2, 32)
    ring, other = Ring(), Ring()
    whole = model(x)
    apply_tensor_parallel(nn.ModuleList([model]), ring)
    with torch.no_grad(), replicated_rows(other):
        alike = torch.equal(model(x), whole)
    with torch.no_grad(), replicated_rows(ring):
        found = model(x)
    torch.testing.assert_close(found, whole)
    ring.close()
    other.close()
    return alike


def _with_other_weights() -> None:
    """On a rank: an MLP that is split, and then another one's weights, and somebody between its products."""
    mlp, other, x = *(small("llama").model.layers[0].mlp for _ in range(2)), torch.ones(1, 2, 32)
    ring = Ring()
    assert apply_tensor_parallel(nn.ModuleList([mlp]), ring) == 1
    for weight in other.parameters():
        weight.mul_(1.5)
    mlp.load_state_dict(other.state_dict(), assign=True)
    with torch.no_grad(), replicated_rows(ring):
        torch.testing.assert_close(mlp(x), other(x))
        mlp.act_fn = other.act_fn = nn.Tanh()
        torch.testing.assert_close(mlp(x), other(x))
    ring.close()


def test_weights_that_are_put_in_later_count(pool: Pools):
    pool(2).run(_with_other_weights)


def test_rows_of_another_ring_are_multiplied_with_all_weights(pool: Pools):
    assert pool(2).run(_beside_another_ring) == [True, True]


def _compiled_graphs(layers: int) -> tuple[int, int]:
    """Graphs that are compiled of a tensor parallel model, and calls of them in a prefill and a decode step."""
    torch._dynamo.reset()
    ring, model, backend = Ring(), small("llama", num_hidden_layers=layers), CountingBackend()
    assert apply_tensor_parallel(model, ring) == layers + 1
    with pytest.MonkeyPatch.context() as patched:
        compare_little(patched, (4,), 200)
        assert compile_for_decode(model, ring, backend=backend) == layers + 1
    graphs, backend.calls = backend.graphs, 0
    decode(model, ring, ((4, 1),))
    ring.close()
    assert backend.graphs == graphs
    return graphs, backend.calls


@pytest.mark.models
def test_compiled_layers_share_the_code_of_their_shards(pool: Pools):
    """Behind attention the output projection, the norm, the shard of the MLP, and the residual."""
    # code for a prompt and for several rows
    assert pool(2).run(_compiled_graphs, 2)[0] == (2 * (6 + 1), 2 * (2 * 6 + 1))
