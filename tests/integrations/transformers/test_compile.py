"""A decoder layer with the ring inside is one graph, and one graph serves all batches of a shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ringattn import Ring
from ringattn.integrations.transformers import shard_batch
from tests.integrations.transformers.models import gradients, learn, make, tokens
from tests.support.pool import Pools


def batch_of(step: int, padded: bool) -> dict[str, Tensor]:
    ids = tokens(22, rows=2, seed=step)
    batch = {"input_ids": ids, "labels": ids}
    if padded:
        mask = torch.ones_like(ids)
        mask[0, 17 - step :] = 0
        batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return batch


def compiled_steps(kind: str, padded: bool) -> tuple[int, list[tuple[Tensor, dict[str, Tensor]]]]:
    """Compilations of a model in three steps, and the results with and without."""
    torch._dynamo.reset()
    ring = Ring()
    counter = CompileCounterWithBackend("aot_eager")
    found = []
    models = [make(kind, "ringattn", torch.float32) for _ in range(2)]
    for layer in models[1].model.layers:
        layer.compile(fullgraph=True, backend=counter)
    for step in range(3):
        for model in models:
            model.zero_grad()
            loss = learn(model, shard_batch(batch_of(step, padded), ring))
            found.append((loss, {name: x.clone() for name, x in gradients(model).items()}))
    return counter.frame_count, found


@pytest.mark.parametrize(
    ("kind", "padded", "world_size"),
    [
        ("llama", True, 2),
        pytest.param("llama", True, 1, marks=pytest.mark.slow),
        *(pytest.param(x, False, n, marks=pytest.mark.slow) for x in ("llama", "gemma2") for n in (1, 2)),
    ],
)
def test_compiled_layers_are_one_graph_each_for_all_batches(
    pool: Pools, kind: str, padded: bool, world_size: int
) -> None:
    for count, found in pool(world_size).run(compiled_steps, kind, padded):
        assert count <= 2, "a graph per layer at most"
        for plain, compiled in zip(found[::2], found[1::2], strict=True):
            torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
