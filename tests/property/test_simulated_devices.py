"""Simulated slices run each batch when, for how long and with what a plain reference of shared GPUs says, law by law."""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import profiles
from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.messages import Done, ModelSpec, Part, RunBatch, SeqRun, SliceSpec
from profiles.device_model import DeviceModel
from profiles.igniter.performance_model import IgniterProfile, read_coefficients, read_hardware
from profiles.interference import interference_named
from profiles.model import ModelProfile, TableProfile
from profiles.requirements import (
    Bandwidths,
    BandwidthTable,
    LinearCoefficients,
    Requirements,
    Usage,
)
from roles.simulator.gpu import SimulatedGpu, SimulatedJob, SimulatedSlice
from tests.references import devices
from tests.references.devices import Law, SharedGpus, Table
from tests.references.start_rule import Ended, EventHeard, InputsHeard, PreemptHeard, RunHeard, Started

HISTORIES = 150
SIZES = (1, 4, 8, 16)
FRONTENDS = ("frontend-0", "frontend-1")
SAME_MS = 1e-5

Profiles = Mapping[ModelId, ModelProfile]


def random_tables(rng: random.Random, low: float, high: float, *, rises: bool = False) -> dict[str, Table]:
    """Of three models, a value at each size."""
    drawn = {name: [rng.uniform(low, high) for _ in SIZES] for name in "abc"}
    return {
        name: dict(zip(SIZES, sorted(values) if rises else values, strict=True))
        for name, values in drawn.items()
    }


def no_law(rng: random.Random) -> tuple[str, Profiles, Law]:
    run_ms = random_tables(rng, 1.0, 20.0, rises=True)
    return (
        "none",
        {ModelId(name): TableProfile({100: table}) for name, table in run_ms.items()},
        devices.none(run_ms),
    )


def sm_law(rng: random.Random) -> tuple[str, Profiles, Law]:
    run_ms, sm = random_tables(rng, 1.0, 20.0, rises=True), random_tables(rng, 5.0, 100.0)
    ours = {
        ModelId(name): TableProfile(
            {100: table},
            usage=Usage({size: Requirements(weighted_sm_percent=w) for size, w in sm[name].items()}),
        )
        for name, table in run_ms.items()
    }
    return "sm", ours, devices.by_sm(run_ms, sm)


def bandwidth_law(rng: random.Random) -> tuple[str, Profiles, Law]:
    run_ms = random_tables(rng, 1.0, 20.0, rises=True)
    l2, dram = random_tables(rng, 0.0, 90.0), random_tables(rng, 0.0, 90.0)
    c = [rng.uniform(-0.2, 1.5) for _ in range(4)] + [rng.uniform(0.8, 1.1)]
    linear = LinearCoefficients(c[0], c[1], c[2], c[3], c[4], is_scaled_by_share=True)
    ours = {
        ModelId(name): TableProfile(
            {100: table},
            usage=Usage(
                bandwidths=BandwidthTable(
                    {100: {size: Bandwidths(l2[name][size], dram[name][size]) for size in SIZES}}, linear
                )
            ),
        )
        for name, table in run_ms.items()
    }
    return "gpulet", ours, devices.by_bandwidth(run_ms, l2, dram, c)


def igniter_law(rng: random.Random) -> tuple[str, Profiles, Law]:
    del rng
    path = Path(profiles.__file__).parent / "data" / "igniter_v100.json"
    shipped: Mapping[str, Any] = json.loads(path.read_text())
    named = dict(zip("abc", shipped["workload_coefficients"].values(), strict=False))
    hardware = read_hardware(shipped["hardware"])
    ours = {
        ModelId(name): IgniterProfile(hardware, read_coefficients(entry), "shipped")
        for name, entry in named.items()
    }
    return "igniter", ours, devices.igniter(shipped["hardware"], named)


LAWS: Mapping[str, Callable[[random.Random], tuple[str, Profiles, Law]]] = {
    "none": no_law,
    "sm": sm_law,
    "gpulet": bandwidth_law,
    "igniter": igniter_law,
}


