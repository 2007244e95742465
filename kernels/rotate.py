"""Rotary embeddings of few rows: q and k rotated at once. Plain torch; `rotate_triton` has the same for GPUs.

Owns what the rotation is, and the choice between the two implementations. Refuses to know where angles come from.

Shape legend: `n` rows, `h` query heads, `hk` key heads, head_dim `d`.

Note [Halves]
    Number i of the first half of a head and number i of the second half are a point of the plane, which is turned by an angle that
    all heads of a row share: (x, y) becomes (x cos a - y sin a, y cos b + x sin b), where cosines and sines are given for
    both halves (a and b are the same angle as a rule). RoFormer, arXiv:2104.09864, in the layout of GPT-NeoX. It is
    computed in fp32 and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.kernels.runtime.optional_triton import import_optional

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 512
"""Numbers of a head at most where there is a kernel."""
MOST_ROWS = 1024
"""Rows up to which the kernel is taken: its programs are too short to be many."""


def has_kernel(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether there is a kernel for tensors like these; see `rotate`."""
    d = q.shape[-1]
    halves = 2 <= d <= WIDEST and d & (d - 1) == 0
    plain = all(x.dtype in DTYPES and x.stride(-1) == 1 and x.shape[-1] == d for x in (q, k, cos, sin))
    few = len(q) <= MOST_ROWS
    return q.is_cuda and few and halves and plain and import_optional("ringattn.kernels.rotate_triton") is not None


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns q and k (Note [Halves]); on a GPU it is one launch, if `has_kernel` says that there is one.

    Args:
        q: `n h d`, any strides.
        k: `n hk d`, the dtype of q, any strides.
        cos: `n d`: of each half's angles.
        sin: `n d`.

    Returns:
        `n h d` and `n hk d`, contiguous, the dtype of q.

    Example:
        >>> x, turn = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[0.0, 0.0]])
        >>> rotate(x, x, turn, turn + 1)[0]  # by a right angle
        tensor([[[0., 1.]]])
    """
    if has_kernel(q, k, cos, sin):
        twin = import_optional("ringattn.kernels.rotate_triton")
        return twin.rotate(q, k, cos, sin)
    return rotate_eager(q, k, cos, sin)


def rotate_eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotate` in plain torch."""
    c, s = cos.float()[:, None], sin.float()[:, None]

    def turned(x: Tensor) -> Tensor:
        one, two = x.float().chunk(2, -1)
        return (x.float() * c + torch.cat((-two, one), -1) * s).to(x.dtype)

    return turned(q), turned(k)
