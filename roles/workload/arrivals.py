"""When requests arrive: Poisson, bursty, constant-gap and recorded, seeded.

Arrivals are drawn in *operational time*, where the mean gap is 1, and then bent through the integral of the
rate. So one seed gives the same burst pattern at every rate (a goodput search compares like with like), rate
steps need no restart of the process, and a longer run begins with the shorter one. Each model has its own
generator, seeded by the run's seed and the model's name: adding a model changes nobody else's arrivals.

A run looks in on arrivals that have long been under way, so every window, the first one too, expects the rate
asked for. The first arrival is therefore what is left of a gap met at a random moment. Long gaps are met more
often, in proportion to their length: of gamma gaps with shape k the one met is gamma with shape k + 1, and
the moment lies anywhere in it (Cox, Renewal Theory, 5.2; for Poisson this is again an exponential).
"""

from __future__ import annotations

import csv
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fabric.errors import ConfigError
from fabric.ids import ModelId
from fabric.messages import PRIORITY_MAX
from fabric.policy_options import brief, shown
from roles.config.checks import MOMENT_S_MAX
from roles.config.cluster import ClusterConfig
from roles.workload.azure import azure_arrivals, is_azure

Moments = NDArray[np.float64]
Priorities = NDArray[np.int8]
NO_PRIORITY = -1
NAMES_SHOWN = 5


@dataclass(slots=True, frozen=True)
class Trace:
    """Recorded arrivals of every model in one file, repeated every `period_ms` (0: played once).

    `priorities`: of each arrival, where the file has them (`NO_PRIORITY`: the model's). `ignored`: how many rows name a model that this trace is not played for, by that name.
    """

    at_ms: Mapping[ModelId, Moments]
    period_ms: float
    name: str = ""
    ignored: Mapping[str, int] = field(default_factory=dict)
    priorities: Mapping[ModelId, Priorities] = field(default_factory=dict)

    def remarks(self, until_ms: float | None = None) -> list[str]:
        """What of the recording is not played as it is: left out, or repeated in a run of that length."""
        found: list[str] = []
        if self.ignored:
            names = [f"{brief(name)} ({count:,})" for name, count in self.ignored.items()]
            more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
            found.append(
                f"{self.name}: {sum(self.ignored.values()):,} rows are not played: no model of the file with this "
                f"trace is called {', '.join(names[:NAMES_SHOWN])}{more}"
            )
        if until_ms is not None and 0 < self.period_ms < until_ms:
            found.append(
                f"{self.name}: lasts {self.period_ms / 1000:,.6g} s, the run {until_ms / 1000:,.6g} s: "
                f"it is played {until_ms / self.period_ms:,.1f} times"
            )
        return found


