"""Whatever happens to the requests of an application, in whatever order: each gets exactly one answer, and nothing is left behind."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.ids import BatchId, ModelId
from fabric.messages import BatchFailed, CancelRequest, Dropped, Returned, SeqRun
from policies.graphs.graph import Stage
from roles.frontend.events import ClientSaid, InputsNotMade, SchedulerSaid, WorkerSaid
from roles.runtime.core import Tick
from tests.applications_stage import ApplicationStage, served
from tests.builders import CLIENT, SLICE, computed, directory, grant, model_info, slice_info

REQUESTS = 5


def random_stages(rng: random.Random) -> list[Stage]:
    stages: list[Stage] = []
    for place in range(rng.randint(1, 6)):
        before = [stage.name for stage in stages]
        after = rng.sample(before, min(len(before), rng.choice((0, 1, 1, 2, 3))))
        stages.append(
            Stage(
                f"s{place}",
                ModelId(f"m{rng.randint(0, 2)}"),
                tuple(after),
                is_optional=rng.random() < 0.25,
                is_answer=rng.random() < 0.25,
            )
        )
    return stages


@given(st.integers(0, 1 << 32))
def test_each_request_has_one_answer_and_its_path_takes_all_of_its_time(seed: int) -> None:
    rng = random.Random(seed)
    stages = random_stages(rng)
    stage = ApplicationStage(served(*stages, slo_ms=rng.choice((60.0, 1_000.0))))
    now_ms, asked, batch = 0.0, 0, 0
    granted: list[tuple[ModelId, int, int]] = []
    boot = "a0a0a0a0"
    while asked < REQUESTS or stage.jobs or stage.announced or granted:
        now_ms += rng.choice((0.0, 0.0, 1.0, 3.0))
        what = rng.random()
        if what < 0.15 and asked < REQUESTS:
            asked += 1
            stage.ask(asked, now_ms)
        elif what < 0.45 and stage.jobs:
            job = rng.choice(stage.jobs)
            if rng.random() < 0.05:
                stage.jobs.remove(job)
                stage.do(InputsNotMade(job.job, "Internal", "no"), now_ms)
            else:
                stage.make(job, rng.choice((0, 1, 1, 2, 3)), now_ms)
        elif what < 0.7 and stage.announced:
            model_id, seq = stage.take()
            runs = (SeqRun(seq, 1),)
            if rng.random() < 0.05:
                stage.do(SchedulerSaid(Dropped(model_id, runs, "Overloaded", "no")), now_ms)
            else:
                batch += 1
                granted.append((model_id, seq, batch))
                stage.do(grant((seq, 1), batch_id=batch, model_id=model_id, incarnation=boot), now_ms)
        elif what < 0.95 and granted:
            model_id, seq, of_batch = granted.pop(rng.randrange(len(granted)))
            end = rng.random()
            if end < 0.9:
                stage.do(computed(seq, batch_id=of_batch, model_id=model_id), now_ms)
            elif end < 0.95:
                returned = Returned(BatchId(of_batch), model_id, (SeqRun(seq, 1),), "late")
                stage.do(SchedulerSaid(returned), now_ms)
            else:
                failed = BatchFailed(BatchId(of_batch), SLICE, model_id, (seq,), "Internal", "raised")
                stage.do(WorkerSaid(failed), now_ms)
        elif what < 0.97:
            stage.do(ClientSaid(CLIENT, CancelRequest(rng.randint(1, REQUESTS))), now_ms)
        elif what < 0.975:
            boot = f"b{rng.randrange(16**7):07x}"
            stage.do(
                directory([model_info(str(one)) for one in stage.models], [slice_info(incarnation=boot)]),
                now_ms,
            )
        stage.do(Tick(), now_ms)
    stage.do(Tick(), now_ms + 10_000.0)
    for job in list(stage.jobs):
        stage.make(job, 1, now_ms + 10_000.0)
    assert dict(stage.finals) == dict.fromkeys(range(1, REQUESTS + 1), 1)
    for answer in stage.answers.values():
        on_path = [line.ledger.total_ms for line in answer.stages if line.is_on_path]
        assert sum(on_path) == pytest.approx(answer.ledger.total_ms)
        assert [line.stage for line in answer.stages] == [one.name for one in _in_order(stage)]
    counters = stage.core.counters
    assert counters["pending"] == counters["tasks_pending"] == counters["pending_bytes"] == 0
    assert counters["accepted"] == counters.get("answers", 0) + counters.get("refusals", 0)
    assert not any(stage.kept.values()), "every payload is given back once"


def _in_order(stage: ApplicationStage) -> tuple[Stage, ...]:
    return stage.application.plan.graph.stages
