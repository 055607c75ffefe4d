"""Why a model misses its SLO now: rules over what was measured and what a simulation of the same minute says.

Two questions decide which rules apply. *Would the plan have served these requests?* The minute is played with profiles as
they are and a network as configured. If that goes well, the fault is in the cluster: a slice slower than its profile, a
neighbour on the GPU, the network, the host's cores. If not, it is in load and plan: too few devices, bursts, or another
model that takes more than it was planned to. *What would have changed it?* Each suspect is taken away in turn, and the minute
is played again: the suspects whose absence mends it are to blame.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from fabric.ids import ModelId, SliceId
from policies.slo import BAD_RATE_ALLOWED
from roles.observability.absences import gone, not_there, second_replica
from roles.observability.remembered import AbsenceSeen, BatchSeen, RequestSeen
from roles.observability.units import late_host, shown_ms

MENDED: Final = 0.3
"""What is left of a bad rate where a change has mended it: at most this part of it, or a fine one."""
SLOW: Final = 1.15
INTERFERES: Final = 1.15
WAY_SHARE: Final = 0.12
"""Of the SLO: ways of inputs and outputs, beyond what is configured, that are worth naming."""
BURSTY: Final = 2.0
"""Variance of counts by their mean: 1 under Poisson arrivals."""
OVER_PLAN: Final = 1.15
"""Times what a plan is for: more than that is told of a rate."""
BATCHES_MIN: Final = 5


class Cause(enum.StrEnum):
    """What makes a model miss its SLO."""

    SLOW_SLICE = "slow_slice"
    NEIGHBOUR = "neighbour"
    NETWORK = "network"
    HOST = "host"
    BURSTS = "bursts"
    CAPACITY = "capacity"
    UNHOSTED = "unhosted"
    NO_SLICE = "no_slice"


@dataclass(frozen=True, slots=True)
class Played:
    """Bad rates of the model in the same minute, played again; None: could not be played.

    `as_planned`: nothing changed. `own_smooth`: its own requests came by chance alone. `others_gone`: no other model's request
    came. `others_as_planned`: other models' requests came by chance alone, at the rates that the plan is for.
    """

    as_planned: float | None = None
    own_smooth: float | None = None
    others_gone: float | None = None
    others_as_planned: float | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one model's last minute.

    `offered`, `bad`: in its last `span_ms`, the whole seconds of what was played. `profile_ms`: by slice and batch size, what the configured profile says. `late_timers_ms`: p99 of each process.
    `configured_way_ms`: of inputs and outputs together, to which comes `data_ms_per_item` for each request of their batch. `dispersion`: of its arrivals, see `BURSTY`.
    """

    model_id: ModelId
    slo_ms: float
    span_ms: float
    offered: int
    bad: int
    replicas: int
    requests: Sequence[RequestSeen]
    batches: Sequence[BatchSeen]
    profile_ms: Mapping[tuple[SliceId, int], float]
    late_timers_ms: Mapping[str, float]
    rates_rps: Mapping[ModelId, float]
    planned_rps: Mapping[ModelId, float]
    dispersion: float
    configured_way_ms: float = 0.0
    data_ms_per_item: float = 0.0
    played: Played = field(default_factory=Played)
    unhosted: Mapping[SliceId, str] = field(default_factory=dict)
    """Why no slice hosts it, where none does: of each that should, or under "" why none should."""
    unserved: int = 0
    """Bad ones that found no slice, or lost theirs."""
    hosting: Collection[SliceId] = ()
    """Slices that should host it."""
    absences: Sequence[AbsenceSeen] = ()
    """When these were not there."""

    @property
    def bad_rate(self) -> float:
        """Of what came."""
        return min(1.0, self.bad / self.offered) if self.offered else 0.0


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause, how sure it is (0 to 1, the surest first), the evidence in a sentence, and what to do about it."""

    cause: Cause
    weight: float
    sentence: str
    advice: str
    about: str = ""
    """The slice, model or process that it is about."""


def diagnose(evidence: Evidence) -> list[Finding]:
    """What makes the model miss its SLO, the surest first; empty where it does not, or nothing known explains it."""
    if evidence.replicas == 0:
        reason, is_gone = not_there(evidence.absences, evidence.hosting, evidence.unhosted)
        text = f"no ready slice hosts {evidence.model_id}" + (f": {reason}" if reason else "")
        advice = "tenuto status shows slices and GPUs; tenuto plan FILE --why what fits"
        return [Finding(Cause.UNHOSTED, 1.0, text, second_replica(evidence.hosting) if is_gone else advice)]
    if evidence.bad_rate < BAD_RATE_ALLOWED:
        return []
    left = replace(evidence, bad=max(0, evidence.bad - evidence.unserved))
    if left.bad_rate < BAD_RATE_ALLOWED:
        return [*_no_slice(evidence)]
    found = [*_slow_slices(left), *_interference(left), *_network(left), *_host(left)]
    if not _is_plan_enough(left):
        found += _load(left)
    return _ranked(evidence, found)


def measured(evidence: Evidence) -> list[Finding]:
    """What is out of the ordinary in the model's minute, the most of it first, without playing it again: for one request's story."""
    found = [*_slow_slices(evidence), *_interference(evidence), *_network(evidence), *_host(evidence)]
    is_starved = any(finding.cause is Cause.HOST for finding in found)
    # Requests that a starved host reads late seem to come in bursts.
    later = [one for one in _out_of_plan(evidence) if not (is_starved and one.cause is Cause.BURSTS)]
    return _ranked(evidence, found) + later


def _ranked(evidence: Evidence, others: Sequence[Finding]) -> list[Finding]:
    """What was refused for want of a slice is explained by that, so that other causes weigh as much as what is left."""
    known = [*_no_slice(evidence)]
    left = 1.0 - sum(finding.weight for finding in known)
    found = [*known, *(replace(finding, weight=left * finding.weight) for finding in others)]
    return sorted(found, key=lambda finding: -finding.weight)


def _no_slice(evidence: Evidence) -> Iterator[Finding]:
    """Its weight is the part of the bad requests that it explains: what they were refused for is no guess."""
    if evidence.unserved:
        why = gone(evidence.absences, evidence.hosting)
        count = f"{evidence.unserved} request{'s' * (evidence.unserved > 1)}"
        yield Finding(
            Cause.NO_SLICE,
            min(1.0, evidence.unserved / max(1, evidence.bad)),
            f"{count} found no slice or lost theirs" + (f": {why}" if why else ""),
            second_replica(evidence.hosting),
        )


def _is_plan_enough(evidence: Evidence) -> bool:
    """Whether the plan, played with profiles as they are, serves what came."""
    planned = evidence.played.as_planned
    return planned is not None and is_mended(planned, evidence.bad_rate)


def is_mended(bad_rate: float | None, before: float) -> bool:
    """Whether little is left of a bad rate."""
    return bad_rate is not None and (bad_rate < BAD_RATE_ALLOWED or bad_rate < MENDED * before)


# ---------------------------------------------------------------- the cluster


def _ratios(evidence: Evidence) -> dict[SliceId, list[tuple[BatchSeen, float]]]:
    """Of each slice's batches: run time by the profile's."""
    found: dict[SliceId, list[tuple[BatchSeen, float]]] = defaultdict(list)
    for batch in evidence.batches:
        if batch.model_id == evidence.model_id and batch.has_run:
            entry = batch.entry
            promised_ms = evidence.profile_ms.get((batch.slice_id, entry.batch_size), entry.table_ms)
            if promised_ms > 0:
                found[batch.slice_id].append((batch, entry.exec_ms / promised_ms))
    return found


def _slow_slices(evidence: Evidence) -> Iterator[Finding]:
    ratios = _ratios(evidence)
    medians = {
        slice_id: median(ratio for _, ratio in its)
        for slice_id, its in ratios.items()
        if len(its) >= BATCHES_MIN
    }
    slow = {slice_id: ratio for slice_id, ratio in medians.items() if ratio >= SLOW}
    for slice_id, ratio in slow.items():
        if _is_interfered(ratios[slice_id], evidence):
            continue  # its neighbour is to blame
        typical = [one.entry.exec_ms for one, _ in ratios[slice_id]]
        lost_ms = median(typical) * (1 - 1 / ratio)
        others = [other for name, other in medians.items() if name != slice_id]
        beside = f", and {median(others):.2f} times on its other slices" if others else ""
        part = len(ratios[slice_id]) / max(1, sum(map(len, ratios.values())))
        yield Finding(
            Cause.SLOW_SLICE,
            _weight(lost_ms, evidence) * (0.5 + 0.5 * part),
            f"its batches take {ratio:.2f} times their profile on {slice_id} ({shown_ms(median(typical))} in the median){beside}",
            f"see what holds that GPU down (tenuto status: clocks, other processes); tenuto drain it, or measure the profile anew there (tenuto profile {evidence.model_id})",
            slice_id,
        )


def _is_interfered(its: Sequence[tuple[BatchSeen, float]], evidence: Evidence) -> bool:
    return _interfered(its, evidence) is not None


def _interfered(
    its: Sequence[tuple[BatchSeen, float]], evidence: Evidence
) -> tuple[float, float, ModelId] | None:
    """Run time by the profile's alone and beside batches of the GPU's other slices, and whose those were mostly."""
    alone: list[float] = []
    beside: list[float] = []
    beside_ms: dict[ModelId, float] = defaultdict(float)
    gpu = its[0][0].gpu
    neighbours = sorted(
        (one for one in evidence.batches if one.gpu == gpu and one.slice_id != its[0][0].slice_id),
        key=lambda one: one.started_at_ms,
    )
    starts = [one.started_at_ms for one in neighbours]
    longest_ms = max((one.ended_at_ms - one.started_at_ms for one in neighbours), default=0.0)
    for batch, ratio in its:
        first = bisect_left(starts, batch.started_at_ms - longest_ms)
        overlap_ms = 0.0
        for one in neighbours[first : bisect_left(starts, batch.ended_at_ms)]:
            ms = one.overlap_ms(batch.started_at_ms, batch.ended_at_ms)
            overlap_ms += ms
            beside_ms[one.model_id] += ms
        part = overlap_ms / max(1e-9, batch.entry.exec_ms)
        if part > 0.5:
            beside.append(ratio)
        elif part < 0.1:
            alone.append(ratio)
    if len(beside) < BATCHES_MIN or not beside_ms:
        return None
    # Without a batch that ran alone the profile is what one would have taken.
    base = median(alone) if len(alone) >= BATCHES_MIN else 1.0
    if median(beside) < INTERFERES * base:
        return None
    return base, median(beside), max(beside_ms, key=lambda model_id: beside_ms[model_id])


def _interference(evidence: Evidence) -> Iterator[Finding]:
    """A neighbour on the same GPU, on a slice of its own, that slows this model down."""
    for slice_id, its in _ratios(evidence).items():
        found = _interfered(its, evidence) if len(its) >= BATCHES_MIN else None
        if found is None:
            continue
        alone, beside, neighbour = found
        lost_ms = median(one.entry.exec_ms for one, _ in its) * (1 - alone / beside)
        yield Finding(
            Cause.NEIGHBOUR,
            _weight(lost_ms, evidence),
            f"on {slice_id} its batches take {beside:.2f} times their profile while {neighbour} runs on the same GPU, and {alone:.2f} times otherwise",
            f"place {neighbour} on another GPU, or use a placement that knows interference (cluster.interference, docs/guides/placement.md)",
            neighbour,
        )


def _network(evidence: Evidence) -> Iterator[Finding]:
    ran = [one.ledger for one in evidence.requests if one.has_run]
    returns = [one.return_ms for one in ran]
    ways = [(one.transfer_ms, one.batch_size) for one in ran]
    if len(ran) < BATCHES_MIN:
        own = [one.entry for one in evidence.batches if one.model_id == evidence.model_id and one.has_run]
        ways, returns = [(one.transfer_ms, one.batch_size) for one in own], [0.0]
    if not ways:
        return
    there_ms, back_ms = median(way_ms for way_ms, _ in ways), median(returns)
    # Inputs of a large batch are longer on their way, and more requests are in it.
    rest_ms = median(way_ms - evidence.data_ms_per_item * size for way_ms, size in ways)
    over_ms = rest_ms + back_ms - evidence.configured_way_ms
    starved_ms = max(evidence.late_timers_ms.values(), default=0.0)
    if over_ms < max(WAY_SHARE * evidence.slo_ms, 2 * starved_ms):
        return
    yield Finding(
        Cause.NETWORK,
        _weight(over_ms, evidence),
        f"inputs take {shown_ms(there_ms)} to the worker and outputs {shown_ms(back_ms)} back (medians), {over_ms / evidence.slo_ms:.0%} of the SLO",
        "see the link between frontends and workers (tenuto bench --json has each stage); put a frontend on the workers' host, or send smaller inputs",
    )


def _host(evidence: Evidence) -> Iterator[Finding]:
    late = late_host(evidence.late_timers_ms, evidence.slo_ms)
    if late is None:
        return
    role_id, late_ms = late
    yield Finding(
        Cause.HOST,
        _weight(late_ms, evidence),
        f"timers of {role_id} are {shown_ms(late_ms)} late (p99 since its start): its host's cores are taken by others, or sleep too deeply",
        "give the host more cores or fewer processes; tenuto doctor says what else (docs/results/performance.md: cores that go idle come back late)",
        role_id,
    )


def _weight(lost_ms: float, evidence: Evidence) -> float:
    """More of the SLO lost is a surer cause; a plan that would have sufficed otherwise makes it surer still."""
    share = min(1.0, lost_ms / (0.5 * evidence.slo_ms))
    return (0.5 + 0.5 * share) if _is_plan_enough(evidence) else 0.5 * share


# ---------------------------------------------------------------- load and plan


def _load(evidence: Evidence) -> Iterator[Finding]:
    """The plan would not have served this, with every profile kept and no message late."""
    played, bad = evidence.played, evidence.bad_rate
    before = played.as_planned if played.as_planned is not None else bad
    if is_mended(played.own_smooth, before) and evidence.dispersion >= BURSTY:
        yield Finding(
            Cause.BURSTS,
            0.9,
            f"its requests come in bursts: counts of 50 ms vary {evidence.dispersion:.0f} times as much as by chance; at the same mean rate ({_rate(evidence, evidence.model_id)}) and without them {played.own_smooth:.1%} would be bad instead of {before:.1%}",
            "more GPUs or a longer SLO carry bursts, or a client that spreads its requests",
        )
        return
    loud = _loudest(evidence)
    if (
        loud is not None
        and is_mended(played.others_gone, before)
        and is_mended(played.others_as_planned, before)
    ):
        planned = evidence.planned_rps.get(loud)
        asked = f"{_rate(evidence, loud)} instead of {planned:.0f} r/s" if planned else _rate(evidence, loud)
        yield Finding(
            Cause.NEIGHBOUR,
            0.9,
            f"{loud}, on the same slices, takes the time that {evidence.model_id} needs: {asked}; as the plan has it {played.others_as_planned:.1%} would be bad instead of {before:.1%}",
            f"plan for what {loud} asks (tenuto models set {loud} --rate …), give it slices of its own, or lower its priority",
            loud,
        )
        return
    planned = evidence.planned_rps.get(evidence.model_id)
    more = f", planned for {planned:.0f}" if planned else ""
    yield Finding(
        Cause.CAPACITY,
        0.8,
        f"too little capacity: {_rate(evidence, evidence.model_id)} came{more}; even with every profile kept {before:.1%} would be bad, and {_or_unknown(played.own_smooth)} with evenly spread requests; its slices were busy {_busy(evidence):.0%} of the time",
        "more GPUs, or a longer SLO",
    )


def _out_of_plan(evidence: Evidence) -> Iterator[Finding]:
    """Requests came otherwise than the plan has them: more, of this or of a neighbouring model, or in bursts."""
    loud = _loudest(evidence)
    for model_id, cause in ((evidence.model_id, Cause.CAPACITY), (loud, Cause.NEIGHBOUR)):
        planned = 0.0 if model_id is None else evidence.planned_rps.get(model_id, 0.0)
        if model_id is not None and evidence.rates_rps.get(model_id, 0.0) > OVER_PLAN * planned > 0:
            text = f"{_rate(evidence, model_id)} of {model_id} came, and the plan is for {planned:.0f}; the slices were busy {_busy(evidence):.0%} of the time"
            yield Finding(cause, 0.0, text, f"tenuto why {evidence.model_id}", model_id)
            return
    if evidence.dispersion >= BURSTY:
        text = f"requests of {evidence.model_id} come in bursts: counts of 50 ms vary {evidence.dispersion:.0f} times as much as by chance"
        yield Finding(Cause.BURSTS, 0.0, text, f"tenuto why {evidence.model_id}", evidence.model_id)


def _rate(evidence: Evidence, model_id: ModelId) -> str:
    return f"{evidence.rates_rps.get(model_id, 0.0):.0f} r/s"


def _or_unknown(rate: float | None) -> str:
    return "an unknown part" if rate is None else f"{rate:.1%}"


def _loudest(evidence: Evidence) -> ModelId | None:
    """The other model that had most of the time of the slices that this one runs on."""
    places = {one.slice_id for one in evidence.batches if one.model_id == evidence.model_id}
    busy_ms: dict[ModelId, float] = defaultdict(float)
    for batch in evidence.batches:
        if batch.slice_id in places and batch.model_id != evidence.model_id:
            busy_ms[batch.model_id] += batch.entry.exec_ms
    return max(busy_ms, key=lambda model_id: busy_ms[model_id]) if busy_ms else None


def _busy(evidence: Evidence) -> float:
    """Of the time from the first of the remembered batches on, on the slices that the model ran on."""
    places = {one.slice_id for one in evidence.batches if one.model_id == evidence.model_id}
    its = [one for one in evidence.batches if one.slice_id in places]
    if not its:
        return 0.0
    span_ms = max(one.ended_at_ms for one in its) - min(one.started_at_ms for one in its)
    return min(1.0, sum(one.entry.exec_ms for one in its) / max(1e-9, span_ms * len(places)))
