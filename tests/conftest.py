"""What every test may ask for."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.environment import AT_ONCE

SEARCH_VARIABLE = "TENUTO_SEARCH"
"""Set by `tests/fuzz.py`: properties look for new examples, instead of judging by the same ones every time."""

# Nothing that times the machine may fail a property: no deadline for an example, no limit for drawing one.
hypothesis.settings.register_profile(
    "verdict",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "search",
    hypothesis.settings.get_profile("verdict"),
    derandomize=False,
    max_examples=500,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("search" if SEARCH_VARIABLE in os.environ else "verdict")

# What ignores a signal hands that on to every process it starts, as `make test &` does with SIGINT; what handles one by
# doing nothing ignores it just as well, but its children do not.
for number in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

os.environ |= AT_ONCE

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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With `--reruns`: how each try failed that was given another one. A test that passed then is a finding all the same."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.write_sep("=", f"RERUN {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder of the test's own, with a name so short that paths of sockets in it keep to their 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="t-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


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
