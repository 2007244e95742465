"""Models whose weights are stored once over ranks answer as those whose weights every rank has."""

from __future__ import annotations

import copy
import ctypes
import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from ringattn import Ring
from ringattn.integrations.transformers import (
    RingCache,
    compile_for_decode,
    decode_compile,
    load_sharded_model,
    register,
    shard_weights,
)
from ringattn.integrations.transformers.model_forward import SHARDED
from ringattn.integrations.transformers.sharded_weights import forwards, load, shard
from ringattn.integrations.transformers.sharded_weights.layer_gather import LayerGather
from ringattn.integrations.transformers.sharded_weights.plan import Slot, plan_weights
from ringattn.integrations.transformers.sharded_weights.slices import Slice, slice_width
from ringattn.sizing.memory import REPLICATED_ROWS
from ringattn.transport.copy_engine.peer_reads import PeerReads
from ringattn.transport.copy_engine.streams import Copy
from ringattn.transport.copy_engine.symmetric_memory import Region
from tests.integrations.transformers.models import tokens
from tests.integrations.transformers.test_decode_compile import compare_little
from tests.support.fake_streams import FakeMemory, FakeStreams, World
from tests.support.graph_recorder import Reruns
from tests.support.pool import Pools

COMMON = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of which few divide by 2 and none by 3."""
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20, "num_experts": 5}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen2": {},  # biases of q, k and v
    "phi3": {"sliding_window": 9},  # q, k and v, and gate and up, are one weight each
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gpt_oss": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [1], "decoder_sparse_step": 1},
    "glm4_moe_lite": {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "n_routed_experts": 6,
        "num_local_experts": 6,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
}
M_MMAP_THRESHOLD = -3
"""Of mallopt: allocations from this size on are mappings of their own."""
GREEDY = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}
SLICES, GATHERED = 10**9, 1
"""Least rows of a prefill that gathers weights: none does, or all do."""

pytestmark = pytest.mark.skipif(int(transformers.__version__[0]) < 5, reason="4.57 stores experts one by one")


def make(kind: str, attention: str = "ringattn", **changes: Any) -> Any:
    """A tiny model; its weights depend on the kind alone."""
    register()
    config = transformers.AutoConfig.for_model(kind, **{**COMMON, **FAMILIES[kind], **changes})
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # larger than the usual start, so that tokens differ
                parameter.mul_(6)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_()
    return model.requires_grad_(False)


def calls() -> list[dict[str, Any]]:
    """A long prompt, one of few tokens, and a batch with padding in chunks."""
    mask = torch.ones(2, 29, dtype=torch.int64)
    mask[0, :5] = 0
    two = tokens(29, 2).masked_fill(mask == 0, 0)
    one, few = tokens(37), tokens(7, seed=2)
    return [
        {"input_ids": one, "attention_mask": torch.ones_like(one), **GREEDY},
        {"input_ids": few, "attention_mask": torch.ones_like(few), **GREEDY},
        {"input_ids": two, "attention_mask": mask, **GREEDY, "prefill_chunk_size": 18},
    ]


SCORED = {"return_dict_in_generate": True, "output_logits": True}


def alone(kind: str, **options: Any) -> list[Any]:
    """Tokens that one process generates with whole weights."""
    model = make(kind, "eager")
    whole = [{name: x for name, x in call.items() if name != "prefill_chunk_size"} for call in calls()]
    return [model.generate(**call, **options) for call in whole]


def on_ranks(kind: str, least_rows: int) -> tuple[list[tuple[Tensor, Tensor]], int, int, int]:
    """Tokens that a rank generates with their logits, bytes of its weights and of whole ones, and the layers that it gathered."""
    ring, model = Ring(), make(kind)
    whole = sum(x.nbytes for x in model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "rows_to_gather", lambda plan: least_rows)
        stored = shard_weights(model, ring)
    weights: Any = SHARDED.get(model)
    before = 0 if weights is None else weights.gather.gathered
    found = []
    for call in calls():
        with RingCache(model, ring, max_tokens=64, batch=2, page_size=4) as cache:
            out = model.generate(**call, past_key_values=cache, **SCORED)
            found.append((out.sequences, torch.stack(out.logits)))
    ring.close()
    return found, stored, whole, 0 if weights is None else weights.gather.gathered - before


@pytest.mark.models
@pytest.mark.parametrize(
    ("world_size", "least_rows"), [(1, SLICES), (2, SLICES), (2, GATHERED), (3, SLICES), (3, GATHERED)]
)
@pytest.mark.parametrize("kind", FAMILIES)
def test_answers_equal_those_of_whole_weights(pool: Pools, kind: str, world_size: int, least_rows: int) -> None:
    expected = alone(kind, **SCORED)
    for found, stored, whole, gathered in pool(world_size).run(on_ranks, kind, least_rows):
        for (ids, logits), one in zip(found, expected, strict=True):
            assert ids.tolist() == one.sequences.tolist()
            torch.testing.assert_close(logits, torch.stack(one.logits), rtol=1e-4, atol=1e-4)
        if world_size > 1:
            assert stored < whole * 0.75
            assert (gathered > 0) == (least_rows == GATHERED)


class _SharedFiles:
    """`Memory` of ranks that are processes: each region is a file per rank, which all map."""

    device = torch.device("cpu")

    def __init__(self, folder: str) -> None:
        self.folder, self.regions = folder, list[Region]()

    def region(self, num_bytes: int, what: str) -> Region:
        paths = [f"{self.folder}/{what}.{rank}" for rank in range(dist.get_world_size())]
        parts = [torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8) for path in paths]
        self.regions.append(Region(parts[dist.get_rank()], tuple(x.data_ptr() for x in parts), parts))
        return self.regions[-1]

    def barrier(self, what: str) -> None:
        del what
        dist.barrier()


class _AtOnce:
    """`Streams` of a device that executes copies as they are enqueued."""

    read_stream = 0

    def main(self) -> int:
        return 0

    def order(self, first: int, then: int) -> None: ...

    def compile(self, ops: list[Copy]) -> list[Copy]:
        return ops

    def launch(self, program: list[Copy], stream: int) -> None:
        for op in program:
            for row in range(op.rows):
                ctypes.memmove(op.target + row * op.target_pitch, op.source + row * op.source_pitch, op.width)


def read_by_copy_engine(kind: str, folder: str) -> tuple[list[list[int]], bool]:
    """Tokens of a model that gathers slices out of its peers' memory, and whether slices of layers are there alone."""
    memory, streams = _SharedFiles(folder), _AtOnce()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "choose_reads", lambda *_: PeerReads(streams, memory))  # pyright: ignore[reportArgumentType]
        patch.setattr(shard, "rows_to_gather", lambda plan: 9)
        ring, model = Ring(), make(kind)
        shard_weights(model, ring)
    weights: Any = SHARDED[model]
    regions = {region.local.untyped_storage().data_ptr() for region in memory.regions}
    slots = [slot for layer in weights.gather._layers for slot in layer]
    once = all(slot.weight.untyped_storage().data_ptr() in regions for slot in slots)
    found = []
    for call in calls():
        with RingCache(model, ring, max_tokens=64, batch=2, page_size=4) as cache:
            found.append(model.generate(**call, past_key_values=cache).tolist())
    ring.close()
    return found, once


