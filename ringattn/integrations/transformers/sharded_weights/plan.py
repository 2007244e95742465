"""Plan of the weights of a model that are sliced, and how: read from its modules, on any device, `meta` included.

In decoder layers: an MLP by its inner columns, experts by the inner columns of each, and any other linear layer by its outputs.
Outside of them: embeddings and the output head by tokens. The rest is whole on every rank: biases, norms, routers, encoders of
images, and the up-projection of latents, which attention multiplies head by head and which is less than 1% of such models.

Note [Experts by inner columns]
    A decode step reads the experts that its rows have chosen. With a slice of the inner columns of each expert, every rank reads an
    equal share of them, whichever they are. With whole experts on ranks, the rank that holds the most chosen ones decides: of 64
    experts of which a token takes 4, on 8 ranks, it reads 1.6 experts on average where the share is 0.5. Both need one reduction
    per block, and a gathered layer has the same bytes. So experts are never distributed whole, however thin their slices are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ringattn.integrations.transformers.latents import hands_latents_on
from ringattn.integrations.transformers.model_forward import has_hooks
from ringattn.integrations.transformers.sharded_weights.slices import Slice, slice_width
from ringattn.integrations.transformers.support import is_tower
from ringattn.integrations.transformers.tensor_parallel import FLOATS, inner_columns, is_float_linear

MOST_WHOLE = 1 / 8
"""Share of the numbers of a decoder layer's matrices that may be whole on every rank: routers and gates."""
SAME_INPUT = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
"""Names of linear layers of an attention that multiply the same rows: one exchange serves them."""


@dataclass(eq=False)
class Slot:
    """A weight that is sliced: parameter `name` of a module."""

    module: nn.Module
    name: str
    slice: Slice

    @property
    def weight(self) -> Tensor:
        """The parameter, whole or sliced."""
        found = self.module._parameters[self.name]
        assert found is not None, "a slot is of a parameter that exists"
        return found


@dataclass(eq=False)
class Part:
    """Modules of a model that compute together.

    Attributes:
        kind: "linears" of one input, "mlp", "experts", "embedding" or "head".
        module: The MLP, experts, embedding or head; of linears the first.
        slots: Their sliced weights; of an MLP in the order in which it applies them.
        layer: The decoder layer; None outside of them.
        share: Share of the weights that a row is multiplied by: less than 1 for experts.
    """

    kind: str
    module: nn.Module
    slots: list[Slot]
    layer: int | None = None
    share: float = 1.0


@dataclass(eq=False)
class WeightPlan:
    """The parts of a model that are sliced over so many ranks."""

    model: PreTrainedModel
    ranks: int
    parts: list[Part] = field(default_factory=list)

    @property
    def slots(self) -> list[Slot]:
        """All sliced weights, a tied one once."""
        found: dict[int, Slot] = {}
        for part in self.parts:
            for slot in part.slots:
                found.setdefault(id(slot.weight), slot)
        return list(found.values())

    def layers(self) -> list[list[Slot]]:
        """Return the sliced weights of each decoder layer that has any, in the order of layers."""
        found: dict[int, list[Slot]] = {}
        for part in self.parts:
            if part.layer is not None:
                found.setdefault(part.layer, []).extend(part.slots)
        return list(found.values())

    def bytes_per_rank(self) -> int:
        """Return the bytes of a rank's weights: slices, and what is whole."""
        sliced = {id(slot.weight): slot for slot in self.slots}
        return sum(
            x.numel() * x.element_size()
            if (slot := sliced.get(id(x))) is None
            else x.numel() * x.element_size() * slot.slice.width // slot.slice.columns
            for x in self.model.parameters()
        )

    def gather_bytes(self) -> int:
        """Return the bytes of the two buffers in which a prefill gathers layers."""
        layers = [sum(slot.weight.numel() * slot.weight.element_size() for slot in layer) for layer in self.layers()]
        return 2 * max(layers, default=0)


def plan_weights(model: PreTrainedModel, ranks: int) -> WeightPlan:
    """Return what is sliced in a model whose weights are whole, or on `meta`.

    Raises:
        NotImplementedError: A module with much of the weights cannot be sliced; it is named.
    """
    plan, name = WeightPlan(model, ranks), type(model).__name__
    towers = [one for one in model.modules() if isinstance(one, PreTrainedModel) and is_tower(one)]
    encoders = {id(one) for tower in towers for one in tower.modules()}
    layers = [
        layer
        for parent in model.modules()
        for one in parent.children()
        if isinstance(one, nn.ModuleList) and id(one) not in encoders
        for layer in one
        if isinstance(layer, GradientCheckpointingLayer)
    ]
    if not layers:
        raise NotImplementedError(
            f"a model with sharded weights must have decoder layers, got {name}; use whole weights"
        )
    names = {id(one): path for path, one in model.named_modules()}
    for index, layer in enumerate(layers):
        _visit(layer, index, plan)
        _check_layer(layer, plan, names)
    _plan_tokens(plan)
    return plan