@dataclass(slots=True, frozen=True)
class ArrivalSource:
    """One model's arrivals; `process` is poisson | gamma | uniform | trace.

    `steps` are (from_ms, rps), ascending, from run start; before the first the rate is 0. `shape`: of the
    gamma gaps of a renewal process, whose squared coefficient of variation is 1/shape. `phase`: the first
    arrival in mean gaps after the start; None draws it. A trace has neither rate nor phase:
    `time_scale` 2 plays it twice as fast.
    """

    model_id: ModelId
    process: str = "poisson"
    steps: tuple[tuple[float, float], ...] = ()
    shape: float = 1.0
    phase: float | None = None
    trace: Trace | None = field(default=None, repr=False)
    time_scale: float = 1.0

    def scaled(self, factor: float) -> ArrivalSource:
        """The same arrivals, `factor` times as dense."""
        steps = tuple((from_ms, rate_rps * factor) for from_ms, rate_rps in self.steps)
        return replace(self, steps=steps, time_scale=self.time_scale * factor)

    def expected(self, from_ms: float, until_ms: float) -> float:
        """How many arrivals to expect in a window."""
        if self.trace is not None:
            return float(self._played_count(until_ms) - self._played_count(from_ms))
        rate = _Rate(self.steps)
        return rate.integral(until_ms) - rate.integral(from_ms)

    def arrivals(self, seed: int, until_ms: float) -> Moments:
        """Ascending moments before `until_ms`, in ms from run start."""
        if self.trace is not None:
            return self._played(until_ms)
        rate = _Rate(self.steps)
        end = rate.integral(until_ms)
        if end <= 0:
            return np.empty(0)
        # random.Random hashes a text seed the same way in every process; the hash() of a str would not.
        own = random.Random(f"{seed}/arrivals/{self.model_id}")
        return rate.moment_of(self._operational(own, end))

    def priorities(self, until_ms: float) -> Priorities | None:
        """Of each of the arrivals before `until_ms`; None where none has one of its own."""
        recorded = None if self.trace is None else self.trace.priorities.get(self.model_id)
        if recorded is None or not recorded.size:
            return None
        return np.resize(recorded, self._played(until_ms).size)

    def _operational(self, own: random.Random, end: float) -> Moments:
        """Arrivals with a mean gap of 1, before `end`."""
        left_of_gap = own.random()  # as a share of the gap that is under way
        if self.process == "uniform":
            start = self.phase if self.phase is not None else left_of_gap
            # Multiples rather than a running sum: a thousand gaps of 0.1 end where they should.
            moments = start + np.arange(max(0, int(np.ceil(end - start)) + 1), dtype=np.float64)
            return moments[moments < end]
        # RandomState is numpy's frozen stream (NEP 19): a seed means the same history with every numpy.
        draws = np.random.RandomState([own.getrandbits(32) for _ in range(8)])
        gap_under_way = float(draws.standard_gamma(self.shape + 1)) / self.shape
        start = self.phase if self.phase is not None else left_of_gap * gap_under_way
        blocks = [np.array([start])]
        while blocks[-1][-1] < end:
            size = 1024 + int((end - blocks[-1][-1]) * 1.02)
            gaps = draws.standard_gamma(self.shape, size) / self.shape
            blocks.append(blocks[-1][-1] + np.cumsum(gaps))
        moments = np.concatenate(blocks)
        return moments[: np.searchsorted(moments, end)]

    def _recorded(self) -> tuple[Moments, float]:
        """One round of the trace and how long it takes, at the speed at which it is played."""
        assert self.trace is not None
        recorded: Moments = self.trace.at_ms.get(self.model_id, np.empty(0)) / self.time_scale
        return recorded, self.trace.period_ms / self.time_scale

    def _played_count(self, until_ms: float) -> int:
        """How many arrivals there are before that moment, without making them: there may be very many."""
        recorded, period_ms = self._recorded()
        rounds = int(until_ms / period_ms) if period_ms > 0 else 0
        return rounds * recorded.size + int(np.searchsorted(recorded, until_ms - rounds * period_ms))

    def _played(self, until_ms: float) -> Moments:
        recorded, period_ms = self._recorded()
        if recorded.size == 0 or recorded[0] >= until_ms:
            return np.empty(0)
        repeats = int((until_ms - recorded[0]) / period_ms) + 1 if period_ms > 0 else 1
        moments = (recorded[None, :] + period_ms * np.arange(repeats)[:, None]).ravel()
        return moments[: np.searchsorted(moments, until_ms)]


@dataclass(slots=True, frozen=True)
class Workload:
    """All models' own arrivals, and those of applications."""

    seed: int
    sources: tuple[ArrivalSource, ...]
    applications: tuple[ArrivalSource, ...] = ()

    def scaled(self, factor: float) -> Workload:
        """The same mix, `factor` times as dense; a trace is played that much faster."""
        return replace(
            self,
            sources=tuple(source.scaled(factor) for source in self.sources),
            applications=tuple(source.scaled(factor) for source in self.applications),
        )

    def of(self, model_ids: Collection[ModelId]) -> Workload:
        """The arrivals of these models; each has the same with and without the others."""
        return replace(self, sources=tuple(one for one in self.sources if one.model_id in model_ids))

    def without(self, silent: Collection[str]) -> Workload:
        """The same, but these models and applications send nothing."""
        sources, applications = (
            tuple(replace(one, steps=(), trace=None) if one.model_id in silent else one for one in part)
            for part in (self.sources, self.applications)
        )
        return replace(self, sources=sources, applications=applications)

    def expected(self, from_ms: float, until_ms: float) -> float:
        """How many requests to expect in a window, all models and applications together."""
        return sum(source.expected(from_ms, until_ms) for source in (*self.sources, *self.applications))

    def remarks(self, until_ms: float | None = None) -> list[str]:
        """What a user should know of the traces, see `Trace.remarks`."""
        traces = {
            source.trace.name: source.trace
            for source in (*self.sources, *self.applications)
            if source.trace is not None
        }
        return [line for trace in traces.values() for line in trace.remarks(until_ms)]

    def arrivals(self, until_ms: float) -> tuple[Moments, ...]:
        """Each model's arrivals before `until_ms`, in the order of `sources`."""
        return tuple(source.arrivals(self.seed, until_ms) for source in self.sources)

    def priorities(self, until_ms: float) -> tuple[Priorities | None, ...]:
        """Those of each model's arrivals, where they have priorities of their own."""
        return tuple(source.priorities(until_ms) for source in self.sources)


