"""Models whose weights are sliced as they are read or drawn: no rank has all of them at any time, on device or host."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from ringattn.integrations.transformers.sharded_weights.plan import Slot, WeightPlan, plan_weights
from ringattn.integrations.transformers.sharded_weights.shard import describe_plan, use_slices
from ringattn.integrations.transformers.sharded_weights.slices import Slice
from ringattn.integrations.transformers.support import NAME
from ringattn.ring import Ring
from ringattn.tensor_checks import digest_bits

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAPPED = 2**28  # bytes after which files are closed: what was read of an open one is counted as memory of the process
DIGESTED = 2**20  # numbers whose digest is made at once: it takes three times their memory


def empty_model(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Return a causal language model of a config that attends with ringattn, its parameters on `meta`, its buffers on the CPU."""
    from accelerate import init_empty_weights

    with torch.random.fork_rng([]), init_empty_weights(include_buffers=False):
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": NAME}
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    model.tie_weights()  # outside, where one parameter may have two names
    return model.eval().requires_grad_(False)


def load_sharded_model(
    folder: str | Path,
    ring: Ring,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """Load a checkpoint of transformers, of which each rank reads and stores its slice; collective over the ring.

    Args:
        folder: With config.json and safetensors; nothing is downloaded, and no code in it is run.
        ring: All ranks that compute together.
        dtype: Of the weights; None: that of the config.
        device: None: the current GPU, or the CPU where there is none.

    Returns:
        The model, in eval mode. See `shard_weights`.

    Raises:
        NotImplementedError: A module cannot be sliced, weights are quantised, or transformers is older than 5; on every rank.
        ValueError: Weights are missing, or not of the model; on every rank.

    Example:
        >>> model = load_sharded_model("Llama-3.3-70B-Instruct", ring)  # doctest: +SKIP
        >>> with RingCache(model, ring, max_tokens=100_000) as cache:  # doctest: +SKIP
        ...     ids = model.generate(**inputs, past_key_values=cache, max_new_tokens=200)
    """
    with ring.propagate_errors():
        folder = Path(folder).expanduser()
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        kind = dtype or getattr(config.get_text_config(decoder=True), "dtype", None) or torch.float32
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        plan = plan_weights(empty_model(config, kind), ring.world_size)
        read_slices(folder, plan, ring.rank, torch.device(device))
    ring.assert_equal_across_ranks("a model to load", describe_plan(plan))
    use_slices(plan, ring)
    return plan.model


@torch.no_grad()
def read_slices(folder: Path, plan: WeightPlan, rank: int, device: torch.device) -> None:
    """Fill a model on `meta` with a rank's slices of the checkpoint in a folder. Raises as `load_sharded_model`, here only."""
    model = plan.model
    if getattr(model.config, "quantization_config", None) is not None:
        raise NotImplementedError(
            f"weights must be plain numbers to be sharded, got quantised ones in {folder}; use whole weights"
        )
    loader = _Loader(plan, rank, device, _Files(folder))
    loader.load()
    if loader.missing:
        raise ValueError(
            f"the folder must have all weights of {type(model).__name__}, got {folder} without {len(loader.missing)} of them, such "
            f"as {min(loader.missing)}, which would be random; fetch the checkpoint again, or correct its config.json"
        )
    nn.Module.to(model, device)  # buffers
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)


