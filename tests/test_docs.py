"""The documentation matches the code: blocks print the output shown, figures and tables are current, links and paths exist.

Code on the pages, fenced:

    ```python                    runs in one process, in the order of the page and in one namespace
    ```python title="x.py"       runs on two ranks
    ```text                      directly after either: its output (rank after rank)
    ```py                        does not run: it needs a GPU, another package, or names that it does not define
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import ringattn
from ringattn import attention_reference
from ringattn.kernels import registry
from tests.support.pages import load
from tests.support.pool import Pools

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)|src=\"([^\"]+)\"")
HEADING = re.compile(r"^#+ (.+?)$", re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str, str | None]]:
    """Return title, code and shown output of every block that runs, in order."""
    text = (DOCS / page).read_text()
    found: list[tuple[str, str, str | None]] = []
    end = -1
    for block in FENCE.finditer(text):
        language, title, body = block[1], block[2].strip(), block[3]
        if language == "text" and found and text[end : block.start()].strip() == "" and end > 0:
            found[-1] = (*found[-1][:2], body)
        end = -1
        if language == "python":
            found.append((title, body, None))
            end = block.end()
    return found


def run(code: str, name: str, space: dict[str, object]) -> str:
    """Execute code and return its output."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, name, "exec"), space)
    return out.getvalue()


def run_rank(code: str, name: str) -> str:
    """Execute code as one rank of a group that already exists."""
    with patch.object(dist, "init_process_group"), patch.object(dist, "destroy_process_group"):
        return run(code, name, {"__name__": "__main__"})


ELSEWHERE = (
    "diffusers.md", "loops.md", "meshes.md", "reinforcement.md", "serve_in_ten_minutes.md", "torchtitan.md",
    "train_in_ten_minutes.md", "trainers.md", "transformers.md",
)  # fmt: skip
"""Pages whose code other tests run, on more ranks or with other packages."""
WITH_CODE = [
    path.name for path in PAGES if path.name not in ELSEWHERE and any(not title for title, _, _ in blocks(path.name))
]
ON_RANKS = [
    path.name for path in PAGES if path.name not in ELSEWHERE and any(title for title, _, _ in blocks(path.name))
]


@pytest.mark.parametrize("page", WITH_CODE)
def test_code_on_a_page_prints_the_output_shown(page: str) -> None:
    space: dict[str, object] = {"__name__": page}
    torch.manual_seed(0)
    for number, (title, code, shown) in enumerate(blocks(page)):
        if not title:
            printed = run(code, f"{page}[{number}]", space)
            assert printed == (shown or "")


@pytest.mark.parametrize("page", ON_RANKS)
def test_code_for_two_ranks_prints_the_output_shown(page: str, pool: Pools) -> None:
    for title, code, shown in blocks(page):
        if title:
            assert "".join(pool(2).run(run_rank, code, title)) == (shown or "")


def test_blocks_are_paired_with_the_output_directly_after_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = "`" * 3
    page = f"{fence}python\nprint(1)\n{fence}\n\n{fence}text\n1\n{fence}\n\nWords.\n\n{fence}text\n2\n{fence}\n"
    page += f'{fence}py\nraise SystemExit\n{fence}\n\n{fence}python title="x.py"\npass\n{fence}\n'
    (tmp_path / "page.md").write_text(page)
    monkeypatch.setitem(globals(), "DOCS", tmp_path)
    assert blocks("page.md") == [("", "print(1)\n", "1\n"), ('title="x.py"', "pass\n", None)]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda path: path.name)
def test_targets_of_links_and_images_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for found in LINK.finditer(text):
        link = found[1] or found[2]
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and not anchor.startswith("ringattn."):
            titles = HEADING.findall(target.read_text())
            slugs = [re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles]
            assert anchor in slugs, f"{page.name} links to {link}"


def test_the_quickstart_of_the_readme_is_the_example_script() -> None:
    script = ast.parse((ROOT / "examples/quickstart.py").read_text())
    block = next(block for block in FENCE.finditer((ROOT / "README.md").read_text()) if block[1] == "python")
    assert ast.dump(ast.parse(block[3])) == ast.dump(ast.Module(script.body[1:], [])), (
        "comments and the docstring aside"
    )


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == [path.name for path in PAGES]


def test_every_public_name_is_on_the_api_page_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = load("pages")
    monkeypatch.setattr(pages, "public_names", lambda: [*ringattn.__all__, "brand_new"])
    shown = re.findall(r"^::: ringattn\.(\w+)$", pages.on_page_markdown((DOCS / "api.md").read_text()), re.MULTILINE)
    assert sorted(shown) == sorted([*ringattn.__all__, "brand_new"])
    monkeypatch.undo()
    assert pages.public_names() == ringattn.__all__


