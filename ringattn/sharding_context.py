"""The current sharding of a thread: set by `use_sharding`, used by calls below that are given none.

It is kept in a `threading.local`, not in a ContextVar: torch.compile traces the former from torch 2.13 on, with guards, so
that a compiled module compiles again for another sharding; it does not trace the latter. For compiled code of older
versions a second, plain object is shared by all threads, and is ambiguous while two threads have a sharding.
Activation checkpointing runs a module again during backward, outside of the `with` or inside of another one. So a
sharding is current only for the pass in which it was set: a forward that is recomputed does not find one of outside, and
`checkpoint_contexts` sets it again inside.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.torch_version import TorchVersion

from ringattn.plan.sharding import Sharding, check_sharding


class _Entry(NamedTuple):
    sharding: Sharding | None  # None: the forward that is recomputed had none
    kv_sharding: Sharding | None
    backward_pass: int  # in which it was set; -1: outside of any


class _Current(threading.local):
    entry: _Entry | None = None


class _Traced:
    """The entry that compiled code finds on versions of torch that cannot trace thread-local data."""

    entry: _Entry | None = None

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside: dict[int, list[_Entry]] = {}

    @contextmanager
    def shown(self, entry: _Entry) -> Iterator[None]:
        """Set the entry of this thread for as long as no other thread has one."""
        here = threading.get_ident()
        with self.lock:
            self.inside.setdefault(here, []).append(entry)
            self._choose()
        try:
            yield
        finally:
            with self.lock:
                self.inside[here].pop()
                if not self.inside[here]:
                    del self.inside[here]
                self._choose()

    def _choose(self) -> None:
        stacks = list(self.inside.values())
        self.entry = None if not stacks else stacks[0][-1] if len(stacks) == 1 else _AMBIGUOUS


_current = _Current()
_AMBIGUOUS = _Entry(None, None, -2)
_traced = None if TorchVersion(torch.__version__) >= "2.13" else _Traced()
_used = False  # whether any sharding has ever been current in this process


def _backward_pass() -> int:
    return torch._C._current_graph_task_id()


@contextmanager
def use_sharding(sharding: Sharding, kv_sharding: Sharding | None = None) -> Iterator[None]:
    """Make a sharding the current one: calls inside that are given none use it.

    For code that cannot pass a sharding as an argument, as the layers of `torch.nn.TransformerEncoder`. Uses may be nested;
    the innermost counts, and a sharding that a call is given wins. It belongs to the thread that enters it.
    Activation checkpointing runs the forward again in the backward, outside of the `with`: pass `checkpoint_contexts` to it.

    Args:
        sharding: The positions of each rank, from `ring.sharding`.
        kv_sharding: The sharding of the keys of cross attention. `RingMultiheadAttention` uses it where key is not the same
            tensor as query; `scaled_dot_product_attention`, which cannot tell, everywhere inside.

    Returns:
        A context manager.

    Example:
        >>> from ringattn import Ring, scaled_dot_product_attention
        >>> x = torch.ones(1, 2, 5, 16)  # b h s d
        >>> with use_sharding(Ring().sharding(5)):
        ...     scaled_dot_product_attention(x, x, x).shape
        torch.Size([1, 2, 5, 16])
    """
    global _used
    check_sharding(sharding)
    if kv_sharding is not None:
        check_sharding(kv_sharding, "kv_sharding")
    _used = True
    with _entered(sharding, kv_sharding):
        yield


@contextmanager
def _entered(sharding: Sharding | None, kv_sharding: Sharding | None) -> Iterator[None]:
    compiling = torch.compiler.is_compiling()
    entry = _Entry(sharding, kv_sharding, -1 if compiling else _backward_pass())
    holder = _current if _traced is None or not compiling else _traced
    before = holder.entry
    holder.entry = entry
    try:
        if _traced is None or compiling:
            yield
        else:
            with _traced.shown(entry):
                yield
    finally:
        holder.entry = before


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Carry the current sharding into recomputation: a `context_fn` for `torch.utils.checkpoint`.

        with ringattn.use_sharding(sharding):
            y = checkpoint(layer, x, use_reentrant=False, context_fn=ringattn.checkpoint_contexts)

    A checkpoint inside of compiled code needs no help, and torch refuses this there: recomputation is part of the graph.

    Returns:
        Context managers for the forward and for the recomputation.
    """
    entry = _current.entry
    return nullcontext(), _Again(*((None, None) if entry is None else entry[:2]))


class _Again(AbstractContextManager[None]):
    """The sharding of a forward, for each of its recomputations: there are several with retain_graph."""

    def __init__(self, sharding: Sharding | None, kv_sharding: Sharding | None) -> None:
        self._shardings = sharding, kv_sharding

    def __enter__(self) -> None:
        self._inside = _entered(*self._shardings)
        self._inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)


def find_sharding() -> tuple[Sharding, Sharding | None] | None:
    """Return the current sharding and that of keys; None where there is none.

    Raises:
        RuntimeError: It was set outside of the backward pass that recomputes this forward.
    """
    # a compiled forward is recomputed by its own graph, where the sharding is a constant
    entry = (_current if _traced is None or not torch.compiler.is_compiling() else _traced).entry
    if entry is not None and entry.backward_pass == _AMBIGUOUS.backward_pass:
        raise RuntimeError(
            f"compiled code on torch {torch.__version__} must find the sharding of one thread, got several threads inside of "
            "use_sharding (autograd may be one: leave the `with` before backward()); pass sharding= to calls, or use torch 2.13"
        )
    if not torch.compiler.is_compiling():
        here = _backward_pass()
        # where there never was a sharding, there is none to be missed
        if entry.backward_pass != here if entry is not None else here >= 0 and _used:
            raise RuntimeError(
                "a forward that is recomputed during backward must find the sharding of its first run, got none that reaches "
                "there; pass use_reentrant=False and context_fn=ringattn.checkpoint_contexts to torch.utils.checkpoint, or "
                "sharding= to the call"
            )
    return None if entry is None or entry.sharding is None else (entry.sharding, entry.kv_sharding)


def resolve_sharding(
    sharding: Sharding | None, kv_sharding: Sharding | None
) -> tuple[Sharding, Sharding | None] | None:
    """Return the sharding of a call and that of its keys where it is another one; None where there is none.

    Given ones win over current ones, and a sharding alone is that of queries and keys.
    """
    for name, x in (("sharding", sharding), ("kv_sharding", kv_sharding)):
        if x is not None:
            check_sharding(x, name)
    if sharding is not None:
        return sharding, kv_sharding
    found = find_sharding()
    if found is None or kv_sharding is None:
        return found
    return found[0], kv_sharding