class Stage:
    """Ours: slices on GPUs, a heap, and what they report."""

    def __init__(self, device: DeviceModel, reference: SharedGpus, models: tuple[ModelSpec, ...]) -> None:
        self.log: list[Started | Ended] = []
        self._heap: list[tuple[float, int, Callable[[Any, float], None], Any]] = []
        self._order = count()
        gpus = {number: SimulatedGpu(number, device) for number in set(reference.gpu_of.values())}
        self.slices: dict[str, SimulatedSlice] = {}
        for name, number in reference.gpu_of.items():
            spec = SliceSpec(SliceId(name), number, "emulated", reference.share_percent[name], models)
            self.slices[name] = SimulatedSlice(spec, NodeId("n"), PeerId(name), [gpus[number]], self)
            gpus[number].slices.append(self.slices[name])

    def schedule(self, at_ms: float, callback: Callable[[Any, float], None], argument: object) -> None:
        heapq.heappush(self._heap, (at_ms, next(self._order), callback, argument))

    def ran(self, slice_: SimulatedSlice, job: SimulatedJob) -> None:
        rows = tuple((str(one.frontend_id), seqs_of(one)) for one in job.parts)
        if rows:  # one that was stopped has none left
            self.log.append(Started(job.started_at_ms, job.run.batch_id, rows))

    def preempted_late(self) -> None:
        pass

    def report(self, peer: PeerId, done: Done, now_ms: float) -> None:
        missing = tuple((str(one.frontend_id), seqs_of(one)) for one in done.missing)
        times_ms = (done.transfer_ms, done.queue_ms) if done.status == "ok" else ()
        self.log.append(Ended(now_ms, done.batch_id, done.status, done.ran, missing, *times_ms))

    def play(self) -> list[Started | Ended]:
        while self._heap:
            at_ms, _, callback, argument = heapq.heappop(self._heap)
            callback(argument, at_ms)
        return self.log


def seqs_of(one: Part) -> tuple[int, ...]:
    return tuple(seq for run in one.runs for seq in range(run.first_seq, run.first_seq + run.count))


def random_history(
    rng: random.Random, slices: list[str], models: str
) -> tuple[list[EventHeard], dict[int, str]]:
    """Batches of one or two parts, up to a few ahead of the device; some inputs late, some batches stopped."""
    heard: list[EventHeard] = []
    model_of = {}
    span_ms = rng.choice((40.0, 200.0, 600.0))
    for number in range(rng.randint(1, 30)):
        at_ms, slice_id = rng.uniform(0, span_ms), rng.choice(slices)
        start_at_ms = at_ms + rng.choice((0.0, rng.uniform(0, 10)))
        latest_at_ms = start_at_ms + rng.choice((0.0, rng.uniform(0, 20)))
        expires_at_ms = latest_at_ms + rng.choice((0.0, rng.uniform(0, 40)))
        parts = tuple((name, tuple(range(rng.randint(1, 8)))) for name in FRONTENDS[: rng.randint(1, 2)])
        model_of[number] = rng.choice(models)
        heard.append(
            RunHeard(
                at_ms, number, slice_id, start_at_ms, latest_at_ms, expires_at_ms, parts, 0.0, fails=False
            )
        )
        for place, (name, seqs) in enumerate(parts):
            in_at_ms = at_ms + rng.uniform(0, 3) + (rng.uniform(0, 40) if rng.random() < 0.2 else 0.0)
            heard.append(InputsHeard(in_at_ms, number, slice_id, place, name, seqs, 1))
        if rng.random() < 0.15:
            heard.append(PreemptHeard(at_ms + rng.uniform(0, 30), number, slice_id))
    return heard, model_of


def job_of(run: RunHeard, heard: list[EventHeard], model: str) -> SimulatedJob:
    """The same batch, as the world hands it to a slice."""
    parts = tuple(Part(FrontendId(name), (SeqRun(0, len(seqs)),)) for name, seqs in run.parts)
    message = RunBatch(
        BatchId(run.number),
        SliceId(run.slice_id),
        Incarnation("00000000"),
        ModelId(model),
        parts,
        0.0,
        0.0,
        0.0,
    )
    in_at_ms = [one.at_ms for one in heard if isinstance(one, InputsHeard) and one.number == run.number]
    size = sum(len(seqs) for _, seqs in run.parts)
    moments = (run.start_at_ms, run.latest_at_ms, run.expires_at_ms)
    return SimulatedJob(message, size, run.at_ms, run.at_ms, *moments, in_at_ms, max(in_at_ms))


