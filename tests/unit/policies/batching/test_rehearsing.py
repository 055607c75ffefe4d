"""A discipline that rehearses: what is asked, what is answered, and when another variant is used."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from msgspec import structs

from fabric.ids import FrontendId, ModelId, SliceId
from policies.batching.base import (
    NEVER_MS,
    BatchDecision,
    BatchModel,
    BatchSlice,
    Discipline,
    Drop,
    HostedModel,
    RequestRun,
)
from policies.batching.disciplines.tenuto import Tenuto
from policies.batching.per_subcluster import PerSubcluster
from policies.batching.registry import make_discipline
from policies.batching.rehearsing.evidence import Evidence
from policies.batching.rehearsing.question import (
    BLOCK_MS,
    PLANNED,
    VARIANTS,
    Arrival,
    Question,
    Rehearsed,
    RehearsedModel,
    Rehearses,
)
from policies.batching.rehearsing.rehearsals import BEGIN_LOST, RUNS_MAX, Rehearsals
from policies.batching.rehearsing.replay import rehearse
from roles.lab import scheduler_only
from roles.lab.scheduler_only import Case, Model
from roles.workload.outcomes import Window

SLO_MS = 30.0
HOSTED = tuple(HostedModel(ModelId(name), tuple(1.0 * size + 6.0 for size in range(1, 33))) for name in "ab")
SIMPLE = next(number for number, one in enumerate(VARIANTS) if one.name == "eager simple")


def arrivals(count: int, per_ms: float) -> tuple[Arrival, ...]:
    draw = random.Random(3)
    at_ms, found = 0.0, []
    for _ in range(count):
        at_ms += draw.expovariate(per_ms)
        found.append(Arrival(at_ms, draw.randrange(2), 1, SLO_MS, 0.0))
    return tuple(found)


def question(runs: tuple[Arrival, ...], variants: tuple[int, ...]) -> Question:
    models = tuple(RehearsedModel(BatchModel(one.model_id, SLO_MS), 300.0, 0.01, 0.0, 0.0) for one in HOSTED)
    slices = tuple(BatchSlice(SliceId(f"s{order}"), order, HOSTED) for order in range(2))
    return Question(1, models, slices, 0.01, runs, variants, 0.0, int(runs[-1].at_ms / BLOCK_MS) + 1)


def lost_by(discipline: Discipline, asked: Question) -> list[int]:
    """The same arrivals at a discipline as users have it."""
    for one in asked.models:
        discipline.add_model(one.model, 0.0)
    for slice_ in asked.slices:
        discipline.add_slice(slice_, 0.0)
    lost = [0] * asked.blocks

    def hear(decisions: Sequence[BatchDecision]) -> None:
        for one in decisions:
            if isinstance(one, Drop):
                for run in one.runs:
                    lost[int(run.arrived_at_ms / BLOCK_MS)] += run.count

    def until(at_ms: float) -> None:
        while (wake_at_ms := discipline.wake_at_ms) is not None and wake_at_ms < at_ms:
            hear(discipline.tick(wake_at_ms))

    for came in asked.arrivals:
        until(came.at_ms)
        run = RequestRun(FrontendId("f"), 0, 1, came.at_ms + came.budget_ms, came.at_ms)
        hear(discipline.arrive(asked.models[came.model].model.model_id, run, came.at_ms))
    until(NEVER_MS)
    return lost


def test_a_rehearsal_loses_what_the_discipline_itself_would_have_lost() -> None:
    asked = question(arrivals(1_500, 1.0), (SIMPLE,))
    ((*rehearsed,),) = rehearse(asked).lost
    assert sum(rehearsed) > 50
    assert rehearsed == lost_by(make_discipline("eager", {"drop": "simple"}), asked)


def test_the_same_question_has_the_same_answer() -> None:
    asked = question(arrivals(800, 1.1), tuple(range(len(VARIANTS))))
    first = rehearse(asked)
    assert first == rehearse(asked)
    assert len(set(first.lost)) > 1, "the variants differ"


def test_a_question_says_what_the_arrivals_do_not_show() -> None:
    """They are what was taken on; that more was asked changes what is planned (`plan_holds`)."""
    discipline = Tenuto(is_lowest_id=False)
    for one in HOSTED:
        discipline.add_model(BatchModel(one.model_id, SLO_MS), 0.0)
    discipline.add_slice(BatchSlice(SliceId("s"), 0, HOSTED), 0.0)
    draw, asked = random.Random(1), []
    at_ms = 0.0
    while at_ms < 4_000.0:
        at_ms += draw.expovariate(4.0)
        while (wake_at_ms := discipline.wake_at_ms) is not None and wake_at_ms < at_ms:
            discipline.tick(wake_at_ms)
            if (new := discipline.rehearsal(wake_at_ms)) is not None:
                asked.append(new)
        run = RequestRun(FrontendId("f"), 0, 1, at_ms + SLO_MS, at_ms)
        discipline.arrive(ModelId(draw.choice("ab")), run, at_ms)
    assert asked
    assert not asked[0].is_lowest_id
    assert all(one.is_over_share for one in asked[0].models)


def test_a_rehearsal_plays_requests_as_they_came_to_the_queue_when_they_were_ready() -> None:
    discipline = Tenuto()
    for one in HOSTED:
        discipline.add_model(BatchModel(one.model_id, SLO_MS), 0.0)
    discipline.add_slice(BatchSlice(SliceId("s"), 0, HOSTED), 0.0)
    draw = random.Random(1)
    asked: list[Question] = []
    at_ms = 0.0
    while at_ms < 3_000.0 or not asked:
        at_ms += draw.expovariate(2.0)
        while (wake_at_ms := discipline.wake_at_ms) is not None and wake_at_ms < at_ms:
            discipline.tick(wake_at_ms)
            if (new := discipline.rehearsal(wake_at_ms)) is not None:
                asked.append(new)
        prepare_ms = draw.choice((0.0, 1.0, SLO_MS / 4))
        run = RequestRun(FrontendId("f"), 0, 1, at_ms + SLO_MS, at_ms, ready_at_ms=at_ms + prepare_ms)
        discipline.arrive(ModelId(draw.choice("ab")), run, at_ms)
    played = asked[0].arrivals
    assert {round(one.budget_ms, 6) for one in played} == {SLO_MS, SLO_MS - 1.0, SLO_MS * 3 / 4}
    assert [one.at_ms for one in played] == sorted(one.at_ms for one in played)


def test_holds_are_planned_in_a_rehearsal_as_where_requests_are_refused() -> None:
    def planned_ms(*, is_over_share: bool) -> float | None:
        """The hold of `a`, which loses far more than `b`."""
        discipline = Tenuto(variant=PLANNED)
        asked = question(arrivals(2, 1.0), (0,))
        models = tuple(
            structs.replace(one, lost_share=share, is_over_share=is_over_share)
            for one, share in zip(asked.models, (0.05, 0.0), strict=True)
        )
        for one in models:
            discipline.add_model(one.model, 0.0)
        for slice_ in asked.slices:
            discipline.add_slice(slice_, 0.0)
        discipline.begin_as(structs.replace(asked, models=models))
        plan = discipline._models[HOSTED[0].model_id].plan
        return plan and plan.timeout_ms

    assert planned_ms(is_over_share=False) == 0.0
    assert (planned_ms(is_over_share=True) or 0.0) > 1.0


def evidence_of(one: Sequence[int], other: Sequence[int]) -> Evidence:
    found = Evidence(2)
    found.add((0, 1), (one, other))
    return found


def test_a_difference_that_one_burst_makes_concludes_nothing() -> None:
    """By hand: 16 blocks, one with 100 lost more: mean 6.25, deviation 24.2, so t = 6.25 / (24.2 / 4) = 1.03."""
    calm = [0] * 16
    assert evidence_of([0] * 15 + [100], calm).better_than(0, (0, 1)) == 0


def test_a_lasting_difference_does() -> None:
    """By hand: half the blocks with 2 and half with 0 lost more: mean 1, deviation 1, so t = 1 / (1 / 4) = 4."""
    found = evidence_of([2, 0] * 8, [0] * 16)
    assert found.better_than(0, (0, 1)) == 1
    assert found.better_than(1, (0, 1)) == 1
    assert found.is_hopeless(0, 1) is False, "4 standard errors are no more than 4"
    assert evidence_of([4, 2] * 8, [0] * 16).is_hopeless(0, 1)


def test_a_few_blocks_conclude_nothing() -> None:
    assert evidence_of([9] * 7, [0] * 7).better_than(0, (0, 1)) == 0


def asking(requests: int, gap_ms: float = 1.0) -> tuple[Rehearsals, Question | None, float]:
    """After so many requests while a percent is lost."""
    found = Rehearsals()
    found.follow(0.01, 0.0)
    at_ms = 0.0
    for _ in range(requests):
        at_ms += gap_ms
        found.note(ModelId("a"), RequestRun(FrontendId("f"), 0, 1, at_ms + SLO_MS, at_ms), at_ms)
    asked = question(arrivals(2, 1.0), (0,))
    return found, found.question(asked.models, lambda: asked.slices, 0.01, at_ms), at_ms


def test_while_nothing_is_lost_nothing_is_recorded_or_asked() -> None:
    found = Rehearsals()
    for second in range(100):
        found.follow(0.9 * BEGIN_LOST, 1000.0 * second)
    assert not found.is_recording
    assert found.due_at_ms == NEVER_MS


def test_what_is_rehearsed_is_bounded() -> None:
    _, asked, _ = asking(50_000, gap_ms=0.02)
    assert asked is None or len(asked.arrivals) <= RUNS_MAX
    _, asked, _ = asking(3_000)
    assert asked is not None
    assert len(asked.arrivals) == 2_501, "the last 2.5 s"


def test_one_question_at_a_time_and_none_is_answered_twice() -> None:
    found, asked, at_ms = asking(3_000)
    assert asked is not None
    assert found.due_at_ms == NEVER_MS
    blocks = [0] * asked.blocks
    worse = [2, 3] * (asked.blocks // 2) + [2] * (asked.blocks % 2)
    answer = Rehearsed(
        asked.number, tuple(tuple(blocks if one == SIMPLE else worse) for one in asked.variants)
    )
    assert not found.judge(Rehearsed(asked.number + 1, answer.lost), at_ms)
    assert found.judge(answer, at_ms)
    assert found.variant == VARIANTS[SIMPLE]
    assert not found.judge(answer, at_ms)
    assert found.due_at_ms > at_ms
    found.follow(0.0, at_ms)  # nothing is lost any more
    assert found.variant == PLANNED
    assert found.due_at_ms == NEVER_MS


def test_an_answer_that_is_none_changes_nothing() -> None:
    found, asked, at_ms = asking(3_000)
    assert asked is not None
    assert not found.judge(Rehearsed(asked.number), at_ms)
    assert found.variant == PLANNED
    assert found.due_at_ms > at_ms


def play(
    rehearsals: Rehearsals, from_ms: float, until_ms: float, best: int, slo_ms: float = SLO_MS
) -> tuple[list[str], float]:
    """An arrival each 10 ms and losses all the time; of all variants `best` loses nothing in any rehearsal. Those in use, and the end."""
    models = [RehearsedModel(BatchModel(ModelId("a"), slo_ms), 100.0, 0.01, 0.0, 0.0)]
    used, at_ms = [], from_ms
    while at_ms < until_ms:
        rehearsals.follow(2 * BEGIN_LOST, at_ms)
        rehearsals.note(ModelId("a"), RequestRun(FrontendId("f"), 0, 1, at_ms + slo_ms, at_ms), at_ms)
        asked = rehearsals.question(models, lambda: (), 2 * BEGIN_LOST, at_ms)
        if asked is not None:
            lost = tuple(
                tuple(0 if one == best else 2 + block % 2 for block in range(asked.blocks))
                for one in asked.variants
            )
            rehearsals.judge(Rehearsed(asked.number, lost), at_ms)
        used.append(rehearsals.variant.name)
        at_ms += 10.0
    return used, at_ms


def test_what_cannot_be_rehearsed_any_more_is_not_used_for_long() -> None:
    """A model comes whose SLO is longer than what is remembered."""
    rehearsals = Rehearsals()
    used, at_ms = play(rehearsals, 0.0, 20_000.0, best=SIMPLE)
    assert used[-1] == VARIANTS[SIMPLE].name
    used, _ = play(rehearsals, at_ms, at_ms + 20_000.0, best=SIMPLE, slo_ms=20_000.0)
    assert used[0] == VARIANTS[SIMPLE].name
    assert set(used[-800:]) == {PLANNED.name}


def test_what_was_found_long_ago_decides_nothing() -> None:
    rehearsals = Rehearsals()
    used, at_ms = play(rehearsals, 0.0, 60_000.0, best=SIMPLE)
    assert used[-1] == VARIANTS[SIMPLE].name
    rehearsals.follow(0.0, at_ms)
    used, _ = play(rehearsals, at_ms + 86_400e3, at_ms + 86_460e3, best=VARIANTS.index(PLANNED))
    assert set(used) == {PLANNED.name}


def test_it_uses_the_better_variant_and_loses_less() -> None:
    """Fourteen models whose holds `tenuto` plans too short: deferral, or a third of the SLO, loses two thirds of what they do."""
    models = tuple(Model(f"m{number}", 1.271, 13.618, 37.0) for number in range(14))
    case, window = Case("fourteen", models, 20, 0.5), Window(4_000.0, 8_000.0)
    arrived = case.arrivals(2, 5_350.0, window.until_ms)

    def bad_rate(discipline: Discipline) -> float:
        for model in case.models:
            hosted = [
                HostedModel(ModelId(one.name), [one.exec_ms(size) for size in range(1, 21)]) for one in models
            ]
            discipline.add_model(BatchModel(ModelId(model.name), model.slo_ms), 0.0)
        for gpu in range(case.gpus):
            discipline.add_slice(BatchSlice(SliceId(f"gpu-{gpu}"), gpu, tuple(hosted)), 0.0)
        return scheduler_only.play(case, discipline, arrived).bad_rate(window)

    planned, rehearsing = bad_rate(Tenuto(variant=PLANNED)), bad_rate(Tenuto())
    assert planned > 0.004
    assert rehearsing < 0.9 * planned


def test_shards_ask_one_at_a_time() -> None:
    shards = PerSubcluster([Tenuto(), Tenuto()], [["a"], ["b"]])  # type: ignore[list-item]  # names are names
    assert isinstance(shards, Rehearses)
    for name in "ab":
        shards.add_model(BatchModel(ModelId(name), SLO_MS), 0.0)
        shards.add_slice(BatchSlice(SliceId(name), 0, (HostedModel(ModelId(name), HOSTED[0].exec_ms),)), 0.0)
    draw = random.Random(1)
    asked: list[tuple[Question, float]] = []
    at_ms = 0.0
    while at_ms < 6_000.0:
        at_ms += draw.expovariate(2.0)
        while (wake_at_ms := shards.wake_at_ms) is not None and wake_at_ms < at_ms:
            shards.tick(wake_at_ms)
            if shards.rehearsal_at_ms <= wake_at_ms and (new := shards.rehearsal(wake_at_ms)) is not None:
                assert not asked or at_ms > asked[-1][1] + 500.0, "only after the answer"
                asked.append((new, at_ms))
        if asked and shards.rehearsal_at_ms == NEVER_MS and at_ms > asked[-1][1] + 500.0:
            shards.rehearsed(Rehearsed(asked[-1][0].number), at_ms)
        run = RequestRun(FrontendId("f"), 0, 1, at_ms + SLO_MS, at_ms)
        shards.arrive(ModelId(draw.choice("ab")), run, at_ms)
    assert {one.models[0].model.model_id for one, _ in asked} == {"a", "b"}


@pytest.mark.parametrize("option", ["window", "simple"])
def test_with_a_drop_rule_of_the_users_nothing_is_rehearsed(option: str) -> None:
    assert Tenuto(drop=option).rehearsal_at_ms == NEVER_MS


def test_a_model_that_leaves_while_arrivals_are_recorded_is_not_in_the_question() -> None:
    discipline = Tenuto()
    for one in HOSTED:
        discipline.add_model(BatchModel(one.model_id, SLO_MS), 0.0)
    discipline.add_slice(BatchSlice(SliceId("s"), 0, HOSTED), 0.0)
    draw = random.Random(1)
    asked: list[Question] = []
    at_ms, names = 0.0, ["a", "b"]
    while at_ms < 8_000.0:
        at_ms += draw.expovariate(1.0)
        while (wake_at_ms := discipline.wake_at_ms) is not None and wake_at_ms < at_ms:
            discipline.tick(wake_at_ms)
            if (new := discipline.rehearsal(wake_at_ms)) is not None:
                asked.append(new)
                discipline.rehearsed(rehearse(new), wake_at_ms)
        if at_ms > 4_000.0 and len(names) == 2:
            discipline.remove_model(ModelId("a"), at_ms)
            names = ["b"]
        run = RequestRun(FrontendId("f"), 0, 1, at_ms + SLO_MS, at_ms)
        discipline.arrive(ModelId(draw.choice(names)), run, at_ms)
    assert [one.model.model_id for one in asked[0].models] == ["a", "b"]
    assert [one.model.model_id for one in asked[-1].models] == ["b"]
