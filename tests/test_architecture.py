"""The direction of imports, and what no file may contain: read from the source, never by importing it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {"ringattn": ROOT / "ringattn", "ringattn.kernels": ROOT / "kernels", "ringattn.launch": ROOT / "launch"}
INTEGERS = [  # each may import those before it
    "plan.layouts",
    "plan.block_pattern",
    "plan.intervals",
    "plan.expressions",
    "plan.mask",
    "plan.ring_plan",
]
DECISIONS = ("ringattn.kernels.attention.hopper.tile_scheduler", "ringattn.kernels.attention.hopper.configs")
"""Integers of the Hopper launches, which the planner reads without Triton."""
DISTRIBUTED = ("torch.distributed", "torch._C._distributed", "torch._C._functional_collectives")


def _modules() -> dict[str, Path]:
    """Dotted name -> file, each file once, by its real path."""
    found = {}
    for room, folder in ROOMS.items():
        for parent, folders, files in os.walk(folder, followlinks=False):
            folders[:] = [f for f in folders if f != "__pycache__"]
            for file in files:
                if file.endswith(".py"):
                    path = Path(parent, file)
                    parts = path.relative_to(folder).with_suffix("").parts
                    found[".".join((room, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = _modules()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _statements(tree: ast.Module, top_level: bool) -> Iterator[ast.AST]:
    """Every statement, or only those that run when the module is imported."""
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop()
        yield node
        runs_later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or _type_checking(node)
        if not (top_level and runs_later):
            stack.extend(ast.iter_child_nodes(node))


@cache
def imports(module: str, path: Path, *, top_level: bool = False) -> set[str]:
    """The dotted names a file imports, relative ones resolved; `from a import b` gives both a and a.b.

    Attribute chains of an imported package (`torch.distributed.send`) count too: they need no import of their own.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    bound: set[str] = set()
    for node in _statements(_tree(path), top_level):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
            bound.update(alias.name.partition(".")[0] for alias in node.names if alias.asname is None)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    for node in _statements(_tree(path), top_level):
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            if chain.partition(".")[0] in bound and re.fullmatch(r"[\w.]+", chain):
                names.add(chain)
    return names


def _within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def test_the_reader_sees_every_kind_of_import(tmp_path):
    file = tmp_path / "mod.py"
    file.write_text(
        "import torch\nfrom . import a\nfrom ..up import b\nx = torch.distributed.get_rank\n"
        "def f():\n    import late\nclass C:\n    import early\n"
    )
    seen = imports("pkg.sub.mod", file)
    assert {"torch", "pkg.sub.a", "pkg.up.b", "torch.distributed", "late", "early"} <= seen
    assert "late" not in imports("pkg.sub.mod", file, top_level=True)


def test_kernels_know_neither_the_ring_nor_processes():
    for module in (m for m in MODULES if _within(m, "ringattn.kernels")):
        for name in imports(module, MODULES[module]):
            assert not _within(name, "ringattn") or _within(name, "ringattn.kernels"), f"{module} imports {name}"
            assert not _within(name, *DISTRIBUTED), f"{module} uses {name}"


def test_nothing_below_launch_imports_launch():
    for module in (m for m in MODULES if not _within(m, "ringattn.launch")):
        assert not [name for name in imports(module, MODULES[module]) if _within(name, "ringattn.launch")], module


def test_the_plan_is_integers_and_standard_library_only():
    for module in INTEGERS:
        allowed = {f"ringattn.{earlier}" for earlier in INTEGERS[: INTEGERS.index(module)]}
        for name in imports(f"ringattn.{module}", MODULES[f"ringattn.{module}"]):
            own = any(_within(name, earlier) for earlier in allowed)
            assert own or name.partition(".")[0] in sys.stdlib_module_names, f"{module} imports {name}"


def test_only_transports_the_ring_and_launch_touch_process_groups():
    for module in MODULES:
        if not _within(module, "ringattn.transport", "ringattn.ring", "ringattn.launch"):
            assert not [name for name in imports(module, MODULES[module]) if _within(name, *DISTRIBUTED)], module


def _needs_triton(module: str) -> bool:
    """Whether importing a module may need Triton."""
    if _within(module, *DECISIONS):
        return False
    kernels = (
        "attention.portable",
        "attention.hopper",
        "decode.latent_fp8",
        "decode.latent_hopper",
        "decode.paged_hopper",
        "runtime.bound_launch",
    )
    return _within(module, *(f"ringattn.kernels.{name}" for name in kernels)) or (
        _within(module, "ringattn.kernels") and module.endswith("_triton") and not module.endswith("optional_triton")
    )


