"""The command: `install` or, without a word, the measurement."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.device import machine
from benchmarks.peers.cases import CASES, Case
from benchmarks.peers.catalog import PEERS
from benchmarks.peers.closed_loop import closed_loops
from benchmarks.peers.cpu_cost import cpu_costs
from benchmarks.peers.install import install, is_installed
from benchmarks.peers.measure import Effort, our_contenders, peer_contender
from benchmarks.peers.run import Found, as_json, compare, read_tuned
from fabric.errors import FabricError

DIRECTORY = Path.home() / ".cache" / "tenuto-peers"


def main() -> None:
    """Parse, then install or measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="of the peers' environments")
    parser.add_argument("--peers", nargs="+", choices=sorted(PEERS), default=list(PEERS), metavar="PEER")
    served = parser.add_mutually_exclusive_group()
    served.add_argument("--cases", type=int, nargs="+", choices=range(1, len(CASES) + 1), help=_cases())
    served.add_argument(
        "--models",
        nargs="+",
        metavar="MODEL",
        help="instead of cases: real models together on --device, such as resnet50 transformers/bert",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of --models")
    parser.add_argument("--slos", type=float, nargs="+", default=[25.0, 50.0], help="of --models, in ms")
    parser.add_argument("--max-batch", type=int, default=64, help="of --models")
    parser.add_argument("--settings", type=int, metavar="N", help="the first N of each peer's settings alone")
    ours = {
        contender.name.removeprefix("ours (").removesuffix(")"): contender for contender in our_contenders()
    }
    parser.add_argument("--ours", nargs="*", choices=list(ours), default=list(ours), metavar="HOW")
    parser.add_argument("--warmup", type=float, default=1.5, help="s, before each window")
    parser.add_argument("--window", type=float, default=8.0, help="s of each load that count")
    parser.add_argument("--precision", type=float, default=0.02, help="of a rate, as a part of it")
    parser.add_argument("--repeat", type=int, default=3, help="seeds; the first one chooses the setting")
    parser.add_argument("--tuned", type=Path, help="an earlier --json: take its settings, do not search them")
    parser.add_argument(
        "--closed", type=int, metavar="N", help="instead: requests/s with so many under way all the time"
    )
    parser.add_argument(
        "--cpu", type=float, nargs="+", metavar="RPS", help="instead: CPU a request at such rates, ascending"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("command", nargs="?", choices=["install", "measure"], default="measure")
    options = parser.parse_args()
    if options.models is not None and options.cpu is not None:
        parser.error("--cpu is measured with an emulated model: leave --models out")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped
    peers = [PEERS[name] for name in options.peers]
    if options.command == "install":
        install(peers, options.directory)
        return
    effort = Effort(options.warmup, options.window, options.precision, tuple(range(1, options.repeat + 1)))
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores; {effort.window_s:g} s windows")
    contenders = [ours[how] for how in options.ours]
    for peer in peers:
        if options.models is not None and not peer.runs_models:
            print(f"{peer.name}: skipped, its server file runs no real models")
        elif is_installed(peer, options.directory):
            contenders.append(peer_contender(peer, options.directory, options.settings))
        else:
            print(
                f"{peer.name}: skipped, not installed (python -m benchmarks.peers install --peers {peer.name})"
            )
    cases: Sequence[Case] = (
        CASES if options.cases is None else [CASES[number - 1] for number in options.cases]
    )
    about: dict[str, str] = {}
    if options.models is not None:
        try:
            cases, about = _real(options)
        except FabricError as error:
            parser.error(str(error))
    found: list[Found] = []
    if options.cpu is not None:
        measurement: Iterator[Found] = cpu_costs(contenders, options.cpu, effort)
    elif options.closed is not None:
        measurement = closed_loops(contenders, cases, effort, options.closed)
    else:
        tuned = read_tuned(options.tuned) if options.tuned else {}
        measurement = compare(contenders, cases, effort, tuned)
    for one in measurement:
        found.append(one)
        _write(options.json, as_json(found, effort, about))


def _real(options: argparse.Namespace) -> tuple[Sequence[Case], dict[str, str]]:
    """Cases of the real models, each measured alone beforehand, and on what. Raises FabricError for what is not there."""
    from benchmarks.peers.real import real_cases  # noqa: PLC0415  takes torch along

    cases = list(real_cases(options.models, options.device, options.slos, options.max_batch))
    about = machine(options.device)
    print(", ".join(f"{name} {value}" for name, value in about.items() if value), flush=True)
    return cases, about


def _write(file: Path | None, text: str) -> None:
    if file is not None:
        file.write_text(text + "\n", encoding="utf-8")


def _cases() -> str:
    return "; ".join(f"{number}: {case.name}" for number, case in enumerate(CASES, 1))


if __name__ == "__main__":
    main()