class _Files:
    """The safetensors of a folder, from which parts of tensors are read."""

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX
        names = [SINGLE]
        if not (folder / SINGLE).is_file() and index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        self._open: dict[str, Any] = {}
        self._mapped = 0
        self._path_of = {key: str(folder / name) for name in names for key in self._file(str(folder / name)).keys()}

    def _file(self, path: str) -> Any:
        """Return an open file, after the others are closed where MAPPED bytes were read."""
        from safetensors import safe_open

        if self._mapped > MAPPED:
            self._open.clear()
            self._mapped = 0
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt", device="cpu")
        return self._open[path]

    @property
    def keys(self) -> list[str]:
        """All names of tensors, numbers in them in the order of numbers."""
        return sorted(self._path_of, key=lambda key: [(len(x), x) if x.isdigit() else (0, x) for x in key.split(".")])

    def read(self, key: str, cut: Slice | None, rank: int) -> Tensor:
        """Return a tensor, or a rank's slice of it, of which only the bytes are read."""
        file = self._file(self._path_of[key])
        if cut is None:
            found = file.get_tensor(key)
            self._mapped += found.nbytes
            return found
        source = file.get_slice(key)
        shape, (first, end) = source.get_shape(), cut.bounds(rank)
        if shape[cut.dim] != cut.parts * cut.columns:
            raise ValueError(
                f"{key} must be {cut.parts * cut.columns} long in dim {cut.dim} as in the model of config.json, got "
                f"{tuple(shape)}; fetch the checkpoint again, or correct its config.json"
            )
        before = (slice(None),) * cut.dim
        parts = [source[(*before, slice(at + first, at + end))] for at in range(0, shape[cut.dim], cut.columns)]
        self._mapped += sum(part.nbytes for part in parts)
        return cut.pad(parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim))


class _Wanted(NamedTuple):
    """Tensors of the checkpoint that a weight is made of, by patterns of a converter; None: of one as it is."""

    converter: Any
    sources: list[tuple[str, str]]


class _Loader:
    """Reads what the weights and buffers of a model are made of, one weight after the other."""

    def __init__(self, plan: WeightPlan, rank: int, device: torch.device, files: _Files) -> None:
        self._model, self._rank, self._device, self._files = plan.model, rank, device, files
        self._targets: dict[str, Tensor] = plan.model.state_dict(keep_vars=True)
        slots = {id(slot.weight): slot.slice for slot in plan.slots}
        self._slices = {name: slots.get(id(x)) for name, x in self._targets.items()}
        self._placed: dict[int, nn.Parameter] = {}
        ignored = getattr(plan.model, "_keys_to_ignore_on_load_missing", None) or ()
        self.missing = {name for name in self._targets if not any(re.search(one, name) for one in ignored)}

    def load(self) -> None:
        """Place all weights that the files have."""
        for target, wanted in self._plan().items():
            if wanted.converter is None:
                [(_, key)] = wanted.sources
                cut = self._slices[target]
                self._place(target, self._files.read(key, cut, self._rank), sliced=cut is not None)
                continue
            cut = _source_slice(self._slices[target], wanted.converter)
            for pattern, key in wanted.sources:
                wanted.converter.add_tensor(
                    target, key, pattern, lambda key=key, cut=cut: self._files.read(key, cut, self._rank)
                )
            found = wanted.converter.convert(target, model=self._model, config=self._model.config)
            for name, x in found.items():
                self._place(name, x[0] if isinstance(x, list) else x, sliced=cut is not None)
        for module in self._model.modules():
            for name, x in module._parameters.items():
                if x is not None and id(x) in self._placed:
                    module._parameters[name] = self._placed[id(x)]
        # tied weights are one parameter, found under its other name
        self.missing = {name for name in self.missing if id(self._targets[name]) not in self._placed}

    def _plan(self) -> dict[str, _Wanted]:
        """Return what each weight is made of, as transformers names and converts tensors of checkpoints."""
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
        except ImportError:
            raise NotImplementedError(
                f"transformers must be 5 or newer to read slices of a checkpoint, got {transformers.__version__}; update it, or "
                "call shard_weights on a loaded model"
            ) from None
        mapping = get_model_conversion_mapping(self._model)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        prefix, found = self._model.base_model_prefix, dict[str, _Wanted]()
        for key in self._files.keys:
            target, pattern = rename_source_key(key, renamings, converters, prefix, self._targets)
            if target not in self._targets and key in self._targets:
                target, pattern = key, None
            if target not in self._targets:
                continue  # transformers ignores them too
            if pattern is None:
                found[target] = _Wanted(None, [("", key)])
            else:
                new = _Wanted(copy.deepcopy(of_pattern[pattern]), [])
                found.setdefault(target, new).sources.append((pattern, key))
        return found

    def _place(self, name: str, x: Tensor, *, sliced: bool) -> None:
        target, cut = self._targets[name], self._slices[name]
        if cut is not None and not sliced:
            x = cut.cut(x, self._rank)
        expected = tuple(target.shape) if cut is None else cut.shape(target.shape)
        if tuple(x.shape) != expected:
            raise ValueError(
                f"{name} must have the shape of the model of config.json, got {tuple(x.shape)} instead of {expected}; fetch the "
                "checkpoint again, or correct its config.json"
            )
        self.missing.discard(name)
        if isinstance(target, nn.Parameter):
            # not a view of what was read, as whole ones are
            own = x.to(self._device, self._dtype(name, target), copy=cut is None).contiguous()
            self._placed[id(target)] = nn.Parameter(own, requires_grad=False)
        else:
            target.copy_(x)

    def _dtype(self, name: str, target: Tensor) -> torch.dtype:
        """Return the dtype of a weight: some models keep some in fp32."""
        kept = self._model._get_dtype_plan(self._model.dtype)
        return next((kind for part, kind in kept.items() if re.search(part.replace("*", ".*"), name)), target.dtype)


