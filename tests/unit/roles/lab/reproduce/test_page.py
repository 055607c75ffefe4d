"""The page of reproductions that is kept: what it says about itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from roles.lab.reproduce import EXPERIMENTS
from roles.lab.reproduce.document import chapters_of, in_order, is_failed, markdown

PAGE = (Path(__file__).resolve().parents[5] / "docs" / "results" / "reproduction.md").read_text(
    encoding="utf-8"
)


def test_the_page_is_what_its_chapters_make() -> None:
    chapters = chapters_of(PAGE)
    assert chapters is not None
    assert set(chapters) <= set(EXPERIMENTS)
    missing = [name for name in EXPERIMENTS if name not in chapters]
    assert markdown(in_order(chapters, list(EXPERIMENTS)), missing) == PAGE
    assert not any(is_failed(text) for text in chapters.values())


def test_the_page_says_why_a_number_differs() -> None:
    _, _, rest = PAGE.partition("### What does not\n")
    table = [line for line in rest.partition("<a id=")[0].splitlines() if line.startswith("| [")]
    assert table
    silent = [line for line in table if line.endswith("|  |")]
    assert not silent, silent


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_there_to_be_imported(name: str) -> None:
    module, _, function = EXPERIMENTS[name].partition(":")
    path = Path(__file__).resolve().parents[5] / f"{module.replace('.', '/')}.py"
    assert f"def {function}(" in path.read_text(encoding="utf-8")
