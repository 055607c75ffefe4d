"""`tenuto doctor`: tells whether this host can run Tenuto, what would run on it, and what to do about what is not well."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, packages_distributions, version

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fabric.errors import ConfigError
from roles.cli.console import plain_console
from roles.cli.host_checks import FAIL, HOST_CHECKS, OK, WARN, Finding, judged
from roles.cli.json_output import echo_json
from roles.runtime.environment import run_dir
from roles.runtime.exit_codes import EXIT_FAILURE

IMPORT_LIMIT_S = 120
PACKAGES = (
    ("torch", "real devices", "worker"),
    ("torchvision", "the torchvision zoo", "worker"),
    ("Pillow", "pictures", "worker"),
    ("pulp", "MILP placements", "plan"),
)
ROOMS = ("deploy", "fabric", "policies", "profiles", "roles")
"""What Tenuto is imported as."""


def examine() -> list[Finding]:
    """Every check, in the order a person would ask."""
    return [finding for check in CHECKS for finding in check()]


def _python() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    is_supported = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield judged("python", f"{found} (3.11 and 3.12 are tested)", not is_supported, "use Python 3.11 or 3.12")
    yield judged(
        "platform",
        f"{sys.platform} (Linux is needed)",
        sys.platform != "linux",
        "run it on Linux, in a container or a virtual machine",
        FAIL,
    )


def _packages() -> Iterator[Finding]:
    for name in ("pyzmq", "msgspec", "numpy", "sortedcontainers", "click", "rich", "PyYAML"):
        yield _package(name, FAIL, "the core needs it", f"pip install {name}")
    for name, use, extra in PACKAGES:
        yield _package(name, WARN, use, f"pip install 'tenuto[{extra}]' on hosts that need it")


def _torchvision() -> Iterator[Finding]:
    """Whether the two wheels belong together: each may be there, and the import fail all the same."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("torchvision") is None:
        return
    problem = _import_problem("torchvision")
    yield judged(
        "import torchvision",
        "works",
        bool(problem)
        and f"{problem}; the zoo's classifiers run even so, a class of your own that imports torchvision does not",
        "install the torchvision that was built for this torch",
    )


def _import_problem(module: str) -> str | None:
    """What importing it raises, asked of a process of its own; None: nothing."""
    command = [sys.executable, "-P", "-c", f"import {module}"]
    try:
        ended = subprocess.run(  # noqa: S603  the command line is ours, and no shell reads it
            command, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"is not imported within {IMPORT_LIMIT_S} s"
    if ended.returncode == 0:
        return None
    return (ended.stderr.strip().splitlines() or [f"ended with code {ended.returncode}"])[-1]


def _package(name: str, missing: str, use: str, remedy: str) -> Finding:
    try:
        return Finding(name, OK, version(name))
    except PackageNotFoundError:
        return Finding(name, missing, f"not installed: {use}", remedy)


def _names() -> Iterator[Finding]:
    """An SSH library on PyPI is imported as `fabric` too; with both installed one of them breaks."""
    owners = packages_distributions()
    for name in ROOMS:
        foreign = sorted({owner for owner in owners.get(name, ()) if owner != "tenuto"})
        yield judged(
            f"import {name}",
            "no other distribution owns the name",
            bool(foreign)
            and f"{' and '.join(foreign)} {'(the SSH library) ' if name == 'fabric' else ''}has the same import name",
            "give Tenuto a virtual environment of its own, or uninstall the other",
            FAIL,
        )


def _run_dir() -> Iterator[Finding]:
    try:
        directory = run_dir()
    except ConfigError as error:
        yield Finding(
            "run directory", FAIL, str(error), "set TENUTO_RUN_DIR to a short directory of your own"
        )
        return
    directory.remove()
    yield Finding("run directory", OK, str(directory.path))


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _packages,
    _torchvision,
    _names,
    _run_dir,
    *HOST_CHECKS,
)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Findings as JSON on stdout.")
def doctor(*, as_json: bool) -> None:
    """Check this host, with a remedy for whatever is not well. Exit 1 when something needed is missing."""
    findings = examine()
    if as_json:
        echo_json([asdict(finding) for finding in findings])
    else:
        _print(findings)
    if any(finding.state == FAIL for finding in findings):
        sys.exit(EXIT_FAILURE)


def _print(findings: list[Finding]) -> None:
    console = plain_console()
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("check", "state", "detail"):
        table.add_column(column, overflow="fold")
    colours = {OK: "green", WARN: "yellow", FAIL: "red"}
    for finding in findings:
        table.add_row(finding.name, Text(finding.state, colours[finding.state]), finding.detail)
    console.print(table)
    unwell = [finding for finding in findings if finding.state != OK]
    for finding in sorted(unwell, key=lambda one: one.state != FAIL):
        console.print(Text.assemble((f"{finding.name}: ", colours[finding.state]), finding.remedy))
