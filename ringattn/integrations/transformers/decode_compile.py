"""`torch.compile` of a model's decoder layers, for decode and prefill over a cache.

A decode step reads all weights for few rows. Beside its matrix products, a layer of a model as transformers writes it launches
about 45 small kernels: norms, rotary embeddings, residuals, and the activation of the MLP. torch.compile fuses them. Attention
over a cache is not traceable, so the graph breaks there, once per layer; layers of one kind share their code. Row counts are
dynamic, but a single row gets code of its own. CUDA graphs are captured around the layers (cuda_graph_runner.py), so none are made
inside. Inductor runs in its deterministic mode: it chooses the order of sums by rules and not by timing, and all ranks get the
same bits. A packed prefill has one batch element and gets code of its own. Other prefills and training run the code of
transformers.

Note [Packed products]
    Queries, keys and values of a layer are products of the same rows, and so are the two first products of a gated MLP. One
    product of all their weights reads memory faster than one after another: the smaller ones do not fill a GPU. So the weights of
    such linear layers are stored behind each other, each parameter a view. In compiled code each of the layers takes its columns of
    the product with all weights, and equal products are merged before the compiler sees them. Everything else calls the layers as
    they were. Sharded weights are stored so from the beginning (sharded_weights/forwards.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import RestartAnalysis
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ringattn.inference import PagedKVCache
from ringattn.integrations.transformers.model_forward import (
    BoundPatch,
    describe_difference,
    describe_error,
    failure_on_any_rank,
    forward_step,
    has_hooks,
    is_in_forward,
    one_forward,
    replicated_rows_ring,
)
from ringattn.integrations.transformers.support import cache_sizes
from ringattn.integrations.transformers.tensor_parallel import WeightGuard, is_float_linear
from ringattn.ring import Ring

TRIED = (1, 4)
"""Batch sizes of decode with which compiled layers are compared: a single row has code of its own, all others share it."""
TOKENS = 4
"""Different tokens in these."""
TRIED_PROMPT = 200
"""Tokens of the prefill with which they are compared."""
VARIANTS = 64
"""Variants of compiled code per function: shapes of calls times kinds of layers; torch's default is 8."""
PACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers that multiply the same rows (Note [Packed products])."""
REFUSAL = "a model must be copied or saved whole before its layers are compiled, got one after; copy it before"


@torch.no_grad()
def compile_for_decode(model: PreTrainedModel, ring: Ring, *, backend: str | Callable = "inductor") -> int:
    """Compile the decoder layers of a model for decode, where that works; collective over the ring.

    Decode steps and a prefill are computed with both: the layers must give the same numbers within rounding, and in decode the
    same bits on all ranks, because ranks choose tokens separately. Otherwise all layers stay as they are on all ranks, with a
    warning. Call it before CUDA graphs are captured, and after `apply_tensor_parallel`. Weights of linear layers that multiply the
    same rows become views of one tensor (Note [Packed products]).

    Args:
        model: Of transformers with `attn_implementation="ringattn"`, whole on every rank, in eval mode.
        ring: The ranks that decode together.
        backend: Of torch.compile.

    Returns:
        The number of modules that were compiled; 0 when none could be.
    """
    shared = _EagerOnError(backend)
    compiled = [_Compiled(module, shared) for module in _modules(model)]
    name = type(model).__name__
    if not compiled:
        warnings.warn(f"{name} decodes without torch.compile: it has no decoder layers to compile", stacklevel=2)
        return 0
    failure = _compare(model, compiled, shared, ring)
    digest = blake2b(b"".join(one.digest.digest() for one in compiled), digest_size=8).hexdigest()
    if failure := failure_on_any_rank(failure, ring, "the output of compiled layers", digest):
        warnings.warn(f"{name} decodes without torch.compile: {failure}", stacklevel=2)
        return 0
    shared.warns = True
    for one in compiled:
        one.module.forward = BoundPatch(one.forward, one.plain, REFUSAL)
    return len(compiled)


def _modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers and the norm behind them, except those with hooks or a replaced forward."""
    found: list[nn.Module] = []
    for parent in model.modules():
        lists = [one for one in parent.children() if isinstance(one, nn.ModuleList)]
        layers = [layer for one in lists for layer in one if isinstance(layer, GradientCheckpointingLayer)]
        norms = [one for one in parent.children() if layers and type(one).__name__.endswith("Norm")]
        found += [*layers, *norms]
    return [one for one in found if "forward" not in vars(one) and not any(map(has_hooks, one.modules()))]


