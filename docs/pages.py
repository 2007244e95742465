"""Hooks of the documentation site: public names on the API page, and no content from other hosts.

A line `<!-- public: the rest -->` becomes the docstrings of the public names that the page does not place itself.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REST = "<!-- public: the rest -->"
FOREIGN = re.compile(r"<(?:script|img|iframe|source|video|link)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>", re.I)


def public_names() -> list[str]:
    """Return `ringattn.__all__`, read without an import."""
    tree = ast.parse((ROOT / "ringattn" / "__init__.py").read_text())
    lists = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return ast.literal_eval(lists[0])


def the_rest(markdown: str) -> str:
    """Return a section of the names that a page does not place; empty when it places all."""
    placed = re.findall(r"^::: ringattn\.(\w+)$", markdown, re.MULTILINE)
    names = [name for name in public_names() if name not in placed]
    return "\n\n".join(["## In existing models", *(f"::: ringattn.{name}" for name in names)]) if names else ""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the remaining public names where a page asks for them."""
    return markdown.replace(REST, the_rest(markdown)) if REST in markdown else markdown


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Raise for a page that would load something from another host."""
    found = FOREIGN.search(output)
    if found is not None and 'rel="canonical"' not in found[0]:
        raise ValueError(f"{page.file.src_uri} must load nothing from other hosts, got {found[0]}; keep it in docs/")
    return output