class _Rate:
    """A piecewise constant rate, its integral (expected arrivals since run start) and the inverse of that."""

    def __init__(self, steps: Sequence[tuple[float, float]]) -> None:
        if not steps or steps[0][0] > 0:
            steps = [(0.0, 0.0), *steps]
        self._from_ms = np.array([from_ms for from_ms, _ in steps])
        self._per_ms = np.array([rate_rps / 1000 for _, rate_rps in steps])
        self._count = np.concatenate(([0.0], np.cumsum(np.diff(self._from_ms) * self._per_ms[:-1])))

    def integral(self, at_ms: float) -> float:
        """Arrivals expected from run start until that moment."""
        k = max(0, int(np.searchsorted(self._from_ms, at_ms, side="right")) - 1)
        return float(self._count[k] + (at_ms - self._from_ms[k]) * self._per_ms[k])

    def moment_of(self, counts: Moments) -> Moments:
        """When the integral reaches each of `counts`, all of them within the integral's range."""
        # Of the steps that begin at the same count all but the last have rate 0: skip them.
        k = np.searchsorted(self._count, counts, side="right") - 1
        at_ms: Moments = self._from_ms[k] + (counts - self._count[k]) / self._per_ms[k]
        return at_ms


PERIOD_MS_MIN: Final = 1e-6  # a trace that repeats sooner is played more often than can be counted


def read_trace(path: Path, model_ids: Sequence[ModelId]) -> Trace:
    """Read recorded arrivals: CSV with header ``at_ms``, then ``model`` and ``priority`` as wanted, ascending from 0 on.

    Without the model column every model of `model_ids` gets all of them; a request without a priority has its
    model's. It repeats after its last arrival plus one mean gap. The public traces of Azure Functions are read as they are
    (`roles/workload/azure.py`). Raises ConfigError with the line number for whatever is wrong.
    """
    rows: dict[ModelId, list[tuple[float, int]]] = {model_id: [] for model_id in model_ids}
    ignored: Counter[str] = Counter()
    count, first_ms, last_ms = 0, 0.0, 0.0
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            header = [name.strip() for name in next(lines, [])]
            if is_azure(header):
                rows_of_it = ((lines.line_num, line) for line in lines if line)
                found, period_ms = azure_arrivals(path, header, rows_of_it, model_ids)
                _check_heard(path, {model_id: at_ms.size for model_id, at_ms in found.items()})
                return Trace(found, period_ms, path.name)
            if header[:1] != ["at_ms"] or header[1:] not in (
                [],
                ["model"],
                ["priority"],
                ["model", "priority"],
            ):
                raise ConfigError(
                    f"{path}: line 1: the header must be 'at_ms', 'at_ms,model', 'at_ms,priority' or "
                    f"'at_ms,model,priority', not {header}"
                )
            for line in lines:
                if not line:
                    continue
                at_ms, named, priority = _trace_row(path, lines.line_num, line, header)
                if at_ms < last_ms:
                    raise ConfigError(
                        f"{path}: line {lines.line_num}: {at_ms:g} ms comes after {last_ms:g} ms: times must ascend"
                    )
                first_ms = at_ms if count == 0 else first_ms
                last_ms = at_ms
                count += 1
                for model_id in model_ids if named is None else (ModelId(named),):
                    if model_id in rows:
                        rows[model_id].append((at_ms, priority))
                    else:  # a recording may hold more models than are asked about
                        ignored[model_id] += 1
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: the trace cannot be read: {error}") from error
    _check_heard(path, {model_id: len(row) for model_id, row in rows.items()}, count)
    period_ms = last_ms + (last_ms - first_ms) / max(1, count - 1)
    if 0 < period_ms < PERIOD_MS_MIN:
        raise ConfigError(
            f"{path}: all of it is played in {period_ms:g} ms; it must take at least {PERIOD_MS_MIN:g} ms, or be at 0"
        )
    moments = {
        model_id: np.array([at_ms for at_ms, _ in row], dtype=np.float64) for model_id, row in rows.items()
    }
    priorities = {
        model_id: np.array([priority for _, priority in row], dtype=np.int8)
        for model_id, row in rows.items()
        if header[-1] == "priority"
    }
    return Trace(moments, period_ms, path.name, ignored, priorities)


