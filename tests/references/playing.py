"""What a plain reference and one of our disciplines are both played on: models, slices, requests, and what was sent.

A reference knows single requests, never runs. It keeps no heap and no timer: after every event it looks at everything
afresh. So it is slow, and it shares no line with `policies/batching`; what it needs of the world is here.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fabric.ids import FrontendId, ModelId, SliceId
from policies.batching.base import (
    BatchDecision,
    BatchModel,
    BatchSlice,
    Delay,
    Discipline,
    Dispatch,
    Drop,
    HostedModel,
    Preempt,
    RequestRun,
)

MARGIN_MS = 1e-5
"""Ours sends a batch so much before the moment after which it would be late (`policies/batching/batch_moments.py`)."""

APART_MS = 1e-3
"""Between two requests at least, so that slices do not become free at one moment later."""
SAME_MS = 0.01
"""The margin is there once for every batch of a row that follow each other on a slice."""


@dataclass(frozen=True)
class Model:
    """`delay_ms`: from the decision until a batch is on the device, the same for every batch."""

    name: str
    slo_ms: float
    delay_ms: float = 0.0


@dataclass(frozen=True)
class Gpu:
    """A slice. `run_ms[model][b - 1]` is l(b) there; `weight[model]` its part of the model's requests in a plan."""

    name: str
    run_ms: Mapping[str, Sequence[float]]
    weight: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One request; `number` is unique. It is announced when it arrives, and no batch may have it before it is ready."""

    number: int
    model: str
    arrived_at_ms: float
    deadline_at_ms: float
    ready_at_ms: float = 0.0


@dataclass(frozen=True)
class Sent:
    """A batch as it was sent."""

    at_ms: float
    gpu: str
    model: str
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """What there is to serve on, and what comes."""

    models: tuple[Model, ...]
    gpus: tuple[Gpu, ...]
    requests: tuple[Request, ...]


@dataclass
class Played:
    """`sent` in order, less what was preempted; every other request was given up or is still in `waiting`."""

    sent: list[Sent] = field(default_factory=list)
    given_up: set[int] = field(default_factory=set)
    preempted: list[tuple[float, str]] = field(default_factory=list)


class Reference(ABC):
    """Plays a setting: after each event `look` does what is to be done now, until nothing is.

    A batch takes only requests that are ready when it starts, and none is kept waiting for one that is not. So to a reference a
    request comes when it is ready, and waits since then; those of a model that are ready at one moment come together. One that would
    be ready too late even to run alone is never seen.
    """

    def __init__(self, setting: Setting) -> None:
        self.models = {model.name: model for model in setting.models}
        self.gpus = setting.gpus
        self.free_at_ms = {gpu.name: 0.0 for gpu in setting.gpus}
        self.played = Played()
        self._requests = setting.requests
        self._hosts = {name: [gpu for gpu in setting.gpus if name in gpu.run_ms] for name in self.models}
        self._tables = {
            name: sorted({id(gpu.run_ms[name]): gpu.run_ms[name] for gpu in hosts}.values(), key=min)
            for name, hosts in self._hosts.items()
        }

    def play(self) -> Played:
        """All of it."""
        came = [replace(one, arrived_at_ms=max(one.arrived_at_ms, one.ready_at_ms)) for one in self._requests]
        late = {
            one.number
            for one in came
            if one.arrived_at_ms == one.ready_at_ms
            and one.deadline_at_ms < one.ready_at_ms + self.fastest_ms(one.model)
        }
        self.played.given_up |= late
        came.sort(key=lambda one: one.arrived_at_ms)
        left = [one for one in reversed(came) if one.number not in late]
        now_ms = 0.0
        while True:
            at_ms = min([moment for moment in self.moments(now_ms) if moment > now_ms], default=math.inf)
            if left and left[-1].arrived_at_ms <= at_ms:
                now_ms = left[-1].arrived_at_ms
                model = left[-1].model
                while left and (left[-1].arrived_at_ms, left[-1].model) == (now_ms, model):
                    self.arrive(left.pop(), now_ms)
            elif at_ms == math.inf:
                return self.played
            else:
                now_ms = at_ms
            self.look(now_ms)

    @abstractmethod
    def arrive(self, request: Request, now_ms: float) -> None:
        """A request has come."""

    @abstractmethod
    def look(self, now_ms: float) -> None:
        """Do all that is to be done now."""

    @abstractmethod
    def moments(self, now_ms: float) -> list[float]:
        """When something may have to be done, if nothing comes; those that have passed do not matter."""

    def hosts(self, model: str) -> list[Gpu]:
        """The slices that host a model."""
        return self._hosts[model]

    def tables(self, model: str) -> list[Sequence[float]]:
        """The run times of a model on its slices, each once, the fastest first."""
        return self._tables[model]

    def fastest_ms(self, model: str) -> float:
        """What a request needs at least: its run alone on the best of its slices, and the way there."""
        return self._tables[model][0][0] + self.models[model].delay_ms


def largest_fitting(run_ms: Sequence[float], left_ms: float) -> int:
    """The largest batch that runs in the time left; 0: none."""
    return bisect_right(run_ms, left_ms)


def play_ours(discipline: Discipline, setting: Setting) -> Played:
    """The same setting, played at one of our disciplines."""
    played = Played()
    running: dict[str, tuple[Sent, list[RequestRun]]] = {}
    for model in setting.models:
        discipline.add_model(BatchModel(ModelId(model.name), model.slo_ms, Delay(model.delay_ms)), 0.0)

    def take(decisions: Sequence[BatchDecision], now_ms: float) -> None:
        stopped: list[tuple[str, list[RequestRun]]] = []
        for decision in decisions:
            if isinstance(decision, Dispatch):
                sent = Sent(now_ms, decision.slice_id, decision.model_id, numbers_of(decision.runs))
                assert len(sent.numbers) == decision.batch_size
                played.sent.append(sent)
                running[decision.slice_id] = sent, decision.runs
            elif isinstance(decision, Drop):
                played.given_up.update(numbers_of(decision.runs))
            else:
                assert isinstance(decision, Preempt)
                played.preempted.append((now_ms, decision.dispatch.slice_id))
                sent, runs = running.pop(decision.dispatch.slice_id)
                played.sent.remove(sent)
                stopped.append((sent.model, runs))
        for name, runs in stopped:
            take(discipline.arrive_again(ModelId(name), runs, now_ms), now_ms)

    for order, gpu in enumerate(setting.gpus):
        hosted = tuple(
            HostedModel(ModelId(name), tuple(run_ms), None, gpu.weight.get(name, 1.0))
            for name, run_ms in gpu.run_ms.items()
        )
        take(discipline.add_slice(BatchSlice(SliceId(gpu.name), order, hosted), 0.0), 0.0)
    now_ms = 0.0
    left = list(reversed(setting.requests))
    while True:
        wake_at_ms = discipline.wake_at_ms
        if left and (wake_at_ms is None or left[-1].arrived_at_ms <= wake_at_ms):
            request = left.pop()
            now_ms = request.arrived_at_ms
            run = RequestRun(
                FrontendId("f"),
                request.number,
                1,
                request.deadline_at_ms,
                now_ms,
                ready_at_ms=request.ready_at_ms,
            )
            take(discipline.arrive(ModelId(request.model), run, now_ms), now_ms)
        elif wake_at_ms is None:
            return played
        else:
            now_ms = max(now_ms, wake_at_ms)
            take(discipline.tick(now_ms), now_ms)


def numbers_of(runs: Sequence[RequestRun]) -> tuple[int, ...]:
    """The requests in them."""
    return tuple(number for run in runs for number in range(run.first_seq, run.first_seq + run.count))


def differences(theirs: Played, ours: Played, kinds: Mapping[str, int] | None = None) -> list[str]:
    """What the reference did and ours did not, in order; empty where they agree.

    `kinds`: slices of one kind are as good as each other, and which of them it was does not matter. (Slices that ran
    the same batches in another order are free at one moment.) In which order batches of one moment were sent does not matter either.
    """
    found = []
    in_order = [sorted(played.sent, key=lambda sent: (sent.at_ms, sent.numbers)) for played in (theirs, ours)]
    for number, (one, other) in enumerate(zip(*in_order, strict=False)):
        is_same = (one.model, one.numbers) == (other.model, other.numbers)
        is_there = one.gpu == other.gpu if kinds is None else kinds[one.gpu] == kinds[other.gpu]
        if not is_same or not is_there or abs(one.at_ms - other.at_ms) > SAME_MS:
            found.append(f"batch {number}: reference {one}, ours {other}")
            break
    if not found and len(theirs.sent) != len(ours.sent):
        found.append(f"{len(theirs.sent)} batches of the reference, {len(ours.sent)} of ours")
    if not found and theirs.given_up != ours.given_up:
        found.append(f"given up by one only: {sorted(theirs.given_up ^ ours.given_up)}")
    if not found and len(theirs.preempted) != len(ours.preempted):
        found.append(f"preempted: reference {theirs.preempted}, ours {ours.preempted}")
    return found


def is_tie(setting: Setting, theirs: Played, ours: Played) -> bool:
    """Whether two slices were free at one moment where the two first differ: which of them is looked at first is chance."""
    delays_ms = {model.name: model.delay_ms for model in setting.models}
    run_ms = {gpu.name: gpu.run_ms for gpu in setting.gpus}
    free_at_ms = {gpu.name: 0.0 for gpu in setting.gpus}
    freed_at_ms: list[float] = []
    for one, other in zip(theirs.sent, ours.sent, strict=False):
        if one.numbers != other.numbers or one.gpu != other.gpu:
            at_ms = one.at_ms + delays_ms[one.model]
            return sum(abs(moment - at_ms) < SAME_MS for moment in freed_at_ms) > 1
        start_at_ms = max(one.at_ms + delays_ms[one.model], free_at_ms[one.gpu])
        free_at_ms[one.gpu] = start_at_ms + run_ms[one.gpu][one.model][len(one.numbers) - 1]
        freed_at_ms.append(free_at_ms[one.gpu])
    return False


def random_setting(
    seed: int,
    *,
    requests: int = 300,
    classes: int | None = None,
    has_own_delays: bool = False,
    is_crossed: bool = False,
    is_prepared: bool = False,
) -> Setting:
    """One to twelve models with Zipf weights and bursts on slices of one to three speeds, from idle to overload.

    Everything lies at random floats and requests are a little apart, so that hardly two things happen at one moment.
    `has_own_delays`: each model one. `is_crossed`: slices that are slower for large batches may be faster for small ones.
    `is_prepared`: half of the requests are ready only later, up to their deadline; half of these together with others of their model.
    """
    rng = random.Random(seed)
    own = random.Random(f"own {seed}")  # the rest is the same with and without
    prepared = random.Random(f"prepared {seed}")
    count = rng.randint(1, 12)
    delay_ms = rng.choice((0.0, 0.0, rng.uniform(0.1, 1.0)))
    models, tables = [], {}
    for rank in range(count):
        alpha_ms, beta_ms = rng.uniform(0.05, 3.0), rng.uniform(0.0, 12.0)
        slo_ms = rng.uniform(1.2, 6.0) * (alpha_ms + beta_ms)
        own_delay_ms = own.uniform(0.0, 1.0) if has_own_delays else delay_ms
        name = f"m{rank}"
        models.append(Model(name, slo_ms + own_delay_ms, own_delay_ms))
        size_max = rng.choice((1, 2, 5, 16, 64))
        tables[name] = [alpha_ms * size + beta_ms for size in range(1, size_max + 1)]
    speeds = [1.0, rng.uniform(1.3, 1.7), rng.uniform(2.1, 4.0)][: classes or rng.choice((1, 1, 2, 3))]
    gpus = []
    scaled = {speed: {name: [speed * ms for ms in run] for name, run in tables.items()} for speed in speeds}
    if is_crossed:
        for speed in speeds[1:]:
            for name, run_ms in tables.items():
                if len(run_ms) > 1 and own.random() < 0.5:
                    scaled[speed][name] = _crossing(run_ms, speed, own.uniform(0.2, 0.9))
    for order in range(rng.randint(1, 10)):
        speed = rng.choice(speeds)
        is_whole = order == 0 or rng.random() < 0.8  # every model is hosted somewhere
        hosted = sorted(tables if is_whole else rng.sample(sorted(tables), max(1, count // 2)))
        gpus.append(Gpu(f"g{order}", {name: scaled[speed][name] for name in hosted}))
    weights = [(rank + 1) ** -rng.choice((0.0, 0.9, 1.5)) for rank in range(count)]
    work_ms = sum(
        weight * tables[model.name][min(4, len(tables[model.name])) - 1] / min(4, len(tables[model.name]))
        for weight, model in zip(weights, models, strict=True)
    ) / sum(weights)
    rate = rng.uniform(0.1, 2.5) * len(gpus) / work_ms  # a millisecond
    is_bursty = rng.random() < 0.5
    came = []
    at_ms = 0.0
    for _ in range(requests):
        at_ms += APART_MS + (rng.gammavariate(0.2, 5.0 / rate) if is_bursty else rng.expovariate(rate))
        (model,) = rng.choices(models, weights)
        came.append((at_ms, model))
    is_varied = rng.random() < 0.3
    asked = []
    for number, (at_ms, model) in enumerate(came):
        budget_ms = model.slo_ms * (rng.uniform(0.5, 1.5) if is_varied else 1.0)
        is_ready = not is_prepared or prepared.random() < 0.5
        ready_at_ms = 0.0 if is_ready else at_ms + budget_ms * prepared.random()
        if not is_ready and prepared.random() < 0.5:
            grid_ms = 0.2 * model.slo_ms
            ready_at_ms = max(at_ms, grid_ms * (1.0 + ready_at_ms // grid_ms))
        asked.append(Request(number, model.name, at_ms, at_ms + budget_ms, ready_at_ms))
    return Setting(tuple(models), tuple(gpus), tuple(asked))


def _crossing(run_ms: Sequence[float], slower: float, faster: float) -> list[float]:
    """Run times so many times as long for the largest batch, and as short for a single request."""
    steps = len(run_ms) - 1
    first_ms, last_ms = faster * run_ms[0], slower * run_ms[-1]
    return [first_ms + (last_ms - first_ms) * step / steps for step in range(len(run_ms))]
