"""The search beside the verdict: property tests over and over, with new seeds, on all cores, until the time is over.

    python -m tests.fuzz --minutes 10

Every test that hypothesis drives takes part, wherever it is. Each round is a process of its own with its own seed and its own
order of tests; it stops in the middle when the time is over, so that a short search is one too. For each failure
stands what makes it happen again: a command with the seed, and hypothesis' blob. Exit code 1: there are findings.

In the rounds this module is the plug-in that counts, stops and reports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

import click
import pytest

from fabric.clock import MonotonicClock
from roles.runtime.process import child_environment, die_with_parent
from tests.conftest import SEARCH_VARIABLE

ROOT = Path(__file__).parents[1]
HANGS_AFTER_S = 300  # where a test is then, is printed; one that hangs for good makes its round a finding
OVERTIME_S = (
    400.0  # a failure that is found at the end is still made small, which takes hypothesis up to 300 s
)
TAIL_CHARS = 6_000
TIME_IS_OVER = "the time is over"
ENDS = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
CLOCK = MonotonicClock()


@dataclass
class Round:
    """What one process found. `is_broken`: it did not even end in order."""

    seed: int
    examples: int = 0
    tests: int = 0
    failures: dict[str, str] = field(default_factory=dict)


def main() -> int:
    """Search; the exit code."""
    parser = argparse.ArgumentParser(description="search for failures of property tests with new seeds")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of all rounds"
    )
    parser.add_argument("--rounds", type=int, help="of each core, even if there is time for more")
    parser.add_argument("paths", nargs="*", help="instead of every file that uses hypothesis")
    options = parser.parse_args()
    paths = options.paths or _files()
    began_ms = CLOCK.now_ms()
    until_ms = began_ms + 60e3 * options.minutes
    seeds = random.Random(options.seed)
    click.echo(f"searching for {options.minutes:g} minutes on {options.jobs} cores, --seed {options.seed}")

    def search(seed: int) -> Iterator[Round]:
        draw = random.Random(seed)
        for number in count():
            if CLOCK.now_ms() >= until_ms or number == options.rounds:
                return
            yield _round(draw.randrange(1 << 32), until_ms, paths)

    found: dict[str, str] = {}
    rounds: list[Round] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for several in pool.map(
            lambda seed: _told(search(seed)), [seeds.randrange(1 << 32) for _ in range(options.jobs)]
        ):
            rounds.extend(several)
    for one in rounds:
        found.update(one.failures)
    seconds = (CLOCK.now_ms() - began_ms) / 1e3
    examples, tests = sum(one.examples for one in rounds), sum(one.tests for one in rounds)
    click.echo(
        f"{examples} examples of {tests} tests in {len(rounds)} rounds and {seconds:.0f} s:"
        f" {examples / seconds:.0f} examples/s; findings: {len(found)}"
    )
    for test in sorted(found):
        click.echo(f"  {test}")
    return 1 if found else 0


def _files() -> list[str]:
    """By their text: importing every test to ask it takes longer than a short search."""
    found = (path.relative_to(ROOT) for path in sorted(ROOT.glob("tests/**/test_*.py")))
    return [str(path) for path in found if "hypothesis" in (ROOT / path).read_text(encoding="utf-8")]


def _told(rounds: Iterator[Round]) -> list[Round]:
    """Findings are told when they are made."""
    kept = []
    for one in rounds:
        kept.append(one)
        for test, text in one.failures.items():
            command = f"{SEARCH_VARIABLE}=1 PYTHONHASHSEED={_hash_seed(one.seed)} python -m pytest --hypothesis-seed={one.seed} '{test}'"
            click.echo(f"\nFOUND {test}\n{text}\nreproduce: {command}\n")
    return kept


def _round(seed: int, until_ms: float, paths: list[str]) -> Round:
    with tempfile.TemporaryDirectory(prefix="tenuto-fuzz-") as directory:
        report = Path(directory) / "report"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.fuzz", "-m", "hypothesis", *paths]
        command += [
            f"--hypothesis-seed={seed}",
            "--timeout=0",
            "-o",
            f"faulthandler_timeout={HANGS_AFTER_S}",
            "-p",
            "no:cacheprovider",
        ]
        environment = child_environment() | {
            SEARCH_VARIABLE: json.dumps({"until_ms": until_ms, "seed": seed, "report": str(report)}),
            "PYTHONHASHSEED": _hash_seed(seed),
        }
        with (Path(directory) / "out").open("wb+") as out:
            left_s = max(0.0, until_ms - CLOCK.now_ms()) / 1e3
            try:
                code = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=left_s + OVERTIME_S,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
            out.seek(0)
            said = out.read().decode("utf-8", "replace")
        if not report.exists() or code not in ENDS:
            return Round(
                seed, failures={"(a whole round)": f"it ended with code {code}:\n{said[-TAIL_CHARS:]}"}
            )
        return Round(seed, **json.loads(report.read_text(encoding="utf-8")))


def _hash_seed(seed: int) -> str:
    return str(seed % (1 << 32))


# ---------------------------------------------------------------- in a round


class _Searching:
    """The plug-in of one round."""

    def __init__(self, until_ms: float, seed: int, report: Path) -> None:
        self._until_ms = until_ms
        self._draw = random.Random(seed)
        self._report = report
        self._counted: set[object] = set()
        self._failures: dict[str, str] = {}
        self._examples = self._tests = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._draw.shuffle(items)
        for item in items:
            if isinstance(item, pytest.Function) and item.function not in self._counted:
                self._counted.add(item.function)
                handle = getattr(item.function, "hypothesis", None)
                if handle is not None:
                    handle.inner_test = self._counting(handle.inner_test)

    def _counting(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Counts examples; when the time is over it skips the rest of the test, unless an example has failed."""
        has_failed = False

        @wraps(inner)
        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_failed
            if not has_failed and CLOCK.now_ms() >= self._until_ms:
                pytest.skip(TIME_IS_OVER)  # hypothesis lets this one through, and ends
            self._examples += 1
            try:
                return inner(*args, **kwargs)
            except Exception as error:
                # hypothesis' own say that an example does not count
                has_failed = has_failed or not type(error).__module__.startswith("hypothesis")
                raise

        return counting

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if CLOCK.now_ms() >= self._until_ms:
            item.session.shouldstop = TIME_IS_OVER

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._tests += 1
        # In the middle of an example that hypothesis has played before, the skip looks to it as if the test were flaky.
        if report.failed and TIME_IS_OVER not in report.longreprtext:
            self._failures[report.nodeid] = report.longreprtext[-TAIL_CHARS:]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failures[report.nodeid] = report.longreprtext[-TAIL_CHARS:]

    def pytest_sessionfinish(self) -> None:
        found = {"examples": self._examples, "tests": self._tests, "failures": self._failures}
        self._report.write_text(json.dumps(found), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Loaded with `-p tests.fuzz`."""
    die_with_parent()
    told = json.loads(os.environ[SEARCH_VARIABLE])
    config.pluginmanager.register(_Searching(told["until_ms"], told["seed"], Path(told["report"])))


if __name__ == "__main__":
    sys.exit(main())
