"""What measured times teach: drift is followed, noise is not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from fabric.ids import FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.limits import SMALLEST_MS, check
from fabric.messages import (
    Arrivals,
    Done,
    FrontendHello,
    ModelSpec,
    RehearsalReplica,
    ReplicaInfo,
    RunBatch,
    SliceReady,
    SliceSpec,
)
from policies.batching.disciplines.tenuto import Tenuto
from policies.batching.matchmaking.model_state import ModelState
from policies.batching.matchmaking.speed_classes import SpeedClasses
from roles.runtime.core import Heard, Tick
from roles.scheduler.core import SchedulerCore
from roles.scheduler.dispatch.corrections import FACTOR_MAX, FACTOR_MIN, SpeedCorrection, WayCorrection
from roles.scheduler.dispatch.estimates import Estimates
from roles.scheduler.dispatch.lateness_guard import GUARD_MS_MAX, LatenessGuard
from roles.scheduler.fleet import Hosting, SliceRecord
from roles.scheduler.settings import SchedulerSettings


def test_a_slice_that_keeps_to_its_table_is_not_corrected() -> None:
    speed = SpeedCorrection()
    assert not any(speed.observe(10.0, 10.0) for _ in range(1_000))
    assert speed.factor == 1.0


def test_a_slice_that_becomes_half_as_fast_is_believed_so() -> None:
    speed = SpeedCorrection()
    for _ in range(200):
        speed.observe(20.0, 10.0)
    assert speed.factor == pytest.approx(2.0, rel=0.06)


def test_a_slice_that_is_a_little_slower_is_never_believed_faster_than_it_is() -> None:
    # What a held batch is underestimated by, it is late by: 3 % is inside a speed class and counts all the same.
    speed = SpeedCorrection()
    changes = sum(speed.observe(10.3, 10.0) for _ in range(1_000))
    assert 1.03 - 1e-6 <= speed.factor <= 1.05
    assert changes <= 5, "the approach to the mean is not published bit by bit"


def test_a_slice_that_is_fast_again_is_believed_so_once_it_matters() -> None:
    speed = SpeedCorrection()
    for _ in range(500):
        speed.observe(13.0, 10.0)
    assert 1.3 - 1e-6 <= speed.factor <= 1.3 / 0.95
    for _ in range(500):
        speed.observe(10.0, 10.0)
    assert 1.0 <= speed.factor <= 1.06


@pytest.mark.parametrize(("measured_ms", "table_ms"), [(0.0, 5.0), (1e9, 1e-300), (1e-300, 1e9), (1e9, 5.0)])
def test_whatever_is_said_to_have_been_measured_a_run_time_stays_one(
    measured_ms: float, table_ms: float
) -> None:
    speed = SpeedCorrection()
    for _ in range(20_000):
        speed.observe(measured_ms, table_ms)
    assert FACTOR_MIN / 2 <= speed.factor <= FACTOR_MAX * 2


@pytest.mark.parametrize("times", [1e-3, 0.5, 2.0, 1e6])
def test_corrected_run_times_can_be_said_in_a_message(times: float) -> None:
    """They are, in every rehearsal."""
    replica = ReplicaInfo(ModelId("m"), 3, (SMALLEST_MS, 1.0, 1e9), interval_ms=(SMALLEST_MS, 0.5, 1e9))
    record = SliceRecord(SliceSpec(SliceId("s"), 0, "emulated", None, ()), NodeId("n"), 0)
    record.hosting = Hosting((replica,))
    record.speeds[replica.model_id] = SpeedCorrection()
    record.speeds[replica.model_id].factor = times
    known = Estimates(SchedulerSettings((ModelSpec(replica.model_id, 50.0, 3),), ()))
    (hosted,) = known.slice_(record, 0.0).hosted
    check(RehearsalReplica(hosted.model_id, tuple(hosted.exec_ms), tuple(hosted.interval_ms)))
    assert list(hosted.exec_ms) == sorted(hosted.exec_ms)
    assert hosted.exec_ms[1] == times
    assert min(hosted.interval_ms) > 0.0, "it is divided by"


def test_a_configured_way_that_is_true_changes_nothing() -> None:
    way = WayCorrection(0.05)
    rng = random.Random(1)
    for _ in range(500):
        size = rng.randint(1, 32)
        assert not way.observe(0.05 * size, size)
    assert (way.fixed_ms, way.ms_per_item) == (0.0, 0.05)


def test_a_fixed_delay_and_a_slope_are_told_apart() -> None:
    way = WayCorrection(0.0)
    rng = random.Random(2)
    for _ in range(500):
        size = rng.randint(1, 32)
        way.observe(1.0 + 0.1 * size, size)
    for size in (1, 16, 32):
        believed_ms = way.fixed_ms + way.ms_per_item * size
        assert believed_ms == pytest.approx(1.0 + 0.1 * size, rel=0.4)


def test_scattered_ways_are_covered_nearly_always() -> None:
    way = WayCorrection(0.0)
    rng = random.Random(3)
    late = 0
    for number in range(2_000):
        size = rng.randint(1, 16)
        took_ms = 0.3 + rng.expovariate(2.0)
        late += number > 100 and took_ms > way.fixed_ms + way.ms_per_item * size
        way.observe(took_ms, size)
    assert late < 0.1 * 2_000


def test_inputs_that_never_come_in_time_are_soon_sent_for_earlier() -> None:
    way = WayCorrection(0.0, 5.0)
    tries = 0
    while (believed_ms := way.fixed_ms + way.ms_per_item * 8) < 25.0:
        way.observe_late(believed_ms + 0.5, 8)  # as long as a batch could wait for them
        tries += 1
    assert tries <= 20


def test_a_single_stall_changes_nothing() -> None:
    way = WayCorrection(0.0, 5.0)
    for _ in range(50):
        way.observe(2.0, 8)
    before_ms = way.fixed_ms + 8 * way.ms_per_item
    for _ in range(20):
        assert not way.observe_late(30.0, 8)
        assert not way.observe_late(30.0, 8)
        way.observe(2.0, 8)
    assert way.fixed_ms + 8 * way.ms_per_item <= before_ms


def test_a_slope_learned_from_a_stall_is_not_kept_by_the_small_batches_it_makes() -> None:
    way = WayCorrection(0.0, 5.0)
    for size in (1, 16) * 20:
        way.observe(3.0 if size == 1 else 150.0, size)
    assert way.ms_per_item > 5.0
    for _ in range(200):
        way.observe(3.0, 1)
    assert way.ms_per_item <= 3.6
    assert way.fixed_ms + way.ms_per_item == pytest.approx(3.0, rel=0.3)


def test_a_late_tick_raises_the_guard_at_once_and_is_forgotten_slowly() -> None:
    guard = LatenessGuard()
    assert not guard.observe(0.0)
    assert guard.observe(0.8)
    assert guard.guard_ms == 0.8
    for _ in range(5):
        guard.observe(0.1)
    assert 0.5 < guard.guard_ms <= 0.8
    for _ in range(200):
        guard.observe(0.0)
    assert guard.guard_ms < 0.1


def test_the_guard_covers_most_ticks_and_not_the_worst_one() -> None:
    guard, draw = LatenessGuard(), random.Random(3)
    late = 0
    for _ in range(20_000):
        late_ms = draw.expovariate(2.0)
        late += late_ms > guard.guard_ms
        guard.observe(late_ms)
    assert 0.005 < late / 20_000 < 0.03


def test_a_stall_that_no_guard_would_cover_does_not_raise_it() -> None:
    guard = LatenessGuard()
    assert not guard.observe(60.0)
    assert guard.guard_ms == 0.0
    for _ in range(100):
        guard.observe(3.0)
    assert guard.guard_ms <= GUARD_MS_MAX


@pytest.mark.parametrize("slices", [1, 2])
def test_the_correction_of_one_model_leaves_the_others_of_its_slice_alone(
    slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`slices`: two are alike until one is corrected."""
    exec_ms = tuple(1.0 * size + 5.0 for size in range(1, 9))
    models = [ModelId(f"m{number:02}") for number in range(50)]
    specs = tuple(ModelSpec(model_id, 50.0, 8, None, exec_ms) for model_id in models)
    node_id, worker, frontend = NodeId("n"), PeerId("worker-n-0/0"), PeerId("frontend-0/0")
    given = [SliceSpec(SliceId(f"n/gpu{gpu}/0"), gpu, "emulated", None, specs) for gpu in range(slices)]
    discipline = Tenuto()
    core = SchedulerCore(SchedulerSettings(specs, tuple((node_id, spec) for spec in given)), discipline)
    counts = Counter[str]()
    for owner, name in ((SpeedClasses, "classify"), (ModelState, "set_pools")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name), counts, name))
    core.handle(Heard(frontend, FrontendHello(FrontendId("frontend-0"), Incarnation("0"), ())), 0.0)
    replicas = tuple(ReplicaInfo(model_id, 8, exec_ms) for model_id in models)
    for spec in given:
        ready = SliceReady(spec.slice_id, Incarnation("0"), node_id, spec.gpu, (), replicas)
        core.handle(Heard(worker, ready), 0.0)
    for number, times in enumerate((1.5, 1.5, 3.0)):
        now_ms = 100.0 * (number + 1)
        core.handle(Tick(), now_ms)
        sent = core.handle(Heard(frontend, Arrivals(models[7], 8 * number, 8, 50.0)), now_ms)
        (batch,) = [send.message for send in sent if isinstance(send.message, RunBatch)]
        before = discipline._slices_given[batch.slice_id].hosted
        counts.clear()
        run_ms = times * exec_ms[-1]
        done = Done(batch.batch_id, batch.slice_id, models[7], "ok", 8, (), 0.0, 0.0, run_ms)
        core.handle(Heard(worker, done), now_ms + run_ms)
        after = discipline._slices_given[batch.slice_id].hosted
        told = [one.model_id for one, former in zip(after, before, strict=True) if one is not former]
        assert told == [models[7]]
        assert counts == {"classify": 1, "set_pools": 1}


