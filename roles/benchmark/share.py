"""One sender process's share of an open-loop run: its requests, and a record of each one's fate."""

from __future__ import annotations

import itertools
import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from operator import attrgetter
from pathlib import Path
from threading import BrokenBarrierError
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fabric.client import Client, ClientOptions
from fabric.clock import MonotonicClock
from fabric.errors import PeerLost, RequestError
from fabric.ids import ModelId
from fabric.link import Tensor
from fabric.messages import Ledger, ModelInfo, StageLine
from roles.applications.tally import StageTally
from roles.benchmark.gateway_target import GATEWAY_SCHEMES, GatewayClient, gateway_client
from roles.benchmark.player import PlannedRequest, PlayedRequest, play, run_precisely
from roles.config.cluster import ClusterConfig
from roles.workload.arrivals import NO_PRIORITY, Workload

if TYPE_CHECKING:
    from roles.gateway.rpc.client import RpcClient

START_AHEAD_MS = 200.0  # between the last sender's readiness and the first request
READY_LIMIT_S = 60.0
FREE_LENGTH = 16  # of an input's axis that may have any length

STAGES = tuple(name for name in Ledger.__struct_fields__ if name.endswith("_ms") and name != "total_ms")
"""The ledger's stages, in the order in which a request goes through them."""

_stages_of = attrgetter(*STAGES)

COLUMNS = ("model", "intended_at_ms", "late_ms", "latency_ms", "batch_size", "slice", *STAGES)
"""Of a record's rows; latency, batch size, slice and stages are NaN for a request that was not answered.

`model` counts the models of the file, then its applications. A request of one of these has neither batch size nor slice.
"""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What all senders of a run share. `targets`: one address of each frontend, of which each sender uses all; or a gateway's.

    `key_file`: for targets by TCP that ask for a key. `payload_bytes`: of a request to a model that declares no inputs. `gather_ms`: requests leave together at its
    multiples (0: each at its own moment).
    """

    config: ClusterConfig
    workload: Workload
    targets: tuple[str, ...]
    until_ms: float
    processes: int
    payload_bytes: int
    gather_ms: float = 0.0
    key_file: Path | None = None
    token: str = ""
    """For a gateway that asks for one."""


@dataclass(slots=True)
class LoadRecord:
    """Rows of `COLUMNS`, one a request; `slices` are the names behind the slice column, `errors` by model's place and code.

    `stages`: of each application, what its answers say of their stages. `slos_ms`: as the cluster had them before the first request.
    """

    rows: NDArray[np.float64]
    slices: tuple[str, ...] = ()
    errors: Counter[tuple[int, str]] = field(default_factory=Counter)
    stages: dict[str, dict[str, StageTally]] = field(default_factory=dict)
    slos_ms: Mapping[ModelId, float] = field(default_factory=dict)

    def errors_of(self, place: int | None = None) -> Counter[str]:
        """By code; of all models, or the one at that place."""
        found: Counter[str] = Counter()
        for (own, code), count in self.errors.items():
            if place is None or own == place:
                found[code] += count
        return found


class OtherSenderFailed(PeerLost):
    """What a sender ends with because another one did: not the cause."""


@dataclass(slots=True)
class StartGate:
    """How the senders of a run start together; shared between their processes."""

    barrier: Barrier
    began_at_ms: Synchronized[float]

    def wait(self, now_ms: float) -> float:
        """The run's zero on this host's clock, once everybody is connected. Raises OtherSenderFailed where one is not, at the latest after a minute."""
        with self.began_at_ms.get_lock():
            self.began_at_ms.value = max(self.began_at_ms.value, now_ms + START_AHEAD_MS)
        try:
            self.barrier.wait(READY_LIMIT_S)
        except BrokenBarrierError as error:
            raise OtherSenderFailed("another sender of this run did not get ready") from error
        return self.began_at_ms.value


def play_share(plan: LoadPlan, number: int, start: StartGate) -> LoadRecord:
    """Send every `processes`-th request of the plan, from the `number`-th on."""
    return run_precisely(_play_share(plan, number, start))


async def _play_share(plan: LoadPlan, number: int, start: StartGate) -> LoadRecord:
    clock = MonotonicClock()
    recorder = Recorder([name for name, _ in asked_of(plan.config)], heads_of(plan.config))
    async with _client_of(plan) as client:
        if isinstance(client, Client):
            infos = {info.model_id: info for info in await client.models()}
        else:
            models = [name for name, _ in asked_of(plan.config)]
            heads = heads_of(plan.config)
            infos = await client.models(name for model in models for name in heads.get(model, (model,)))
        requests = planned_requests(plan, number, infos)
        began_at_ms = start.wait(clock.now_ms())
        await play(client, requests, began_at_ms, clock, recorder.note, plan.gather_ms)
    record = recorder.record()
    record.slos_ms = {name: infos[name].slo_ms for name, _ in asked_of(plan.config) if name in infos}
    return record


def _client_of(plan: LoadPlan) -> Client | GatewayClient | RpcClient:
    if plan.targets[0].startswith(GATEWAY_SCHEMES):
        longest_ms = max(slo_ms for _, slo_ms in asked_of(plan.config))
        return gateway_client(plan.targets[0], plan.token, longest_ms)
    return Client(plan.targets, ClientOptions(key_file=plan.key_file))


def planned_requests(
    plan: LoadPlan, number: int, infos: Mapping[ModelId, ModelInfo]
) -> Iterator[PlannedRequest]:
    """This sender's requests in order: all arrivals merged, and dealt out one by one.

    Arrivals and inputs are made here and now, which takes a second and more for a long run: before it begins.
    """
    asked = asked_of(plan.config)
    heads = heads_of(plan.config)
    names = [heads.get(name, (name,)) for name, _ in asked]
    inputs = [inputs_for(infos.get(several[0]), plan.payload_bytes) for several in names]
    in_turn = [itertools.cycle(several) for several in names]
    own = [part[number :: plan.processes].copy() for part in merged(plan.workload, plan.until_ms)]

    def request(place: int, at_ms: float, priority: int) -> PlannedRequest:
        given = None if priority == NO_PRIORITY else priority
        return PlannedRequest(at_ms, next(in_turn[place]), inputs[place], asked[place][1], given)

    return itertools.starmap(request, zip(*(part.tolist() for part in own), strict=True))


def asked_of(config: ClusterConfig) -> list[tuple[ModelId, float]]:
    """Everything that requests are sent to, with its SLO: models, then applications."""
    return [
        *((model.model_id, model.slo_ms) for model in config.models),
        *((ModelId(one.name), one.slo_ms) for one in config.applications),
    ]


def heads_of(config: ClusterConfig) -> dict[ModelId, tuple[ModelId, ...]]:
    """Of the models that are asked by their heads' names, in turn."""
    return {model.model_id: model.head_names for model in config.models if model.heads}