def test_triton_is_imported_at_the_top_of_triton_kernels_only():
    for module in MODULES:
        if not _needs_triton(module):
            names = imports(module, MODULES[module], top_level=True)
            assert not [name for name in names if _within(name, "triton") or _needs_triton(name)], module


def test_what_is_decided_about_hopper_launches_needs_no_triton():
    for module in DECISIONS:
        assert not [x for x in imports(module, MODULES[module]) if _within(x, "triton")], module


def test_gluon_is_known_to_the_hopper_kernels_only():
    for module in MODULES:
        hopper = ("attention.hopper", "decode.latent_fp8", "decode.latent_hopper", "decode.paged_hopper")
        if not _within(module, *(f"ringattn.kernels.{name}" for name in hopper)):
            names = imports(module, MODULES[module])
            assert not [name for name in names if _within(name, "triton.experimental", "triton._C")], module


def test_optional_packages_are_imported_where_they_are_used():
    optional = (
        "transformers", "diffusers", "matplotlib", "tyro", "tqdm", "rich", "psutil", "fastapi", "uvicorn", "accelerate",
        "aiohttp",
    )  # fmt: skip
    for module in MODULES:
        if not _within(module, "ringattn.launch", "ringattn.integrations"):
            names = imports(module, MODULES[module], top_level=True)
            assert not [name for name in names if _within(name, *optional)], module


def _library(module: str) -> bool:
    return not _within(module, "ringattn.launch")


def test_the_library_does_not_print():
    for module in filter(_library, MODULES):
        calls = [node for node in ast.walk(_tree(MODULES[module])) if isinstance(node, ast.Call)]
        printed = [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]
        assert not printed, f"{module} prints in lines {printed}"


FACTORIES = "arange as_tensor asarray empty eye full linspace ones rand randint randn randperm tensor zeros".split()


def test_tensors_are_made_where_the_code_says_not_where_the_caller_defaults_to():
    """Under torch.set_default_device what names no device is on a GPU, where host memory is meant too."""
    for module in filter(_library, MODULES):
        for node in ast.walk(_tree(MODULES[module])):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in [f"torch.{name}" for name in FACTORIES]:
                where = f"{MODULES[module]}:{node.lineno}"
                assert any(x.arg == "device" for x in node.keywords), f"{where} makes a tensor on the default device"


def test_every_module_says_what_it_owns():
    for module in MODULES:
        assert ast.get_docstring(_tree(MODULES[module])), f"{MODULES[module]} has no docstring"


def test_every_refusal_says_something():
    for module in filter(_library, MODULES):
        for node in ast.walk(_tree(MODULES[module])):
            if not isinstance(node, ast.Raise) or node.exc is None:
                continue
            call = node.exc
            name = ast.unparse(call.func if isinstance(call, ast.Call) else call)
            if name in ("ValueError", "NotImplementedError", "RuntimeError", "TypeError"):
                where = f"{MODULES[module]}:{node.lineno}"
                assert isinstance(call, ast.Call), f"{where} raises {name} without a message"
                assert call.args, f"{where} raises {name} without a message"
                assert ast.unparse(call.args[0]) not in ("''", "f''"), f"{where} raises {name} with an empty message"


def _public() -> dict[str, ast.AST | None]:
    """Every name of `ringattn.__all__` and where it is defined, following `from ringattn.x import name`."""
    init = _tree(MODULES["ringattn"])
    names: list[str] = []
    sources: dict[str, tuple[str, str]] = {}
    for node in ast.walk(init):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
        if isinstance(node, ast.ImportFrom) and node.module:
            base = node.module if node.level == 0 else f"ringattn.{node.module}"
            sources.update({alias.asname or alias.name: (base, alias.name) for alias in node.names})
    found: dict[str, ast.AST | None] = {}
    for name in names:
        module, original = sources.get(name, ("ringattn", name))
        if f"{module}.{original}" in MODULES:
            found[name] = None  # a module: its docstring is asked for above
            continue
        body = _tree(MODULES[module]).body
        definitions = [n for n in body if getattr(n, "name", None) == original]
        found[name] = definitions[-1] if definitions else None  # the last one: overloads come before it
    return found


def test_every_public_name_is_described():
    for name, node in _public().items():
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        doc = ast.get_docstring(node)
        assert doc, f"ringattn.{name} has no docstring"
        if isinstance(node, ast.FunctionDef):
            arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if re.search(r"[Tt]akes the arguments of `\w+`", doc):
                arguments = []  # described there
            assert not arguments or "Args:" in doc, f"ringattn.{name} does not describe its arguments"
            assert "Returns:" in doc or (node.returns and ast.unparse(node.returns) == "None"), name
            for argument in arguments:
                assert re.search(rf"\b{argument}\b", doc), f"ringattn.{name} does not mention {argument}"
            annotated = [a for a in (*node.args.args, *node.args.kwonlyargs) if a.annotation is None]
            assert not annotated, f"ringattn.{name} leaves {[a.arg for a in annotated]} without a type"


