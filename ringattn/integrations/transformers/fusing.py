"""Fewer and larger kernels around a model's attention: norms, MLPs and rotary embeddings compiled, products joined and gated.

Owns which parts of a model these are, and how they are compiled and joined. Refuses to know caches and steps, and whether a new
part is right (replacing.py).

Note [Small kernels]
    Decoding reads all weights for few rows, and beside these products a layer of a model as transformers writes it has some 45
    small kernels, most of them in its norms, in its rotary embeddings and behind the first products of its MLP. torch.compile
    makes one of each norm, one or two of the rotary embeddings of q and k, and one between the products of an MLP. Inductor is
    asked to be deterministic: it then chooses how sums are made by rules and not by timing. Attention stays as it is: it takes
    steps, which are no tensors.

Note [Rotation]
    Rotary embeddings are a function of a model's file that its attention calls, and the file is everybody's. So an attention gets a
    forward of its own: the code that it had, to which the name of that function means another one. Where halves of heads are
    turned, which is found by trying, few rows take one launch for q and k (`kernels.rotate`); else it is compiled.

Note [Joined products]
    q, k and v are products of the same rows. With the weights in one piece of memory they are one product, which reads faster
    than three: whoever of the three is called first makes it, and the others find what is theirs. The weights they had are views
    of the piece. Called with other rows than the first, they multiply by themselves.

Note [Few rows]
    A step of decoding has few rows, and a library of products is made for many: it cuts the sums of one to keep the device busy,
    adds up in a second launch, and makes an MLP of four or more. Few rows take kernels of our own instead (products.py): one for
    a product, one for both products of an MLP and the gate between them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringattn.integrations.transformers.products import ALIKE, Product, find_gate
from ringattn.integrations.transformers.replacing import (
    FLOATS,
    TRIED,
    Held,
    Replacement,
    agree,
    code_of,
    describe,
    distance,
    is_product,
    is_row_wise,
    replace,
    rows_for,
    width,
)
from ringattn.kernels import rotate as turning
from ringattn.ring import Ring

ROTATION = "apply_rotary_pos_emb"
"""Under which name models have the function that rotates q and k."""
JOINED = ("q_proj", "k_proj", "v_proj")
"""Under which names an attention has products of the same rows."""


class CannotFuse(RuntimeError):
    """The parts stay as they were; the message says why."""


@torch.no_grad()
def fuse(model: nn.Module, ring: Ring, *, backend: str | Callable = "inductor") -> int:
    """Compiles and joins what is around a model's attention, for inference; every rank calls it alike.

    Args:
        model: Of transformers, whole on every rank, in eval mode.
        ring: The ranks that go on from the same numbers.
        backend: Of torch.compile.

    Returns:
        How many parts have changed.

    Raises:
        CannotFuse: A part could not be compiled, or gave other numbers, on any rank; on every rank.
    """
    why, replacements = "", list[Replacement]()
    with contextlib.ExitStack() as undo:
        try:
            replacements = _replacements(model, ring, backend, undo)
        except Exception as error:  # one rank's memory may end before the others'
            why = describe(error)
        if why := agree(why, ring) or replace(replacements, ring, "fused"):
            replacements.clear()  # each piece goes when its weights have left it
            raise CannotFuse(why)
        undo.pop_all()
    return len(replacements)


def _replacements(
    model: nn.Module, ring: Ring, backend: str | Callable, undo: contextlib.ExitStack
) -> list[Replacement]:
    """All parts of a model that can be changed, with what they become; undo: makes the model what it was."""
    replacements: list[Replacement] = []
    rotations: dict[Callable, Callable] = {}
    # ranks that share the work of a head split it as it is
    head = getattr(model, "get_output_embeddings", lambda: None)() if ring.world_size > 1 else None
    taken = {id(head)}
    for part in model.modules():
        if "forward" in vars(part):
            # somebody else has changed it
            taken.update(id(one) for one in part.modules())
            continue
        if is_row_wise(part):
            columns = width(part)
            assert columns is not None, "rows have columns"
            kind = type(part), columns
            replacements.append(Replacement(part, kind, _compiled(part, backend), rows_for(part, columns)))
            taken.update(id(one) for one in part.modules())
        elif (rotate := _rotation(part)) is not None and (tried := _angles_for(part, rotate)):
            if rotate not in rotations:
                rotations[rotate] = _compiled_rotation(rotate, tried, backend)
            replacements.append(_rotating(part, rotate, rotations[rotate], tried))
        joined = _joining(part, undo)
        taken.update(id(one.part) for one in joined)
        replacements += joined
    for part in model.modules():
        if id(part) not in taken and is_product(part) and (product := Product(part.weight, part.bias)).has_kernel:
            kind = "product", part.in_features, part.out_features, part.bias is None
            replacements.append(Replacement(part, kind, _while_plain(product, part), rows_for(part, part.in_features)))
    return replacements


def _while_plain(product: Product, part: nn.Linear) -> Callable[[Tensor], Tensor]:
    """A product that is multiplied by torch as soon as its weight is another one, or has a gradient."""
    held = Held([part])

    def forward(x: Tensor) -> Tensor:
        return product(x) if held.is_plain() else F.linear(x, part.weight, part.bias)

    return forward


def compiled(call: Callable, backend: str | Callable) -> Callable:
    """What torch.compile makes of a function or forward, for any number of rows."""
    return torch.compile(call, dynamic=True, backend=backend, options=_options() if backend == "inductor" else None)


def _compiled(part: nn.Module, backend: str | Callable) -> Callable[[Tensor], Tensor]:
    """The forward of a part that takes rows, compiled; whatever the shape of a call is, it sees them in one line."""
    plain = part.forward
    call = compiled(plain, backend)
    gate = find_gate(part)
    last = None if gate is None else Product(gate.last.weight, gate.last.bias)
    held = Held((one for one in part.children() if isinstance(one, nn.Linear)), part)

    def forward(x: Tensor) -> Tensor:
        if gate is not None and last is not None and gate.has_kernel(x) and held.is_plain():
            return last(gate(x))
        # an expert may get no rows, for which nothing need be compiled
        return call(x.reshape(1, -1, x.shape[-1])).view(x.shape) if x.numel() else plain(x)

    return forward


def _options() -> dict[str, Any]:
    """Of inductor: sums made by rules, where it can, and no processes beside this one, which would outlive the few kernels."""
    import torch._inductor.config

    return {"compile_threads": 1} | (
        {"deterministic": True} if hasattr(torch._inductor.config, "deterministic") else {}
    )


def _rotation(part: nn.Module) -> Callable | None:
    """The function that an attention rotates q and k with, if it is one that can be replaced (Note [Rotation])."""
    code = code_of(part)
    known = code is not None and ROTATION in code.__code__.co_names and isinstance(getattr(part, "head_dim", None), int)
    rotate = code.__globals__.get(ROTATION) if known and code is not None else None
    if (
        not isinstance(rotate, FunctionType)
        or next(part.parameters(), torch.empty(0, device="cpu")).dtype not in FLOATS
    ):
        return None
    return rotate if list(inspect.signature(rotate).parameters)[:4] == ["q", "k", "cos", "sin"] else None


def _compiled_rotation(rotate: Callable, tried: list[tuple[Tensor, ...]], backend: str | Callable) -> Callable:
    """The function that rotates q and k, compiled; whatever the batch of a call is, it sees its rows in one line."""
    by_halves = _turns_halves(rotate, tried)

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        found = rotate(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
        one, other = (x[0].transpose(0, 1).contiguous() for x in found)
        return one, other

    # compilers bound how many variants a code has, and those of other models are none of this one's
    rotated.__code__ = rotated.__code__.replace()
    call = compiled(rotated, backend)

    def forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        plain = more or named or q.dim() != 4 or cos.dim() != 3 or not q.numel()
        if plain or torch.is_grad_enabled():
            return rotate(q, k, cos, sin, *more, **named)
        b, _, s, _ = q.shape
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k)]
        angles = [x.expand(b, -1, -1).flatten(0, 1) for x in (cos, sin)]
        turn = turning.rotate if by_halves and turning.has_kernel(*rows, *angles) else call
        return tuple(x.unflatten(0, (b, s)).transpose(1, 2) for x in turn(*rows, *angles))

    return forward


def _turns_halves(rotate: Callable, tried: list[tuple[Tensor, ...]]) -> bool:
    """Whether a function rotates q and k as `kernels.rotate` does."""
    for q, k, cos, sin in tried:
        if cos.shape[-1] != q.shape[-1]:
            return False
        mine = turning.rotate_eager(q[:, :, 0], k[:, :, 0], cos[:, 0], sin[:, 0])
        for x, y in zip(mine, rotate(q, k, cos, sin), strict=True):
            apart, size = distance(x, y[:, :, 0])
            if not apart <= ALIKE * size:
                return False
    return True


def _angles_for(part: nn.Module, rotate: Callable) -> list[tuple[Tensor, ...]]:
    """Rows and angles to try a rotation with, the same on every rank; none where it takes others than models mostly have."""
    weight, d = next(part.parameters()), getattr(part, "head_dim", 0)
    for angles in (d, d // 2):
        draw = torch.Generator().manual_seed(0)
        shapes = [((n, 4, 1, d), (n, 2, 1, d), (n, 1, angles), (n, 1, angles)) for n in TRIED]
        tried = [
            tuple(torch.randn(x, generator=draw, device="cpu").to(weight.device, weight.dtype) for x in one)
            for one in shapes
        ]
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            rotate(*tried[0])
            return tried
    return []


def _rotating(part: nn.Module, rotate: Callable, other: Callable, tried: list[tuple[Tensor, ...]]) -> Replacement:
    """An attention whose code calls another function to rotate with (Note [Rotation])."""
    code = code_of(part)
    assert code is not None, "an attention with a rotation has code"
    names = {**code.__globals__, ROTATION: other}
    forward = FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
    forward.__kwdefaults__ = code.__kwdefaults__
    kind = rotate, *(x.shape for x in tried[0])
    return Replacement(part, kind, MethodType(forward, part), tried, before=rotate, after=other)


def _joining(part: nn.Module, undo: contextlib.ExitStack) -> list[Replacement]:
    """The products of an attention that take the same rows (Note [Joined products]); none where they can not be joined."""
    found = [getattr(part, name, None) for name in JOINED]
    products = [one for one in found if is_product(one)]
    facts = {(one.in_features, one.weight.dtype, one.weight.device, one.bias is None) for one in products}
    if len(products) < len(found) or len(facts) != 1:
        return []
    joined, columns = _Joined(products), products[0].in_features
    undo.callback(joined.part)
    rows = rows_for(products[0], columns)
    return [
        Replacement(one, ("joined", columns, one.out_features, place), joined.forward(place), rows)
        for place, one in enumerate(products)
    ]


class _Joined:
    """Products of the same rows, made at once (Note [Joined products]).

    Args:
        products: All with a bias, or all without.
    """

    def __init__(self, products: Sequence[nn.Linear]) -> None:
        self._weight = torch.cat([one.weight for one in products])
        self._bias = None if products[0].bias is None else torch.cat([one.bias for one in products])
        self._sizes = [one.out_features for one in products]
        for one, weight in zip(products, self._weight.split(self._sizes), strict=True):
            one.weight.data = weight
        if self._bias is not None:
            for one, bias in zip(products, self._bias.split(self._sizes), strict=True):
                one.bias.data = bias
        self._product = Product(self._weight, self._bias)
        self._products = list(products)
        self._held = Held(products)
        # in one piece: another thread's call may come between any two lines
        self._made: tuple[Tensor | None, list[Tensor | None]] = None, []

    def part(self) -> None:
        """Gives the weights memory of their own again; where that ends, they stay views."""
        with contextlib.suppress(torch.OutOfMemoryError):
            for one in self._products:
                one.weight.data = one.weight.data.clone()
                if one.bias is not None:
                    one.bias.data = one.bias.data.clone()

    def forward(self, place: int) -> Callable[[Tensor], Tensor]:
        """What one of the products gives."""

        def forward(x: Tensor) -> Tensor:
            if place == 0:
                plain = self._held.is_plain()
                self._made = (x, list(self._product(x).split(self._sizes, -1))) if plain else (None, [])
            rows, left = self._made
            found = left[place] if x is rows else None
            if found is None:
                one = self._products[place]
                return F.linear(x, one.weight, one.bias)
            left[place] = None
            if place == len(self._sizes) - 1:
                self._made = None, []
            return found

        return forward