@pytest.mark.parametrize("kind", ["qwen2", "gpt_oss"])
def test_slices_in_memory_that_peers_read_answer_alike_and_are_stored_once(
    pool: Pools, kind: str, tmp_path: Any
) -> None:
    expected = [x.tolist() for x in alone(kind)]
    assert pool(2).run(read_by_copy_engine, kind, str(tmp_path)) == [(expected, True)] * 2


class _Place:
    """In place of a ring: a rank of it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


def _slot(mine: Tensor, cut: Slice) -> Slot:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(mine, requires_grad=False)
    return Slot(module, "weight", cut)


def read_in_any_order(seed: int, one_queue: bool) -> list[bool]:
    """Gather layers of unequal sizes on three ranks, in three calls; whether each weight was whole when it was used."""
    torch.manual_seed(seed)
    ranks, found, gathers = 3, list[bool](), dict[int, LayerGather]()
    # dim, columns and parts; some ranks have few columns or none
    cuts = [Slice(d, n, slice_width(n, ranks), parts) for d, n, parts in ((0, 20, 1), (1, 6, 1), (2, 5, 2), (0, 10, 2))]
    whole = [[(torch.randn(20, 6, 10), cut) for cut in cuts[: 4 - layer % 3]] for layer in range(5)]
    world = World(ranks, seed)
    world.shared = one_queue
    streams = [FakeStreams(world, rank) for rank in range(ranks)]

    def begin(rank: int) -> None:
        layers = [[_slot(cut.cut(x, rank), cut) for x, cut in weights] for weights in whole]
        reads, ring = PeerReads(streams[rank], FakeMemory(world, rank)), _Place(rank, ranks)
        gathers[rank] = LayerGather(layers, ring, reads)  # pyright: ignore[reportArgumentType]
        forward(rank, 5)

    def forward(rank: int, ends: int) -> None:
        with gathers[rank].gather_ahead():
            for layer, weights in enumerate(whole[:ends]):
                for index, (expected, _) in enumerate(weights):
                    x = gathers[rank].whole(layer, index)
                    streams[rank].call(lambda x=x, expected=expected: found.append(torch.equal(x, expected)))

    world.hosts(begin)
    # a call that ends early leaves nothing behind
    for ends in (2, 5):
        world.hosts(lambda rank, ends=ends: forward(rank, ends))
    world.drain()
    return found


@pytest.mark.parametrize("one_queue", [False, True])
def test_slices_that_peers_read_are_whole_weights_in_any_interleaving(one_queue: bool) -> None:
    for seed in range(6):
        assert read_in_any_order(seed, one_queue) == [True] * 3 * (16 + 7 + 16), seed


def from_folder(folder: str) -> tuple[list[int], int, int, int]:
    """Tokens of a loaded model, the bytes that this rank stores, those that it read, and the most that it read at a time."""
    register()
    ring, read = Ring(), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        whole = load._Files.read

        def seen(*given: Any) -> Tensor:
            found = whole(*given)
            read.append(found.nbytes)
            return found

        patch.setattr(load._Files, "read", seen)
        model: Any = load_sharded_model(folder, ring)
    stored = sum(x.nbytes for x in model.parameters())
    with RingCache(model, ring, max_tokens=64, page_size=4) as cache:
        found = model.generate(**calls()[0], past_key_values=cache)
    ring.close()
    return found[0].tolist(), stored, sum(read), max(read)


@pytest.mark.models
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_rank_reads_and_stores_its_slice_of_a_checkpoint_alone(pool: Pools, kind: str, tmp_path: Any) -> None:
    model = make(kind, "eager")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    expected = model.generate(**calls()[0])[0].tolist()
    whole = sum(x.nbytes for x in model.parameters())
    for found, stored, read, most in pool(2).run(from_folder, str(tmp_path)):
        assert found == expected
        assert stored < 0.75 * whole
        # buffers beside parameters, and no weight twice
        assert read <= stored + 2048
        assert most <= whole / 8


def peaks(folder: str, rank: int, ranks: int) -> list[int]:
    """Most bytes of memory that this process takes more while it reads a rank's slices, and while it draws them; what they take."""
    register()
    libc, found = ctypes.CDLL(None), list[int]()
    device, config = torch.device("cpu"), transformers.AutoConfig.from_pretrained(folder)

    def status(name: str) -> int:
        [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)]
        return 1024 * int(line.split()[1])

    libc.mallopt(M_MMAP_THRESHOLD, 2**17)  # what is freed is given back
    mapped, load.MAPPED = load.MAPPED, 2**20
    for make_slices in (
        lambda plan: load.read_slices(Path(folder), plan, rank, device),
        lambda plan: load.draw_weights(plan.model, device, 0, plan, rank),
    ):
        plan = plan_weights(load.empty_model(config, torch.float32), ranks)
        gc.collect()
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = status("VmRSS")
        make_slices(plan)
        found.append(status("VmHWM") - before)
    libc.mallopt(M_MMAP_THRESHOLD, 2**25)
    load.MAPPED = mapped
    return [*found, sum(x.nbytes for x in plan.model.parameters())]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_takes_memory_for_its_slices_and_one_weight(pool: Pools, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 2**15, "num_hidden_layers": 1, "vocab_size": 512}
    config = transformers.AutoConfig.for_model("llama", **sizes, num_attention_heads=4, num_key_value_heads=2)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    read, drawn, stored = pool(1).run(peaks, str(tmp_path), 1, 3)[0]
    largest, other = 4 * 256 * 2**15, 12 * 2**20  # modules that are imported, and the numbers of a digest
    assert stored < 38e6 < 100e6 < (tmp_path / "model.safetensors").stat().st_size
    # of a weight the bytes that are read and the slice that is made of them
    assert read < stored + largest // 3 + other
    # a weight is drawn whole
    assert drawn < stored + largest + other


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss", "glm4_moe_lite"])
def test_random_slices_are_those_of_random_whole_weights(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **{**COMMON, **FAMILIES[kind]})
    register()
    whole = load.empty_model(config, torch.float32)
    digest = load.draw_weights(whole, torch.device("cpu"), 3)
    assert digest != load.draw_weights(load.empty_model(config, torch.float32), torch.device("cpu"), 4)
    for rank in range(3):
        plan = plan_weights(load.empty_model(config, torch.float32), 3)
        slices = {
            name: slot.slice for name, x in plan.model.named_parameters() for slot in plan.slots if slot.weight is x
        }
        assert digest == load.draw_weights(plan.model, torch.device("cpu"), 3, plan, rank)
        for name, x in plan.model.named_parameters():
            full = whole.get_parameter(name)
            assert torch.equal(x, slices[name].cut(full, rank) if name in slices else full), name
        for name, x in plan.model.named_buffers():
            assert torch.equal(x, whole.get_buffer(name)), name