def test_committed_drawings_are_current() -> None:
    drawn = load("drawings").drawings()
    there = {path.name: path.read_text() for path in (DOCS / "drawings").glob("*.svg")}
    assert there == drawn, "run `python docs/drawings.py`"
    assert (DOCS / "ring.svg").read_text() == load("ring_figure").figure(), "run `python docs/ring_figure.py`"


def test_drawings_show_the_pairs_that_the_reference_computes() -> None:
    drawings = load("drawings")
    for mask in drawings.MASKS:
        # all scores equal, values that are unit vectors: the output has a weight where a key is visible
        q, k = torch.zeros(1, mask.seq_len, 1, 16), torch.zeros(1, mask.kv_len, 1, 16)
        v = torch.eye(mask.kv_len)[None, :, None, :]
        o = attention_reference(q, k, v, **mask.fields)[0, :, 0, :]
        seen = torch.zeros(mask.seq_len, mask.kv_len, dtype=torch.bool)
        for i, stretches in drawings.visible(mask.mask).items():
            for lo, hi in stretches:
                seen[i, lo:hi] = True
        assert torch.equal(o > 0, seen), mask.name
        steps = torch.zeros_like(seen, dtype=torch.int64)
        queries, keys = (drawings.holders(mask.shards(side)) for side in ("queries", "keys"))
        for step in range(drawings.WORLD_SIZE):
            for i, stretches in drawings.seen_at(step, mask.mask, queries, keys).items():
                for lo, hi in stretches:
                    steps[i, lo:hi] += 1
        assert torch.equal(steps, seen.long()), f"{mask.name}: every visible pair belongs to one step"


def test_every_drawing_is_on_a_page() -> None:
    shown = set(re.findall(r"drawings/([\w-]+\.svg)", "".join(path.read_text() for path in PAGES)))
    assert shown == {path.name for path in (DOCS / "drawings").glob("*.svg")}


def test_computed_tables_are_current() -> None:
    tables = load("tables")
    pages = tables.pages()
    asked = [name for path in pages for name in tables.MARKED.findall(path.read_text())]
    assert sorted(asked) == sorted(tables.TABLES)
    for path in pages:
        assert path.read_text() == tables.fill(path.read_text()), "run `python docs/tables.py`"


def test_the_table_of_kernels_has_a_row_for_every_option() -> None:
    assert load("tables").kernels().count("\n") == 1 + 4 + 9 + 1 + len(registry.FEATURES)


def test_speeds_in_the_readme_are_on_a_page_of_results() -> None:
    section = (ROOT / "README.md").read_text().split("## How fast")[1].split("\n## ")[0]
    rows = [line.split("|")[2:4] for line in section.splitlines() if line.startswith("| ")]
    number = re.compile(r"\d[\d.,]*\d")
    shown = {x for row in rows for cell in row for x in number.findall(cell)}
    results = {
        x
        for page in ("results.md", "latent.md", "results/weights/README.md")
        for x in number.findall((DOCS / page).read_text())
    }
    assert len(rows) == 17, "a head and sixteen rows"
    assert len(shown) >= 15
    assert shown - results == set()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 220


@pytest.mark.parametrize(
    "page", ["README.md", "docs/design.md", "docs/contributing.md", "docs/dropins.md", "docs/transport.md"]
)
def test_files_named_on_a_page_exist(page: str) -> None:
    named = re.findall(r"`((?:[\w.]+/)*[\w.]+(?:\.py|\.md|/))`", (ROOT / page).read_text())
    named = {path for path in named if "NAME" not in path and path != "x.py"}
    tops = ("ringattn", "kernels", "launch", "tests", "docs", "examples")
    there = [
        f"/{x.relative_to(ROOT)}" + "/" * x.is_dir() for top in tops for x in (ROOT / top, *(ROOT / top).rglob("*"))
    ]
    assert named
    assert [path for path in sorted(named) if not any(one.endswith(f"/{path}") for one in there)] == []


def test_pages_from_other_hosts_are_refused() -> None:
    pages = load("pages")
    page = type("Page", (), {"file": type("File", (), {"src_uri": "x.md"})})
    assert pages.on_post_page('<a href="https://x.org">x</a><script src="a.js"></script>', page)
    with pytest.raises(ValueError, match=r"x\.md must load nothing"):
        pages.on_post_page('<script src="https://x.org/a.js"></script>', page)
