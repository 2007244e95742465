"""Captured and replayed calls equal plain calls: static inputs, empty rows, growth, and refusals."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Ring
from ringattn.inference import PagedKVCache
from ringattn.integrations.transformers import RingCache, cuda_graph_runner, run_step
from ringattn.integrations.transformers.cuda_graph_runner import CUDAGraphRunner, batch_sizes, select_capturer
from tests.integrations.transformers.models import make, tokens
from tests.support.graph_recorder import Hung, Reruns
from tests.support.pool import Pools, RankError

VOCAB = 61


def make_cache(ring: Ring, pages: int = 64, page_size: int = 4) -> PagedKVCache:
    return PagedKVCache(
        ring, layers=2, kv_heads=2, head_dim=8, dtype=torch.float32, pages=pages, page_size=page_size, device="cpu"
    )


def fill(model: Any, cache: PagedKVCache, lengths: Sequence[int], reserve: int = 60) -> list[int]:
    """Requests with prompts of these lengths."""
    requests = [cache.add_request(reserve) for _ in lengths]
    for seed, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        run_step(model, cache.extend([request], [length], mode="prefill"), tokens(length, seed=seed)[0], wanted=[])
    return requests


class Twins:
    """Two caches with the same requests: one decodes by replays, the other by plain calls."""

    def __init__(self, kind: str, lengths: Sequence[int], recorder: Reruns, reserve: int = 60, **how: Any) -> None:
        self.model, self.ring, self.recorder = make(kind, "ringattn", torch.float32).eval(), Ring(), recorder
        self.caches = [make_cache(self.ring, pages=64 + len(lengths) * reserve // 4) for _ in range(2)]
        self.requests, _ = [fill(self.model, cache, lengths, reserve) for cache in self.caches]
        replayed, plain = self.caches
        self.replayed = CUDAGraphRunner(self.model, replayed, recorder, **how)
        self.plain = CUDAGraphRunner(self.model, plain, None)
        self.said: list[str] = []

    def step(self, requests: Sequence[int], new: int = 1, last: int = 1, seed: int = 0) -> bool:
        """Whether a step of some requests gives the same logits, and leaves the same keys, to the bit where shapes are the same."""
        ids = tokens(new, rows=len(requests), seed=seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = self.replayed.run(requests, ids, last=last).logits.clone()
        self.said += [str(one.message) for one in caught]
        wanted = self.plain.run(requests, ids, last=last).logits
        assert found.shape == wanted.shape == (len(requests), last, VOCAB)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(self.caches[0].k, self.caches[1].k, rtol=1e-5, atol=1e-5)
        return bool((found.argmax(-1) == wanted.argmax(-1)).all())


def coming_and_going(kind: str) -> tuple[list[tuple[int, ...]], int, int]:
    """Requests join and leave between steps; every step is a replay of the smallest batch that has room."""
    twins = Twins(kind, (7, 30, 18, 3, 12), recorder := Reruns(), batches=batch_sizes(4))
    draw, steps = random.Random(0), 0
    for seed in range(14):
        chosen = draw.sample(twins.requests, draw.randint(1, 5) if seed else 5)
        assert twins.step(chosen, seed=seed)
        steps += len(chosen) <= 4
    for cache in twins.caches:
        cache.free(twins.requests[1])
    late, _ = [fill(twins.model, cache, (9,)) for cache in twins.caches]
    assert twins.step([*late, twins.requests[4]], seed=99)
    assert twins.replayed.captured == recorder.records <= 3
    assert not twins.said
    return recorder.shapes, recorder.replays, steps + 1


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss"])
def test_replays_equal_plain_calls_while_requests_are_added_and_freed(pool: Pools, kind: str) -> None:
    for shapes, replays, steps in pool(2).run(coming_and_going, kind):
        assert sorted(shapes) == [(1, 1), (2, 1), (4, 1)]
        assert replays == steps


def several_tokens() -> None:
    twins = Twins("llama", (11, 25), Reruns(), capture_at=2)
    for seed, (new, last) in enumerate([(3, 3), (3, 3), (3, 1), (5, 2), (5, 2), (3, 3), (3, 1)]):
        assert twins.step(twins.requests, new, last, seed)
    assert twins.recorder.shapes == [(2, 3), (2, 2), (2, 1)]
    assert twins.recorder.replays == 4


def test_several_new_tokens_are_replayed_from_the_second_call_of_their_shape_on(pool: Pools) -> None:
    pool(2).run(several_tokens)


def growing() -> tuple[list[int], int, int]:
    """Requests that may grow further than those that a graph was recorded for."""
    before, cuda_graph_runner.LEAST_BLOCKS = cuda_graph_runner.LEAST_BLOCKS, 2
    try:
        twins = Twins("llama", (5, 6), recorder := Reruns(), batches=(2,), reserve=14)
        rooms = []
        for lengths, reserve in (((), 0), ((30, 28), 60), ((140, 3), 160)):
            both = [fill(twins.model, cache, lengths, reserve) for cache in twins.caches]
            twins.requests = [*both[0], *twins.requests][:2]
            for seed in range(8):
                assert twins.step(twins.requests, seed=seed)
                rooms.append(next(iter(twins.replayed._graphs.values())).step.max_blocks)
        return rooms, recorder.records, recorder.replays
    finally:
        cuda_graph_runner.LEAST_BLOCKS = before


def test_a_graph_that_is_outgrown_is_recorded_anew_once_for_all_that_is_reserved(pool: Pools) -> None:
    for rooms, records, replays in pool(2).run(growing):
        assert [len(set(rooms[i : i + 8])) for i in (0, 8, 16)] == [1, 1, 1]
        assert rooms[0] < rooms[8] < rooms[16]
        assert all(room & (room - 1) == 0 for room in rooms)
        assert (records, replays) == (3, 24)


def refused(rank: int, **how: Any) -> tuple[list[str], str | None, int, int]:
    """A recorder that fails, or lies, on one rank."""
    recorder = Reruns(**how) if Ring().rank == rank else Reruns()
    twins = Twins("llama", (7, 9, 5), recorder, batches=(1, 4))
    for seed in range(4):
        assert twins.step(twins.requests[seed % 2 :], seed=seed)
        assert twins.step(twins.requests[:1], seed=seed)
    return twins.said, twins.replayed.refusal, recorder.records, twins.replayed.captured


def test_a_call_that_one_rank_cannot_capture_is_plain_on_all_and_earlier_graphs_stay(pool: Pools) -> None:
    (said0, why0, *counts0), (said1, why1, *counts1) = pool(2).run(refused, 1, fails=2)
    assert counts0 == counts1 == [2, 1]
    assert why0 == "another rank could not capture a call"
    assert why1 == "the model looks at numbers"
    assert said0 == [f"decoding continues without more CUDA graphs: {why0}"]
    assert said1 == [f"decoding continues without more CUDA graphs: {why1}"]


def test_a_replay_that_lies_is_found_at_once_and_dropped_on_all_ranks(pool: Pools) -> None:
    (said0, why0, *counts0), (said1, why1, *counts1) = pool(2).run(refused, 1, stuck=True)
    assert counts0 == counts1 == [1, 0]
    assert why0 == "another rank got wrong logits"
    assert why1 is not None
    assert why1.startswith("wrong answer: a replay's logits differ from a plain call's by")
    assert len(said0) == len(said1) == 1


def prepared() -> None:
    twins = Twins("mistral", (7, 9, 5), recorder := Reruns(), batches=batch_sizes(3))
    twins.replayed.prepare()
    assert recorder.shapes == [(3, 1), (2, 1), (1, 1)]
    assert recorder.replays == 0
    for seed in range(3):
        assert twins.step(twins.requests[seed:], seed=seed)
    assert (recorder.records, recorder.replays) == (3, 3)


def test_prepared_shapes_are_not_captured_again(pool: Pools) -> None:
    pool(2).run(prepared)


def packed(kind: str) -> tuple[list[tuple[int, ...]], int]:
    """Prompts that are replayed in pieces, beside the ring: fresh ones, ends of longer ones, and turns of a conversation."""
    twins = Twins(kind, (7, 30), recorder := Reruns(), reserve=200, pieces=(1, 2, 5), batches=(2,))
    twins.replayed.prepare()
    shapes = list(recorder.shapes)
    ring, plain = twins.caches
    first, second = twins.requests
    third, _ = [cache.add_request(100) for cache in twins.caches]
    draw = random.Random(3)
    for seed, (requests, counts) in enumerate(
        [([first], [16]), ([third, second], [17, 1]), ([second, first, third], [20, 16, 32]), ([third], [3])]
    ):
        ids = tokens(sum(counts), seed=seed)[0]
        found = twins.replayed.run_mixed(requests, counts, ids)
        assert found is not None
        wanted = run_step(twins.model, plain.extend(requests, counts, mode="prefill"), ids)
        assert found.shape == wanted.shape == (len(requests), VOCAB)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ring.k, plain.k, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ring.v, plain.v, rtol=1e-5, atol=1e-5)
        assert ring.allocator.table(first, 0) == plain.allocator.table(first, 0)
        # decoding goes on from there, and so does the ring
        assert twins.step(draw.sample([first, second, third], 2), seed=seed)
        more = tokens(9, seed=seed)[0]
        ended = [run_step(twins.model, cache.extend([first], [9], mode="prefill"), more) for cache in twins.caches]
        torch.testing.assert_close(*ended, rtol=1e-5, atol=1e-5)
    before = ring.allocator.length(first)
    for requests, counts in (([first], [81]), ([first, second, third], [33, 32, 16])):
        assert twins.replayed.run_mixed(requests, counts, tokens(sum(counts))[0]) is None, "six pieces"
    assert ring.allocator.length(first) == before
    assert not twins.said
    return shapes, recorder.replays


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss"])
def test_short_prompts_in_pieces_equal_prefill(pool: Pools, kind: str) -> None:
    for world_size in (1, 2):
        for shapes, replays in pool(world_size).run(packed, kind):
            assert shapes == [(1, 5), (1, 2), (1, 1), (2, 1)]
            assert replays == 8


def outgrown_pieces() -> None:
    """A context with more blocks than a packed step has room for is left to the ring."""
    before = cuda_graph_runner.LEAST_BLOCKS, cuda_graph_runner.PACKED_BLOCKS
    cuda_graph_runner.LEAST_BLOCKS = cuda_graph_runner.PACKED_BLOCKS = 4
    try:
        twins = Twins("llama", (5, 60), Reruns(), reserve=100, pieces=(2,))
        twins.replayed.prepare()
        assert twins.replayed.most_pieces == 2
        assert twins.replayed.run_mixed(twins.requests[:1], [1], tokens(1)[0]) is not None
        assert twins.replayed.run_mixed(twins.requests[1:], [1], tokens(1)[0]) is None
        assert twins.replayed.captured == 1
    finally:
        cuda_graph_runner.LEAST_BLOCKS, cuda_graph_runner.PACKED_BLOCKS = before


def test_requests_with_too_many_blocks_are_not_packed() -> None:
    outgrown_pieces()


def refused_packed(rank: int, **how: Any) -> tuple[list[str], int]:
    recorder = Reruns(**how) if Ring().rank == rank else Reruns()
    twins = Twins("llama", (7, 9), recorder, pieces=(2,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twins.replayed.prepare()
        found = twins.replayed.run_mixed(twins.requests, [5, 3], tokens(8)[0])
        if found is not None:
            plain = twins.caches[1]
            wanted = run_step(twins.model, plain.extend(twins.requests, [5, 3], mode="prefill"), tokens(8)[0])
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    return [str(one.message) for one in caught], twins.replayed.most_pieces


@pytest.mark.parametrize("how", [{"fails": 1}, {"stuck": True}])
def test_packed_calls_that_can_not_be_replayed_are_dropped_on_all_ranks(pool: Pools, how: dict[str, Any]) -> None:
    for said, pieces in pool(2).run(refused_packed, 1, **how):
        assert len(said) == 1
        assert said[0].startswith("decoding continues without more CUDA graphs")
        assert pieces == 0


def test_no_more_shapes_are_recorded_than_allowed() -> None:
    twins = Twins("llama", (7, 9, 5), recorder := Reruns(), max_graphs=2)
    for seed, count in enumerate((1, 2, 3, 3, 2, 1)):
        assert twins.step(twins.requests[:count], seed=seed)
    assert recorder.shapes == [(1, 1), (2, 1)]
    assert recorder.replays == 4


def generated(calls: list[dict[str, Any]], recorder: Reruns | None, sizes: dict[str, Any]) -> tuple[list[Tensor], int]:
    ring = Ring()
    model = make("gemma3", "ringattn", torch.float32).eval()
    torch.manual_seed(ring.rank)
    with RingCache(model, ring, max_tokens=64, page_size=4, graphs=recorder, **sizes) as cache:
        found = []
        for call in calls:
            found.append(model.generate(**call, past_key_values=cache).clone())
            cache.reset()
    return found, 0 if recorder is None else recorder.replays


PROMPTS = {
    "input_ids": tokens(21, rows=3),
    "attention_mask": (torch.arange(21) >= torch.tensor([[4], [2], [0]])).long(),
}
GREEDY = {"do_sample": False, "max_new_tokens": 9, "eos_token_id": None}
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 20, "max_new_tokens": 9, "eos_token_id": None}
LOOKED_UP = {"input_ids": tokens(9).repeat(1, 3), "prompt_lookup_num_tokens": 4, "eos_token_id": 2}


def test_generation_by_replays_is_generation(pool: Pools) -> None:
    """Greedy and sampled, with padding on the left, by beams, and with guesses that are taken back, in one cache."""
    calls = [{**PROMPTS, **GREEDY}, {**PROMPTS, **SAMPLED}, {**PROMPTS, **GREEDY, "num_beams": 3}]
    calls += [{**LOOKED_UP, "attention_mask": torch.ones(1, 27).long(), "do_sample": False, "max_new_tokens": 14}]
    for world_size in (1, 2):
        plain = pool(world_size).run(generated, calls, None, {"batch": 9})
        for (found, replays), (wanted, _) in zip(
            pool(world_size).run(generated, calls, Reruns(), {"batch": 9}), plain, strict=True
        ):
            assert [x.tolist() for x in found] == [x.tolist() for x in wanted]
            # of 8 decoding calls the first of each shape is plain
            assert replays >= 7 + 8 + 7


def hung(timeout: float) -> tuple[str, int]:
    """Error of `generate` when its third replay does not end, and the tokens that are stored then."""
    ring = Ring()
    ring._bounded_wait.timeout = timeout
    model = make("llama", "ringattn", torch.float32).eval()
    recorder = Hung(good=2)
    with RingCache(model, ring, max_tokens=64, page_size=4, graphs=recorder) as cache:
        with pytest.raises(RuntimeError) as caught:
            model.generate(**ONE, **GREEDY, past_key_values=cache)
        # a rank that has given up does not wait again
        ring._bounded_wait.timeout = 1e9
        with pytest.raises(RuntimeError, match="has not ended"):
            model(tokens(1), past_key_values=cache)
        assert recorder.replays == 3
        return str(caught.value), cache.get_seq_length()


ONE = {"input_ids": tokens(21), "attention_mask": torch.ones(1, 21).long()}


def test_a_replay_that_does_not_end_is_an_error_of_generate_on_every_rank(pool: Pools) -> None:
    for rank, (said, length) in enumerate(pool(2).run(hung, 0.2)):
        assert said.startswith(f"ring rank {rank} of ring ")
        assert "replayed decode step 3 (1 requests, 1 new tokens each) has not ended 0.3 s after it began" in said
        # a prompt, a plain call and two replays: the token of the third is not there
        assert length == 21 + 3


def go_down(folder: str) -> None:
    """A rank of a server whose second decoding step is a replay that does not end; it ends the process."""
    from ringattn.launch.serve import run
    from ringattn.launch.serve.config import ServeArgs
    from ringattn.launch.serve.engine import Engine
    from ringattn.launch.serve.sampling import Sampling
    from ringattn.launch.serve.scheduler import AnswerRequest
    from ringattn.transport import timeout

    descriptor = os.open(f"{folder}/{Ring().rank}", os.O_WRONLY | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    cuda_graph_runner.select_capturer = lambda *_: Hung(good=1)  # pyright: ignore[reportAttributeAccessIssue]
    timeout.BoundedWait.bound_s, run.CAUSE_S = 0.3, 0.2  # pyright: ignore[reportAttributeAccessIssue]
    serve = Engine.run

    def ask_first(engine: Engine) -> None:
        engine.submit([AnswerRequest(0, [1, 2, 3], 8, sampling=Sampling())])
        serve(engine)

    Engine.run = ask_first  # pyright: ignore[reportAttributeAccessIssue]
    run.run_rank(ServeArgs("tiny", device="cpu", port=0, cache_gib=0.002, max_running=2, timeout=60.0))


def test_a_replay_that_does_not_end_ends_every_rank_of_the_server(pool: Pools, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    with pytest.raises(RankError, match="died with exit code 1"):
        pool(2).run(go_down, str(tmp_path))
    for rank in range(2):
        said = (tmp_path / str(rank)).read_text()
        told = f"error: rank {rank}: RuntimeError: ring rank {rank} of ring "
        assert told in said
        assert "replayed decode step 2 (1 requests, 1 new tokens each) has not ended 0.3 s after it began" in said


def test_logits_of_a_call_outlive_the_next_one() -> None:
    model = make("llama", "ringattn", torch.float32).eval()
    with torch.no_grad(), RingCache(model, Ring(), max_tokens=64, page_size=4, graphs=Reruns()) as cache:
        kept = [model(tokens(1, seed=seed), past_key_values=cache) for seed in range(5)]
        ids = torch.cat([tokens(1, seed=seed) for seed in range(5)], 1)
        wanted = make("llama", "sdpa", torch.float32).eval()(ids, use_cache=False).logits[0]
        torch.testing.assert_close(torch.cat([out.logits[0] for out in kept]), wanted, rtol=1e-4, atol=1e-4)
        assert all(out.past_key_values is cache for out in kept)
        assert len({type(out) for out in kept}) == 1


def test_graphs_are_refused_where_there_are_none() -> None:
    model = make("llama", "ringattn", torch.float32).eval()
    with pytest.raises(
        ValueError, match=r"graphs must be False or left out .* graphs need a GPU, and the cache is in cpu"
    ):
        RingCache(model, Ring(), max_tokens=64, graphs=True)
    cache = make_cache(Ring())
    assert select_capturer(None, model, cache) is None
    assert select_capturer(False, model, cache) is None