def compiled(kind: str) -> tuple[list[int], int]:
    """Tokens of a model whose layers are compiled, and the number of compiled modules."""
    ring, model = Ring(), make(kind, num_hidden_layers=1)
    shard_weights(model, ring)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patched:
        compare_little(patched, (1,), 20)
        modules = compile_for_decode(model, ring, backend="eager")
    with RingCache(model, ring, max_tokens=64, page_size=4) as cache:
        found = model.generate(**calls()[0], past_key_values=cache)[0].tolist()
    ring.close()
    return found, modules


@torch.no_grad()
def test_slices_of_one_input_are_one_product_in_compiled_code_and_stay_the_weights() -> None:
    linears, products = [torch.nn.Linear(8, 12, bias=bias) for bias in (True, False)], list[int]()
    slots = [Slot(one, "weight", Slice(0, 12, 8)) for one in linears]
    wholes = copy.deepcopy(linears)
    for slot in slots:
        slot.weight.data = slot.slice.cut(slot.weight.data, 1)
    gate, up = forwards._column_parallel(slots, 1)

    def product(x: Tensor) -> Tensor:
        return gate(x).sigmoid() * up(x)

    def backend(graph: Any, inputs: Any) -> Any:
        del inputs
        decode_compile._merge_equal_products(graph)
        products.append(len(graph.graph.find_nodes(op="call_function", target=torch.nn.functional.linear)))
        return graph.forward

    x = torch.randn(1, 1, 8)
    linears[1].weight.mul_(2)  # in place, where the product reads it
    expected = wholes[0](x).sigmoid() * wholes[1](x) * 2
    for found in (product(x), torch.compile(product, backend=backend)(x)):
        torch.testing.assert_close(found[..., :4], expected[..., 8:])
    assert products == [1]


