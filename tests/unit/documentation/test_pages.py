"""Links lead somewhere, every page can be found, and pages that are made from the code are as the code is now."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generate import generated
from roles.runtime import exit_codes
from tests.documentation import DOCS, PAGES, ROOT, anchors, links


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or not target.is_relative_to(ROOT):
            dead.append(f"{path}: there is no such file")
        elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
            dead.append(f"{path}#{anchor}: there is no such heading")
    assert dead == []


def test_every_page_is_in_the_list_of_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = list(_pages_in(yaml.safe_load(text)["nav"]))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    decisions = {path for path in pages if re.fullmatch(r"adr/\d.*", path)}  # adr/README.md lists them
    assert sorted(listed) == sorted({"index.md", *pages} - decisions)


def _pages_in(nav: Any) -> Any:
    if isinstance(nav, str):
        yield nav
        return
    for one in nav.values() if isinstance(nav, dict) else nav:
        yield from _pages_in(one)


@pytest.mark.parametrize(
    ("path", "text"), generated().items(), ids=lambda one: "" if isinstance(one, str) else named(one)
)
def test_pages_made_from_the_code_are_as_the_code_is(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "the code has changed: run `python -m docs.generate`"


def test_exit_codes_are_the_documented_ones() -> None:
    rows = re.findall(r"^\| (\d+) \| \S", (DOCS / "design.md").read_text(encoding="utf-8"), re.MULTILINE)
    known = {value for name, value in vars(exit_codes).items() if name.startswith("EXIT_")}
    ours = known - {
        exit_codes.EXIT_NOT_STARTED,
        exit_codes.EXIT_UNKNOWN,
    }  # of processes that never were, or are nobody's
    assert sorted(map(int, rows)) == sorted({0, 2} | ours)  # 2 is click's
