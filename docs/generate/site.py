"""What `mkdocs build` does beside Markdown: the README is the first page, and links that leave docs/ are mended."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
INDEX = "index.md"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as the first page."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, INDEX, content=mended(text, "README.md", "docs/" + INDEX)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Mend a page's links."""
    if page.file.src_uri == INDEX:
        return markdown
    here = f"docs/{page.file.src_uri}"
    return mended(markdown, here, here)


def mended(text: str, written_in: str, shown_in: str) -> str:
    """Links of a text, written relative to one page and shown on another; what the site does not have is only named."""

    def mend(link: re.Match[str]) -> str:
        words, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(written_in), target))
        if path == "README.md":
            path = f"docs/{INDEX}"
        if not path.startswith("docs/"):
            return f"{words} (`{path}`)" if words.strip("`") != path else words
        return f"[{words}]({posixpath.relpath(path, posixpath.dirname(shown_in))}{anchor})"

    return LINK.sub(mend, text)
