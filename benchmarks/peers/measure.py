"""Measures one contender in one case: the best of its settings, and the goodput of that one with every seed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.peers.cases import Case, RealCase
from benchmarks.peers.catalog import Peer
from benchmarks.peers.install import interpreter_of
from benchmarks.peers.search import Best, best_setting, highest_good_rps, highest_good_rps_near
from benchmarks.peers.sender import Load, Sender, Target, Verdict
from benchmarks.peers.serving import our_cluster, our_gateway, peer_servers
from fabric.errors import FabricError
from roles.runtime.own_version import own_version
from roles.workload.outcomes import Window

OURS = ("tenuto", "eager")
"""Our batching disciplines that run; ratios are of the first."""

TRIES = 4
"""Of a load that was bad while the sender itself was late: whatever disturbed it may have disturbed both."""

PAUSE_S = 1.0
"""Before it is tried again."""


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
    """One row: who, and how it may be started in a case, by the setting's words; no settings: it is not for that case."""

    name: str
    version: str
    settings: Callable[[Case], Sequence[tuple[str, Callable[[], AbstractContextManager[Target]]]]]


@dataclass(frozen=True, slots=True)
class Measured:
    """A contender's goodput in a case, by seed, with its best setting, and the verdicts at those rates.

    `doubtful_rps`: rates that count as bad though the sender itself was late each time. `tried`: what each setting
    carried, 0 where it was no better than the best before it. `load_average`: of the host, as it began.
    """

    contender: str
    version: str
    case: Case
    setting: str
    per_seed_rps: tuple[float, ...]
    at_goodput: tuple[Verdict, ...]
    doubtful_rps: tuple[float, ...]
    tried: tuple[tuple[str, float], ...]
    load_average: float

    @property
    def goodput_rps(self) -> float:
        """The median of the seeds'."""
        return statistics.median(self.per_seed_rps)


def our_contenders() -> list[Contender]:
    """Tenuto by its SDK, with each discipline, and with the first one by HTTP."""
    by_sdk = [_our_contender(batching, partial(our_cluster, batching)) for batching in OURS]
    by_http = _our_contender(f"{OURS[0]}, HTTP", partial(our_gateway, OURS[0]))
    without_graphs = _our_contender(
        f"{OURS[0]}, no graphs", partial(our_cluster, OURS[0], has_graphs=False), may_have_graphs
    )
    return [*by_sdk, by_http, without_graphs]


def may_have_graphs(case: Case) -> bool:
    """Whether the case's models may run as CUDA graphs."""
    return isinstance(case, RealCase) and case.device != "cpu"


def _our_contender(
    name: str,
    start: Callable[[Case], AbstractContextManager[Target]],
    is_for: Callable[[Case], bool] = lambda _: True,
) -> Contender:
    return Contender(
        f"ours ({name})",
        own_version(),
        lambda case: [("as it comes", partial(start, case))] if is_for(case) else [],
    )


def peer_contender(peer: Peer, directory: Path, settings_max: int | None = None) -> Contender:
    """A peer that is installed under `directory`, or here; with so many of its settings at most."""
    return Contender(
        peer.name,
        peer.version,
        lambda case: [
            (
                str(setting),
                partial(peer_servers, peer, interpreter_of(peer, directory, case), setting, case),
            )
            for setting in peer.settings(case)[:settings_max]
        ],
    )


class Measurement:
    """One contender in one case, as it is being measured."""

    def __init__(self, contender: Contender, case: Case, effort: Effort, sender: Sender) -> None:
        self._starts = dict(contender.settings(case))
        self._contender, self._case, self._effort, self._sender = contender, case, effort, sender
        self._verdicts: dict[float, Verdict] = {}
        self._doubtful: list[float] = []
        self._tried: dict[str, float] = {}

    def run(self, tuned: str | None) -> Measured:
        """With the first seed search the best setting, unless it is `tuned`; with the others its goodput."""
        settings = [tuned] if tuned in self._starts else list(self._starts)
        load_average = os.getloadavg()[0]
        best = best_setting(settings, self._tried_rps)
        per_seed_rps, at_goodput = [best.rate_rps], []
        if best.rate_rps:
            at_goodput.append(self._verdicts[best.rate_rps])
            for seed in self._effort.seeds[1:]:
                per_seed_rps.append(self._near_rps(best, seed))
                if per_seed_rps[-1]:
                    at_goodput.append(self._verdicts[per_seed_rps[-1]])
        return Measured(
            self._contender.name,
            self._contender.version,
            self._case,
            best.setting,
            tuple(per_seed_rps),
            tuple(at_goodput),
            tuple(self._doubtful),
            tuple(self._tried.items()),
            load_average,
        )

    def _tried_rps(self, setting: str, beat_rps: float) -> float:
        """A setting's goodput, 0 where it is no better. One that does not serve at all is said and out."""
        effort, bound_rps = self._effort, self._case.bound_rps
        try:
            with self._starts[setting]() as target:
                is_good = self._asker(target, effort.seeds[0])
                self._tried[setting] = highest_good_rps(is_good, bound_rps, effort.precision, beat_rps)
        except FabricError as error:
            print(f"  {self._contender.name}, {setting}: {error}", flush=True)
            self._tried[setting] = 0.0
        return self._tried[setting]

    def _near_rps(self, best: Best[str], seed: int) -> float:
        with self._starts[best.setting]() as target:
            is_good = self._asker(target, seed)
            return highest_good_rps_near(best.rate_rps, is_good, self._case.bound_rps, self._effort.precision)

    def _asker(self, target: Target, seed: int) -> Callable[[float], bool]:
        case = self._case

        def is_good(rate_rps: float) -> bool:
            window = self._effort.window
            load = Load(target, case.inputs, rate_rps, case.slo_ms, seed, window)
            for _ in range(TRIES):
                verdict = self._sender.send(load)
                if verdict.is_valid:
                    if verdict.is_good:
                        self._verdicts[rate_rps] = verdict
                    return verdict.is_good
                time.sleep(PAUSE_S)
            self._doubtful.append(rate_rps)
            return False

        return is_good