@pytest.mark.slow
def test_compiled_layers_answer_alike(pool: Pools) -> None:
    expected = make("llama", "eager", num_hidden_layers=1).generate(**calls()[0])[0].tolist()
    assert pool(2).run(compiled, "llama") == [(expected, 2)] * 2


def replayed(kind: str) -> tuple[list[list[int]], int]:
    """Tokens of a model whose steps are replayed, and of one with fp8 pages; replays."""
    ring, model, found = Ring(), make(kind), []
    shard_weights(model, ring)
    recorder = Reruns()
    ways: list[dict[str, Any]] = [{"graphs": recorder}, {"kv_dtype": torch.float8_e4m3fn}]
    for options in ways:
        with RingCache(model, ring, max_tokens=64, page_size=4, **options) as cache:
            found.append(model.generate(**calls()[0], past_key_values=cache)[0].tolist())
    ring.close()
    return found, recorder.replays


def whole_with_fp8(kind: str) -> list[int]:
    """Tokens of whole weights on ranks, with fp8 pages."""
    ring, model = Ring(), make(kind)
    with RingCache(model, ring, max_tokens=64, page_size=4, kv_dtype=torch.float8_e4m3fn) as cache:
        return model.generate(**calls()[0], past_key_values=cache)[0].tolist()


