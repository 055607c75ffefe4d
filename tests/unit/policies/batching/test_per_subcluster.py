from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from fabric.ids import FrontendId, ModelId, SliceId
from policies.batching.base import (
    BatchDecision,
    BatchModel,
    BatchSlice,
    Discipline,
    Dispatch,
    Drop,
    HostedModel,
    RequestRun,
)
from policies.batching.per_subcluster import PerSubcluster, per_subcluster
from policies.batching.registry import make_discipline
from policies.connected_models import components

FRONTEND = FrontendId("frontend-0/0")
EXEC_MS = tuple(float(b + 5) for b in range(1, 33))
A, B, C, D = (ModelId(name) for name in "abcd")


def make() -> Discipline:
    return make_discipline("deferred")


def batch_slice(number: int, *models: ModelId, free_at_ms: float = 0.0) -> BatchSlice:
    hosted = tuple(HostedModel(model_id, EXEC_MS) for model_id in models)
    return BatchSlice(SliceId(f"a/gpu{number}/0"), number, hosted, free_at_ms)


def run(first_seq: int, count: int, now_ms: float, slo_ms: float = 30.0) -> RequestRun:
    return RequestRun(FRONTEND, first_seq, count, now_ms + slo_ms, now_ms)


def with_models(discipline: Discipline, *models: ModelId) -> Discipline:
    for model_id in models:
        discipline.add_model(BatchModel(model_id, 30.0), 0.0)
    return discipline


def two_shards() -> PerSubcluster:
    discipline = with_models(PerSubcluster([make(), make()], [{A, B}, {C}]), A, B, C)
    discipline.add_slice(batch_slice(0, A, B), 0.0)
    discipline.add_slice(batch_slice(1, C), 0.0)
    assert isinstance(discipline, PerSubcluster)
    return discipline


def sent(decisions: Sequence[BatchDecision]) -> list[tuple[SliceId, ModelId, int]]:
    return [(d.slice_id, d.model_id, d.batch_size) for d in decisions if isinstance(d, Dispatch)]


def play(discipline: Discipline, *models: ModelId) -> list[tuple[float, SliceId, ModelId, int]]:
    """Tick until nothing of these models waits any more."""
    gone = []
    while any(discipline.queued(model_id) for model_id in models):
        now_ms = discipline.wake_at_ms
        assert now_ms is not None
        gone += [(round(now_ms, 3), *one) for one in sent(discipline.tick(now_ms))]
    return gone


# ---------------------------------------------------------------- components


def test_models_that_share_a_slice_directly_or_by_others_are_one_component() -> None:
    assert components([[A], [B], [C, D], [A, B]]) == [{A, B}, {C, D}]
    assert components([[A, B], [C, D], [B, C]]) == [{A, B, C, D}]
    assert components([[], []]) == []


def test_one_component_uses_the_plain_discipline() -> None:
    assert not isinstance(per_subcluster(make, [[A, B]] * 4), PerSubcluster)
    assert not isinstance(per_subcluster(make, []), PerSubcluster)
    assert isinstance(per_subcluster(make, [[A, B], [C], [A, B]]), PerSubcluster)


# ---------------------------------------------------------------- routing


def test_each_component_serves_its_own_models_on_its_own_slices() -> None:
    discipline = two_shards()
    assert discipline.wake_at_ms is None
    discipline.arrive(A, run(0, 2, 0.0), 0.0)
    discipline.arrive(C, run(0, 3, 0.0), 0.0)
    assert (discipline.queued(A), discipline.queued(B), discipline.queued(C)) == (2, 0, 3)
    # Each at its own frontrun moment, 30 - l(b + 1).
    assert play(discipline, A, C) == [(21, "a/gpu1/0", "c", 3), (22, "a/gpu0/0", "a", 2)]


def test_withdrawing_and_removing_go_to_the_models_shard() -> None:
    discipline = two_shards()
    discipline.arrive(C, run(0, 4, 0.0), 0.0)
    discipline.withdraw(C, FRONTEND, [(0, 1)], 1.0)
    assert discipline.queued(C) == 3
    (drop,) = discipline.remove_model(C, 2.0)
    assert isinstance(drop, Drop)
    assert sum(one.count for one in drop.runs) == 3
    assert discipline.queued(C) == 0
    assert discipline.wake_at_ms is None
    assert not discipline.remove_slices((SliceId("nobody"),), 3.0)
    assert discipline.slice_free(SliceId("nobody"), 3.0, 3.0) == ()


