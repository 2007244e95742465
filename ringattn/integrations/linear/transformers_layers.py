"""Recurrent layers of transformers models over a sharded sequence: gated delta rule and Mamba-2.

A layer keeps its weights, their names in a state dict, and its class as a base class. Its forward computes the same projections
from its public attributes, and the convolution and the scan by ops.py. Models pass keywords on to their layers, so a hook of the
model adds one, `recurrence`, beside `sharding`; activation checkpointing keeps both for recomputation.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ringattn.integrations.linear.ops import KERNELS, causal_conv1d, gated_delta_rule, mamba2_scan
from ringattn.plan.layouts import contiguous
from ringattn.plan.sharding import Sharding, check_sharding
from ringattn.ring import default_world_size

PENDING = "ringattn_sharding"
"""Attribute of a model's base with the sharding of a call that does not pass its keywords on to it."""


@dataclass(frozen=True, eq=False)
class RecurrentRows:
    """The rows that recurrent layers of one call have."""

    sharding: Sharding
    tokens: Tensor | None  # `b s`, 1 for tokens and 0 for padding among this rank's rows; None: there is no padding


def replace_recurrent_layers(model: nn.Module, *, kernels: str = "auto") -> list[str]:
    """Let the recurrent layers of a transformers model work over sharded sequences; in place, weights are kept.

    Afterwards the model takes what `shard_batch` returns, in any layout. Calls without a sharding run as before. Call it before
    FSDP or DDP wraps the model; calling it again changes nothing.

    Args:
        model: A model of Qwen3-Next, Qwen 3.5, Olmo Hybrid (gated delta rule), Mamba-2, Bamba, Zamba2, Falcon-H1, Nemotron-H or
            Granite 4 hybrid (Mamba-2), made with `attn_implementation="ringattn"`.
        kernels: See `ringattn.integrations.linear.gated_delta_rule`.

    Returns:
        Names of the recurrent layers.

    Raises:
        ValueError: The model has no recurrent layer, or kernels is unknown.
        NotImplementedError: The model has a layer that mixes rows in another way, or does not pass keywords on to its layers.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ringattn")  # doctest: +SKIP
        >>> replace_recurrent_layers(model)  # doctest: +SKIP
        ['model.layers.0.linear_attn', ...]
        >>> loss = model(**shard_batch(batch, ring)).loss  # doctest: +SKIP
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels must be one of {', '.join(KERNELS)}, got {kernels!r}; leave it out for 'auto'")
    layers = {name: part for name, part in model.named_modules() if _family(type(part)) is not None}
    if not layers:
        raise ValueError(
            f"a model must have recurrent layers of a kind that ringattn knows, got {type(model).__name__}; models with attention "
            f"alone need no change. Known are {', '.join(sorted(_FAMILIES))}"
        )
    paths = {name: _path(model, name) for name in layers}
    _check_layers(model, layers, paths)
    for name, layer in layers.items():
        if not isinstance(layer, _RecurrentLayer):
            if not _takes_keywords(layer):
                # of 4.x: the layer around it gets the keywords, and hands over the rows
                paths[name][-1].register_forward_pre_hook(functools.partial(_hand_over, layer), with_kwargs=True)
            layer.__class__ = _ring_class(type(layer))  # as fully_shard of torch does
        assert isinstance(layer, _RecurrentLayer), "of this class now"
        layer.ringattn_kernels = kernels
    for base in {id(path[0]): path[0] for path in paths.values()}.values():
        if PENDING not in vars(base):
            setattr(base, PENDING, None)
            base.register_forward_pre_hook(_add_rows, with_kwargs=True)
            if model is not base:
                model.register_forward_pre_hook(functools.partial(_keep_sharding, base), with_kwargs=True)
    return list(layers)


class _RecurrentLayer(nn.Module):
    """Forward of a recurrent layer over sharded rows; the other base class is the layer of transformers."""

    ringattn_kinds: ClassVar[str]  # names of the classes of transformers
    ringattn_kernels: str
    ringattn_rows: RecurrentRows | None = None

    def forward(
        self, hidden_states: Tensor, *args: Any, recurrence: RecurrentRows | None = None, **kwargs: Any
    ) -> Tensor:
        """Return the output of this rank's rows, `b s e`."""
        rows = self.ringattn_rows if recurrence is None else recurrence
        if rows is None:
            if (ranks := default_world_size()) > 1:
                raise RuntimeError(
                    f"a model with recurrent layers must be called with a sharding among {ranks} ranks, got none; call it with "
                    "shard_batch(batch, ring), or pass sharding=Ring(group_of_this_rank_alone).sharding(seq_len) when every rank "
                    "has whole sequences. If it was, this version of transformers does not pass keywords on to its layers: use "
                    "transformers 5"
                )
            return super().forward(hidden_states, *args, **kwargs)
        sharding, tokens = rows.sharding, rows.tokens
        with sharding.ring.propagate_errors():
            # the name of earlier releases than 5.24 comes last
            if (args and args[0] is not None) or any(
                kwargs.get(name) is not None for name in ("cache", "cache_params")
            ):
                raise NotImplementedError(
                    "a cache must be left out where ranks share a sequence, whose states are not stored; pass "
                    "use_cache=False, as shard_batch does"
                )
        stretches = _stretches(sharding)
        if stretches is not sharding:
            hidden_states = sharding.reshard(hidden_states, stretches)
            tokens = None if tokens is None else sharding.reshard(tokens, stretches)
        if tokens is not None:
            hidden_states = hidden_states * tokens[..., None].to(hidden_states.dtype)
        out = self.mix(hidden_states, stretches, tokens)
        return out if stretches is sharding else stretches.reshard(out, sharding)

    def mix(self, x: Tensor, sharding: Sharding, tokens: Tensor | None) -> Tensor:
        """Return the output of rows `b s e`, which are stretches of the sequence."""
        raise NotImplementedError(f"mix must be defined, got {type(self).__name__}")

    def convolve(self, x: Tensor, sharding: Sharding) -> Tensor:
        """Return the layer's causal convolution of rows `b s c`, and its activation."""
        conv: Any = self.conv1d
        return causal_conv1d(x, conv.weight.squeeze(1), conv.bias, sharding, activation="silu")


