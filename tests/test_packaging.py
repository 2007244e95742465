"""What users install is what the repository holds: wheel, sdist and editable, tried outside the repository.

Run with `python -m pytest -m packaging tests/test_packaging.py`. The environments borrow torch from the one that runs
the tests (through a path file, which does not carry this checkout along); that pip resolves it is proven by .ci/setup.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.packaging

SMOKE = """
import ringattn, ringattn.kernels.attention.eager, ringattn.kernels.interface, ringattn.launch
from importlib.util import find_spec
from importlib.metadata import version
from pathlib import Path
assert Path(ringattn.__file__).with_name("py.typed").exists()
assert version("ringattn")
kernels = find_spec("kernels")
assert kernels is None or kernels.origin is None, "the package claims the top-level name `kernels`"
print(ringattn.__file__)
"""


def _run(*command: str | Path, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def _sources() -> list[str]:
    """Every source file a user gets, by its installed name."""
    names = ["ringattn/py.typed", "ringattn/launch/serve/http/page.html"]
    profiles = (ROOT / "ringattn/sizing/profiles").glob("*.json")
    names += [path.relative_to(ROOT).as_posix() for path in profiles]
    for folder, room in (("ringattn", "ringattn"), ("kernels", "ringattn/kernels"), ("launch", "ringattn/launch")):
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.relative_to(ROOT / folder)
            if relative.parts[0] not in ("kernels", "launch") or folder != "ringattn":
                names.append(f"{room}/{relative.as_posix()}")
    return sorted(set(names))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked and new files of this checkout, links kept, without what a build leaves behind."""
    copy = tmp_path_factory.mktemp("checkout") / "ringattn"
    ignored = shutil.ignore_patterns(
        ".git", ".venv*", "__pycache__", "*.egg-info", "build", "dist", "runs", "site", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def built(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """sdist: the source archive; wheel: built from the checkout; wheel_of_sdist: built from the archive."""
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--outdir", out / "chain", cwd=checkout)  # sdist, then its wheel
    _run(sys.executable, "-m", "build", "--wheel", "--outdir", out / "direct", cwd=checkout)
    [sdist] = (out / "chain").glob("*.tar.gz")
    [of_sdist] = (out / "chain").glob("*.whl")
    [direct] = (out / "direct").glob("*.whl")
    return {"sdist": sdist, "wheel": direct, "wheel_of_sdist": of_sdist}


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of a fresh environment that can import torch but not this checkout."""
    folder = tmp_path / "venv"
    venv.create(folder, symlinks=True)  # without pip, which works on it from outside in a tenth of the time
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()))
    interpreter = folder / "bin" / "python"
    absent = subprocess.run([interpreter, "-c", "import torch, ringattn"], cwd=tmp_path, capture_output=True, text=True)
    assert "No module named 'ringattn'" in absent.stderr
    return interpreter


def _install(python: Path, *what: str | Path) -> None:
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--ignore-installed")
    _run(*pip, *what, cwd=python.parent)


def test_wheels_hold_every_source_file_and_nothing_else(built):
    wheels = [zipfile.ZipFile(built[kind]) for kind in ("wheel", "wheel_of_sdist")]
    for wheel in wheels:
        assert sorted(n for n in wheel.namelist() if ".dist-info/" not in n) == _sources()
        assert any(n.endswith("licenses/LICENSE") for n in wheel.namelist())
    assert all(len({wheel.read(name) for wheel in wheels}) == 1 for name in _sources())


def test_the_wheel_is_pure_and_asks_for_torch_but_not_for_triton(built):
    assert built["wheel"].name.endswith("py3-none-any.whl")
    wheel = zipfile.ZipFile(built["wheel"])
    [metadata] = [wheel.read(n).decode() for n in wheel.namelist() if n.endswith("METADATA")]
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert any("torch>=2.11" in line for line in required)
    assert not any("triton" in line for line in required)


def test_the_source_archive_holds_real_files(built):
    members = tarfile.open(built["sdist"]).getmembers()
    assert not [m.name for m in members if m.issym() or m.islnk()]
    assert any(m.name.endswith("ringattn/kernels/attention/eager.py") for m in members)


def test_a_wheel_works_outside_the_repository(built, python, tmp_path):
    _install(python, built["wheel_of_sdist"])
    assert str(tmp_path / "venv") in _run(python, "-c", SMOKE, cwd=tmp_path)
    _run(python, "-m", "ringattn.launch.doctor", cwd=tmp_path)


def test_a_wheel_works_inside_the_repository(built, python, checkout):
    _install(python, built["wheel"])
    assert str(checkout) in _run(python, "-c", SMOKE, cwd=checkout)


def test_an_editable_install_works_and_follows_edits(python, checkout, tmp_path):
    _install(python, "--editable", checkout)
    assert str(checkout) in _run(python, "-c", SMOKE, cwd=tmp_path)
    # Regression: beside the clone its folder was a namespace package that came first
    assert str(checkout / "ringattn") in _run(python, "-c", f"{SMOKE}\nringattn.Ring", cwd=checkout.parent)
    _run(python, "-m", "ringattn.launch.doctor", cwd=tmp_path)
    added = checkout / "kernels" / "added_later.py"
    added.write_text('"""Written after the install."""\n')
    try:
        _run(python, "-c", "import ringattn.kernels.added_later", cwd=tmp_path)
    finally:
        added.unlink()
