"""Keys and values of many requests, spread over the ranks of a ring in pages.

Owns the memory of this rank's pages: how it is laid out, how rows are put there and taken out. Refuses to know who keeps what
(pages.py) and how attention reads it (attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ringattn.inference.accord import Accord
from ringattn.inference.pages import Pages
from ringattn.inference.step import MOST_DECODED, Step, make_step
from ringattn.ring import Ring


class PagedKVCache:
    """A cache of keys and values whose pages lie on all ranks of a ring.

    Every rank makes the same cache and the same calls in the same order; each keeps the tokens that fall to it, and all know who keeps
    what, without a message. A request joins with the length that it may grow to; what cannot fit is refused before work begins.

    Args:
        ring: The ranks.
        layers: Layers of the model.
        kv_heads: Key heads.
        head_dim: Of the keys.
        v_head_dim: Of the values; default head_dim.
        dtype: Of keys and values as attention gets and reads them.
        pages: Pages of each rank.
        page_size: Tokens of a page.
        device: Where; default the current GPU, or the CPU where there is none.

    Attributes:
        ring: As given.
        pages: The books.
        accord: What the ranks have compared.
        page_size: As given.
        device: Where it is.
        k: `layers pages hk page_size d`.
        v: `layers pages hk page_size dv`.

    Example:
        >>> cache = PagedKVCache(Ring(), layers=1, kv_heads=1, head_dim=16, dtype=torch.float32, pages=4, page_size=4, device="cpu")
        >>> request = cache.join(reserve=10)
        >>> step = cache.extend([request], [7])
        >>> step.mode, step.rows, step.positions.tolist()
        ('decode', 7, [[0, 1, 2, 3, 4, 5, 6]])
    """

    def __init__(
        self,
        ring: Ring,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype,
        pages: int,
        page_size: int = 64,
        device: torch.device | str | None = None,
    ) -> None:
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.ring, self.page_size, self.device = ring, page_size, torch.device(device)
        self.layers, self.kv_heads, self.dtype = layers, kv_heads, dtype
        self.head_dim, self.v_head_dim = head_dim, head_dim if v_head_dim is None else v_head_dim
        self.pages = Pages(ring.world_size, pages, page_size)
        sizes = f"{layers} layers of {pages} pages of {page_size} x {kv_heads} heads x {self.head_dim} + {self.v_head_dim} {dtype}"
        self.accord = Accord(ring, f"a cache of {sizes}")
        shape = (layers, pages, kv_heads, page_size)
        self.k = torch.zeros(*shape, self.head_dim, dtype=dtype, device=self.device)
        self.v = torch.zeros(*shape, self.v_head_dim, dtype=dtype, device=self.device)

    def join(self, reserve: int, first: int = 0) -> int:
        """Lets a request in; see `Pages.join`."""
        return self.pages.join(reserve, first)

    def fork(self, request: int, length: int | None = None, reserve: int | None = None) -> int:
        """Lets a request in that shares the beginning of another one; see `Pages.fork`."""
        return self.pages.fork(request, length, reserve)

    def crop(self, request: int, length: int) -> None:
        """Forgets a request's last tokens; see `Pages.crop`."""
        self.pages.crop(request, length)

    def leave(self, request: int) -> None:
        """Lets a request go."""
        self.pages.leave(request)

    def length(self, request: int) -> int:
        """Tokens of a request."""
        return self.pages.length(request)

    def extend(self, requests: Sequence[int], counts: Sequence[int], *, mode: Literal["auto", "prefill", "decode"] = "auto", alike: bool = False) -> Step:
        """Makes room for new tokens, and says how the call of the model that brings them goes.

        Args:
            requests: Which ones, each once.
            counts: New tokens of each.
            mode: "prefill", "decode", or "auto": decode when all bring the same number, at most 16.
            alike: The requests are one batch of equal lengths: prefill keeps the batch dimension instead of packing them.

        Raises:
            ValueError: As `Pages.place`; or decode with unequal or too many new tokens.
            CacheFull: As `Pages.place`.
        """
        few = len(set(counts)) == 1 and counts[0] <= MOST_DECODED
        if mode == "decode" and not few:
            raise ValueError(f"decode must bring the same number of new tokens for each request, at most {MOST_DECODED}, got {list(counts)}; use mode='prefill'")
        if mode == "auto":
            mode = "decode" if few else "prefill"
        pieces = self.pages.place(requests, counts, alike=alike, one_by_one=mode == "decode")
        return make_step(self, requests, counts, pieces, mode, alike)

    def put(self, layer: int, step: Step, k: Tensor, v: Tensor) -> None:
        """Keeps the rows of a step that fall to this rank.

        Args:
            layer: Of which layer.
            step: Whose rows.
            k: `batch rows hk d`.
            v: `batch rows hk dv`.
        """
        slots = step.slots.flatten()
        mine = slots >= 0
        page, row = slots[mine] // self.page_size, slots[mine] % self.page_size
        self.k[layer][page, :, row] = k.flatten(0, 1)[mine]
        self.v[layer][page, :, row] = v.flatten(0, 1)[mine]

    def take(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Rows that are kept here.

        Args:
            layer: Of which layer.
            slots: `batch t`: page * page_size + row.

        Returns:
            K `batch t hk d` and v `batch t hk dv`.
        """
        page, row = slots // self.page_size, slots % self.page_size
        return self.k[layer][page, :, row], self.v[layer][page, :, row]
