"""What `import ringattn`, its operators, and a choice of kernels on a CPU do not do, seen from a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import ringattn

ROOT = Path(__file__).parents[1]

SCRIPT = """
import json, sys, threading

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

REFUSED = set(json.loads(sys.argv[1]))
sys.meta_path.insert(0, Refuse())
import torch
before, threads = set(sys.modules), threading.active_count()
import ringattn
for name in getattr(ringattn, "__all__", []):
    getattr(ringattn, name)
import ringattn.numerics.softmax
from ringattn.kernels.registry import select_kernels
select_kernels(torch.device("cpu"), torch.float32, 64, 64)
import torch.distributed as dist
print(json.dumps({
    "modules": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
    "group": dist.is_available() and dist.is_initialized(),
    "threads": threading.active_count() - threads,
}))
"""


def _fresh(refused: list[str]) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(refused)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def plain() -> dict:
    return _fresh([])


def test_the_version_is_that_of_the_metadata(monkeypatch: pytest.MonkeyPatch):
    assert ringattn.__version__ == metadata.version("ringattn")
    with pytest.raises(AttributeError, match="module 'ringattn' has no attribute 'version'"):
        getattr(ringattn, "version")  # noqa: B009
    monkeypatch.setattr(metadata.Distribution, "discover", lambda **_: iter(()))
    assert not hasattr(ringattn, "__version__"), "a source tree that nobody installed"


def test_import_works_where_no_optional_package_is_installed():
    seen = _fresh(
        ["triton", "transformers", "diffusers", "matplotlib", "tyro", "tqdm", "rich", "psutil", "fastapi", "aiohttp"]
    )
    assert "ringattn" in seen["modules"]


def test_import_brings_no_optional_package(plain):
    optional = {
        "triton", "transformers", "diffusers", "matplotlib", "tyro", "tqdm", "rich", "fastapi", "aiohttp", "hypothesis",
        "pytest",
    }  # fmt: skip
    assert not optional & {name.partition(".")[0] for name in plain["modules"]}


def test_import_loads_no_triton_kernels(plain):
    kernels = ("attention.portable", "attention.hopper", "runtime.bound_launch")
    names = [name for name in plain["modules"] if not name.endswith(".optional_triton")]
    assert not [
        name for name in names if "triton" in name or name.startswith(tuple(f"ringattn.kernels.{x}" for x in kernels))
    ]


def test_import_does_not_start_the_compiler(plain):
    assert not [name for name in plain["modules"] if name.startswith(("torch._inductor", "torch._dynamo"))]


def test_import_touches_no_device_and_no_process_group(plain):
    assert not plain["cuda"]
    assert not plain["group"]
    assert plain["threads"] == 0