def _compare(model: PreTrainedModel, compiled: list[_Compiled], shared: _EagerOnError, ring: Ring) -> str:
    """Return how compiled modules differ from plain ones in steps over an empty cache; empty when they do not."""
    try:
        sizes, pages = cache_sizes(model), max(*TRIED, -(-TRIED_PROMPT // 16))
        cache = PagedKVCache(ring, **sizes, dtype=model.dtype, pages=pages, page_size=16, device=model.device)
        for one in compiled:
            one.pack()
            one.module.forward = one.compare
        for batch, new in [*((batch, 1) for batch in TRIED), (1, TRIED_PROMPT)]:
            requests = [cache.add_request(new) for _ in range(batch)]
            step = cache.extend(requests, [new] * batch, mode="decode" if new == 1 else "prefill")
            tokens = torch.arange(batch * new, device="cpu").view(batch, new) % TOKENS
            forward_step(model, step, {"input_ids": tokens}, step.positions, [0])
            for request in requests:
                cache.free(request)
    except Exception as error:  # compilers raise errors of any type
        return describe_error(error)
    finally:
        for one in compiled:
            vars(one.module).pop("forward", None)
    return next((one.failure for one in compiled if one.failure), "") or next(iter(shared.failures), "")


class _EagerOnError:
    """Backend of torch.compile that runs what it cannot compile as plain torch, so that a step never fails on one rank alone."""

    def __init__(self, backend: str | Callable) -> None:
        self._backend = _inductor if backend == "inductor" else backend
        self.module = ""  # class of the module that is compiled
        self.warns, self.failures = False, list[str]()  # whether it warns of each failure, and all of them

    def __call__(self, graph: Any, inputs: Any) -> Any:
        _merge_equal_products(graph)
        try:
            return torch._dynamo.lookup_backend(self._backend)(graph, inputs)
        except RestartAnalysis:
            raise  # dynamo traces again
        except Exception as error:  # compilers raise errors of any type
            self.failures.append(f"{self.module}: {describe_error(error)}")
            if self.warns:
                warnings.warn(f"{self.module} runs without torch.compile: {describe_error(error)}", stacklevel=2)
            return graph.forward


def _merge_equal_products(graph: Any) -> None:
    """Let a product that a graph computes several times be computed once (Note [Packed products])."""
    found: dict[Any, Any] = {}
    for node in graph.graph.find_nodes(op="call_function", target=F.linear):
        first = found.setdefault((node.args, tuple(node.kwargs.items())), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.graph.erase_node(node)
    graph.recompile()


def _inductor(graph: Any, inputs: Any) -> Any:
    """Compile with inductor: no timing in its choices, and no processes beside this one for so few kernels."""
    import torch._inductor.config

    options: dict[str, Any] = {"compile_threads": 1}
    options |= {"deterministic": True} if hasattr(torch._inductor.config, "deterministic") else {}
    return torch._inductor.compile(graph, inputs, options=options)


class _Compiled:
    """One module, and its compiled forward; dynamo keeps code per backend, so all modules of a model share one."""

    def __init__(self, module: nn.Module, backend: _EagerOnError) -> None:
        self.module, self.plain, self._backend = module, module.forward, backend
        self._compiled = torch.compile(self.plain, dynamic=True, backend=backend)
        # how the outputs of the compiled forward differed, and their digest
        self.failure, self.digest = "", blake2b(digest_size=8)
        self._columns: list[tuple[Any, Callable[[Tensor], Tensor]]] = []
        self._guards: list[WeightGuard] = []

    def pack(self) -> None:
        """Store weights of linear layers with the same input behind each other (Note [Packed products])."""
        for parent in self.module.modules():
            for names in PACKED:
                linears = [one for name in names if is_float_linear(one := getattr(parent, name, None))]
                if len(linears) == len(names) and "forward" not in vars(parent) and _can_be_packed(linears):
                    self._columns += zip(linears, _pack(linears), strict=True)
                    self._guards.append(WeightGuard(linears, parent))

    @contextmanager
    def _packed(self) -> Iterator[None]:
        """Let linear layers take their columns of packed products inside."""
        for linear, columns in self._columns:
            linear.forward = columns
        try:
            yield
        finally:
            for linear, _ in self._columns:
                del linear.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled code in decode and in packed prefill, and the plain forward elsewhere."""
        hidden = args[0] if args else kwargs["hidden_states"]
        serves = replicated_rows_ring() is not None or (is_in_forward() and hidden.shape[0] == 1)
        if not serves or torch.is_grad_enabled() or not all(one.is_valid() for one in self._guards):
            return self.plain(*args, **kwargs)
        self._backend.module = type(self.module).__name__
        # the cache of fake tensors costs more than it saves where sizes are symbols
        with torch._dynamo.config.patch(recompile_limit=VARIANTS, fake_tensor_cache_enabled=False), self._packed():
            return self._compiled(*args, **kwargs)

    def compare(self, *args: Any, **kwargs: Any) -> Any:
        """Run both, record how they differ, and return the plain output."""
        expected = self.plain(*args, **kwargs)
        with one_forward():
            found = self.forward(*args, **kwargs)
        for x, y in zip(_tensors(found), _tensors(expected), strict=True):
            if replicated_rows_ring() is not None:
                self.digest.update(x.cpu().contiguous().view(torch.uint8).numpy().tobytes())
            name = f"compiled {type(self.module).__name__}"
            self.failure = self.failure or describe_difference(name, x, y, self.module)
        return expected


def _can_be_packed(linears: list[nn.Linear]) -> bool:
    """Return whether linear layers have the same input, and weights of their own and of one kind."""
    kinds = {(x.in_features, x.bias is None, x.weight.dtype, x.weight.device) for x in linears}
    return len(kinds) == 1 and len({x.weight.data_ptr() for x in linears}) == len(linears)


def _pack(linears: list[nn.Linear]) -> list[Callable[[Tensor], Tensor]]:
    """Store weights of linear layers behind each other; return functions that take the columns of each from one product."""
    sizes = [one.out_features for one in linears]
    weight = _concatenate([one.weight for one in linears], sizes)
    bias = None if linears[0].bias is None else _concatenate([one.bias for one in linears], sizes)

    def columns(ends: tuple[int, int]) -> Callable[[Tensor], Tensor]:
        return lambda x: F.linear(x, weight, bias)[..., ends[0] : ends[1]]

    return list(map(columns, pairwise(accumulate(sizes, initial=0))))


def _concatenate(parts: list[Tensor], sizes: list[int]) -> nn.Parameter:
    """Store parameters behind each other; return all of them as one, whose shape the compiler takes as constant."""
    whole = nn.Parameter(torch.cat([x.data for x in parts]), requires_grad=False)
    for x, part in zip(parts, whole.split(sizes), strict=True):
        x.data = part
    return whole


def _tensors(output: Any) -> list[Tensor]:
    return [one for one in (output if isinstance(output, tuple) else (output,)) if isinstance(one, Tensor)]