def merged(
    workload: Workload, until_ms: float
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int8]]:
    """All arrivals in order: the place of each one's model or application, its moment in ms from the start, and its priority."""
    sources = (*workload.sources, *workload.applications)
    moments = [source.arrivals(workload.seed, until_ms) for source in sources]
    priorities = [
        np.full(own.size, NO_PRIORITY, np.int8) if recorded is None else recorded
        for own, recorded in zip(moments, (one.priorities(until_ms) for one in sources), strict=True)
    ]
    of_model = np.concatenate([np.full(len(own), place, np.int64) for place, own in enumerate(moments)])
    at_ms = np.concatenate(moments)
    order = np.argsort(at_ms, kind="stable")
    return of_model[order], at_ms[order], np.concatenate(priorities)[order]


def inputs_for(info: ModelInfo | None, payload_bytes: int) -> dict[str, Tensor]:
    """Made-up inputs of the right shape: seeded noise, small numbers where a model wants whole ones."""
    if info is None or not info.inputs:
        return {"input": np.zeros(payload_bytes, np.uint8)}
    noise = np.random.default_rng(0)
    made: dict[str, Tensor] = {}
    for spec in info.inputs:
        shape = tuple(FREE_LENGTH if axis < 0 else axis for axis in spec.shape)
        dtype = np.dtype(spec.dtype)
        if dtype.kind == "f":
            made[spec.name] = noise.standard_normal(shape).astype(dtype)
        else:
            made[spec.name] = noise.integers(0, 2, shape).astype(dtype)
    return made


class Recorder:
    """Notes what became of each request, as one row of `COLUMNS`."""

    def __init__(
        self, model_ids: Sequence[ModelId], heads: Mapping[ModelId, Sequence[ModelId]] = MappingProxyType({})
    ) -> None:
        self._places = {model_id: float(place) for place, model_id in enumerate(model_ids)}
        for model_id, names in heads.items():
            self._places |= dict.fromkeys(names, self._places[model_id])
        self._slices: dict[str, float] = {}
        self._errors: Counter[tuple[int, str]] = Counter()
        self._rows = array("d")
        self._stages: dict[str, dict[str, StageTally]] = {}

    def note(self, played: PlayedRequest) -> None:
        """One request's fate."""
        planned, result = played.planned, played.result
        head = (self._places[ModelId(planned.model)], planned.at_ms, played.late_ms)
        if result is None:
            error = played.error
            code = error.code if isinstance(error, RequestError) else "PeerLost"
            self._errors[int(head[0]), code] += 1
            self._rows.extend(head)
            self._rows.extend((math.nan,) * (len(COLUMNS) - len(head)))
            return
        ledger = result.ledger
        if result.stages:
            self._note_stages(planned.model, result.stages)
            self._rows.extend((*head, played.latency_ms, math.nan, math.nan, *_stages_of(ledger)))
            return
        slice_no = self._slices.setdefault(ledger.slice_id, float(len(self._slices)))
        stages = _stages_of(ledger)
        # Who does not tell its batches (a gateway may be anybody's) has none.
        batch_size = float(ledger.batch_size or math.nan)
        self._rows.extend((*head, played.latency_ms, batch_size, slice_no, *stages))

    def record(self) -> LoadRecord:
        """All that was noted so far."""
        rows = np.frombuffer(self._rows, np.float64).reshape(-1, len(COLUMNS))
        return LoadRecord(rows, tuple(self._slices), self._errors, self._stages)

    def _note_stages(self, application: str, lines: Sequence[StageLine]) -> None:
        """A line tells of the request of its stage that was answered last; it stands for all of them."""
        tallies = self._stages.setdefault(application, {})
        for line in lines:
            tally = tallies.setdefault(line.stage, StageTally())
            answered = line.requests - line.lost
            ledger = line.ledger
            waited_ms = ledger.held_ms + ledger.waited_ms + ledger.transfer_ms + ledger.queue_ms
            tally.add(
                StageTally(
                    line.requests, answered, line.lost, 0, answered * waited_ms, answered * ledger.gpu_ms
                )
            )
