"""Log-probabilities with the same bits on any number of processes: `torchrun --nproc_per_node 2 examples/same_bits.py`.

The ring computes attention as 4 virtual ranks, whatever the number of processes that divides 4. The bits of a matrix product may
depend on its number of rows, so the other layers, too, are given the rows of one virtual rank at a time. On 1, 2 and 4 processes it
prints one digest. A ring without virtual ranks (--plain) prints another one for each.
"""

import argparse
import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import rms_norm

import ringattn

VOCABULARY, DIM, HEADS = 97, 64, 4


class Block(nn.Module):
    """Attention and an MLP, both behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, sharding: ringattn.Sharding) -> Tensor:
        """Return the rows of this process after the block, `b s dim`."""
        qkv = by_rank(lambda rows: self.qkv(rms_norm(rows, (DIM,))), x, sharding)
        q, k, v = qkv.unflatten(2, (HEADS, -1)).chunk(3, -1)
        o = ringattn.ring_attention(q, k, v, sharding, causal=True).flatten(2)
        x = x + by_rank(self.out, o, sharding)
        return x + by_rank(lambda rows: self.mlp(rms_norm(rows, (DIM,))), x, sharding)


def by_rank(layer: Callable[[Tensor], Tensor], x: Tensor, sharding: ringattn.Sharding) -> Tensor:
    """Apply a layer to the rows of one virtual rank at a time."""
    lens = [rows.shard_len for rows in sharding.hosted or (sharding,)]
    return torch.cat([layer(rows) for rows in x.split(lens, 1)], 1)


def main() -> None:
    """Print a digest of the log-probabilities of a random text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="a ring without virtual ranks")
    plain = parser.parse_args().plain
    dist.init_process_group("gloo")
    ring = ringattn.Ring(virtual_size=None if plain else 4)
    torch.manual_seed(0)
    embedding, blocks, head = nn.Embedding(VOCABULARY, DIM), [Block(), Block()], nn.Linear(DIM, VOCABULARY)
    tokens = torch.randint(VOCABULARY, (1, 501))
    sharding = ring.sharding(tokens.shape[1])
    with torch.no_grad():
        x = embedding(sharding.shard(tokens))
        for block in blocks:
            x = block(x, sharding)
        scores = by_rank(lambda rows: head(rows).log_softmax(-1), x, sharding)
        labels = sharding.shift_labels(tokens, ignore_index=0)
        found = sharding.unshard(scores.gather(2, labels[..., None])[..., 0])
    digest = hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16]
    print(f"rank {ring.rank} of {ring.world_size}: sum {found.sum():.4f}, digest {digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
