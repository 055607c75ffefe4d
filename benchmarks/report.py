"""Runs the quick benchmarks and writes `docs/results/benchmarks.md`: what `make bench` does.

    python -m benchmarks.report [--only latency throughput] [--results DIR] [--render] [--out docs/results/benchmarks.md]

Each one's figures go to `--results` as NAME.json and what it printed as NAME.txt; one that was not asked for keeps
those of the time before, `--render` writes the document from all of them and runs nothing. What does not run is named
in the document, with its last line, and makes the exit code 1; a missed line does not: that is for the reader.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from benchmarks.catalog import LONG, QUICK, Long, Quick
from benchmarks.figures import Figures, Line, Table, read, shown

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 600.0


@dataclass(slots=True, frozen=True)
class Machine:
    """What the figures were measured on, and when."""

    cpu: str
    cores: int
    memory_gb: float
    kernel: str
    python: str
    libzmq: str
    date: str


@dataclass(slots=True, frozen=True)
class Result:
    """What became of one benchmark. Without `figures`, `text` is all it printed; with `failure`, why there is nothing."""

    name: str
    command: str
    figures: Figures | None = None
    text: str = ""
    failure: str = ""


def this_machine() -> Machine:
    """The one this runs on."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpu=_cpu_name(Path("/proc/cpuinfo").read_text(encoding="utf-8")),
        cores=len(os.sched_getaffinity(0)),
        memory_gb=memory_bytes / 1e9,
        kernel=".".join(platform.release().split(".")[:2]),
        python=platform.python_version(),
        libzmq=zmq.zmq_version(),
        date=dt.datetime.now(dt.UTC).date().isoformat(),
    )


def document(machine: Machine, results: Sequence[Result], long: Sequence[Long]) -> str:
    """The page, as Markdown."""
    lines = [(result.name, line) for result in results if result.figures for line in result.figures.lines]
    parts = [
        (
            "# Benchmarks\n\nWritten by `make bench` (`benchmarks/report.py`); each section is one command. A ratio compares"
            " what ran in turn in one run. Latency counts from the intended moment wherever load is open loop.\n"
        ),
        _machine(machine),
        _lines(lines),
        *map(_section, results),
        "## Longer ones\n\nNot part of `make bench`.\n",
        _markdown(
            Table("", ("command", "last figures"), [(f"`{one.command}`", one.figures) for one in long])
        ),
    ]
    return "\n".join(part for part in parts if part)


def _machine(machine: Machine) -> str:
    return (
        f"{machine.date}: {machine.cores} cores of {machine.cpu}, {machine.memory_gb:.0f} GB; Linux {machine.kernel},"
        f" Python {machine.python}, libzmq {machine.libzmq}."
        " Clients, servers and devices share these cores; each section says the load average before it.\n"
    )


def _lines(lines: Sequence[tuple[str, Line]]) -> str:
    """Every line in one place, the missed ones first."""
    if not lines:
        return ""
    rows = [
        (name, line.what, shown(line.measured), line.bound, "yes" if line.is_held else "**no**")
        for name, line in sorted(lines, key=lambda one: one[1].is_held)
    ]
    held = sum(line.is_held for _, line in lines)
    table = Table("", ("benchmark", "what", "measured", "line", "held"), list(rows))
    return f"## Lines\n\n{held} of {len(lines)} are held.\n\n{_markdown(table)}"


def _section(result: Result) -> str:
    head = f"## {result.name.replace('_', ' ').capitalize()}\n\n`{result.command}`"
    if result.failure:
        return f"{head}\n\nDid not run: {result.failure}\n"
    if result.figures is None:
        return f"{head}\n\n```\n{result.text.rstrip()}\n```\n"
    figures = result.figures
    tables = "\n".join(f"{table.caption}:\n\n{_markdown(table)}" for table in figures.tables)
    remarks = "".join(f"- {remark}\n" for remark in figures.remarks)
    return f"{head}; {figures.conditions}.\n\n{tables}" + (f"\n{remarks}" if remarks else "")


def _markdown(table: Table) -> str:
    """The first column to the left, figures to the right."""
    aligned = [
        "---",
        *("---:" if _is_figures(table, place) else "---" for place in range(1, len(table.columns))),
    ]
    rows = [tuple(map(shown, row)) for row in table.rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n"
        for row in (table.columns, aligned, *rows)
    )


def _is_figures(table: Table, place: int) -> bool:
    return all(not isinstance(row[place], str) for row in table.rows)


def _cpu_name(cpuinfo: str) -> str:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


# ---------------------------------------------------------------- running


def command_of(quick: Quick) -> str:
    """As one would type it."""
    return " ".join(("python", *quick.words))


def run(quick: Quick, results: Path) -> None:
    """Run it; its figures, its text, or why it failed are in `results` then, and what was there before is not."""
    figures, text, failed = (results / f"{quick.name}.{kind}" for kind in ("json", "txt", "failed"))
    for path in (figures, text, failed):
        path.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            [sys.executable, *quick.words, "--json", str(figures)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        failed.write_text(f"it took more than {LIMIT_S:.0f} s", encoding="utf-8")
        return
    print(done.stdout, flush=True)
    text.write_text(done.stdout, encoding="utf-8")
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        failed.write_text(last, encoding="utf-8")
        print(f"{quick.name} failed: {last}", file=sys.stderr)


def result_of(quick: Quick, results: Path) -> Result | None:
    """What `run` left; None where it never ran."""
    figures, text, failed = (results / f"{quick.name}.{kind}" for kind in ("json", "txt", "failed"))
    command = command_of(quick)
    if failed.exists():
        return Result(quick.name, command, failure=failed.read_text(encoding="utf-8"))
    if not text.exists():
        return None
    found = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else None
    if isinstance(found, dict) and found.keys() >= {"title", "tables", "lines"}:
        return Result(quick.name, command, figures=read(found))
    return Result(quick.name, command, text=text.read_text(encoding="utf-8"))


def main() -> int:
    """Run what was asked for, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [quick.name for quick in QUICK]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "benchmarks")
    parser.add_argument("--render", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "benchmarks.md")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    machine = this_machine()
    for quick in QUICK:
        if quick.name in options.only and not options.render:
            print(f"== {command_of(quick)}", flush=True)
            run(quick, options.results)
    found = [result for quick in QUICK if (result := result_of(quick, options.results)) is not None]
    options.out.write_text(document(machine, found, LONG), encoding="utf-8")
    print(f"written: {options.out}")
    return 1 if any(result.failure for result in found) else 0


if __name__ == "__main__":
    sys.exit(main())