@pytest.mark.parametrize("kind", ["gemma3_text", "glm4_moe_lite"])
def test_replays_and_fp8_pages_answer_alike(pool: Pools, kind: str) -> None:
    expected, halved = alone(kind)[0].tolist(), pool(2).run(whole_with_fp8, kind)[0]
    for found, replays in pool(2).run(replayed, kind):
        assert found == [expected[0], halved]
        assert replays > 2


def refusals() -> list[str]:
    ring, found = Ring(), []
    llama = make("llama")

    class Quantised(torch.nn.Linear):
        """Weights that are no plain numbers."""

    odd = make("llama")
    odd.model.layers[1].mlp.down_proj = Quantised(56, 40)
    gpt2: dict[str, Any] = {"n_embd": 40, "n_layer": 1, "n_head": 4, "vocab_size": 61}
    conv = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(**gpt2))
    for model in (odd, conv):
        try:
            shard_weights(model, ring)
        except NotImplementedError as error:
            found.append(str(error))
    for way, error in (("copy_engine", RuntimeError), ("nccl", ValueError)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(shard.GATHER, way)
            with pytest.raises(error) as refusal:
                shard_weights(make("llama"), ring)
        found.append(str(refusal.value))
    shard_weights(llama, ring)

    def answer_with_another_layer() -> None:
        mlp = llama.model.layers[0].mlp
        mlp.up_proj = torch.nn.Sequential(mlp.up_proj)  # as adapters do
        with RingCache(llama, ring, max_tokens=8) as cache:
            llama(input_ids=tokens(5), past_key_values=cache)

    for call in (
        lambda: llama(input_ids=tokens(5)),
        lambda: copy.deepcopy(llama),
        llama.state_dict,
        lambda: shard_weights(llama, ring),
        answer_with_another_layer,
    ):
        with pytest.raises((RuntimeError, ValueError)) as refusal:
            call()
        found.append(str(refusal.value))
    ring.close()
    return found


def test_modules_that_cannot_be_sliced_and_calls_without_a_cache_are_refused_by_name(pool: Pools) -> None:
    for linear, conv, engine, way, call, copied, saved, again, changed in pool(2).run(refusals):
        assert "got model.layers.1.mlp.gate_proj" in linear or "got model.layers.1.mlp.down_proj.weight" in linear
        assert "of Quantised, which cannot be sliced; use whole weights" in linear
        assert "got transformer.h.0.mlp.c_fc.weight, (40, 160) torch.float32 of Conv1D, which cannot be sliced" in conv
        assert "RINGATTN_WEIGHT_GATHER=copy_engine must have GPUs of one host that reach each other" in engine
        assert "RINGATTN_WEIGHT_GATHER must be one of ('auto', 'all_gather', 'copy_engine'), got 'nccl'" in way
        assert "must be called with a step of a cache of its ring, by RingCache or run_step" in call
        assert copied.startswith("a model must be copied or saved whole before its weights are sharded")
        assert saved == copied
        assert "must have whole weights to be sharded, got a LlamaForCausalLM that is sharded already" in again
        assert "must keep its layers and its weights, got others since; add adapters" in changed


def test_gathering_begins_where_weights_arrive_before_slices_have_computed() -> None:
    register()
    llama = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = transformers.AutoConfig.for_model("llama", **llama, num_hidden_layers=1, vocab_size=64)

    def rows(ranks: int) -> int:
        return shard.rows_to_gather(plan_weights(load.empty_model(config, torch.bfloat16), ranks))

    # with e bytes per number: products of 2 / 8 FLOP per weight and row, outputs of q, k, v, o, addends and sums of the MLP
    weights = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)
    row = 2 * weights / 8 / shard.FLOPS_PER_BYTE + 7 / 8 * (2 * (2 * 8192 + 2 * 1024) + (4 + 2) * 8192)
    assert rows(8) == int(7 / 8 * 2 * weights / row) == 7446
    assert 1000 < rows(2) < rows(4) < rows(8) < REPLICATED_ROWS
    # hidden states of all rows are on every rank
    assert rows(64) == REPLICATED_ROWS


