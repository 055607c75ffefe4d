"""What a frontend counts of its requests, through its core."""

from __future__ import annotations

import pytest

from fabric.messages import CancelRequest, Dropped, SeqRun
from roles.frontend.core import FrontendCore
from roles.frontend.events import ClientSaid, SchedulerSaid, TurnEnded
from roles.frontend.recorder import MODELS_MAX, RequestRecorder
from roles.runtime.core import Lost, Tick
from roles.runtime.metrics import catalog
from roles.runtime.metrics.catalog import Metric
from roles.runtime.metrics.snapshot import Buckets
from tests.builders import CLIENT, DIGITS, asked, computed, directory, frontend_settings, grant, model_info


def linked(slo_ms: float = 100.0) -> FrontendCore:
    core = FrontendCore(frontend_settings())
    core.handle(Tick(), 0.0)
    core.handle(directory((model_info(slo_ms=slo_ms),)), 0.0)
    return core


def counted(core: FrontendCore, metric: Metric) -> dict[tuple[str, ...], float | Buckets]:
    return {one.labels: one.value for one in core.recorder.measured(core.margins_ms) if one.metric is metric}


def outcomes(core: FrontendCore) -> dict[str, float]:
    found = counted(core, catalog.REQUESTS)
    return {
        outcome: value for (_, outcome), value in found.items() if not isinstance(value, Buckets) and value
    }


def buckets(core: FrontendCore, metric: Metric) -> Buckets:
    found = counted(core, metric)[DIGITS,]
    assert isinstance(found, Buckets)
    return found


def test_each_request_has_one_outcome() -> None:
    core = linked()
    for number in range(1, 7):
        core.handle(asked(number), 0.0)
    core.handle(asked(7, model_id="nothing"), 0.0)
    core.handle(asked(8, budget_ms=10.0, late_ms=20.0), 0.0)
    core.handle(TurnEnded(), 0.0)
    core.handle(ClientSaid(CLIENT, CancelRequest(6)), 1.0)
    core.handle(grant((0, 2)), 5.0)
    core.handle(computed(0, 1), 20.0)
    core.handle(SchedulerSaid(Dropped(DIGITS, (SeqRun(2, 1),), "Overloaded", "given up")), 21.0)
    core.handle(Tick(), 100.0)
    assert outcomes(core) == {"good": 2, "Overloaded": 1, "Cancelled": 1, "DeadlineExceeded": 3}
    counters = core.counters
    assert (
        sum(outcomes(core).values()) == counters["accepted"] + counters["refused_at_door"] - 1
    )  # of no model


def test_whose_client_leaves_is_abandoned() -> None:
    core = linked()
    core.handle(asked(1), 0.0)
    core.handle(Lost(CLIENT, "closed"), 1.0)
    assert outcomes(core) == {"abandoned": 1}


def test_an_answer_after_the_moment_that_its_client_needs_is_late() -> None:
    core = linked()
    core.handle(asked(1, way_ms=10.0), 0.0)
    core.handle(asked(2), 0.0)
    core.handle(TurnEnded(), 0.0)
    core.handle(grant((0, 2)), 5.0)
    core.handle(computed(0, 1), 95.0)
    assert outcomes(core) == {"good": 1, "late": 1}


def test_latency_and_the_stages_of_the_ledger_are_counted() -> None:
    core = linked()
    core.handle(asked(1), 0.0)
    core.handle(TurnEnded(), 0.0)
    core.handle(grant((0, 1), waited_ms=4.0), 10.0)
    core.handle(computed(0, transfer_ms=1.0, queue_ms=2.0, gpu_ms=3.0), 20.0)
    latency = buckets(core, catalog.LATENCY)
    assert (sum(latency.counts), latency.total) == (1, 20.0)
    assert latency.counts[list(latency.bounds).index(25.0)] == 1
    assert buckets(core, catalog.HELD).total == pytest.approx(6.0)
    assert buckets(core, catalog.WAITED).total == pytest.approx(4.0)
    stages = {stage: value for (_, stage), value in counted(core, catalog.STAGES).items()}
    assert stages == pytest.approx(
        {
            "preprocess": 0.0,
            "held": 0.006,
            "waited": 0.004,
            "transfer": 0.001,
            "queue": 0.002,
            "gpu": 0.003,
            "return": 0.004,
        }
    )


def test_another_slo_begins_anew_and_the_same_goes_on() -> None:
    core = linked()
    core.handle(asked(1, late_ms=200.0), 0.0)
    core.handle(directory((model_info(slo_ms=100.0),)), 1.0)
    assert outcomes(core) == {"DeadlineExceeded": 1}
    core.handle(directory((model_info(slo_ms=50.0),)), 2.0)
    assert outcomes(core) == {}
    assert buckets(core, catalog.LATENCY).bounds[-1] == 200.0
    core.handle(directory(()), 3.0)
    assert counted(core, catalog.REQUESTS) == {}


def test_there_is_a_limit_to_how_many_models_are_counted() -> None:
    recorder = RequestRecorder()
    recorder.know([model_info(f"m{number}") for number in range(MODELS_MAX + 5)])
    recorder.turned_away(model_info(f"m{MODELS_MAX + 1}").model_id, "Overloaded")
    shown = {one.labels[0] for one in recorder.measured({})}
    assert len(shown) == MODELS_MAX
