"""The documentation as tests see it: its pages, their links, and their fenced blocks with the marks in front of them.

A block is run, or a comment on the line before it says why not: `<!-- not run: REASON -->`; or which test runs it:
`<!-- run by PATH -->`. Blocks of plain text are output or drawings. A block whose first line is a comment with nothing but a file's
name is that file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ELSEWHERE = ("README.md", "CHANGELOG.md", "tests/gpu/README.md", "profiles/data/README.md")
PAGES = [*(ROOT / name for name in ELSEWHERE), *sorted(DOCS.rglob("*.md"))]
LANGUAGES = ("", "text", "console", "python", "yaml", "toml", "ini", "json", "proto")
_MARK = re.compile(r"<!-- (not run|run by):? (.+?) -->\s*")
_NAMED = re.compile(r"# ([\w./-]+\.(?:ya?ml|py|toml|json|csv))\s*\n")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. `line`: of its fence, from 1. `mark`: ("not run", reason) or ("run by", path)."""

    page: Path
    line: int
    language: str
    text: str
    mark: tuple[str, str] | None

    @property
    def where(self) -> str:
        """For people."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """The file that it is."""
        named = _NAMED.match(self.text)
        return named[1] if named else None

    @property
    def commands(self) -> list[str]:
        """Of a console: what is typed, continued lines as one. A prompt may name a host: `head$`."""
        whole = self.text.replace("\\\n", " ")
        return [match[1] for match in re.finditer(r"^(?:[\w-]+)?\$ (.*)$", whole, re.MULTILINE)]


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """All blocks of code of a page. One that is only indented is of no language of ours, as nothing says what it is."""
    found: list[Block] = []
    before: Token | None = None
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
        line = (token.map or [0])[0] + 1
        if token.type in {"fence", "code_block"}:
            mark = (
                _MARK.fullmatch(before.content)
                if before is not None and before.type == "html_block"
                else None
            )
            language = token.info.strip() if token.type == "fence" else "indented"
            found.append(Block(page, line, language, token.content, (mark[1], mark[2]) if mark else None))
        before = token
    return tuple(found)


def all_blocks() -> Iterator[Block]:
    """Of all pages."""
    for page in PAGES:
        yield from blocks(page)


@cache
def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def inline_code(page: Path) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def links(page: Path) -> list[tuple[str, str]]:
    """(path, anchor) of each link that stays in the repository."""
    found = re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)", prose(page))
    return [(path, anchor) for path, anchor in found if "://" not in path and not path.startswith("mailto:")]


@cache
def anchors(page: Path) -> frozenset[str]:
    """Of a page's headings, as GitHub and the site both name them."""
    seen: dict[str, int] = dict.fromkeys(re.findall(r'<a id="([^"]+)">', prose(page)), 1)
    for heading in re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        if count:
            seen[f"{slug}-{count}"] = 1
    return frozenset(seen)
