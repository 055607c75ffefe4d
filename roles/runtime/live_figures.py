"""How models fare now: what their frontends counted in the last seconds, put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from fabric.errors import PeerLost
from fabric.ids import ModelId, PeerId
from fabric.keys import Keyring
from fabric.messages import FiguresAsked, FiguresListed, ModelFigures, ModelInfo
from fabric.operator_questions import ask_role, ask_status
from roles.runtime.metrics.catalog import CLIENT_FAULTS
from roles.runtime.running_cluster import ProcessReport, frontends_of

ANSWER_MS: Final = 1_000.0
PAGES_MAX: Final = 16
"""Answers asked for one after the other: all models that a frontend counts."""


@dataclass(frozen=True, slots=True)
class LiveModel:
    """A model in the last `window_s`. `bad_rate`: late or dropped, of those that ended; None: none did.

    `dropped`: refused through no fault of their clients, by code. `p50_ms`, `p99_ms`: from the frontend's receipt to its answer, read off
    a histogram whose buckets are an eighth of the SLO and more; None: none was answered. More than four SLOs are told as four.
    `stage_rate_rps`, `stage_goodput_rps`: the part of the rates that stages of applications asked, and no client.
    """

    model_id: ModelId
    slo_ms: float
    window_s: float
    rate_rps: float
    goodput_rps: float
    late: int
    dropped: dict[str, int]
    bad_rate: float | None
    p50_ms: float | None
    p99_ms: float | None
    stage_rate_rps: float = 0.0
    stage_goodput_rps: float = 0.0

    @property
    def drops(self) -> int:
        """All of them."""
        return sum(self.dropped.values())


@dataclass(slots=True)
class LiveFigures:
    """By name, of models and applications. `applications`: as clients see them. `silent`: frontends that did not answer."""

    models: dict[ModelId, LiveModel]
    silent: list[str] = field(default_factory=list)
    applications: Sequence[ModelInfo] = ()


def live_figures(processes: Sequence[ProcessReport], keyring: Keyring | None = None) -> LiveFigures:
    """Ask every frontend among these."""
    told: dict[ModelId, list[ModelFigures]] = {}
    silent: list[str] = []
    for process in frontends_of(processes):
        try:
            for one in _told_by(process.role_id, process.addresses["client"], keyring):
                told.setdefault(one.model_id, []).append(one)
        except PeerLost:
            silent.append(process.role_id)
    heard = [process for process in processes if process.role_id not in silent]
    figures = {model_id: together(its) for model_id, its in sorted(told.items())}
    return LiveFigures(figures, silent, applications_of(heard, keyring))


def applications_of(
    processes: Sequence[ProcessReport], keyring: Keyring | None = None
) -> Sequence[ModelInfo]:
    """The applications, as the first frontend among these lists them that answers; all of a cluster have the same."""
    for process in frontends_of(processes):
        try:
            listed = ask_status(
                process.addresses["client"], ANSWER_MS, server=PeerId(process.role_id), keyring=keyring
            )
        except PeerLost:
            continue
        return [one for one in listed.models if one.asks]
    return ()


def _told_by(role_id: str, addresses: Sequence[str], keyring: Keyring | None) -> Iterable[ModelFigures]:
    after = ModelId("")
    for _ in range(PAGES_MAX):
        answer = ask_role(
            addresses,
            FiguresAsked(after),
            FiguresListed,
            ANSWER_MS,
            server=PeerId(role_id),
            keyring=keyring,
        )
        yield from answer.models
        if not answer.has_more or not answer.models:
            return
        after = answer.models[-1].model_id


def together(several: Sequence[ModelFigures]) -> LiveModel:
    """Of one model, what each frontend said of it. At least one."""
    first = several[0]
    refused: Counter[str] = Counter()
    for one in several:
        refused.update({code: round(count) for code, count in one.refused.items()})
    dropped = {code: count for code, count in sorted(refused.items()) if code not in CLIENT_FAULTS}
    good, late = sum(one.good for one in several), sum(one.late for one in several)
    ended = good + late + sum(dropped.values())
    # One that has just heard of another SLO has other buckets: it is left out for the few seconds that this lasts.
    alike = [one for one in several if one.bounds_ms == first.bounds_ms]
    answered = [sum(counts) for counts in zip(*(one.answered for one in alike), strict=True)]
    return LiveModel(
        first.model_id,
        first.slo_ms,
        max(one.window_ms for one in several) / 1e3,
        sum(1e3 * one.asked / one.window_ms for one in several if one.window_ms),
        sum(1e3 * one.good / one.window_ms for one in several if one.window_ms),
        late,
        dropped,
        1 - good / ended if ended else None,
        percentile(first.bounds_ms, answered, 0.5),
        percentile(first.bounds_ms, answered, 0.99),
        sum(1e3 * one.stage_asked / one.window_ms for one in several if one.window_ms),
        sum(1e3 * one.stage_good / one.window_ms for one in several if one.window_ms),
    )


def percentile(bounds: Sequence[float], counts: Sequence[int], fraction: float) -> float | None:
    """Of a histogram, as if a bucket's values lay evenly in it; of those over the last bound that bound. None: it is empty."""
    rank = fraction * sum(counts)
    if not rank:
        return None
    below = 0.0
    for bound, count, reached in zip(bounds, counts, accumulate(counts), strict=False):
        if reached >= rank:
            return below + (bound - below) * (rank - (reached - count)) / count
        below = bound
    return below