def _source_slice(cut: Slice | None, converter: Any) -> Slice | None:
    """Return the slice of each source of a converter that commutes with it: experts that are stacked; None: sources are whole."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    if cut is None or cut.dim == 0:
        return None
    merge, *others = converter.operations
    if type(merge) is not MergeModulelist or merge.dim != 0:
        return None
    if not others:
        return cut._replace(dim=cut.dim - 1)
    joins = len(others) == 1 and type(others[0]) is Concatenate and others[0].dim == cut.dim
    return cut._replace(dim=cut.dim - 1, parts=1) if joins and len(converter.source_patterns) == cut.parts else None


@torch.no_grad()
def draw_weights(
    model: PreTrainedModel, device: torch.device, seed: int, plan: WeightPlan | None = None, rank: int = 0
) -> int:
    """Fill a model on `meta` with random weights, module by module; the same numbers with and without slices.

    Args:
        model: As returned by `empty_model`.
        device: Where they are drawn and stay.
        seed: Of torch's generator for the device.
        plan: Which weights are sliced; None: all are whole.
        rank: Whose slices are kept.

    Returns:
        A digest of the whole weights: GPUs of different kinds may draw different numbers.
    """
    slots = {} if plan is None else {(id(slot.module), slot.name): slot for slot in plan.slots}
    placed: dict[int, nn.Parameter] = {}
    digest = 0
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for owner, module in _initialised(model, model):
            metas = {name: x for name, x in module._parameters.items() if x is not None and id(x) not in placed}
            for name, x in metas.items():
                module._parameters[name] = nn.Parameter(torch.zeros_like(x, device=device), requires_grad=False)
            vars(module).pop("_is_hf_initialized", None)
            if metas or not module._parameters:
                owner._initialize_weights(module)
            for name, x in metas.items():
                own: Any = module._parameters[name]
                digest = _add_digest(digest, own)
                placed[id(x)] = _kept(own, slots.get((id(module), name)), rank)
                del own  # a whole weight goes before the next one comes
            for name, x in list(module._parameters.items()):
                if name in metas:
                    module._parameters[name] = placed[id(metas[name])]
                elif x is not None:
                    module._parameters[name] = placed[id(x)]  # tied to one that was drawn before
    nn.Module.to(model, device)  # buffers
    return digest


def _add_digest(digest: int, x: Tensor) -> int:
    for part in x.detach().flatten().split(DIGESTED):
        digest = (digest * 31 + int(digest_bits(part))) % 2**61
    return digest


def _kept(whole: nn.Parameter, slot: Slot | None, rank: int) -> nn.Parameter:
    return whole if slot is None else nn.Parameter(slot.slice.cut(whole.data, rank), requires_grad=False)


def _initialised(module: nn.Module, owner: PreTrainedModel) -> Iterator[tuple[Any, nn.Module]]:
    """Return all modules, children first, each with the model that knows how to initialise it."""
    for child in module.children():
        yield from _initialised(child, child if isinstance(child, PreTrainedModel) else owner)
    yield owner, module
