"""Rotary embeddings that take other frequencies for longer calls, and calls that ranks would rotate differently.

Owns which models have such embeddings, and what ranks must have in common for them. Refuses to rotate, and to correct rotations.

Note [Frequencies of a call]
    Models with rope_type 'longrope' or 'dynamic' choose frequencies by the last position of a call. A rank is called with its
    own rows, so its last position is not that of the sequence, and its queries and keys may be rotated otherwise than those of
    other ranks. Frequencies of 'longrope' are one set up to a length and another one beyond it: all is well where every rank
    is on the same side. Those of 'dynamic' are of the very length once that is beyond what the model was trained for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ringattn.plan.sharding import Sharding, positions_of


def find_turns(config: Any) -> tuple[tuple[str, int], ...]:
    """The rope_type and the length from which on frequencies are other ones, for each kind of layer where they become so."""
    told = getattr(config, "rope_parameters", None)  # of 5.x
    told = getattr(config, "rope_scaling", None) if told is None else told
    return tuple(_turns_of(told, config)) if isinstance(told, dict) else ()


def _turns_of(told: dict[str, Any], config: Any) -> Iterator[tuple[str, int]]:
    for own in told.values():
        if isinstance(own, dict):
            yield from _turns_of(own, config)
    kind = told.get("rope_type", told.get("type")) or ""
    if kind == "longrope":
        of_config = getattr(config, "original_max_position_embeddings", None)
        yield kind, told.get("original_max_position_embeddings") or of_config or config.max_position_embeddings
    elif "dynamic" in kind:
        yield kind, config.max_position_embeddings


def find_ends(sharding: Sharding, last: int | None = None) -> list[int]:
    """One past the last position of each rank that has rows.

    Args:
        sharding: Who holds which rows.
        last: The last position of this rank, which tells where positions count from; None: from the start of each document.
    """
    mine = sharding.rank
    found = [ends for ends in (_within_documents(sharding), _within_sequence(sharding)) if ends is not None]
    chosen = found[0] if last is None else next((ends for ends in found if ends[mine] == last + 1), found[-1])
    shift = 0 if last is None else last + 1 - chosen[mine]
    return [end + shift for end in chosen if end]


def _within_sequence(sharding: Sharding) -> list[int]:
    return [shard[-1].last + 1 if shard else 0 for shard in sharding.shards]


def _within_documents(sharding: Sharding) -> list[int] | None:
    if sharding.documents is None:
        return None
    if torch.compiler.is_compiling():
        # without a look at positions: any rank may have the end of the longest one, or none
        lengths = [stop - start for start, stop in zip(sharding.documents[:-1], sharding.documents[1:], strict=True)]
        return [max(lengths)] + [1] * (len(sharding.shards) - 1)
    edges, found = torch.tensor(sharding.documents, device="cpu"), list[int]()
    for positions in map(positions_of, sharding.shards):
        inside = positions - edges[torch.searchsorted(edges, positions, right=True) - 1]
        found.append(int(inside.max()) + 1 if len(positions) else 0)
    return found


def check_rotation(turns: Iterable[tuple[str, int]], ends: Iterable[int]) -> None:
    """Refuses calls that not all ranks, and not all requests of it, rotate by the frequencies of one process.

    Args:
        turns: What `find_turns` found.
        ends: One past the last position, of each rank and each request.

    Raises:
        NotImplementedError: Frequencies would differ.
    """
    lengths = sorted(set(ends))
    for kind, most in turns:
        if len(lengths) < 2 or lengths[-1] <= most or (kind == "longrope" and lengths[0] > most):
            continue
        instead = "" if kind != "longrope" else f", or longer ones, of which all have positions beyond {most}"
        raise NotImplementedError(
            f"rows of all ranks and requests must end by position {most} where rope_type is {kind!r}, whose frequencies depend on "
            f"the last position of a call, got some that end at {lengths[0]} and at {lengths[-1]}; use shorter "
            f"sequences{instead}, or one process and one request at a time"
        )
