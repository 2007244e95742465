"""Compiled decoder layers: the same numbers within rounding, in decode only, and all or none on all ranks."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from ringattn.inference import PagedKVCache
from ringattn.integrations.transformers import NAME, compile_for_decode, decode_compile, register, run_step
from ringattn.integrations.transformers.model_forward import describe_difference
from ringattn.integrations.transformers.support import cache_sizes
from ringattn.ring import Ring
from tests.integrations.transformers.models import CONFIGS, make
from tests.support.pool import Pools

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 60}


def small(kind: str, **options: Any) -> Any:
    register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | options)
    return AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()


def decode(model: Any, ring: Ring | None = None, shapes: tuple[tuple[int, int], ...] = ((1, 1), (3, 1))) -> Any:
    """The logits of steps of so many requests with so many new tokens each, after a prompt."""
    sizes = cache_sizes(model)
    cache = PagedKVCache(ring or Ring(), **sizes, dtype=model.dtype, pages=16, page_size=4)
    found = []
    for batch, new in shapes:
        requests = [cache.add_request(12) for _ in range(batch)]
        prompt = cache.extend(requests, [5] * batch, mode="prefill")
        found.append(run_step(model, prompt, torch.arange(5 * batch).remainder(59)))
        step = cache.extend(requests, [new] * batch, mode="decode")
        found.append(run_step(model, step, torch.arange(batch * new).view(batch, new)))
        for request in requests:
            cache.free(request)
    return found


def compare_little(monkeypatch: pytest.MonkeyPatch, tried: tuple[int, ...] = (1,), prompt: int = 1) -> None:
    """Compile fewer kinds of steps before they are compared: tracing takes seconds for each."""
    monkeypatch.setattr(decode_compile, "TRIED", tried)
    monkeypatch.setattr(decode_compile, "TRIED_PROMPT", prompt)


class CountingBackend:
    """Counts the graphs that it compiles, and the calls of them; runs them as they are."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        del inputs
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            self.calls += 1
            return graph.forward(*arguments)

        return run


@pytest.mark.models
@torch.no_grad()
@pytest.mark.parametrize(("kind", "layers"), [("llama", 2), ("qwen3", 3)])
def test_layers_share_compiled_code_which_runs_in_steps_of_a_cache_only(kind: str, layers: int) -> None:
    torch._dynamo.reset()
    model, backend = small(kind, num_hidden_layers=layers), CountingBackend()
    expected, ids = decode(model), torch.arange(14).view(2, 7)
    whole = model(ids, use_cache=False).logits
    assert compile_for_decode(model, Ring(), backend=backend) == layers + 1  # the last norm
    # before attention the norm, and q, k and v; behind it the output projection, and the MLP; the last norm
    assert backend.graphs == 3 * (4 + 1), "one row has code of its own, and prefill"
    before = backend.calls
    assert model(ids, use_cache=False).logits.equal(whole)
    assert backend.calls == before, "without a step"
    found = decode(model)
    torch.testing.assert_close(found, expected)
    assert backend.graphs == 3 * (4 + 1), "what was compared serves all batches and prompts"
    assert backend.calls == before + 4 * (4 * layers + 1)


@pytest.fixture(scope="module")
def compiled() -> tuple[Any, list[int]]:
    """A compiled model that has biases in some of its linear layers, and the number of products in each piece of code."""
    torch._dynamo.reset()
    model, products = small("qwen2"), list[int]()

    def backend(graph: Any, inputs: Any) -> Any:
        del inputs
        products.append(len(graph.graph.find_nodes(op="call_function", target=nn.functional.linear)))
        return graph.forward

    assert compile_for_decode(model, Ring(), backend=backend) == 3
    return model, products


@torch.no_grad()
def test_linear_layers_of_the_same_rows_are_one_product_and_keep_their_weights(compiled: tuple[Any, list[int]]) -> None:
    (model, products), other = compiled, small("qwen2")
    # per variant: no products in norms, then q with k and v, o, gate with up, and down
    assert sorted(products) == sorted(3 * [0, 0, 1, 1, 2])
    assert all(x.equal(y) for x, y in zip(model.parameters(), other.parameters(), strict=True))
    for one in (model, other):
        one.model.layers[1].self_attn.k_proj.weight.mul_(2)  # in place, where the product reads it
    torch.testing.assert_close(decode(model), decode(other))
    model.model.layers[1].self_attn.k_proj.weight.div_(2)


