"""Measures Tenuto and its peers in turn, prints the table and writes the JSON."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.catalog import PAYLOAD_FLOATS, Case, Peer
from benchmarks.peers.install import python_of
from benchmarks.peers.search import best_setting, highest_good_rps
from benchmarks.peers.sender import Load, Sender, Target, Verdict
from benchmarks.peers.serving import our_cluster, peer_servers
from fabric.errors import FabricError
from roles.outcomes import Window

OURS = ("tenuto", "eager")
"""Our batching disciplines that run; ratios are of the first."""

TRIES = 3
"""Of a load that was bad while the sender itself was late: whatever disturbed it may have disturbed both."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure: windows and warm-up in s, the precision of a rate as a part of it, seeds."""

    warmup_s: float
    window_s: float
    precision: float
    seeds: tuple[int, ...]

    @property
    def window(self) -> Window:
        """What counts of each load."""
        return Window(self.warmup_s * 1e3, (self.warmup_s + self.window_s) * 1e3)


@dataclass(frozen=True, slots=True)
class Contender:
    """One row: who, and how it may be started in a case, by the setting's words."""

    name: str
    version: str
    settings: Callable[[Case], Sequence[tuple[str, Callable[[], AbstractContextManager[Target]]]]]


@dataclass(frozen=True, slots=True)
class Measured:
    """A contender's goodput in a case: of each seed, with the setting that was best, and the loads at those rates."""

    contender: str
    version: str
    case: Case
    setting: str
    per_seed_rps: tuple[float, ...]
    at_goodput: tuple[Verdict, ...]
    doubtful_rps: tuple[float, ...]
    tried: tuple[tuple[str, float], ...]

    @property
    def goodput_rps(self) -> float:
        """The median of the seeds'."""
        return statistics.median(self.per_seed_rps)


def our_contenders() -> list[Contender]:
    """Tenuto by its SDK, with each discipline."""
    return [_our_contender(batching) for batching in OURS]


def _our_contender(batching: str) -> Contender:
    return Contender(
        f"ours ({batching})",
        version("tenuto"),
        lambda case: [("as it comes", partial(our_cluster, batching, case))],
    )


def peer_contender(peer: Peer, directory: Path) -> Contender:
    """A peer that is installed under `directory`."""
    python = python_of(peer, directory)
    return Contender(
        peer.name,
        peer.version,
        lambda case: [
            (str(setting), partial(peer_servers, peer, python, setting, case))
            for setting in peer.settings(case)
        ],
    )


def measure(contender: Contender, case: Case, effort: Effort, sender: Sender) -> Measured:
    """Search its best setting with the first seed, then that setting's goodput with the others."""
    starts = dict(contender.settings(case))
    verdicts: dict[float, Verdict] = {}
    doubtful: list[float] = []
    tried: dict[str, float] = {}
    found: list[Verdict] = []

    def goodput(setting: str, seed: int, beat_rps: float) -> float:
        verdicts.clear()
        with starts[setting]() as target:

            def is_good(rate_rps: float) -> bool:
                load = Load(
                    target, case.model_names, rate_rps, case.slo_ms, seed, effort.window, PAYLOAD_FLOATS
                )
                for _ in range(TRIES):
                    verdict = verdicts[rate_rps] = sender.send(load)
                    if verdict.is_valid:
                        return verdict.is_good
                doubtful.append(rate_rps)
                return False

            return highest_good_rps(is_good, case.bound_rps, effort.precision, beat_rps)

    def first(setting: str, beat_rps: float) -> float:
        try:
            rate_rps = tried[setting] = goodput(setting, effort.seeds[0], beat_rps)
        except FabricError as error:
            print(f"  {contender.name}, {setting}: {error}", flush=True)
            rate_rps = tried[setting] = 0.0
        if rate_rps:
            found[:] = [verdicts[rate_rps]]
        return rate_rps

    best = best_setting(starts, first)
    per_seed_rps = [best.rate_rps]
    for seed in effort.seeds[1:]:
        per_seed_rps.append(goodput(best.setting, seed, 0.0))
        if per_seed_rps[-1]:
            found.append(verdicts[per_seed_rps[-1]])
    return Measured(
        contender.name,
        contender.version,
        case,
        best.setting,
        tuple(per_seed_rps),
        tuple(found),
        tuple(doubtful),
        tuple(tried.items()),
    )


def compare(contenders: Sequence[Contender], cases: Sequence[Case], effort: Effort) -> Iterator[Measured]:
    """All of them in every case, one at a time; prints each as it is known."""
    with Sender() as sender:
        for case in cases:
            print(f"\n{case.name} (a device's bound {case.bound_rps / case.devices:.0f} r/s)", flush=True)
            ours_rps: float | None = None
            for contender in contenders:
                measured = measure(contender, case, effort, sender)
                if ours_rps is None and contender.name.startswith("ours"):
                    ours_rps = measured.goodput_rps
                print(_line(measured, ours_rps), flush=True)
                yield measured


def _line(measured: Measured, ours_rps: float | None) -> str:
    goodput_rps = measured.goodput_rps
    spread = f"({min(measured.per_seed_rps):.0f} to {max(measured.per_seed_rps):.0f})"
    ratio = f"ours / it {ours_rps / goodput_rps:5.2f}" if ours_rps and goodput_rps else " " * 15
    late_ms = max((verdict.late_p99_ms for verdict in measured.at_goodput), default=0.0)
    doubt = f", sender late at {len(measured.doubtful_rps)} rates" if measured.doubtful_rps else ""
    return (
        f"  {measured.contender:14} {measured.version:8} {goodput_rps:6.0f} r/s {spread:16} {ratio}"
        f"  sender late p99 {late_ms:.2f} ms{doubt}  [{measured.setting}]"
    )


def as_json(measured: Sequence[Measured], load_average: float, effort: Effort) -> str:
    """Everything, for the record."""
    return json.dumps(
        {
            "load_average": load_average,
            "cores": os.cpu_count(),
            "effort": asdict(effort),
            "results": [{**asdict(one), "goodput_rps": one.goodput_rps} for one in measured],
        },
        indent=1,
    )