class _GatedDeltaNet(_RecurrentLayer):
    """The gated delta rule of Qwen3-Next, Qwen 3.5 and Olmo Hybrid, whose projections are divided differently."""

    ringattn_kinds = "OlmoHybridGatedDeltaNet Qwen3NextGatedDeltaNet Qwen3_5GatedDeltaNet Qwen3_5MoeGatedDeltaNet"

    def mix(self, x: Tensor, sharding: Sharding, tokens: Tensor | None) -> Tensor:
        del tokens
        layer: Any = self
        if hasattr(self, "in_proj_qkvz"):
            *qkv, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
            qkv = torch.cat([part.flatten(2) for part in qkv], -1)
        elif hasattr(self, "in_proj_qkv"):
            qkv, z, b, a = (proj(x) for proj in (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a))
        else:
            qkv = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
            z, b, a = layer.g_proj(x), layer.b_proj(x), layer.a_proj(x)
        q, k, v = self.convolve(qkv, sharding).split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
        q, k = (part.unflatten(2, (-1, layer.head_k_dim)) for part in (q, k))
        v = v.unflatten(2, (-1, layer.head_v_dim))
        beta = b.sigmoid() * (2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0)
        g = -layer.A_log.float().exp() * nn.functional.softplus(a.float() + layer.dt_bias)
        out = gated_delta_rule(q, k, v, g, beta, sharding, normalize_qk=True, kernels=self.ringattn_kernels)
        names = ("norm", "o_norm"), ("out_proj", "o_proj")
        norm, projection = (getattr(layer, new, None) or getattr(layer, old) for new, old in names)
        out = norm(out.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim))
        return projection(out.view(*x.shape[:2], -1))


class _Mamba2(_RecurrentLayer):
    """Mamba-2 of all models that have it; Falcon-H1 adds multipliers and may go without a norm."""

    ringattn_kinds = (
        "BambaMixer FalconH1Mixer GraniteMoeHybridMambaLayer Mamba2Mixer NemotronHMamba2Mixer Zamba2MambaMixer"
    )

    def mix(self, x: Tensor, sharding: Sharding, tokens: Tensor | None) -> Tensor:
        layer: Any = self
        projected = layer.in_proj(x * getattr(layer, "ssm_in_multiplier", 1.0)) * getattr(layer, "mup_vector", 1.0)
        gate, rows, dt = projected.split([layer.intermediate_size, layer.conv_dim, layer.num_heads], -1)
        rows = self.convolve(rows, sharding)
        if tokens is not None:
            rows = rows * tokens[..., None].to(rows.dtype)
        states = layer.n_groups * layer.ssm_state_size
        values, b, c = rows.split([layer.intermediate_size, states, states], -1)
        dt = nn.functional.softplus(dt + layer.dt_bias.to(dt.dtype)).clamp(*layer.time_step_limit)
        y = mamba2_scan(
            values.unflatten(2, (layer.num_heads, layer.head_dim)),
            dt,
            -torch.exp(layer.A_log.float()),
            b.unflatten(2, (layer.n_groups, -1)),
            c.unflatten(2, (layer.n_groups, -1)),
            sharding,
            d=layer.D,
            kernels=self.ringattn_kernels,
        ).flatten(2)
        normed = layer.norm(y, gate) if getattr(layer, "mamba_rms_norm", True) else y * nn.functional.silu(gate)
        return layer.out_proj(normed.to(x.dtype))