def _check_heard(path: Path, counts: Mapping[ModelId, int], others: int = 0) -> None:
    """Every model has arrivals; `others`: how many there are, of whichever models."""
    if not others and not any(counts.values()):
        raise ConfigError(f"{path}: the trace has no arrivals")
    silent = [model_id for model_id, count in counts.items() if not count]
    if silent:
        raise ConfigError(f"{path}: the trace has no arrivals of {', '.join(silent)}")


def _trace_row(
    path: Path, line_no: int, line: Sequence[str], header: Sequence[str]
) -> tuple[float, str | None, int]:
    if len(line) != len(header):
        raise ConfigError(f"{path}: line {line_no}: {len(header)} columns expected, not {len(line)}")
    try:
        at_ms = float(line[0])
    except ValueError as error:
        raise ConfigError(f"{path}: line {line_no}: {shown(line[0])} is not a number of ms") from error
    if not 0 <= at_ms <= 1000 * MOMENT_S_MAX:
        raise ConfigError(
            f"{path}: line {line_no}: {shown(line[0])} must be 0 or more, and at most {1000 * MOMENT_S_MAX:,.0f}"
        )
    named = line[1].strip() if "model" in header else None
    priority = line[-1].strip() if "priority" in header else ""
    number = float(priority) if priority.isdecimal() else NO_PRIORITY  # an int has no more than 4,300 digits
    if priority and not 0 <= number <= PRIORITY_MAX:
        raise ConfigError(
            f"{path}: line {line_no}: {shown(priority)} must be a priority from 0 to {PRIORITY_MAX}, or empty"
        )
    return at_ms, named, int(number)


def workload_of(
    config: ClusterConfig, seed: int | None = None, silent: Collection[str] = frozenset()
) -> Workload:
    """The arrivals a configuration asks for, but of `silent` models and applications, which send nothing.

    Raises ConfigError where one of the others has none, or a trace is wrong.
    """
    asked_by_stages = {stage.model_id for one in config.applications for stage in one.plan.graph.stages}
    senders = [
        *((model.model_id, model.arrival, model.rate_steps) for model in config.models),
        *((ModelId(one.name), one.arrival, one.rate_steps) for one in config.applications),
    ]
    traced: dict[Path, list[ModelId]] = {}
    for place, (name, arrival, rate_steps) in enumerate(senders):
        if name in silent:
            continue
        if arrival.trace_path is not None:
            traced.setdefault(arrival.trace_path, []).append(name)
        elif not rate_steps and name not in asked_by_stages:
            kind = "models" if place < len(config.models) else "applications"
            raise ConfigError(f"{kind}: {name} has no rate_rps, so nothing says when its requests come")
    traces = {path: read_trace(path, names) for path, names in traced.items()}
    sources = tuple(
        ArrivalSource(
            name,
            arrival.process,
            rate_steps,
            arrival.shape,
            arrival.phase,
            None if arrival.trace_path is None else traces.get(arrival.trace_path),
        )
        for name, arrival, rate_steps in senders
    )
    count = len(config.models)
    workload = Workload(config.seed if seed is None else seed, sources[:count], sources[count:])
    return workload.without(silent)
