"""Slices that were gone, in words: of a model, and of one request."""

from __future__ import annotations

from dataclasses import replace as replace_evidence

import pytest
from msgspec.structs import replace

from fabric.errors import nothing_ready
from fabric.ids import BatchId, ModelId, SliceId
from fabric.messages import Ledger, RequestRecord, SliceAbsence, SliceReport, StatusListed
from roles.cli.why import _unhosted
from roles.observability.absences import gone
from roles.observability.diagnosis import Cause, Evidence, Played, diagnose, measured
from roles.observability.explain import explain
from roles.observability.remembered import AbsenceSeen, RequestSeen
from roles.observability.situation import Situation
from tests.observed_stage import observed
from tests.unit.roles.observability.test_scripted_cases import NO_LOADER, OURS, document, first

KILLED = AbsenceSeen(
    SliceAbsence(SliceId("here/gpu0/0"), "its worker was killed by signal 9", 41_000.0, 29_000.0),
    1_000.0,
    13_000.0,
)
AWAY = (
    "its only slice here/gpu0/0 was gone for 12 s, from 41 s to 29 s ago (its worker was killed by signal 9)"
)


def after_a_loss(*, bad: int = 156, unserved: int = 156, late_timers_ms: float = 129.0) -> Evidence:
    return Evidence(
        OURS, 200.0, 60_000.0, 564, bad, 1, (), (), {}, {"frontend-1": late_timers_ms}, {OURS: 10.0}, {}, 1.0,
        played=Played(as_planned=0.0), unserved=unserved, hosting={KILLED.slice_id}, absences=[KILLED],
    )  # fmt: skip


def test_a_slice_that_was_gone_is_the_cause_of_what_was_refused_meanwhile() -> None:
    (finding,) = diagnose(after_a_loss())
    assert (finding.cause, finding.weight) == (Cause.NO_SLICE, 1.0)
    assert finding.sentence == f"156 requests found no slice or lost theirs: {AWAY}"
    assert finding.advice.startswith("have a second replica on another node")


@pytest.mark.parametrize(("unserved", "first_cause"), [(150, Cause.NO_SLICE), (20, Cause.HOST)])
def test_other_causes_explain_what_is_left(unserved: int, first_cause: Cause) -> None:
    found = diagnose(after_a_loss(unserved=unserved))
    assert {one.cause for one in found} == {Cause.NO_SLICE, Cause.HOST}
    assert found[0].cause is first_cause


def test_evidence_has_the_absences_of_the_minute_of_the_slices_that_should_host_the_model() -> None:
    situation = observed(document(), 1.0)
    known = {name: getattr(situation, name) for name in situation.__slots__}
    old = AbsenceSeen(SliceAbsence(KILLED.slice_id, "long ago", 90_000.0, 70_000.0), 0.0, 1.0)
    others = AbsenceSeen(SliceAbsence(SliceId("here/gpu1/0"), "not ours", 9_000.0), 0.0, None)
    lost = Situation(
        **known
        | {"bad": {OURS: 90}, "unserved": {OURS: 90}, "hosting": {OURS: {KILLED.slice_id}}}
        | {"absences": [old, KILLED, others]}
    )
    assert first(lost).sentence == f"90 requests found no slice or lost theirs: {AWAY}"


def test_of_slices_that_a_former_plan_had_those_are_told_that_should_have_hosted_the_model() -> None:
    situation = observed(document(), 1.0)
    known = {name: getattr(situation, name) for name in situation.__slots__}
    node_lost = "its node agent is gone: its connection was closed"
    former = AbsenceSeen(
        SliceAbsence(SliceId("old/gpu0/0"), node_lost, 41_000.0, 29_000.0, (OURS,)), 1_000.0, 13_000.0
    )
    others = AbsenceSeen(
        SliceAbsence(SliceId("old/gpu1/0"), "not ours", 9_000.0, 1.0, (ModelId("bert"),)), 0.0, 1.0
    )
    new = SliceId("here/gpu0/0")
    lost = Situation(
        **known
        | {"bad": {OURS: 90}, "unserved": {OURS: 90}, "hosting": {OURS: {new}}}
        | {"absences": [former, others], "unhosted": {OURS: {new: f"{new} is starting"}}}
    )
    away = f"1 of its 2 slices was gone: old/gpu0/0 (of a former plan) for 12 s, from 41 s to 29 s ago ({node_lost})"
    finding = first(lost)
    assert finding.sentence == f"90 requests found no slice or lost theirs: {away}"
    assert finding.advice.startswith("have a second replica on another node"), "it had one at a time"
    unhosted = first(Situation(**{name: getattr(lost, name) for name in lost.__slots__} | {"replicas": {}}))
    assert unhosted.sentence == f"no ready slice hosts resnet50: {away}; here/gpu0/0 is starting"


