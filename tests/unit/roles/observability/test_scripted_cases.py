"""What is wrong is known, because the stage made it so: `why` has to tell it, and tell nothing else first. On virtual time."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from fabric.ids import BatchId, ModelId, NodeId, SliceId
from fabric.messages import BatchEntry, SliceSpec
from roles.cli.why import told, why_document
from roles.config.cluster import NetworkConfig
from roles.observability.diagnosis import Cause, Evidence, Finding, Played, diagnose, measured
from roles.observability.explain import explain
from roles.observability.last_minute import minute_from
from roles.observability.remedies import Remedy, remedies
from roles.observability.remembered import BatchSeen, CountsSeen
from roles.observability.situation import Situation
from tests.observed_stage import observed

LINE = {"alpha_ms": 1.0, "beta_ms": 5.0, "max_batch": 32}
OURS = ModelId("resnet50")
LOUD = {
    "name": "bert",
    "slo_ms": 200,
    "rate_rps": 50,
    "profile": {"alpha_ms": 2, "beta_ms": 30, "max_batch": 32},
}


def document(
    rate_rps: float = 300.0, *, gpus: int = 2, others: tuple[dict[str, Any], ...] = (), **keys: Any
) -> dict[str, Any]:
    own = {"name": OURS, "slo_ms": 25, "rate_rps": rate_rps, "profile": LINE}
    return {"models": [own, *others], "cluster": {"gpus": gpus}, **keys}


def first_gpu_slow(node_id: NodeId, spec: SliceSpec) -> SliceSpec:
    del node_id
    if spec.gpu:
        return spec
    models = tuple(replace(one, exec_ms=tuple(1.8 * ms for ms in one.exec_ms)) for one in spec.models)
    return replace(spec, models=models)


def causes(situation: Situation) -> list[Cause]:
    return [finding.cause for finding in diagnose(situation.evidence(OURS))]


def first(situation: Situation) -> Finding:
    return diagnose(situation.evidence(OURS))[0]


def changes(situation: Situation) -> list[Remedy]:
    return remedies(situation.like_live(), situation.evidence(OURS))


@pytest.mark.parametrize(
    ("law", "family", "slo_ms", "names"),
    [
        ("igniter", "igniter-v100", 30, {"resnet50": 500, "vgg19": 250}),
        ("sm", "thesis-v100", 60, {"resnet50": 90, "vgg19": 60}),
    ],
)
def test_neighbours_whose_law_is_configured_slow_a_simulated_batch_once(
    law: str, family: str, slo_ms: float, names: dict[str, float]
) -> None:
    slices = [{"gpu": 0, "share_percent": 50, "models": [{"model": name}]} for name in names]
    situation = observed(
        {
            "models": [
                {
                    "name": name,
                    "slo_ms": slo_ms,
                    "rate_rps": rate,
                    "profile": {"ref": f"{family}/{name}"},
                }
                for name, rate in names.items()
            ],
            "cluster": {"gpus": 1, "gpu_type": "v100", "interference": law},
            "batching": "eager",
            "placement": {"given": {"slices": slices}},
        },
        4.0,
    )
    live = situation.like_live()
    assert [sorted(its) for its in live.slowdown.values()] == [sorted(names)]
    for factors in live.slowdown.values():
        assert list(factors.values()) == pytest.approx([1.0, 1.0], abs=0.02)
    assert max(situation.bad_rates.values()) > 0.05
    for name, bad_rate in situation.bad_rates.items():
        assert live.bad_rate(name) == pytest.approx(bad_rate, abs=0.05)


def test_a_model_that_keeps_its_slo_is_told_to_keep_it() -> None:
    situation = observed(document(), 3.0)
    evidence = situation.evidence(OURS)
    assert (diagnose(evidence), evidence.bad) == ([], 0)
    (line,) = told(evidence, [], [])
    assert re.fullmatch(
        r"resnet50 keeps its SLO of 25 ms: 0 of \d+ requests of the last 3 s were late or refused \(0.0%\)\.",
        line,
    )


def test_a_network_as_it_is_configured_is_not_to_blame() -> None:
    """Batches of some ten, whose inputs take 0.6 ms each."""
    own = {"name": OURS, "slo_ms": 40, "rate_rps": 900, "profile": {"alpha_ms": 0.5, "beta_ms": 8}}
    network = {"control_ms": 0.2, "data_ms_per_item": 0.6, "result_ms": 0.2}
    situation = observed({"models": [own], "cluster": {"gpus": 1, "network": network}}, 4.0)
    assert Cause.NETWORK not in {one.cause for one in measured(situation.evidence(OURS, is_played=False))}
    live = situation.like_live()
    assert live.config.network.data_ms_per_item == 0.0, "it is in the medians"
    assert live.bad_rate(OURS) == pytest.approx(situation.bad_rates[OURS], abs=0.02)


def test_a_pipeline_that_runs_as_its_profile_says_is_not_slow() -> None:
    """Its stages together take longer than the whole model on one GPU."""
    own = {
        "name": OURS,
        "slo_ms": 100,
        "rate_rps": 60,
        "profile": {"table": {1: 20, 4: 44}, "stages": {2: [12, 12]}},
    }
    sliced = {"gpu": 0, "following": [1], "models": [{"model": OURS}]}
    situation = observed(
        {"models": [own], "cluster": {"gpus": 2}, "placement": {"given": {"slices": [sliced]}}}, 4.0
    )
    assert measured(situation.evidence(OURS, is_played=False)) == []
    (factors,) = situation.like_live().slowdown.values()
    assert factors[OURS] == pytest.approx(1.0)


def test_one_slow_gpu() -> None:
    situation = observed(document(850.0), 3.0, reality=first_gpu_slow)
    finding = first(situation)
    assert (finding.cause, finding.about) == (Cause.SLOW_SLICE, "local/gpu0/0")
    assert "1.80 times their profile on local/gpu0/0" in finding.sentence
    assert Cause.CAPACITY not in causes(situation), "the plan would have sufficed"
    assert any(change.is_enough for change in changes(situation))


def test_a_bursty_model() -> None:
    situation = observed(document(), 8.0, asked={OURS: {"arrival": {"process": "gamma", "shape": 0.02}}})
    assert causes(situation) == [Cause.BURSTS]
    assert [change.change for change in changes(situation) if change.is_enough]


def test_too_little_capacity() -> None:
    situation = observed(document(), 2.5, asked={OURS: {"rate_rps": 1_500}})
    assert causes(situation) == [Cause.CAPACITY]
    assert "planned for 300" in first(situation).sentence
    enough = [change for change in changes(situation) if change.is_enough]
    assert "1 GPU more" in {change.change for change in enough}


def test_a_noisy_neighbour_on_the_same_slices() -> None:
    situation = observed(
        document(150.0, others=(LOUD,), batching="eager"), 2.5, asked={"bert": {"rate_rps": 900}}
    )
    finding = first(situation)
    assert (finding.cause, finding.about) == (Cause.NEIGHBOUR, "bert")
    assert "instead of 50 r/s" in finding.sentence


def test_a_neighbour_that_interferes_from_another_slice() -> None:
    evidence = beside_a_neighbour(slowed_by=1.6, always=1.0)
    (finding,) = diagnose(evidence)
    assert (finding.cause, finding.about) == (Cause.NEIGHBOUR, "bert")
    assert (
        "1.60 times their profile while bert runs on the same GPU, and 1.00 times otherwise"
        in finding.sentence
    )


def test_a_neighbour_is_not_to_blame_for_a_gpu_that_is_always_slow() -> None:
    evidence = beside_a_neighbour(slowed_by=1.0, always=1.6)
    assert [finding.cause for finding in diagnose(evidence)] == [Cause.SLOW_SLICE]


def beside_a_neighbour(*, slowed_by: float, always: float) -> Evidence:
    """Every second batch of ours runs while one of bert does, on another slice of the GPU."""
    batches: list[BatchSeen] = []
    for number in range(40):
        is_beside = number % 2 == 0
        exec_ms = 10.0 * always * (slowed_by if is_beside else 1.0)
        batches.append(batch(OURS, "local/gpu0/0", 100.0 * number, exec_ms))
        if is_beside:
            batches.append(batch("bert", "local/gpu0/1", 100.0 * number - 1.0, 50.0))
    played = Played(as_planned=0.0)
    return Evidence(
        OURS, 25.0, 60_000.0, 1_000, 100, 1, (), batches, {}, {}, {OURS: 100.0}, {}, 1.0, played=played
    )


def batch(model_id: str, slice_id: str, started_at_ms: float, exec_ms: float) -> BatchSeen:
    entry = BatchEntry(
        1,
        BatchId(1),
        ModelId(model_id),
        SliceId(slice_id),
        4,
        "ok",
        "full",
        0,
        0,
        10.0,
        10.0,
        exec_ms,
        0.1,
        0.0,
        0.0,
    )
    return BatchSeen(entry, started_at_ms - 1.0, started_at_ms, started_at_ms + exec_ms)


@pytest.mark.parametrize(
    "odd",
    [{"model_id": ModelId("of-another-shard")}, {"ended_ago_ms": 61_000.0}],
    ids=["another shard", "before"],
)
def test_ways_of_another_shard_or_of_before_are_not_the_minutes(odd: dict[str, Any]) -> None:
    situation = observed(document(), 1.0)
    others = [
        dataclasses.replace(one, entry=replace(one.entry, transfer_ms=500.0, **odd))
        for one in 2 * [*situation.batches]
    ]
    mixed = dataclasses.replace(situation, batches=[*situation.batches, *others])
    assert mixed.like_live().config.network == situation.like_live().config.network


def test_a_starved_host() -> None:
    """What a host without cores does to messages is what jitter does; that it is the host its timers say."""
    situation = observed(
        document(),
        5.0,
        network=NetworkConfig(jitter_ms=6.0),
        late_timers_ms={"frontend-0": 0.2, "scheduler-0": 14.0},
    )
    finding = first(situation)
    assert (finding.cause, finding.about) == (Cause.HOST, "scheduler-0")
    assert Cause.NETWORK not in causes(situation)


def test_a_slow_link() -> None:
    situation = observed(
        document(), 3.0, network=NetworkConfig(control_ms=1.0, data_ms_per_item=1.5, result_ms=8.0)
    )
    finding = first(situation)
    assert finding.cause is Cause.NETWORK
    assert "back (medians)" in finding.sentence
    assert Cause.HOST not in causes(situation)


CASES: dict[str, tuple[Cause, str, Callable[[], Situation]]] = {
    "one slow GPU": (
        Cause.SLOW_SLICE,
        "its batches take 1.80 times their profile on local/gpu0/0",
        lambda: observed(document(850.0), 3.0, reality=first_gpu_slow),
    ),
    "one bursty model": (
        Cause.BURSTS,
        "requests of resnet50 come in bursts",
        lambda: observed(document(), 8.0, asked={OURS: {"arrival": {"process": "gamma", "shape": 0.02}}}),
    ),
    "too little capacity": (
        Cause.CAPACITY,
        "of resnet50 came, and the plan is for 300",
        lambda: observed(document(), 2.5, asked={OURS: {"rate_rps": 1_500}}),
    ),
    "a noisy neighbour": (
        Cause.NEIGHBOUR,
        "of bert came, and the plan is for 50",
        lambda: observed(
            document(150.0, others=(LOUD,), batching="eager"), 2.5, asked={"bert": {"rate_rps": 900}}
        ),
    ),
    "a starved host": (
        Cause.HOST,
        "imers of scheduler-0 are 14 ms late (p99 since its start)",
        lambda: observed(
            document(), 5.0, network=NetworkConfig(jitter_ms=6.0), late_timers_ms={"scheduler-0": 14.0}
        ),
    ),
    "a slow link": (
        Cause.NETWORK,
        "outputs 8.0 ms back (medians)",
        lambda: observed(
            document(), 3.0, network=NetworkConfig(control_ms=1.0, data_ms_per_item=1.5, result_ms=8.0)
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_why_explain_and_the_page_tell_the_same_cause(case: str) -> None:
    cause, words, stage = CASES[case]
    situation = stage()
    evidence = situation.evidence(OURS)
    findings = diagnose(evidence)
    assert findings[0].cause is cause
    lately = measured(situation.evidence(OURS, is_played=False))
    assert lately[0].cause is cause
    hosting = {one.slice_id for one in situation.batches}
    bad = [one for one in situation.requests if one.is_bad and one.record.model_id == OURS]
    assert bad
    for one in bad[:30]:
        told_of_it = explain(one, situation.batches, hosting, lately).sentences
        assert any(words in sentence for sentence in told_of_it)
    # The page asks `tenuto why --json` and shows its findings and remedies; those are made of the same.
    shown = json.loads(json.dumps(why_document(evidence, findings, [])))
    assert shown["findings"][0]["cause"] == cause
    assert shown["bad_rate"] >= 0.01


NO_LOADER = "it has no loader for a cpu device"


def test_a_model_that_nothing_hosts() -> None:
    situation = observed(document(), 1.0)
    known = {name: getattr(situation, name) for name in situation.__slots__}
    bare = Situation(**known | {"replicas": {}, "unhosted": {OURS: {SliceId(""): NO_LOADER}}})
    assert causes(bare) == [Cause.UNHOSTED]
    assert first(bare).sentence == f"no ready slice hosts resnet50: {NO_LOADER}"
    (verdict, *_) = told(bare.evidence(OURS), diagnose(bare.evidence(OURS)), [])
    assert verdict.startswith("resnet50 is not served: ")


def test_a_minute_of_which_no_frontend_counts_anything_is_one_in_which_nothing_came() -> None:
    situation = observed(document(), 1.0)
    config, settings = situation.minute.config, situation.minute.settings
    assert settings is not None
    minute = minute_from(config, settings, {}, 0.0)
    counts = CountsSeen()
    counted_ms = counts.counted_ms(minute.span_ms)
    nothing = Situation(minute, (), (), {}, 0.0, counted_ms, {}, {}, {OURS: 1}, {}, {})
    evidence = nothing.evidence(OURS)
    assert told(evidence, diagnose(evidence), []) == ["No request for resnet50 came in the last 60 s."]


def test_a_network_as_configured_is_not_blamed_for_large_batches_among_many_small_ones() -> None:
    """Most batches are of one request, most requests are in batches of 64; late ones are remembered in full."""
    situation = observed(document(), 1.0)
    way_ms = 0.25
    network = NetworkConfig(data_ms_per_item=way_ms)
    (first_batch, *_) = situation.batches
    (first_request, *_) = (one for one in situation.requests if one.has_run)
    batches, requests = [], []
    for size in [1] * 40 + [64] * 20:
        transfer_ms = way_ms * size
        entry = replace(first_batch.entry, batch_size=size, transfer_ms=transfer_ms)
        batches.append(dataclasses.replace(first_batch, entry=entry))
        ledger = replace(first_request.ledger, batch_size=size, transfer_ms=transfer_ms, return_ms=0.0)
        one = dataclasses.replace(first_request, record=replace(first_request.record, ledger=ledger))
        requests += [one] * size
    config = replace(situation.minute.config, network=network)
    known = {name: getattr(situation, name) for name in situation.__slots__}
    minute = replace(situation.minute, config=config)
    as_configured = Situation(**known | {"minute": minute, "batches": batches, "requests": requests})
    nearer = replace(minute, config=replace(config, network=NetworkConfig()))
    for played, is_blamed in ((minute, False), (nearer, True)):
        evidence = dataclasses.replace(as_configured, minute=played).evidence(OURS, is_played=False)
        assert (Cause.NETWORK in [one.cause for one in measured(evidence)]) is is_blamed


def test_a_late_or_refused_request_is_explained_by_what_ran_instead() -> None:
    situation = observed(
        document(150.0, others=(LOUD,), batching="eager"), 2.0, asked={"bert": {"rate_rps": 900}}
    )
    refused = [one for one in situation.requests if one.is_bad and one.record.model_id == OURS]
    assert refused
    hosting = {one.slice_id for one in situation.batches}
    explained = [explain(one, situation.batches, hosting) for one in refused[:50]]
    for one, its in zip(refused, explained, strict=False):
        assert its.sentences[0].startswith(
            f"Request {one.record.request_id} of resnet50 was not answered but refused with"
        )
        assert its.alone_ms is not None
        assert its.alone_ms < 25.0
    named = [its for its in explained if any("bert on local/gpu" in sentence for sentence in its.sentences)]
    assert len(named) > 0.8 * len(explained)
    assert any(its.would_have_met and "without the batches of bert" in its.would_have_met[0] for its in named)