def test_a_compiled_model_is_not_copied(compiled: tuple[Any, list[int]], tmp_path: Path) -> None:
    """A copy would run the weights of the first one."""
    model, _ = compiled
    for way in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="copied or saved whole before its layers are compiled"):
            way(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(x.equal(y) for x, y in zip(model.parameters(), again.parameters(), strict=True))


def test_a_compiled_model_learns_as_before(compiled: tuple[Any, list[int]]) -> None:
    (model, _), other, ids = compiled, small("qwen2"), torch.arange(14).view(2, 7)
    for one in (model, other):
        one(ids, labels=ids, use_cache=False).loss.backward()
    for (name, x), y in zip(model.named_parameters(), other.parameters(), strict=True):
        assert x.grad is not None, name
        torch.testing.assert_close(x.grad, y.grad, msg=lambda text, name=name: f"{name}: {text}")


class _Adapted(nn.Module):
    """A linear layer and something more, as adapters are put in."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.base(x)


@torch.no_grad()
def test_weights_and_modules_that_are_put_in_later_count(compiled: tuple[Any, list[int]]) -> None:
    # the last test of this model
    (model, _), other = compiled, small("qwen2")
    for x in other.parameters():
        x.mul_(1.5)
    model.load_state_dict({name: x.clone() for name, x in other.state_dict().items()}, assign=True)
    torch.testing.assert_close(decode(model), decode(other))
    for one in (model, other):
        for layer in one.model.layers:
            layer.mlp.gate_proj = _Adapted(layer.mlp.gate_proj)
            layer.self_attn.q_proj = _Adapted(layer.self_attn.q_proj)
    torch.testing.assert_close(decode(model), decode(other))
    torch.testing.assert_close(decode(model.double()), decode(other.double()))


@pytest.mark.models
@torch.no_grad()
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "llama4", "glm"])
def test_every_kind_of_model_can_be_compiled(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, experts, layers without rotary embeddings, rotations of neighbours; several new tokens of each request, too."""
    torch._dynamo.reset()
    compare_little(monkeypatch, (4,), 200)
    model = make(kind, NAME, torch.float32).eval() if kind in CONFIGS else small(kind, pad_token_id=0, eos_token_id=2)
    expected = decode(model, shapes=((4, 1), (2, 3)))
    assert compile_for_decode(model, Ring(), backend="eager") == 3
    torch.testing.assert_close(decode(model, shapes=((4, 1), (2, 3))), expected)


@torch.no_grad()
def test_inductor_compiles_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    compare_little(monkeypatch, (4,), 200)
    model = small("llama", num_hidden_layers=1)
    expected = decode(model, shapes=((3, 1),))
    assert compile_for_decode(model, Ring()) == 2
    torch.testing.assert_close(decode(model, shapes=((3, 1),)), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_layers_that_someone_observes_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    compare_little(monkeypatch)
    model, seen = small("llama"), list[Any]()
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *given: seen.append(given[-1]))
    assert compile_for_decode(model, Ring(), backend="eager") == 2
    seen.clear()
    decode(model, shapes=((1, 1),))
    assert len(seen) == 2
    assert compile_for_decode(model, Ring(), backend="eager") == 0, "nothing is compiled twice"


@torch.no_grad()
def test_wrappers_around_forwards_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    compare_little(monkeypatch)
    model, factor = small("llama", num_hidden_layers=1), [1.0]

    def steered(plain: Any) -> Any:
        @functools.wraps(plain)
        def forward(*given: Any, **named: Any) -> Any:
            found = plain(*given, **named)
            return factor[0] * found if isinstance(found, Tensor) else (factor[0] * found[0], *found[1:])

        return forward

    for part in (model.model.layers[0].self_attn, model.model.layers[0].mlp):
        monkeypatch.setattr(type(part), "forward", steered(type(part).forward))
    assert compile_for_decode(model, Ring(), backend="eager") == 2
    factor[0] = 3.0
    found = decode(model, shapes=((1, 1),))
    monkeypatch.undo()
    other = small("llama", num_hidden_layers=1)
    for layer in other.model.layers:
        layer.self_attn.o_proj.weight *= 3
        layer.mlp.down_proj.weight *= 3
    torch.testing.assert_close(found, decode(other, shapes=((1, 1),)))


def _wrong(graph: Any, inputs: Any) -> Any:
    del inputs

    def scale(x: Any) -> Any:
        return x * 1.01 if isinstance(x, Tensor) and x.is_floating_point() else x

    return lambda *arguments: tuple(map(scale, graph.forward(*arguments)))


def _failing(graph: Any, inputs: Any) -> Any:
    raise OSError("no compiler")


@torch.no_grad()
@pytest.mark.parametrize(
    ("backend", "why"),
    [
        (_wrong, r"LlamaForCausalLM decodes without torch\.compile: compiled Llama\w+ differs by"),
        (_failing, r"LlamaForCausalLM decodes without torch\.compile: Llama\w+: OSError: no compiler"),
    ],
)
def test_a_model_that_cannot_be_compiled_stays_as_it_is_with_a_warning(
    backend: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    compare_little(monkeypatch)
    model = small("llama", num_hidden_layers=1)
    expected = decode(model, shapes=((1, 1),))
    with pytest.warns(UserWarning, match=why):
        assert compile_for_decode(model, Ring(), backend=backend) == 0
    assert not any("forward" in vars(part) for part in model.modules())
    assert all(x.equal(y) for x, y in zip(decode(model, shapes=((1, 1),)), expected, strict=True))


@torch.no_grad()
def test_later_compile_errors_fall_back_to_eager_and_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    compare_little(monkeypatch)
    model, fails = small("llama", num_hidden_layers=1), list[bool]()
    expected = decode(model, shapes=((2, 3),))

    def backend(graph: Any, inputs: Any) -> Any:
        return _failing(graph, inputs) if fails else graph.forward

    assert compile_for_decode(model, Ring(), backend=backend) == 2
    fails.append(True)
    with pytest.warns(UserWarning, match=r"LlamaDecoderLayer runs without torch\.compile: OSError: no compiler"):
        found = decode(model, shapes=((2, 3),))  # of several new tokens, which was not compared
    torch.testing.assert_close(found, expected)


def test_a_model_without_decoder_layers_is_named() -> None:
    model = small("llama")
    model.model.layers = nn.ModuleList()
    model.model.norm = nn.Identity()
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM decodes without torch\.compile: it has no decoder layers"):
        assert compile_for_decode(model, Ring(), backend="eager") == 0


def test_long_sums_in_another_order_are_no_error_and_wrong_ones_are() -> None:
    """As libraries of matrix products make them for other shapes: sums of 4,096 products, here one after the other."""
    torch.manual_seed(0)
    part = nn.Linear(4096, 64, bias=False)
    x, total = torch.randn(5, 4096), torch.zeros(5, 64)
    with torch.no_grad():
        for a, w in zip(x.unbind(1), part.weight.unbind(1), strict=True):
            total += a[:, None] * w
        assert describe_difference("Linear", total, part(x), part) == ""
        assert "Linear differs by" in describe_difference("Linear", 1.0001 * total, part(x), part)
        assert "Linear gives" in describe_difference("Linear", total[:4], part(x), part)


def _compile_on(fault: str) -> tuple[int, list[str], bool]:
    """Modules that are compiled, and the warnings, on a rank whose neighbour fails or gets other bits."""
    torch._dynamo.reset()
    model, ring = small("llama", num_hidden_layers=1), Ring()

    def backend(graph: Any, inputs: Any) -> Any:
        del inputs
        if dist.get_rank() == 1 and fault == "fails":
            raise OSError("no compiler")
        if dist.get_rank() == 1 and fault == "bits":
            return lambda *arguments: tuple(
                x + 1e-7 * x if isinstance(x, Tensor) else x for x in graph.forward(*arguments)
            )
        return graph.forward

    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patched:
        warnings.simplefilter("always")
        compare_little(patched)
        count = compile_for_decode(model, ring, backend=backend)
    decode(model, ring, ((1, 1),))
    ring.close()
    said = [str(one.message) for one in caught if "torch.compile" in str(one.message)]
    return count, said, any("forward" in vars(part) for part in model.modules())


def test_a_rank_that_fails_or_gets_other_bits_stops_all(pool: Pools) -> None:
    here, there = pool(2).run(_compile_on, "fails")
    assert here == (0, ["LlamaForCausalLM decodes without torch.compile: another rank failed"], False)
    assert (there[0], there[2]) == (0, False)
    assert "OSError: no compiler" in there[1][0]
    for count, (said,), patched in pool(2).run(_compile_on, "bits"):
        assert "the output of compiled layers" in said
        assert (count, patched) == (0, False)