def test_of_slices_that_are_not_ready_each_is_told_why() -> None:
    lasting = AbsenceSeen(SliceAbsence(KILLED.slice_id, "killed", 9_000.0), 1.0, None)
    here, there = KILLED.slice_id, SliceId("there/gpu0/0")
    slices = (
        SliceReport(here, "lost", "killed", (OURS,), 0, 0),
        SliceReport(there, "failed", "out of memory", (OURS,), 0, 0),
    )
    states = {here: "here/gpu0/0 is lost: killed", there: "there/gpu0/0 is failed: out of memory"}
    evidence = replace_evidence(
        after_a_loss(), replicas=0, unhosted=states, hosting=set(states), absences=[lasting]
    )
    (finding,) = diagnose(evidence)
    assert finding.sentence == (
        "no ready slice hosts resnet50: 1 of its 2 slices was gone: here/gpu0/0 for the last 9 s (killed);"
        " there/gpu0/0 is failed: out of memory"
    )
    assert _unhosted(StatusListed("scheduler", 1, slices, (), {})) == {OURS: states}
    many = {SliceId(f"n/gpu{number}/0"): f"n/gpu{number}/0 is failed" for number in range(9)}
    (finding,) = diagnose(replace_evidence(evidence, unhosted=many, hosting=set(many), absences=()))
    assert finding.sentence.endswith(
        ": n/gpu0/0 is failed; n/gpu1/0 is failed; n/gpu2/0 is failed; and 6 more"
    )
    one_reason = dict.fromkeys(many, NO_LOADER)
    (finding,) = diagnose(replace_evidence(evidence, unhosted=one_reason, hosting=set(many), absences=()))
    assert finding.sentence == f"no ready slice hosts resnet50: {NO_LOADER}"


def test_without_a_known_absence_the_refusals_are_told() -> None:
    (finding,) = diagnose(replace_evidence(after_a_loss(), absences=()))
    assert finding.sentence == "156 requests found no slice or lost theirs"


def test_several_absences_and_slices_are_summed_up() -> None:
    here, there, third = SliceId("a/gpu0/0"), SliceId("b/gpu0/0"), SliceId("c/gpu0/0")
    twice = [
        AbsenceSeen(SliceAbsence(here, "killed", 9_000.0, 5_000.0), 1.0, 2.0),
        AbsenceSeen(SliceAbsence(here, "hung", 2_000.0), 3.0, None),
    ]
    assert gone(twice, {here}) == (
        "its only slice a/gpu0/0 was gone 2 times, 6 s in all, and last for the last 2 s (hung)"
    )
    other = AbsenceSeen(SliceAbsence(there, "", 4_000.0, 1_000.0), 1.0, 2.0)
    assert gone([twice[0], other], {here, there, third}) == (
        "2 of its 3 slices were gone: a/gpu0/0 for 4 s, from 9 s to 5 s ago (killed), b/gpu0/0 for 3 s, from 4 s to 1 s ago"
    )


def test_a_request_that_found_no_slice_is_told_which_was_gone() -> None:
    record = RequestRecord(
        1, "a-1", OURS, "NoReplica", nothing_ready(OURS), 30_000.0, 200.0, Ledger(total_ms=5.0), BatchId(0)
    )
    request = RequestSeen(record, 11_995.0, 12_000.0)
    lately = measured(after_a_loss())
    assert lately[0].cause is Cause.NO_SLICE
    sentences = explain(request, (), {KILLED.slice_id}, lately, [KILLED]).sentences
    assert f"No slice of its model was there: {AWAY}." in sentences
    assert any("have a second replica on another node" in one for one in sentences)
    assert not any("No single change" in one for one in sentences)
    earlier = explain(RequestSeen(record, 400.0, 500.0), (), {KILLED.slice_id}, (), [KILLED]).sentences
    assert not any(AWAY in one for one in earlier)
    nothing = "none had started, or what was gone then is not remembered any more"
    assert f"No slice of its model was there: {nothing}." in earlier
    unasked = explain(request, (), {KILLED.slice_id}).sentences
    assert "No slice of its model was there: tenuto explain a-1 says which were gone." in unasked
    former = AbsenceSeen(replace(KILLED.entry, models=(OURS,)), 1_000.0, 13_000.0)
    assert f"No slice of its model was there: {AWAY}." in explain(request, (), (), (), [former]).sentences


@pytest.mark.parametrize(
    ("asked_at_ms", "ended_at_ms"), [(900.0, KILLED.began_at_ms - 1.5), (13_001.5, 13_002.0)]
)
def test_clocks_agree_to_some_milliseconds(asked_at_ms: float, ended_at_ms: float) -> None:
    """What is refused in the very event that loses the slice has ended before, on another role's clock."""
    record = RequestRecord(1, "a-1", OURS, "NoReplica", nothing_ready(OURS), 1.0, 200.0, Ledger(), BatchId(0))
    request = RequestSeen(record, asked_at_ms, ended_at_ms)
    sentences = explain(request, (), {KILLED.slice_id}, (), [KILLED]).sentences
    assert f"No slice of its model was there: {AWAY}." in sentences