_FAMILIES = {name: family for family in (_GatedDeltaNet, _Mamba2) for name in family.ringattn_kinds.split()}


def _family(kind: type[nn.Module]) -> type[_RecurrentLayer] | None:
    return next((_FAMILIES[base.__name__] for base in kind.__mro__ if base.__name__ in _FAMILIES), None)


@functools.cache
def _ring_class(kind: type[nn.Module]) -> type[nn.Module]:
    family = _family(kind)
    assert family is not None, "layers are found by their family"
    return type(f"Ring{kind.__name__}", (family, kind), {"__doc__": family.__doc__, "__module__": __name__})


def _check_layers(model: nn.Module, layers: dict[str, nn.Module], paths: dict[str, list[nn.Module]]) -> None:
    """Refuse a model in which rows mix in another way, or whose layers would not get the rows of a call."""
    for name, part in model.named_modules():
        inside = any(name.startswith(f"{layer}.") for layer in layers)
        # a causal convolution of each channel mixes rows, and belongs to a recurrence or stands for one
        if not inside and isinstance(part, nn.Conv1d) and part.groups == part.in_channels and part.padding != (0,):
            raise NotImplementedError(
                f"layers that mix rows must be attention, gated delta rule or Mamba-2 where ranks share a sequence, got {name} of "
                f"{type(model).__name__}; run this model on one process"
            )
    for name, layer in layers.items():
        if getattr(layer, "activation", "silu") not in ("silu", "swish"):
            raise NotImplementedError(
                f"a recurrent layer must have the activation 'silu', got {layer.activation!r} in {name}; run this model on one "
                "process"
            )
        for around in paths[name]:
            if not _takes_keywords(around):
                raise NotImplementedError(
                    f"a model must pass keywords on to its layers, got {type(around).__name__} of this version of transformers, "
                    "which does not; use transformers 5"
                )


def _takes_keywords(part: nn.Module) -> bool:
    parameters = inspect.signature(part.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _path(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the modules around a layer, outermost first, from the base of the model, which has the list of layers."""
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts))]
    lists = [i for i, part in enumerate(around) if isinstance(part, nn.ModuleList)]
    return [part for part in around[lists[-1] - 1 if lists else 0 :] if not isinstance(part, nn.ModuleList)]


def _keep_sharding(base: nn.Module, module: nn.Module, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep the sharding of a call for the base of the model, which not every head passes it to."""
    sharding = kwargs.get("sharding")
    setattr(base, PENDING, sharding)
    if sharding is not None and sharding.world_size > 1 and getattr(module, "z_loss_coefficient", 0):
        error = NotImplementedError(
            f"z_loss_coefficient must be 0 where ranks share a sequence, got {module.z_loss_coefficient}: its mean would be over "
            "each rank's tokens; set model.z_loss_coefficient = 0"
        )
        sharding.ring.raise_on_all_ranks(error)


def _add_rows(
    base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Add `recurrence` to the keywords of a call with a sharding."""
    sharding, mask = kwargs.get("sharding") or getattr(base, PENDING), kwargs.get("attention_mask")
    setattr(base, PENDING, None)
    if kwargs.get("step") is not None:
        raise NotImplementedError(
            "step must be left out of a call of a model with recurrent layers, whose states no cache stores; generate on one "
            "process, without a RingCache"
        )
    if sharding is None:
        return None
    check_sharding(sharding)
    tokens = None
    with sharding.ring.propagate_errors():
        if kwargs.get("tree") is not None:
            raise NotImplementedError(
                "tree must be left out for a model with recurrent layers, whose state goes from each row to the next; run the "
                "answers one by one"
            )
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dim() != 2:
                raise NotImplementedError(
                    "attention_mask must be `batch tokens` for a model with recurrent layers, got something else; leave it out"
                )
            tokens = sharding.shard(mask)
    return args, {**kwargs, "sharding": sharding, "recurrence": RecurrentRows(sharding, tokens)}


def _hand_over(layer: Any, _module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    layer.ringattn_rows = kwargs.get("recurrence")


def _stretches(sharding: Sharding) -> Sharding:
    """Return a sharding of the same rows whose shards have no strides: the same one where it has none."""
    if all(run.stride == 1 for shard in sharding.shards for run in shard):
        return sharding
    shards = contiguous(sharding.seq_len, sharding.world_size)
    documents, ring = sharding.documents, sharding.ring
    return Sharding(sharding.seq_len, "contiguous", shards, sharding.rank, documents, ring=ring, device=sharding.device)
