"""Attention over one sequence held by all ranks: `torchrun --nproc_per_node 2 examples/quickstart.py`."""

import torch
import torch.distributed as dist

import ringattn

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
device = f"cuda:{dist.get_node_local_rank()}" if cuda else "cpu"
torch.set_default_device(device)
ring = ringattn.Ring()
sharding = ring.sharding(seq_len=1001, layout="zigzag")  # any length, any number of ranks
x = torch.randn(1, sharding.shard_len, 8, 64, requires_grad=True)  # this rank's rows: b s h d
y = ringattn.ring_attention(x, x, x, sharding, causal=True)  # ... over the keys of all ranks
y.sum().backward()
print(f"rank {ring.rank} of {ring.world_size}: output {tuple(y.shape)}, gradient norm {x.grad.norm():.3f}")
dist.destroy_process_group()
