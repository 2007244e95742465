"""Generate an image with the denoiser on a ring: `torchrun --nproc_per_node 2 examples/diffusers_image.py [image.png]`.

A Flux pipeline with tiny random weights, so that it runs on a laptop; the two changes to a pipeline of yours are marked. Each rank
computes its share of the text and image tokens, and gets the whole image. Rank 0 prints:

    36 x 28 image, 5 text and 63 image tokens, rows by rank: 35, 33
    largest difference to one process ... (equal up to rounding)
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from PIL import Image

import ringattn
from ringattn.integrations.diffusers import disable_ring, enable_ring

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
device = f"cuda:{dist.get_node_local_rank()}" if cuda else "cpu"
ring = ringattn.Ring()

torch.manual_seed(0)  # the same weights and text on all ranks
transformer = FluxTransformer2DModel(
    in_channels=16,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=32,
    num_attention_heads=4,
    joint_attention_dim=32,
    pooled_projection_dim=16,
    axes_dims_rope=(8, 12, 12),
)
vae = AutoencoderKL(
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    block_out_channels=(8, 8),
    norm_num_groups=4,
    latent_channels=4,
    shift_factor=0.0,
)
pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), vae, None, None, None, None, transformer).to(device)
pipe.set_progress_bar_config(disable=True)
prompt = {"prompt_embeds": torch.randn(1, 5, 32), "pooled_prompt_embeds": torch.randn(1, 16)}


def generate():
    """Return an image, `height width 3` in 0 to 1."""
    return pipe(
        **{name: x.to(device) for name, x in prompt.items()},
        height=36,
        width=28,
        num_inference_steps=4,
        generator=torch.Generator("cpu").manual_seed(1),  # the same noise on all ranks: change 1
        output_type="np",
    ).images[0]


one = generate()
enable_ring(pipe.transformer, ring)  # change 2
image = generate()
disable_ring(pipe.transformer)

worst = float(np.abs(image - one).max())
if ring.rank == 0:
    rows = ring.sharding(5 + 63, "segments", segments=[5, 63]).shard_lens
    print(f"36 x 28 image, 5 text and 63 image tokens, rows by rank: {', '.join(map(str, rows))}")
    verdict = "equal up to rounding" if worst < (1e-2 if cuda else 1e-5) else "DIFFERENT"
    print(f"largest difference to one process {worst:.1e} ({verdict})")
    for path in sys.argv[1:]:
        Image.fromarray((image * 255).round().astype("uint8")).save(path)
dist.destroy_process_group()
