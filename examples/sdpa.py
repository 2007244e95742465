"""Swap `F.scaled_dot_product_attention` for the one that spans ranks: `torchrun --nproc_per_node 2 examples/sdpa.py`.

The attention block below is ordinary code that calls SDPA. Each rank runs it on its own rows with ringattn's function in
place of torch's, and compares with the whole sequence on one process. Rank 0 prints:

    output: largest difference to one process ... (equal up to rounding)
    gradients: largest difference to one process ... (equal up to rounding)
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ringattn


class Block(nn.Module):
    """Causal self-attention that calls SDPA, with 8 query heads and 2 key heads."""

    def __init__(self, sdpa) -> None:
        super().__init__()
        self.sdpa = sdpa
        self.qkv, self.out = nn.Linear(256, (8 + 2 + 2) * 32), nn.Linear(256, 256)

    def forward(self, x):
        """Rows to rows, `b s e`."""
        q, k, v = self.qkv(x).unflatten(-1, (-1, 32)).transpose(1, 2).split((8, 2, 2), 1)  # b h s d
        o = self.sdpa(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(o.transpose(1, 2).flatten(2))


cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
torch.set_default_device(f"cuda:{dist.get_node_local_rank()}" if cuda else "cpu")
ring = ringattn.Ring(check_inputs=True)  # for the first steps: an error if ranks have different sequences
sharding = ring.sharding(seq_len=1001)

torch.manual_seed(0)  # the same weights and the same whole sequence on all ranks
block = Block(ringattn.scaled_dot_product_attention)  # the swap
x = torch.randn(1, 1001, 256)

with ringattn.use_sharding(sharding):
    y = block(sharding.shard(x))  # this rank's rows over the keys of all ranks
y.square().sum().backward()

one = Block(F.scaled_dot_product_attention)
one.load_state_dict(block.state_dict())
whole = one(x)
whole.square().sum().backward()


def report(name, pairs):
    """Prints the largest difference, relative to the largest number."""
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    if ring.rank == 0:
        print(f"{name}: largest difference to one process {worst:.1e} ({verdict(worst)})")


def verdict(worst):
    """What a difference means; TF32 and SDPA's own kernels round more on a GPU."""
    return "equal up to rounding" if worst < (1e-2 if cuda else 1e-5) else "DIFFERENT"


report("output", [(sharding.unshard(y.detach()), whole.detach())])
for parameter in block.parameters():
    dist.all_reduce(parameter.grad)  # each rank has the share of its rows
report("gradients", [(p.grad, q.grad) for p, q in zip(block.parameters(), one.parameters(), strict=True)])
dist.destroy_process_group()