@pytest.mark.parametrize("name", ["kernels", "launch"])
def test_the_rooms_hang_on_relative_links(name):
    link = ROOT / "ringattn" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_the_links_are_committed_as_links():
    listed = subprocess.run(
        ["git", "ls-files", "-s", "ringattn/kernels", "ringattn/launch"], cwd=ROOT, capture_output=True, text=True
    )
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["120000", "120000"], listed.stderr


def test_names_that_break_things_are_not_used():
    assert not (ROOT / "kernels" / "__init__.py").exists(), "kernels/__init__.py would shadow the package `kernels`"
    assert not (ROOT / "launch" / "profile.py").exists(), "launch/profile.py would shadow the standard library"
    assert not [str(path) for path in MODULES.values() if path.stem in ("utils", "util", "helpers", "misc", "common")]


def _text_files() -> list[Path]:
    suffixes = {".py", ".md", ".toml", ".txt", ".svg", ".yml", ".yaml", ".cfg", ".sh", ""}
    skipped = {".git", "__pycache__", "runs", "build", "dist", "site"}
    found = []
    for parent, folders, files in os.walk(ROOT, followlinks=False):
        hidden = {f for f in folders if f.startswith(".") and f not in (".ci", ".github")}
        folders[:] = sorted(f for f in folders if f not in skipped | hidden and not f.endswith(".egg-info"))
        for file in files:
            path = Path(parent, file)
            if path.suffix in suffixes and file != ".git" and not path.is_symlink():
                found.append(path)
    return found


def test_no_file_names_a_machine():
    # built from parts, so that this file does not contain what it looks for
    folder = re.compile(r"(?<![\w.{}$)])/(?:" + "|".join(["work", "home", "root", "mnt", "Users", "data"]) + r")/\w")
    address = re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b")
    host = re.compile(r"https?://[\w.-]*(?:pypi|pythonhosted|download)[\w.-]*", re.IGNORECASE)
    for path in _text_files():
        text = path.read_text(errors="replace")
        found = folder.findall(text) + host.findall(text)
        found += [a for a in address.findall(text) if a not in ("127.0.0.1", "0.0.0.0")]
        assert not found, f"{path.relative_to(ROOT)} names a machine: {found}"


FOLDERS = [
    "kernels", "plan", "sizing", "transport", "schedule", "", "numerics", "training", "inference", "integrations",
    "launch",
]  # fmt: skip
"""From the bottom: each may import those before it; "" is the modules directly in ringattn/."""
SHARED = {"ringattn.tensor_checks", "ringattn.ring_registry", "ringattn.sharding_context"}
"""Modules directly in ringattn/ that stand below all folders but kernels."""
MOST_MODULES = 16


def _level(module: str) -> int:
    parts = module.split(".")
    folder = parts[1] if len(parts) > 1 and parts[1] in FOLDERS else ""
    return FOLDERS.index("plan" if module in SHARED else folder)


def _imported_modules(module: str) -> set[str]:
    """Modules of ours that a module imports, in functions and for type checkers too."""
    names = imports(module, MODULES[module])
    return {name for name in names if name in MODULES and name != module and MODULES[name].name != "__init__.py"}


def test_folders_import_those_below_them_only():
    for module in MODULES.keys() - {"ringattn"}:  # its lazy names come from everywhere
        above = [name for name in _imported_modules(module) if _level(name) > _level(module)]
        assert not above, f"{module} imports {above}, which stand above it"


def _run_by(module: str) -> set[str]:
    """Modules that importing a module runs before its own top-level code: what it imports, and their packages."""
    names = imports(module, MODULES[module], top_level=True)
    packages = {".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 1)}
    own = {".".join(module.split(".")[:n]) for n in range(1, module.count(".") + 2)}
    return {name for name in names | packages if name in MODULES} - own


@pytest.mark.parametrize("edges", [_imported_modules, _run_by])
def test_no_modules_import_each_other(edges):
    left = {module: edges(module) for module in MODULES}
    while free := {module for module, needed in left.items() if not needed & left.keys()}:
        for module in free:
            del left[module]
    assert not left, f"in cycles or above them: {sorted(left)}"


def test_no_folder_is_crowded():
    counts = Counter(path.parent for path in MODULES.values() if path.name not in ("__init__.py", "__main__.py"))
    assert max(counts.values()) <= MOST_MODULES, counts.most_common(2)
