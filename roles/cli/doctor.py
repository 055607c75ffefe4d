"""`tenuto doctor`: tells whether this host can run Tenuto, and what would run on it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import click
from rich.table import Table
from rich.text import Text

from fabric.errors import ConfigError
from roles.cli.console import plain_console
from roles.cli.options import echo_json
from roles.runtime.environment import run_dir
from roles.runtime.exit_codes import EXIT_FAILURE

OK, WARN, FAIL = "ok", "warn", "fail"
IMPORT_LIMIT_S = 120


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: `state` is ok, warn (something optional is missing) or fail."""

    name: str
    state: str
    detail: str


def examine() -> list[Finding]:
    """Every check, in the order a person would ask."""
    return [finding for check in CHECKS for finding in check()]


def _python() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    is_supported = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield Finding("python", OK if is_supported else WARN, f"{found} (3.11 and 3.12 are tested)")
    yield Finding("platform", OK if sys.platform == "linux" else FAIL, f"{sys.platform} (Linux is needed)")


def _packages() -> Iterator[Finding]:
    for name in ("pyzmq", "msgspec", "numpy", "sortedcontainers", "click", "rich", "PyYAML"):
        yield _package(name, FAIL, "the core needs it")
    for name, use in (
        ("torch", "real devices"),
        ("torchvision", "the torchvision zoo"),
        ("Pillow", "pictures"),
        ("pulp", "MILP placements"),
    ):
        yield _package(name, WARN, use)


def _torchvision() -> Iterator[Finding]:
    """Whether the two wheels belong together: each may be there, and the import fail all the same."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("torchvision") is None:
        return
    problem = _import_problem("torchvision")
    if problem is None:
        yield Finding("import torchvision", OK, "works")
        return
    yield Finding(
        "import torchvision",
        WARN,
        f"{problem}; the zoo's classifiers run even so, a class of your own that imports torchvision does not: "
        "install the torchvision that was built for this torch",
    )


def _import_problem(module: str) -> str | None:
    """What importing it raises, asked of a process of its own; None: nothing."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        ended = subprocess.run(  # noqa: S603  the command line is ours, and no shell reads it
            command, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"is not imported within {IMPORT_LIMIT_S} s"
    if ended.returncode == 0:
        return None
    return (ended.stderr.strip().splitlines() or [f"ended with code {ended.returncode}"])[-1]


def _package(name: str, missing: str, use: str) -> Finding:
    try:
        return Finding(name, OK, version(name))
    except PackageNotFoundError:
        return Finding(name, missing, f"not installed: {use}")


def _fabric_name() -> Iterator[Finding]:
    """An SSH library on PyPI is imported as `fabric` too; with both installed one of them breaks."""
    try:
        foreign = version("fabric")
    except PackageNotFoundError:
        yield Finding("fabric", OK, "no other distribution owns the import name")
    else:
        yield Finding(
            "fabric", FAIL, f"the SSH library fabric {foreign} is installed here: use another environment"
        )


def _run_dir() -> Iterator[Finding]:
    try:
        directory = run_dir()
    except ConfigError as error:
        yield Finding("run directory", FAIL, str(error))
        return
    directory.remove()
    yield Finding("run directory", OK, str(directory.path))


def _host() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding("cores", OK if cores > 1 else WARN, str(cores))


def _gpu() -> Iterator[Finding]:
    if importlib.util.find_spec("pynvml") is None:
        yield Finding("gpu", WARN, "nvidia-ml-py is not installed: CPU and emulated slices only")
        return
    import pynvml  # noqa: PLC0415  an optional package

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield Finding("gpu", WARN, f"no NVIDIA driver ({error}): CPU and emulated slices only")
        return
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            yield Finding(f"gpu {index}", OK, str(pynvml.nvmlDeviceGetName(handle)))
    finally:
        pynvml.nvmlShutdown()
    daemon = shutil.which("nvidia-cuda-mps-control")
    yield Finding("mps", OK if daemon else WARN, daemon or "nvidia-cuda-mps-control is not on the PATH")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _packages,
    _torchvision,
    _fabric_name,
    _run_dir,
    _host,
    _gpu,
)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Findings as JSON on stdout.")
def doctor(*, as_json: bool) -> None:
    """Check this host. Exit 1 when something needed is missing."""
    findings = examine()
    if as_json:
        echo_json([asdict(finding) for finding in findings])
    else:
        table = Table("check", "state", "detail")
        colours = {OK: "green", WARN: "yellow", FAIL: "red"}
        for finding in findings:
            table.add_row(finding.name, Text(finding.state, colours[finding.state]), finding.detail)
        plain_console().print(table)
    if any(finding.state == FAIL for finding in findings):
        sys.exit(EXIT_FAILURE)