class _Gathers:
    """In place of a ring of two ranks with equal slices: records when transfers begin and end."""

    world_size = 2

    def __init__(self) -> None:
        self.events: list[str] = []

    def post_gather(self, x: Tensor, out: Tensor) -> Any:
        layer = int(x.flatten()[0])
        self.events.append(f"post {layer}")

        def wait() -> None:
            self.events.append(f"wait {layer}")
            out.copy_(x.expand_as(out))

        return wait


def test_a_layer_is_gathered_while_the_one_before_it_computes_into_the_buffer_that_is_free() -> None:
    ring: Any = _Gathers()
    layers = [[Slot(torch.nn.Linear(3, 8), "weight", Slice(0, 10, 8))] for _ in range(4)]
    for number, [slot] in enumerate(layers):
        slot.weight.data.fill_(number)
    gather = LayerGather(layers, ring)
    for ends in (4, 2, 4):
        # a call that ends early leaves nothing behind
        ring.events.clear()
        with gather.gather_ahead():
            for layer in range(ends):
                whole = gather.whole(layer, 0)
                ring.events.append(f"compute {layer}")
                assert torch.equal(whole, torch.full((10, 3), float(layer)))
                assert whole.data_ptr() == gather.whole(layer, 0).data_ptr()
        expected = ["post 0"]
        for layer in range(ends):
            ahead = [f"post {layer + 1}"] if layer + 1 < len(layers) else []
            expected += [f"wait {layer}", *ahead, f"compute {layer}"]
        assert ring.events == expected + [f"wait {ends}"] * (ends < len(layers))
    assert gather.buffer_bytes == 256  # 16 rows of 3, aligned


@pytest.mark.parametrize(
    "cut", [Slice(0, 10, 8), Slice(1, 6, 8), Slice(2, 5, 8, 2), Slice(1, 3, 8, 2), Slice(0, 5, 8, 2)]
)
def test_slices_of_all_ranks_are_the_whole_weight(cut: Slice) -> None:
    whole = torch.randn(10, 6, 10)
    slices = torch.stack([cut.cut(whole, rank) for rank in range(3)])
    assert slices.shape[1:] == cut.shape(whole.shape)
    assert cut.whole_shape(slices.shape[1:]) == whole.shape
    found = torch.full_like(whole, torch.nan)
    cut.write(slices, found)
    assert torch.equal(found, whole)
    assert float(slices.double().sum()) == pytest.approx(float(whole.double().sum()))  # padding is zeros