def test_a_slice_that_connects_two_shards_makes_them_one_without_losing_a_request() -> None:
    discipline = two_shards()
    for seq in range(3):
        discipline.arrive(A, run(seq, 1, 0.0), 0.0)
        discipline.arrive(C, run(seq, 1, 0.0), 0.0)
    discipline.slice_free(SliceId("a/gpu1/0"), 100.0, 0.0)  # what hosts c now is busy for long
    assert sent(discipline.add_slice(batch_slice(2, A, C), 1.0)) == []
    assert (discipline.queued(A), discipline.queued(C)) == (3, 3)
    gone = [(slice_id, model_id, size) for _, slice_id, model_id, size in play(discipline, A, C)]
    assert sorted(gone) == [("a/gpu0/0", "a", 3), ("a/gpu2/0", "c", 3)]  # and gpu1 is still busy


def test_a_running_batch_keeps_its_slice_busy_when_shards_become_one() -> None:
    discipline = two_shards()
    (full,) = sent(discipline.arrive(C, run(0, 32, 0.0, slo_ms=60.0), 0.0))
    assert full == ("a/gpu1/0", "c", 32)  # until 37
    discipline.add_slice(batch_slice(0, A, B, C, free_at_ms=50.0), 1.0)
    assert sent(discipline.arrive(C, run(32, 32, 2.0, slo_ms=80.0), 2.0)) == []
    wake_at_ms = discipline.wake_at_ms
    while wake_at_ms is not None and wake_at_ms < 37:
        assert sent(discipline.tick(wake_at_ms)) == []
        wake_at_ms = discipline.wake_at_ms
    assert wake_at_ms == 37
    assert sent(discipline.tick(37.0)) == [("a/gpu1/0", "c", 32)]


def test_a_slice_may_change_its_shard() -> None:
    discipline = two_shards()
    discipline.add_slice(batch_slice(0, C), 0.0)
    discipline.remove_slices((SliceId("a/gpu1/0"),), 0.0)
    discipline.arrive(C, run(0, 32, 0.0, slo_ms=60.0), 0.0)
    assert discipline.queued(C) == 0
    discipline.arrive(A, run(0, 1, 0.0), 0.0)
    while discipline.wake_at_ms is not None:
        assert sent(discipline.tick(discipline.wake_at_ms)) == []  # nothing hosts it any more


# ---------------------------------------------------------------- the same decisions as undivided


@pytest.mark.parametrize("name", ["deferred", "eager"])
@pytest.mark.parametrize("seed", range(4))
def test_independent_dispatchers_decide_as_one_for_all_would(name: str, seed: int) -> None:
    groups = [(A, B), (C,), (D,)]
    divided = with_models(PerSubcluster([make_discipline(name) for _ in groups], groups), A, B, C, D)
    whole = with_models(make_discipline(name), A, B, C, D)
    slices = [batch_slice(number, *groups[number % 3]) for number in range(6)]
    for one in slices:
        divided.add_slice(one, 0.0)
        whole.add_slice(one, 0.0)
    draw = random.Random(seed)
    now_ms, seq = 0.0, 0
    out: tuple[list[BatchDecision], list[BatchDecision]] = ([], [])
    for _ in range(1500):
        now_ms += draw.expovariate(2.0)
        for discipline, decisions in zip((divided, whole), out, strict=True):
            while discipline.wake_at_ms is not None and discipline.wake_at_ms <= now_ms:
                decisions.extend(discipline.tick(discipline.wake_at_ms))
        model_id, count = draw.choice((A, B, C, D)), draw.randrange(1, 9)
        out[0].extend(divided.arrive(model_id, run(seq, count, now_ms), now_ms))
        out[1].extend(whole.arrive(model_id, run(seq, count, now_ms), now_ms))
        seq += count
        assert divided.wake_at_ms == whole.wake_at_ms
    assert len(out[0]) > 100
    assert sorted(map(repr, out[0])) == sorted(map(repr, out[1]))


def test_of_models_that_come_and_go_only_the_last_few_are_remembered() -> None:
    discipline = two_shards()
    held = []
    for number in range(300):
        new = ModelId(f"new-{number}")
        with_models(discipline, new)
        discipline.add_slice(batch_slice(1, C, new), 0.0)
        discipline.remove_model(new, 0.0)
        discipline.add_slice(batch_slice(1, C), 0.0)
        held.append(len(discipline._shard_of))
    assert max(held) < 30


def test_a_model_that_is_added_again_soon_goes_where_it_was() -> None:
    discipline = two_shards()
    discipline.remove_model(C, 0.0)
    discipline.remove_slices((SliceId("a/gpu1/0"),), 0.0)
    with_models(discipline, C)
    discipline.add_slice(batch_slice(1, C), 0.0)
    discipline.arrive(A, run(0, 2, 0.0), 0.0)
    assert [one.queued(A) for one in discipline._inner] == [2, 0]
    discipline.arrive(C, run(0, 3, 0.0), 0.0)
    assert [one.queued(C) for one in discipline._inner] == [0, 3], "its slice did not make two shards one"
