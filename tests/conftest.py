"""What every test may ask for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

# A deadline per example would time the machine, not the code: a busy one must not fail a property.
hypothesis.settings.register_profile("tenuto", deadline=None)
hypothesis.settings.load_profile("tenuto")

# The suite leaves nothing outside the checkout: matplotlib would keep its font list in the user's home.
os.environ.setdefault("MPLCONFIGDIR", str(Path(__file__).parents[1] / ".pytest_cache" / "matplotlib"))

GOLDEN_DIR = Path(__file__).parent / "golden"

Golden = Callable[[str, str], None]
"""Compare a text with the file of that name under tests/golden."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-golden",
        action="store_true",
        help="write the golden files anew instead of comparing; review the diff",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    def compare(name: str, text: str) -> None:
        path = GOLDEN_DIR / name
        if request.config.getoption("--rewrite-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"there is no {path}: write it with --rewrite-golden"
        assert text == path.read_text(encoding="utf-8")

    return compare
