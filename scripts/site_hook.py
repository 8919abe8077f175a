"""For mkdocs: blocks that the tests run are marked, as in `bash run`, which Markdown for sites does not know."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The text of a page with only the language at its blocks."""
    return re.sub(r"^```(\w+) .*$", r"```\1", markdown, flags=re.MULTILINE)