def counted(call: Callable[..., Any], counts: Counter[str], name: str) -> Callable[..., Any]:
    def counting(*args: Any) -> Any:
        counts[name] += 1
        return call(*args)

    return counting


@pytest.mark.parametrize("stall_ms", [5.0, 300.0, 60_000.0])
def test_one_long_way_is_a_stall_and_what_lasts_is_learned(stall_ms: float) -> None:
    """The first batch of a worker that has just begun; then the same of a way that has become so long."""
    way = WayCorrection(0.0, 0.3)
    way.observe(stall_ms, 1)
    assert way.fixed_ms + way.ms_per_item < 3.0
    for _ in range(200):
        way.observe(0.3, 1)
    assert way.fixed_ms + way.ms_per_item < 0.4
    for _ in range(200):
        way.observe(stall_ms, 1)
    assert way.fixed_ms + way.ms_per_item > 0.99 * stall_ms


def test_what_a_way_takes_is_known_once_the_guess_counts_for_nothing() -> None:
    way = WayCorrection(0.0, fixed_ms=5.0)
    for _ in range(63):
        way.observe(1.0, 1)
    assert way.known_ms == 0.0
    way.observe(1.0, 1)
    assert way.known_ms == pytest.approx(1.0, abs=0.2)
    for _ in range(20):  # stalls, each the same as one that has an answer in time
        way.observe(9.0, 1)
        way.observe(1.0, 1)
    assert way.known_ms < 2.0
