"""What the documentation site adds to its pages: sections of the README, public names, and the refusal of other hosts.

Owns the hooks that mkdocs.yml names. Refuses to know what any page says. On a line of its own

    <!-- readme: Numerics contract -->  becomes the body of the README's section of that name
    <!-- public: the rest -->           becomes the docstrings of the public names that the page does not place itself
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
REST = "<!-- public: the rest -->"
ASKED = re.compile(r"^<!-- readme: (.+?) -->$", re.MULTILINE)
FOREIGN = re.compile(r"<(?:script|img|iframe|source|video|link)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>", re.I)


def section(name: str, text: str | None = None) -> str:
    """The body of a section of the README, with its links as seen from docs/.

    Args:
        name: Its heading, of level two.
        text: The README; None reads it.

    Raises:
        ValueError: The README has no such section.
    """
    text = README.read_text() if text is None else text
    found = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"README.md must have a section '## {name}', got none; name one that is there")
    return found[1].strip("\n").replace("](docs/", "](")


def public_names() -> list[str]:
    """`ringattn.__all__`, read and not imported."""
    tree = ast.parse((ROOT / "ringattn" / "__init__.py").read_text())
    lists = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return ast.literal_eval(lists[0])


def the_rest(markdown: str) -> str:
    """The names that a page does not place, as a section of their own; nothing where it places all."""
    placed = re.findall(r"^::: ringattn\.(\w+)$", markdown, re.MULTILINE)
    names = [name for name in public_names() if name not in placed]
    return "\n\n".join(["## In existing models", *(f"::: ringattn.{name}" for name in names)]) if names else ""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts sections of the README, and public names, where pages ask for them."""
    if REST in markdown:
        markdown = markdown.replace(REST, the_rest(markdown))
    return ASKED.sub(lambda asked: section(asked[1]), markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuses a page that would load something from another host."""
    found = FOREIGN.search(output)
    if found is not None and 'rel="canonical"' not in found[0]:
        raise ValueError(f"{page.file.src_uri} must load nothing from other hosts, got {found[0]}; keep it in docs/")
    return output
