"""Sends one load after another, open loop, from a process of its own, and says what became of it.

The schedule and its player are `tenuto bench`'s (`roles/workload`, `roles/benchmark`), whoever answers: Poisson moments drawn from a seed,
bent to the rate; latency counts from the intended moment, and the sender's own lateness is reported. A load that
cannot become good any more is cut short.
"""

from __future__ import annotations

import asyncio
import gc
import math
import multiprocessing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Final, Self

import numpy as np

from fabric.client import Client
from fabric.clock import MonotonicClock
from fabric.errors import FabricError, PeerLost
from fabric.ids import ModelId
from fabric.link import Tensor
from policies.slo import BAD_RATE_ALLOWED
from roles.benchmark.http_connections import HttpClient, HttpTarget
from roles.benchmark.player import PlannedRequest, PlayedRequest, Submits, play, run_precisely
from roles.benchmark.share import COLUMNS, STAGES, LoadRecord, Recorder, merged
from roles.benchmark.verdict import LATE_MS_MAX
from roles.runtime.process import die_with_parent
from roles.workload.arrivals import ArrivalSource, Workload
from roles.workload.outcomes import ROUNDING_MS, Window, model_outcome, nearest_rank

START_AHEAD_MS: Final = 50.0
START_LIMIT_MS: Final = 60_000.0  # from listening to the first answer
CALM_LIMIT_MS: Final = 10_000.0  # from there to answers within the SLO: what a flood left is worked off first
CALM_RETRY_S: Final = 0.05
CALM_ANSWERS: Final = 3
ANSWER_LIMIT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class SdkTarget:
    """A Tenuto cluster, by the addresses of one frontend."""

    addresses: tuple[str, ...]


Target = SdkTarget | HttpTarget


