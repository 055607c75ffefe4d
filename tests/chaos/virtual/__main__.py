"""Play histories, make a failing one small, and play it again.

    python -m tests.chaos.virtual --count 1000 --first 0      # draws and plays; a failure is made small and printed
    python -m tests.chaos.virtual --replay FILE               # a script as printed, or - for stdin
    python -m tests.chaos.virtual --replay FILE --show Grant  # with the messages that have that word

Exit code 1: something that always holds did not.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

import click

from fabric.clock import MonotonicClock
from fabric.link import Received
from tests.chaos.virtual.draw import draw
from tests.chaos.virtual.processes.network import End, Wire
from tests.chaos.virtual.script import Script, read
from tests.chaos.virtual.shrink import failure_of, shrunk
from tests.chaos.virtual.world import World


def main() -> int:
    """Search, or replay; the exit code."""
    parser = argparse.ArgumentParser(description="play virtual histories in which things go wrong")
    parser.add_argument("--first", type=int, default=0, help="the first history's seed")
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--replay", help="a file with a script, - for stdin, or a seed")
    parser.add_argument("--show", help="print messages that have one of these words, separated by |")
    options = parser.parse_args()
    if options.replay is None:
        return _search(options.first, options.count)
    script = _script(options.replay)
    if options.show:
        _show(options.show)
    failure = failure_of(script)
    click.echo(f"FAILED {failure}" if failure else "all held")
    return 1 if failure else 0


def _search(first: int, count: int) -> int:
    clock = MonotonicClock()
    began_ms = clock.now_ms()
    failures: Counter[str] = Counter()
    for seed in range(first, first + count):
        script = draw(seed)
        failure = failure_of(script)
        if not failure:
            continue
        failures[failure.kind] += 1
        click.echo(f"seed {seed}: {failure}")
        if failures[failure.kind] <= 3:
            small, what = shrunk(script, failure)
            click.echo(f"  {what}\n  python -m tests.chaos.virtual --replay - <<< '{small.text()}'")
    seconds = (clock.now_ms() - began_ms) / 1e3
    click.echo(f"{count} histories, {sum(failures.values())} failed, {count / seconds:.1f} a second")
    return 1 if failures else 0


def _script(where: str) -> Script:
    if where.isdigit():
        return draw(int(where))
    return read(sys.stdin.read() if where == "-" else Path(where).read_text(encoding="utf-8"))


def _show(words: str) -> None:
    made = World.__init__

    def shown(self: World, script: Script) -> None:
        made(self, script)

        watched = self.network.read

        def told(wire: Wire, end: End, sent_at_ms: float, received: Received) -> None:
            ends = f"{wire.near.owner.place}-{wire.far.owner.place}"
            text = (
                f"{self.now_ms:10.3f} sent {sent_at_ms:10.3f} epoch {received.epoch} {ends}"
                f" read by {end.owner.place}: {received.message!r}"
            )
            if any(word in text for word in words.split("|")):
                click.echo(text[:400])
            watched(wire, end, sent_at_ms, received)

        self.network.read = told

    World.__init__ = shown  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is a part of a history
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.chaos.virtual", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    sys.exit(main())
