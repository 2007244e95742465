"""`bench model`: everybody trains the same model, and who computes another loss has no speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ringattn
from ringattn.launch.bench import __main__ as bench
from ringattn.launch.bench import model as model_bench
from ringattn.launch.bench.model import Batch, ModelFlags
from ringattn.launch.train.model import Transformer
from ringattn.sizing.shapes import ModelShape
from ringattn.training import checkpoint_layers_, chunk_rows_

SMALL = ["--layers", "2", "--dim", "16", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--mlp-dim", "24"]
SHAPE = ModelShape("x", 16, 2, 4, 2, 8, 24, vocab_size=11)


def _bench(out: str, *more: str) -> int:
    words = ["--lengths", "63", "128", "--vocab-size", "11", "--mlp-rows", "40", "--device", "cpu", "--out", out]
    return bench.main(["model", *SMALL, *words, *more])


def test_every_attention_has_a_row_and_only_those_that_run_have_a_speed(pool, tmp_path: Path) -> None:
    assert pool(2).run(_bench, str(tmp_path)) == [0, 0]
    rows = json.loads((tmp_path / "model.json").read_text())["rows"]
    assert [(row["seq_len"], row["who"]) for row in rows] == [
        (n, who) for n in (63, 128) for who in ModelFlags().attentions
    ]
    for row in rows:
        if row["who"].startswith("ring"):
            assert row["tokens_per_s_per_gpu"] == pytest.approx(row["seq_len"] / row["step_s"] / 2)
            assert row["losses"][0] > row["losses"][-1]  # the parameters were updated
        else:
            assert row["refused"] == "runs among several GPUs only"
            assert "step_s" not in row


def test_bench_model_needs_a_process_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _bench(str(tmp_path)) == 1
    said = "error: bench model must run in ranks of torchrun, over which FSDP2 shards, got a process by itself; start it with"
    assert capsys.readouterr().err == f"{said} torchrun --nproc_per_node 1 -m ringattn.launch.bench model\n"


def _cut_off(out: str) -> None:
    right = model_bench._measure

    def end(*given: Any) -> dict[str, Any]:
        if given[3].sharding.seq_len == 128:
            raise InterruptedError("cut off")
        return right(*given)

    model_bench._measure = end
    try:
        with pytest.raises(InterruptedError):
            _bench(out)
    finally:
        model_bench._measure = right


def test_rows_say_what_waits_in_host_memory_and_how_fast_it_is_copied(pool, tmp_path: Path) -> None:
    more = ("--attentions", "ring", "--lengths", "64", "--mlp-rows", "40", "9", "--offload", "0", "2", "--steps", "1")
    assert pool(2).run(_bench, str(tmp_path), *more) == [0, 0]
    copies, *rows = json.loads((tmp_path / "model.json").read_text())["rows"]
    assert copies["out_gbps"] > 0 < copies["back_gbps"]
    assert [(row["mlp_rows"], row["offload"]) for row in rows] == [(40, 0), (40, 2), (9, 0), (9, 2)]
    assert [row["host_gib"] > 0 for row in rows] == [False, True] * 2
    assert rows[0]["losses"][0] > rows[-1]["losses"][-1], "all train the same parameters"


def test_a_run_that_is_cut_off_leaves_what_it_has_measured(pool, tmp_path: Path) -> None:
    pool(2).run(_cut_off, str(tmp_path))
    rows = json.loads((tmp_path / "model.json").read_text())["rows"]
    assert [(row["seq_len"], row["who"]) for row in rows] == [(63, who) for who in ModelFlags().attentions]


def _wrong(q: Tensor, k: Tensor, v: Tensor, sharding: ringattn.Sharding, **mask: object) -> Tensor:
    return ringattn.ring_attention(q, k, v, sharding, causal=False)


def _disagree() -> dict[str, str]:
    from ringattn.launch.common.session import open_session

    args = ModelFlags(
        lengths=(64,), layers=(1,), dtype="fp32", dim=16, heads=4, kv_heads=2, head_dim=8, mlp_dim=24, vocab_size=11,
        mlp_rows=(7,),
    )  # fmt: skip
    with open_session("cpu") as session:
        model, _ = model_bench.open_model(args, 1, session)
        calls = []

        def forward_once_right(*inputs: Tensor, **mask: object) -> Tensor:
            calls.append(1)
            return (ringattn.ring_attention if len(calls) < 2 else _wrong)(*inputs, **mask)  # type: ignore[operator]

        model.blocks[0].attention.attend = forward_once_right  # type: ignore[union-attr,assignment]
        variants = [model_bench.Variant(who, 7, 0) for who in args.attentions]
        wrong = model_bench.disagreement(args, variants, model, ringattn.Ring(), session)
        return {variant.who: why for variant, why in wrong.items()}


def test_an_attention_with_another_loss_has_no_speed(pool) -> None:
    for wrong in pool(2).run(_disagree):
        assert set(wrong) == {"ring_recomputed", "torch_cp_allgather", "torch_cp_alltoall"}
        assert wrong["ring_recomputed"].startswith("wrong ")


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_rows_in_pieces_give_the_same_loss_and_gradients(how: str) -> None:
    torch.manual_seed(0)
    pieces, whole = Transformer(SHAPE), Transformer(SHAPE)
    whole.load_state_dict(pieces.state_dict())
    chunk_rows_([block.mlp for block in pieces.blocks], 7)  # type: ignore[union-attr]
    checkpoint_layers_([*pieces.blocks], how)
    batch = Batch.draw(ringattn.Ring(), 33, 11, torch.device("cpu"))
    found, expected = batch.loss(pieces), batch.loss(whole)
    torch.testing.assert_close(found, expected)
    for x, y in zip(
        *(torch.autograd.grad(loss, list(model.parameters())) for loss, model in ((found, pieces), (expected, whole))),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


def test_model_flops_are_counted_by_hand() -> None:
    model = Transformer(SHAPE)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and name != "embedding.weight")
    found = ModelShape("x", 16, 2, 4, 2, 8, 24, 11).step_flops(tokens=10, pairs=55)
    # two products per head and pair, a multiplication and an addition each, forward once and backward twice
    assert found == 6 * matrices * 10 + 2 * (3 * 2 * 2 * 4 * 8 * 55)


def test_layers_fit_the_lengths() -> None:
    with pytest.raises(ValueError, match="layers must be one number or one per length"):
        ModelFlags(lengths=(1, 2, 3), layers=(4, 5))