@dataclass(frozen=True, slots=True)
class Load:
    """Equal Poisson rates of some models, together `rate_rps`; arrivals inside `window` count. `inputs`: of one request, by model."""

    target: Target
    inputs: Mapping[str, Mapping[str, Tensor]]
    rate_rps: float
    slo_ms: float
    seed: int
    window: Window

    @property
    def models(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(self.inputs)

    @property
    def workload(self) -> Workload:
        """The same bursts at every rate."""
        each_rps = self.rate_rps / len(self.models)
        sources = tuple(ArrivalSource(ModelId(model), "poisson", ((0.0, each_rps),)) for model in self.models)
        return Workload(self.seed, sources)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a load. Where it `is_cut` it was bad before its end, and the counts are of what was sent.

    Latencies are of what was answered, lateness is the sender's; stages are the mean ledger, where there is one.
    """

    rate_rps: float
    bad_rate: float
    offered: int
    good: int
    p50_ms: float | None
    p99_ms: float | None
    late_p50_ms: float
    late_p99_ms: float
    is_cut: bool
    errors: Mapping[str, int]
    stages_ms: Mapping[str, float] = field(default_factory=dict)
    batch_mean: float | None = None

    @property
    def is_good(self) -> bool:
        """Whether every model's bad rate is under 1 %."""
        return not self.is_cut and self.bad_rate < BAD_RATE_ALLOWED

    @property
    def is_valid(self) -> bool:
        """Whether the sender kept to its plan; latency counts its lateness, so only a bad verdict is in doubt."""
        return self.is_good or self.late_p99_ms <= LATE_MS_MAX


class Hope:
    """Ends a plan once more of one model's requests are bad than 1 % of all that it will have."""

    def __init__(self, load: Load, requests: list[tuple[str, float]]) -> None:
        self._load = load
        self._allowed = dict.fromkeys(load.models, 0.0)
        for model, at_ms in requests:
            if self._counts(at_ms):
                self._allowed[model] += BAD_RATE_ALLOWED
        self.is_gone = False

    def note(self, played: PlayedRequest) -> None:
        """One request's fate."""
        planned = played.planned
        is_bad = played.error is not None or played.latency_ms > self._load.slo_ms + ROUNDING_MS
        if is_bad and self._counts(planned.at_ms):
            self._allowed[planned.model] -= 1
            self.is_gone = self.is_gone or self._allowed[planned.model] < 0

    def _counts(self, at_ms: float) -> bool:
        return self._load.window.from_ms <= at_ms < self._load.window.until_ms


class Sender:
    """The process that sends. Use as a context manager; start it from the main thread."""

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.join(5.0)
        self._pipe.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None, "entered, so started"
        return self._process.pid

    def send(self, load: Load) -> Verdict:
        """Play one load to its end. Raises PeerLost where nobody answers, FabricError where the sender fails."""
        self._pipe.send(load)
        limit_s = ANSWER_LIMIT_S + load.window.until_ms / 1e3
        try:
            if not self._pipe.poll(limit_s):
                raise FabricError(f"the sender says nothing for {limit_s:g} s")
            said = self._pipe.recv()
        except EOFError as error:
            raise FabricError("the sender ended without a word") from error
        if isinstance(said, FabricError):
            raise said
        assert isinstance(said, Verdict)
        return said


def _serve(pipe: Connection) -> None:
    die_with_parent()
    gc.freeze()
    while True:
        try:
            load = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            pipe.send(run_precisely(_send(load)))
        except FabricError as error:
            pipe.send(error)


async def _send(load: Load) -> Verdict:
    client = client_of(load.target)
    async with client:
        clock = MonotonicClock()
        await calm(client, load)
        of_model, moments, _ = merged(load.workload, load.window.until_ms)
        requests = [
            (load.models[place], at_ms)
            for place, at_ms in zip(of_model.tolist(), moments.tolist(), strict=True)
        ]
        recorder = Recorder([ModelId(model) for model in load.models])
        hope = Hope(load, requests)

        def note(played: PlayedRequest) -> None:
            recorder.note(played)
            hope.note(played)

        def plan() -> Iterator[PlannedRequest]:
            for model, at_ms in requests:
                if hope.is_gone:
                    return
                yield PlannedRequest(at_ms, model, load.inputs[model], load.slo_ms)

        await play(client, plan(), clock.now_ms() + START_AHEAD_MS, clock, note)
    return judged(load, recorder.record(), is_cut=hope.is_gone)


def client_of(target: Target) -> Client | HttpClient:
    """Who asks it; use as a context manager."""
    return Client(target.addresses) if isinstance(target, SdkTarget) else HttpClient(target)


async def calm(client: Submits, load: Load) -> None:
    """Wait until lone requests are answered in time: a queue that an earlier load left is nobody's fault."""
    clock = MonotonicClock()
    for model, inputs in load.inputs.items():
        calm, until_ms, first_answer_at_ms = 0, clock.now_ms() + START_LIMIT_MS, math.inf
        while calm < CALM_ANSWERS:
            asked_at_ms = clock.now_ms()
            try:
                await client.submit(model, inputs, load.slo_ms)
                took_ms = clock.now_ms() - asked_at_ms
                first_answer_at_ms = min(first_answer_at_ms, asked_at_ms)
                last = f"takes {took_ms:.1f} ms"
            except FabricError as error:
                took_ms, last = math.inf, f"fails: {error}"
                await asyncio.sleep(CALM_RETRY_S)
            calm = calm + 1 if took_ms <= load.slo_ms else 0
            if clock.now_ms() > min(until_ms, first_answer_at_ms + CALM_LIMIT_MS):
                raise PeerLost(f"a lone request to {model} still {last}")


def judged(load: Load, record: LoadRecord, *, is_cut: bool) -> Verdict:
    """Judge by the rules of `tenuto bench`: arrivals in the window, the model that fares worst."""
    columns = {name: record.rows[:, place] for place, name in enumerate(COLUMNS)}
    at_ms, latency_ms = columns["intended_at_ms"], columns["latency_ms"]
    inside = (at_ms >= load.window.from_ms) & (at_ms < load.window.until_ms)
    outcomes = []
    for place in range(len(load.models)):
        own = columns["model"] == place
        outcomes.append(model_outcome(at_ms[own], at_ms[own] + latency_ms[own], load.slo_ms, load.window))
    answered = inside & ~np.isnan(latency_ms)
    ascending, late_ms = np.sort(latency_ms[answered]), np.sort(columns["late_ms"][inside])
    has_ledger = bool(answered.any()) and isinstance(load.target, SdkTarget)
    return Verdict(
        rate_rps=load.rate_rps,
        bad_rate=max(outcome.bad_rate for outcome in outcomes),
        offered=sum(outcome.offered for outcome in outcomes),
        good=sum(outcome.good for outcome in outcomes),
        p50_ms=nearest_rank(ascending, 0.5),
        p99_ms=nearest_rank(ascending, 0.99),
        late_p50_ms=nearest_rank(late_ms, 0.5) or 0.0,
        late_p99_ms=nearest_rank(late_ms, 0.99) or 0.0,
        is_cut=is_cut,
        errors=dict(record.errors_of()),
        stages_ms={stage: float(columns[stage][answered].mean()) for stage in STAGES} if has_ledger else {},
        batch_mean=float(1 / np.mean(1 / columns["batch_size"][answered])) if has_ledger else None,
    )
