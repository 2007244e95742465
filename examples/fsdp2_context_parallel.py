"""FSDP2 beside context parallelism: a small transformer on a mesh of dp x cp, with the loss of one process.

    torchrun --nproc_per_node 4 examples/fsdp2_context_parallel.py            # dp 2 x cp 2; GPUs, or CPUs without them
    torchrun --nproc_per_node 4 examples/fsdp2_context_parallel.py --cp 4     # dp 1 x cp 4

Every dp rank has sequences of its own, every cp rank its rows of them. Parameters, gradients and optimizer state are sharded
over all ranks. Expect a falling loss, and in the last column its difference to the same training in one process: rounding.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import ringattn

VOCABULARY, WIDTH, HEADS, HEAD_DIM, BLOCKS = 128, 64, 4, 16, 2
SEQUENCES, SEQ_LEN = 4, 501
TEXT = "one ring to join the rows that no single rank can hold; "


class Block(nn.Module):
    """Norm, attention, norm, MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, sharding: ringattn.Sharding | None) -> Tensor:
        """This rank's rows `b s e`; all rows where there is no sharding."""
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, HEAD_DIM).unbind(2)
        if sharding is None:  # one process, by torch's own attention
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            o = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:
            o = ringattn.ring_attention(q, k, v, sharding, causal=True)
        x = x + self.out(o.flatten(2))
        return x + self.down(silu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Embeddings, blocks, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQ_LEN, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, sharding: ringattn.Sharding | None) -> Tensor:
        """Logits, one row per token, of tokens `b s` at global positions `s`."""
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x, sharding)
        return self.head(x.flatten(0, 1))


def sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """In nats, over the tokens that are here."""
    return cross_entropy(logits.float(), labels.flatten(), reduction="sum")


def batch_of(step: int, device: str) -> tuple[Tensor, Tensor]:
    """All sequences of a step, the same on every rank; labels are shifted before anything is sharded."""
    text = torch.tensor(list(TEXT.encode()), device=device)
    starts = torch.randint(len(text), (SEQUENCES, 1), generator=torch.Generator().manual_seed(step)).to(device)
    rows = text[(starts + torch.arange(SEQ_LEN + 1, device=device)) % len(text)]
    return rows[:, :-1], rows[:, 1:]


def train(steps: int, cp: int | None) -> list[tuple[float, float]]:
    """Trains on the mesh, and beside it in one process; (loss, loss of one process) of each step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    world_size = dist.get_world_size()
    cp = cp or (2 if world_size % 2 == 0 else world_size)
    if world_size % cp:
        raise SystemExit(f"--cp must divide the {world_size} ranks, got {cp}")
    mesh = init_device_mesh(device, (world_size // cp, cp), mesh_dim_names=("dp", "cp"))
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    if SEQUENCES % mesh["dp"].size():
        raise SystemExit(f"dp must divide the {SEQUENCES} sequences, got {mesh['dp'].size()}")

    torch.manual_seed(0)
    model = Transformer().to(device)
    whole_model = copy.deepcopy(model)  # what one process would train
    for module in (*model.blocks, model):
        fully_shard(module, mesh=everyone)

    ring = ringattn.Ring(mesh["cp"])
    sharding = ring.sharding(SEQ_LEN, device=device)
    optimizer, whole_optimizer = (torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (model, whole_model))

    losses = []
    for step in range(steps):
        ring.check_inputs = step < 3  # an error if cp ranks of one sequence were given different tokens
        tokens, labels = batch_of(step, device)
        count = labels.numel()  # of all ranks; with masked labels: those that count, summed over the mesh

        mine = [x.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for x in (tokens, labels)]
        my_tokens, my_labels = (sharding.shard(x, dim=1) for x in mine)
        loss = sum_of_losses(model(my_tokens, sharding.positions, sharding), my_labels) / count
        (loss * everyone.size()).backward()  # FSDP takes the mean over its ranks, and we want the sum
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss, group=everyone.get_group())

        whole_loss = sum_of_losses(whole_model(tokens, torch.arange(SEQ_LEN, device=device), None), labels) / count
        whole_loss.backward()
        whole_optimizer.step()
        whole_optimizer.zero_grad()

        losses.append((loss.item(), whole_loss.item()))
        if dist.get_rank() == 0:
            if step == 0:
                rows = ", ".join(str(n) for n in sharding.shard_lens)
                print(f"{world_size} ranks on {device}: dp {mesh['dp'].size()} x cp {cp}, rows per cp rank: {rows}")
                print("step      loss   one process   difference")
            print(
                f"{step:4}  {loss.item():8.5f}      {whole_loss.item():8.5f}     {loss.item() - whole_loss.item():+.1e}"
            )
    difference = max(abs(a - b) for a, b in losses)
    if difference > 1e-3:
        raise SystemExit(f"the loss must be that of one process, got a difference of {difference}")
    if dist.get_rank() == 0:
        print(f"equal within rounding: {difference:.1e}")
    return losses


def main() -> None:
    """Joins the ranks that torchrun started, and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, help="ranks that share a sequence; the others are dp; default 2")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_node_local_rank())
    try:
        train(args.steps, args.cp)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