def _visit(module: nn.Module, layer: int, plan: WeightPlan) -> None:
    """Add the parts of a module of a decoder layer."""
    if (inner := inner_columns(module)) is not None:
        plan.parts.append(Part("mlp", module, _mlp_slots(module, inner, plan.ranks), layer))
        return
    if _are_experts(module):
        experts: Any = module
        config = plan.model.config.get_text_config(decoder=True)
        names = "num_experts_per_tok", "top_k_experts"
        chosen = next((value for name in names if (value := getattr(config, name, None))), experts.num_experts)
        slots = _expert_slots(experts, plan.ranks)
        plan.parts.append(Part("experts", module, slots, layer, share=chosen / experts.num_experts))
        return
    linears = {name: one for name, one in module.named_children() if is_float_linear(one)}
    if hands_latents_on(module):
        linears.pop("kv_b_proj", None)
    together = [one for name, one in linears.items() if name in SAME_INPUT]
    together = [one for one in together if one.in_features == together[0].in_features]
    for group in [together, *([one] for one in linears.values() if one not in together)]:
        slots = [
            Slot(one, "weight", Slice(0, one.out_features, slice_width(one.out_features, plan.ranks)))
            for one in group
            if one.out_features >= plan.ranks
        ]
        if slots:
            plan.parts.append(Part("linears", slots[0].module, slots, layer))
    for child in module.children():
        _visit(child, layer, plan)


def _mlp_slots(mlp: nn.Module, inner: int, ranks: int) -> list[Slot]:
    *first, last = [one for one in mlp.children() if isinstance(one, nn.Linear)]
    width = slice_width(inner, ranks)
    slots = [Slot(one, "weight", Slice(0, inner, width, one.out_features // inner)) for one in first]
    return [*slots, Slot(last, "weight", Slice(1, inner, width))]


def _are_experts(module: Any) -> bool:
    """Return whether a module is all experts of a layer, as transformers 5 stores them, whose inner columns are independent."""
    given = vars(module)
    if not given.get("has_gate") or given.get("has_post_expert_norm") or has_hooks(module) or "forward" in given:
        return False
    weights = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    return all(type(x) is nn.Parameter and x.dim() == 3 and x.dtype in FLOATS for x in weights)


def _expert_slots(experts: Any, ranks: int) -> list[Slot]:
    # e 2i d, or transposed e d 2i; the two products one behind the other, or in turns
    inner_dim = 2 if experts.is_transposed else 1
    inner = experts.gate_up_proj.shape[inner_dim] // 2
    width = slice_width(inner, ranks)
    first = Slice(inner_dim, inner, width, 2) if experts.is_concatenated else Slice(inner_dim, 2 * inner, 2 * width)
    last = Slice(1 if experts.is_transposed else 2, inner, width)
    return [Slot(experts, "gate_up_proj", first), Slot(experts, "down_proj", last)]


def _check_layer(layer: nn.Module, plan: WeightPlan, names: dict[int, str]) -> None:
    """Raise unless most of a layer's numbers are sliced."""
    sliced = {id(slot.weight) for slot in plan.slots}
    matrices = [
        (module, name, x)
        for module in layer.modules()
        for name, x in module.named_parameters(recurse=False)
        if x.dim() > 1
    ]
    up_projections = {id(x.kv_b_proj) for x in layer.modules() if hands_latents_on(x)}  # pyright: ignore[reportArgumentType]
    whole = [one for one in matrices if id(one[2]) not in sliced and id(one[0]) not in up_projections]
    if sum(x.numel() for *_, x in whole) <= MOST_WHOLE * sum(x.numel() for *_, x in matrices):
        return
    module, name, x = max(whole, key=lambda one: one[2].numel())
    raise NotImplementedError(
        f"a model with sharded weights must have linear layers, MLPs and experts of plain float weights in its layers, got "
        f"{names[id(module)]}.{name}, {tuple(x.shape)} {x.dtype} of {type(module).__name__}, which cannot be sliced; use whole "
        "weights"
    )


def _plan_tokens(plan: WeightPlan) -> None:
    """Add embeddings and output head, which are sliced by tokens, so that they may be one weight."""
    embedding, head = plan.model.get_input_embeddings(), plan.model.get_output_embeddings()
    name = type(plan.model).__name__
    if not isinstance(embedding, nn.Embedding) or has_hooks(embedding) or type(embedding.weight) is not nn.Parameter:
        raise NotImplementedError(
            f"embeddings must be an nn.Embedding with float weights to be sharded, got {type(embedding).__name__} in {name}; use "
            "whole weights"
        )
    if not is_float_linear(head):
        raise NotImplementedError(
            f"the output head must be an nn.Linear with float weights to be sharded, got {type(head).__name__} in {name}; use "
            "whole weights"
        )
    for kind, module in (("embedding", embedding), ("head", head)):
        tokens = module.weight.shape[0]
        slot = Slot(module, "weight", Slice(0, tokens, slice_width(tokens, plan.ranks)))
        plan.parts.append(Part(kind, module, [slot]))
