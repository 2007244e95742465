"""Which ranks new pages are on.

Owns how pages are dealt, by what each rank has room for. Refuses to know whose they are, and why there is room. Standard library
only.

Note [Even work]
    A page of a prompt is computed by the rank that keeps it, and a causal row costs what lies before it. So the new pages of
    a prompt are dealt in a zigzag: one stretch per rank on the way up, one on the way down, equally long as far as ranks have
    room. Tokens that come one by one go to the rank with most free pages.
"""

from __future__ import annotations

from collections.abc import Sequence


def deal(pages: int, room: Sequence[int], one_by_one: bool) -> list[tuple[int, int]]:
    """The ranks of new pages, in order, as (rank, so many) (Note [Even work])."""
    assert pages <= sum(room), f"{pages} promised pages must be there, got {list(room)}"
    if one_by_one:
        left, dealt = list(room), []
        for _ in range(pages):
            rank = max(range(len(room)), key=left.__getitem__)
            left[rank] -= 1
            dealt.append((rank, 1))
        return dealt
    share = share_out(pages, room)
    up = [(held + 1) // 2 for held in share]
    ranks = range(len(room))
    order = [(r, up[r]) for r in ranks] + [(r, share[r] - up[r]) for r in reversed(ranks)]
    return [(rank, held) for rank, held in order if held]


def share_out(pages: int, room: Sequence[int]) -> list[int]:
    """How many pages each rank gets: equally many as far as there is room, the odd ones where it is emptiest."""
    share = [0] * len(room)
    while pages:
        ranks = [rank for rank in range(len(room)) if share[rank] < room[rank]]
        each = pages // len(ranks)
        if not each:
            for rank in sorted(ranks, key=lambda r: (share[r] - room[r], r))[:pages]:
                share[rank] += 1
            return share
        for rank in ranks:
            more = min(each, room[rank] - share[rank])
            share[rank] += more
            pages -= more
    return share
