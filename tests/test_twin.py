"""Triton twins: none where Triton is missing, and an error where anything else is."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ringattn.kernels.twin import find_twin

KERNELS = Path(__file__).parents[1] / "kernels"

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module that nobody has imported, and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"twin_{tmp_path.name}"
    monkeypatch.delitem(sys.modules, name, raising=False)

    def write(source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        return name

    yield write
    sys.modules.pop(name, None)
    find_twin.cache_clear()


class Refuse:
    """Finds no Triton, wherever it is."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refuse(), *sys.meta_path])


@pytest.mark.usefixtures("no_triton")
@pytest.mark.parametrize("source", ["import triton", "import triton.language as tl", "from triton import knobs"])
def test_without_triton_there_is_no_twin(write, source):
    assert find_twin(write(source)) is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import packages_that_nobody_has", "packages_that_nobody_has"),
        ("import triton.no_such_part", "triton.no_such_part"),
        ("from triton import no_such_name", "no_such_name"),
        ("from ringattn.kernels import no_such_twin", "no_such_twin"),
        ("raise ImportError('the twin is broken')", "the twin is broken"),
    ],
)
def test_a_twin_that_is_broken_is_an_error_and_not_a_reason_for_plain_torch(write, monkeypatch, source, message):
    package = ModuleType("triton")  # one that is installed, with nothing in it
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "triton", package)
    name = write(source)
    for _ in range(2):  # the error is not taken for an answer
        with pytest.raises(ImportError, match=message):
            find_twin(name)


def test_a_twin_that_does_not_exist_is_an_error():
    with pytest.raises(ModuleNotFoundError, match="no_such_twin"):
        find_twin("ringattn.kernels.no_such_twin")


def test_a_twin_is_imported_once(write):
    name = write("")
    assert find_twin(name) is find_twin(name) is sys.modules[name]


def test_every_twin_that_is_asked_for_is_a_file():
    texts = [path.read_text() for path in sorted(KERNELS.rglob("*.py"))]
    names = [name for text in texts for name in re.findall(r'find_twin\("ringattn\.kernels\.(\w+)"\)', text)]
    assert {"pack_triton", "pages_triton", "parts_triton"} <= set(names)
    assert all((KERNELS / f"{name}.py").exists() for name in names)
