"""What the documentation site adds to its pages: sections of the README, and the refusal of other hosts.

Owns the two hooks that mkdocs.yml names. Refuses to know what any page says.

    <!-- readme: Changes -->      on a line of its own becomes the body of the README's section "Changes"
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
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


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts sections of the README where pages ask for them."""
    return ASKED.sub(lambda asked: section(asked[1]), markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuses a page that would load something from another host."""
    found = FOREIGN.search(output)
    if found is not None and 'rel="canonical"' not in found[0]:
        raise ValueError(f"{page.file.src_uri} must load nothing from other hosts, got {found[0]}; keep it in docs/")
    return output