def in_order(log: list[Started | Ended]) -> list[tuple[Any, ...]]:
    """Comparable: of each batch in turn; a start counts where the batch was not stopped."""
    stopped = {one.number for one in log if isinstance(one, Ended) and one.status == "preempted"}
    entries: list[tuple[Any, ...]] = []
    for one in log:
        if isinstance(one, Ended):
            times_ms = (one.at_ms, one.transfer_ms, one.queue_ms)
            entries.append((one.number, 1, (one.status, one.ran, one.missing), times_ms))
        elif one.number not in stopped:
            entries.append((one.number, 0, one.rows, (one.at_ms,)))
    return sorted(entries, key=lambda entry: entry[:2])


@pytest.mark.parametrize("name", LAWS)
def test_batches_run_when_and_as_long_as_on_plain_shared_gpus(name: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(HISTORIES):
        rng = random.Random(f"{name}/{seed}")
        law_name, ours, law = LAWS[name](rng)
        device = DeviceModel(ours, interference_named(law_name, ours, "any"))
        shares = rng.choice(([100.0], [50.0, 50.0], [20.0, 30.0, 50.0], [25.0] * 4))
        slices = {f"g{gpu}/{place}": (gpu, share) for gpu in range(2) for place, share in enumerate(shares)}
        heard, model_of = random_history(rng, list(slices), "".join(sorted(ours)))
        reference = SharedGpus(
            gpu_of={key: gpu for key, (gpu, _) in slices.items()},
            share_percent={key: share for key, (_, share) in slices.items()},
            model_of=model_of,
            law=law,
        )
        specs = tuple(ModelSpec(model, 100.0, 16, None, ()) for model in ours)
        stage = Stage(device, reference, specs)
        for event in sorted(heard, key=lambda one: one.at_ms):
            if isinstance(event, RunHeard):
                job = job_of(event, heard, model_of[event.number])
                stage.schedule(event.at_ms, stage.slices[event.slice_id].take, job)
            elif isinstance(event, PreemptHeard):
                stage.schedule(event.at_ms, stage.slices[event.slice_id].preempt, BatchId(event.number))
        reference.play(heard)
        theirs, mine = in_order(reference.log), in_order(stage.play())
        for one, other in zip(theirs, mine, strict=False):
            is_same = one[:3] == other[:3] and one[3] == pytest.approx(other[3], abs=SAME_MS)
            assert is_same, f"history {seed}: reference {one}, ours {other}"
        assert len(theirs) == len(mine), f"history {seed}"
        seen.update(one.status for one in reference.log if isinstance(one, Ended))
        seen["in part"] += sum(
            isinstance(one, Ended) and one.ran > 0 and bool(one.missing) for one in reference.log
        )
    assert all(seen[what] >= 20 for what in ("ok", "expired", "preempted", "in part")), seen


def test_a_device_that_was_freed_early_takes_a_batch_at_its_last_moment() -> None:
    """The timer that was to give it back while the device was busy must not win over its start."""
    _, ours, law = no_law(random.Random(0))
    reference = SharedGpus(
        gpu_of={"g0/0": 0}, share_percent={"g0/0": 100.0}, model_of={0: "a", 1: "a"}, law=law
    )
    stage = Stage(
        DeviceModel(ours), reference, tuple(ModelSpec(model, 100.0, 16, None, ()) for model in ours)
    )
    slice_, parts = stage.slices["g0/0"], tuple((name, (0, 1)) for name in FRONTENDS)
    first = RunHeard(0.0, 0, "g0/0", 0.0, 0.0, 1.0, parts, 0.0, fails=False)
    second = RunHeard(0.1, 1, "g0/0", 0.2, 0.9, 0.9, parts, 0.0, fails=False)
    heard: list[EventHeard] = [
        InputsHeard(0.0, 0, "g0/0", place, FRONTENDS[place], (0, 1), 1) for place in (0, 1)
    ]
    heard += [
        InputsHeard(at_ms, 1, "g0/0", place, FRONTENDS[place], (0, 1), 1)
        for place, at_ms in enumerate((0.2, 5.0))
    ]
    stage.schedule(0.0, slice_.take, job_of(first, heard, "a"))
    stage.schedule(0.1, slice_.take, job_of(second, heard, "a"))
    stage.schedule(0.5, slice_.preempt, BatchId(0))
    log = stage.play()
    assert [(one.at_ms, one.rows) for one in log if isinstance(one, Started)] == [
        (0.9, (("frontend-0", (0, 1)),))
    ]
