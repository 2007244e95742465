"""Triton twins: none where Triton is missing, and an error where anything else is."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ringattn.kernels.runtime.optional_triton import import_optional

KERNELS = Path(__file__).parents[3] / "kernels"

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module that nobody has imported, and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"module_{tmp_path.name}"
    monkeypatch.delitem(sys.modules, name, raising=False)

    def write(source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        return name

    yield write
    sys.modules.pop(name, None)
    import_optional.cache_clear()


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
def test_without_triton_there_is_no_module(write, source):
    assert import_optional(write(source)) is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import packages_that_nobody_has", "packages_that_nobody_has"),
        ("import triton.no_such_part", "triton.no_such_part"),
        ("from triton import no_such_name", "no_such_name"),
        ("from ringattn.kernels import no_such_module", "no_such_module"),
        ("raise ImportError('the module is broken')", "the module is broken"),
    ],
)
def test_a_module_that_is_broken_is_an_error_and_not_a_reason_for_plain_torch(write, monkeypatch, source, message):
    package = ModuleType("triton")  # one that is installed, with nothing in it
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "triton", package)
    name = write(source)
    for _ in range(2):  # the error is not taken for an answer
        with pytest.raises(ImportError, match=message):
            import_optional(name)


def test_a_module_that_does_not_exist_is_an_error():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_optional("ringattn.kernels.no_such_module")


def test_a_module_is_imported_once(write):
    name = write("")
    assert import_optional(name) is import_optional(name) is sys.modules[name]


def test_every_module_that_is_asked_for_is_a_file():
    texts = [path.read_text() for path in sorted(KERNELS.rglob("*.py"))]
    names = [
        name for text in texts for name in re.findall(r'import_optional\(\s*"ringattn\.kernels\.([\w.]+)"\s*\)', text)
    ]
    assert {"kv.pack_triton", "kv.pages_triton", "partials.packed_triton"} <= set(names)
    assert all((KERNELS / f"{name.replace('.', '/')}.py").exists() for name in names)
