"""Steps of an engine of verl on CPU ranks: prints losses, norms of gradients and log-probabilities as JSON.

    torchrun --nproc_per_node 2 job.py FOLDER ring ulysses_sequence_parallel_size=2

verl knows no CPUs: a platform for them is registered through its own registry. With "own" the engine is verl's (the reference on
one rank, with sdpa, which keeps packed documents apart by their positions). FOLDER has a model of transformers.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ["VERL_PLATFORM"] = "cpu"
import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import AutoModelForTokenClassification
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

_nothing = lambda *_, **__: None  # noqa: E731


def _value(x: Any) -> Any:
    return property(lambda self: x)


class Cpu(PlatformBase):
    """A CPU, as far as the engine asks."""

    device_name = _value("cpu")
    vendor_name = _value("none")
    device_module = _value(
        SimpleNamespace(
            **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated"), lambda *_: 0),
            **dict.fromkeys(("empty_cache", "manual_seed", "manual_seed_all", "synchronize", "set_device"), _nothing),
            mem_get_info=lambda *_: (1, 1),
            current_device=lambda: "cpu",
        )
    )
    current_device = lambda self: "cpu"  # noqa: E731
    device_count = lambda self: 1  # noqa: E731
    is_available = is_platform_available = lambda self, *_, **__: True
    nvtx_range = lambda self, *_: nullcontext()  # noqa: E731
    communication_backend_name = _value("gloo")


for _name in Cpu.__abstractmethods__:
    if _name not in vars(Cpu):
        setattr(Cpu, _name, _nothing)
Cpu.__abstractmethods__ = frozenset()
PlatformRegistry.register(platform="cpu")(Cpu)

from verl.models.transformers import monkey_patch  # noqa: E402
from verl.utils import model as verl_models  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.config.engine import FSDPEngineConfig  # noqa: E402
from verl.workers.config.model import HFModelConfig  # noqa: E402
from verl.workers.config.optimizer import FSDPOptimizerConfig  # noqa: E402
from verl.workers.engine.fsdp import transformer_impl  # noqa: E402
from verl.workers.utils.losses import sft_loss  # noqa: E402


def _load_critic(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
    """Load a critic as verl does, which asks for flash-attn."""
    model_config.num_labels = 1
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa"
    )


verl_models.load_valuehead_model = _load_critic
monkey_patch.is_trl_available = lambda: False  # verl 0.9.1 patches a class that TRL 1.16 has no more
LENGTHS = (11, 29, 5, 18)
STEPS = 3


def batch(step: int, *, fused: bool) -> TensorDict:
    """The same packed samples on all ranks."""
    generator = torch.Generator().manual_seed(step)

    def nested(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    data = TensorDict(
        {
            "input_ids": nested([torch.randint(3, 61, (n,), generator=generator) for n in LENGTHS]),
            "position_ids": nested([torch.arange(n) for n in LENGTHS]),
            "loss_mask": nested([(torch.arange(n) > n // 3).long() for n in LENGTHS]),
        },
        batch_size=[len(LENGTHS)],
    )
    numbers = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "use_fused_kernels": fused, "temperature": 1.0}
    tensordict_utils.assign_non_tensor(data, calculate_entropy=True, **numbers)
    return data


def main(folder: str, kind: str, *words: str) -> None:
    """Train some steps, and print."""
    options: dict[str, Any] = {name: json.loads(x) for name, _, x in (word.partition("=") for word in words)}
    model_options = {name: options.pop(name) for name in ("use_fused_kernels", "value") if name in options}
    dist.init_process_group("gloo")
    fused, value = model_options.get("use_fused_kernels", False), model_options.get("value", False)
    config = HFModelConfig(
        path=folder,
        model_type="value_model" if value else "language_model",
        load_tokenizer=False,
        override_config={"attn_implementation": "sdpa"},
        use_fused_kernels=fused,
        external_lib="ringattn.integrations.verl" if kind == "ring" else None,
    )
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine_config = FSDPEngineConfig(
        strategy="fsdp2", use_torch_compile=False, mixed_precision=precision, use_fused_kernels=fused, **options
    )
    optimizer = FSDPOptimizerConfig(lr=1e-2, weight_decay=0.0)
    head = "ValueHead" if value else "LMHead"
    if kind == "ring":
        from ringattn.integrations import verl as ours

        engine_class = getattr(ours, f"RingEngineWith{head}")
    else:
        engine_class = getattr(transformer_impl, f"FSDPEngineWith{head}")
    engine = engine_class(config, engine_config, optimizer, SimpleNamespace())
    transformer_impl.FSDPCheckpointManager = lambda **_: None  # type: ignore[assignment]
    engine.initialize()
    name, losses, norms = "values" if value else "log_probs", [], []

    def value_loss(model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> Any:
        return model_output["values"].values().square().sum() / data["batch_num_tokens"] * data["dp_size"], {}

    loss = value_loss if value else partial(sft_loss, None)
    for step in range(STEPS):
        with engine.train_mode():
            found = engine.train_batch(batch(step, fused=fused), loss)
        losses.append(sum(found["loss"]) if isinstance(found["loss"], list) else found["loss"])
        if "grad_norm" in found["metrics"]:
            norms.append(float(found["metrics"]["grad_norm"]))
    with engine.eval_mode():
        output = engine.infer_batch(batch(9, fused=fused), loss)["model_output"]
    shown = {key: output[key].values().tolist() for key in (name, "entropy") if key in output}
    sys.stdout.write(json.dumps({"losses": losses, "norms": norms, **shown}) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
