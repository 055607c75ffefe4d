"""Malformed bytes for every decoder and listening socket: nothing but typed errors, no crash, no growth of memory.

    python -m tests.malformed --inputs 1000000

Half of the inputs go to decoders, the others to sockets of a process of their own, and a tenth more by HTTP to a gateway; `--http`: all
of them by HTTP, and nothing else. `--coverage SECONDS` gives each decoder
that long to atheris instead, where it is installed: it keeps what reaches new code. Exit code 1: there are findings, each with what
makes it happen again.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path

import click

from fabric.clock import MonotonicClock
from tests.malformed import requests, sockets
from tests.malformed.decoders import Decoder, decoders
from tests.malformed.mutations import Mutations

CLOCK = MonotonicClock()
GROWTH_MB_MAX = 48.0  # of a process from a tenth of its inputs to their end
FINDINGS_SHOWN = 20
HTTP_PART = 10  # each of them is a connection, so that they are fewer


def rss_mb() -> float:
    """What this process has resident."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6


def feed(decoder: Decoder, count: int, seed: int) -> tuple[int, list[str]]:
    """So many mutants into one decoder: how many it took for right, and what it raised that it may not."""
    mutations = Mutations(random.Random(seed), decoder.examples)
    accepted, findings = 0, []
    for _ in range(count):
        data = mutations.one()
        try:
            decoder.decode(data)
        except decoder.errors:
            continue
        except Exception as error:  # noqa: BLE001  that is what it looks for
            findings.append(f"{decoder.name}: {error!r:.300} by {base64.b64encode(data).decode()}")
            continue
        accepted += 1
    return accepted, findings


def feed_all(inputs: int, seed: int) -> list[str]:
    """Every decoder, and how much memory that cost."""
    findings = []
    with decoders(seed) as known:
        weights = sum(decoder.weight for decoder in known)
        for decoder in known:
            count = max(1, inputs * decoder.weight // weights)
            began_ms = CLOCK.now_ms()
            accepted, found = feed(decoder, count // 10, seed)
            before_mb = rss_mb()
            more, later = feed(decoder, count - count // 10, seed + 1)
            found, grown_mb = found + later, rss_mb() - before_mb
            if grown_mb > GROWTH_MB_MAX:
                found.append(f"{decoder.name}: memory grew by {grown_mb:.0f} MB over {count} inputs")
            seconds = max(1e-3, (CLOCK.now_ms() - began_ms) / 1e3)
            click.echo(
                f"{decoder.name:24} {count:8,} inputs {count / seconds:9,.0f}/s  taken for right {accepted + more:7,}"
                f"  memory {grown_mb:+6.1f} MB  findings {len(found)}"
            )
            findings += found
    return findings


def cover(decoder: Decoder, seconds: int) -> None:
    """Atheris drives this process from here on, and ends it."""
    import atheris  # type: ignore[import-untyped]

    def one(data: bytes) -> None:
        with contextlib.suppress(*decoder.errors):
            decoder.decode(data)

    atheris.instrument_all()
    arguments = [sys.argv[0], f"-max_total_time={seconds}", "-rss_limit_mb=2048", "-print_final_stats=1"]
    atheris.Setup(arguments, one)
    atheris.Fuzz()


def cover_all(seconds: int) -> list[str]:
    """Each decoder in a process of its own, as libFuzzer wants it."""
    findings = []
    with decoders() as known:
        names = [decoder.name for decoder in known]
    for name in names:
        command = [sys.executable, "-m", "tests.malformed", "--only", name, "--coverage", str(seconds)]
        told = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        lines = told.stderr.splitlines()
        executed = next((line for line in lines if "number_of_executed_units" in line), "it did not run")
        click.echo(f"{name:24} {executed.rpartition(':')[2].strip():>10} inputs by coverage")
        if told.returncode:
            findings.append(f"{name}: " + "\n".join(lines[-FINDINGS_SHOWN:]))
    return findings


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--coverage", type=int, default=0, metavar="SECONDS")
    parser.add_argument("--http", action="store_true", help="all of them by HTTP to a gateway")
    parser.add_argument("--only", help="one decoder, in this process")
    options = parser.parse_args()
    if options.only:
        with decoders() as known:
            (decoder,) = (one for one in known if one.name == options.only)
            if options.coverage:
                cover(decoder, options.coverage)
            findings = feed(decoder, options.inputs, options.seed)[1]
    elif options.coverage:
        findings = cover_all(options.coverage)
    elif options.http:
        click.echo(f"{options.inputs:,} malformed inputs by HTTP, --seed {options.seed}")
        findings = requests.attack(options.inputs, random.Random(options.seed))
    else:
        click.echo(f"{options.inputs:,} malformed inputs, --seed {options.seed}")
        findings = feed_all(options.inputs // 2, options.seed)
        findings += sockets.attack_all(options.inputs - options.inputs // 2, options.seed)
        findings += requests.attack(options.inputs // HTTP_PART, random.Random(options.seed))
    for finding in findings[:FINDINGS_SHOWN]:
        click.echo(f"FOUND {finding}")
    click.echo(f"findings: {len(findings)}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
