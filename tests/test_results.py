"""The README and its figure say what the rows in docs/results say."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LENGTHS = (2048, 4096)


def test_result_tables_of_the_readme_are_written_from_their_rows() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs/results.py"), "--check"], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 0, "run `python docs/results.py`"


def _row(who: str, direction: str, mask: str = "full", n: int = 16384, **other: Any) -> dict[str, Any]:
    shape = {"seq_len": n, "batch": 1, "heads": 16, "kv_heads": 16, "head_dim": 128, "dtype": "bf16"}
    row = {"who": who, "level": "op", "group": "target", "direction": direction, "mask": mask, "window": 4095}
    return {**row, "document": 4096, **shape, "timing": "graph", "ms": 1.0, "tflops": 100.0, **other}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_results", ROOT / "docs/results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(module, "HERE", tmp_path)
    return module


def _keep(results: ModuleType, name: str, date: str, rows: list[dict[str, Any]]) -> None:
    line = {"date": date, "gpus": ["X"], "torch": "2", "triton": "3", "commit": "0123456789abcdef", "command": "run"}
    (results.HERE / "results" / name).write_text(json.dumps({"machine": line, "rows": rows}))


def test_the_target_table_has_a_column_per_contender_and_full_beside_causal(results: ModuleType) -> None:
    rows = [_row(who, way, mask) for who in ("fa4", "hopper") for way in ("forward", "backward") for mask in ("full",)]
    rows += [_row("hopper", "forward", "causal", tflops=90.4, timing="calls")]
    rows += [_row("flex", "forward") | {"refused": "no"}]
    del rows[-1]["tflops"]
    rows += [_row("hopper", "forward", level="kernel", tflops=123.0)]
    rows += [_row("hopper", "forward", level="carried", group="carry", cost_percent=2.52)]
    _keep(results, "kernels.json", "2026-01-01", rows)
    text = results.kernels()
    assert "| full / causal | ringattn hopper | FA4 |" in text
    assert "| forward, head_dim 128 | 100 / 90* | 100 / - |" in text
    assert "| forward, head_dim 128 | 123 / - |" in text
    assert "hopper, full, 16384 tokens, head_dim 128: +2.5%" in text
    assert "FlexAttention" not in text


def test_a_problem_is_shown_from_the_last_run_that_measured_it(results: ModuleType) -> None:
    _keep(results, "kernels-b.json", "2026-01-01", [_row("fa4", "forward", tflops=1.0), _row("cudnn", "forward")])
    _keep(results, "kernels-a.json", "2026-01-02", [_row("fa4", "forward", tflops=2.0)])
    rows = results.kernel_rows(results.kernel_runs())
    assert [(row["who"], row["tflops"], row["run"]) for row in rows] == [("fa4", 2.0, 1)]


def test_other_shapes_say_their_mask_and_heads(results: ModuleType) -> None:
    rows = [_row("hopper", "forward", mask, group="masks") for mask in ("window", "documents")]
    rows += [_row("hopper", "backward", "causal", group="grouped", heads=32, kv_heads=4)]
    _keep(results, "kernels.json", "2026-01-01", rows)
    text = results.kernels()
    assert "| 128 | window 4096 | 1 x 16384 | 16 | 100 / - |" in text
    assert "| 128 | documents of 4096 | 1 x 16384 | 16 | 100 / - |" in text
    assert "| 128 | causal | 1 x 16384 | 32/4 | - / 100 |" in text


def test_the_figure_is_drawn_from_the_rows_and_known_to_be(results: ModuleType) -> None:
    _keep(results, "kernels.json", "2026-01-01", [_row("fa4", "forward")])
    results.draw_figure()
    assert not (results.HERE / "kernels.svg").exists(), "one length is no line"
    assert results.figure_is_true()
    lines = [_row(who, "forward", n=n, group="lengths") for who in ("hopper", "fa4") for n in LENGTHS]
    _keep(results, "kernels.json", "2026-01-01", lines)
    assert not results.figure_is_true()
    results.draw_figure()
    assert results.figure_is_true()
    text = (results.HERE / "kernels.svg").read_text()
    assert all(word in text for word in ("ringattn hopper", "FlashAttention-4", "forward, full, head_dim 128", "2K"))
    _keep(results, "kernels.json", "2026-01-01", [*lines[:-1], lines[-1] | {"tflops": 101.0}])
    assert not results.figure_is_true()
