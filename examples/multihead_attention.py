"""Convert a torch model to ring attention: `torchrun --nproc_per_node 2 examples/multihead_attention.py`.

A classifier made of `nn.TransformerEncoder` learns which of two tokens a padded sequence holds more often. One call converts it;
each rank then holds its own rows of every sequence. Beside it the same model trains on one process. Rank 0 prints:

    converted: layers.layers.0.self_attn, layers.layers.1.self_attn
    step 1: loss 0.6..., one process 0.6..., gradients differ by ... (equal up to rounding)
    ...
    step 10: loss 0.2..., one process 0.2..., gradients differ by ... (equal up to rounding)
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ringattn


class Classifier(nn.Module):
    """Tokens to one of two classes; the mean over tokens is the only thing that knows of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(8, 64), nn.Embedding(201, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(64, 2)

    def forward(self, tokens, positions, padding):
        """The logits, summed over the tokens that are here and not padding."""
        x = self.layers(self.tokens(tokens) + self.places(positions), src_key_padding_mask=padding)
        return self.head(x).masked_fill(padding[..., None], 0).sum(1)


cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
torch.set_default_device(f"cuda:{dist.get_node_local_rank()}" if cuda else "cpu")
ring = ringattn.Ring()
sharding = ring.sharding(seq_len=201, layout="contiguous")  # no mask is causal: plain stretches are balanced

torch.manual_seed(0)  # the same weights and the same batches on all ranks
one = Classifier()
model = copy.deepcopy(one)
names = ringattn.replace_multihead_attention(model, ring)  # the swap; optimizers and hooks go on working
optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (model, one)]
if ring.rank == 0:
    print("converted:", ", ".join(names))

positions = torch.arange(201)
for step in range(1, 11):
    ring.check_inputs = step <= 3  # an error if ranks were given different tokens
    lengths = torch.randint(100, 202, (8, 1))
    shares = torch.rand(8, 1)
    tokens = torch.where(torch.rand(8, 201) < 0.5, torch.rand(8, 201) < shares, torch.randint(2, 8, (8, 201))).long()
    padding = positions >= lengths
    labels = (((tokens == 1) & ~padding).sum(1) > ((tokens == 0) & ~padding).sum(1)).long()

    with ringattn.use_sharding(sharding):
        part = model(*(sharding.shard(x, dim=-1) for x in (tokens, positions, padding)))
    logits = torch.stack(ring.gather(part[None], 0, [1] * ring.world_size)).sum(0)[0]
    loss = F.cross_entropy(logits / lengths, labels)
    (loss / ring.world_size).backward()  # every rank computes this loss: together they count it once
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # each rank has the share of its rows

    expected = F.cross_entropy(one(tokens, positions, padding) / lengths, labels)
    expected.backward()
    worst = max(
        float((p.grad - q.grad).abs().max() / q.grad.abs().max())
        for p, q in zip(model.parameters(), one.parameters(), strict=True)
    )
    if ring.rank == 0 and (step == 1 or step % 5 == 0):
        # weights drift apart by rounding, step by step
        verdict = "equal up to rounding" if worst < (0.05 if cuda else 1e-3) else "DIFFERENT"
        print(f"step {step}: loss {loss:.4f}, one process {expected:.4f}, gradients differ by {worst:.1e} ({verdict})")
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
