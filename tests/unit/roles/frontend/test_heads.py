"""Heads at a frontend: clients ask them, the scheduler hears of their model, the worker is told which is which."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fabric.ids import ModelId
from fabric.messages import Answer, Arrivals, HeadInfo, ModelInfo, Refusal, TensorInfo
from roles.frontend.core import FrontendCore
from roles.frontend.events import PushInputs, Reply, SchedulerSaid, TurnEnded
from roles.runtime.core import Tick
from tests.builders import (
    asked,
    computed,
    directory,
    frontend_settings,
    grant,
    model_info,
    of_type,
    slice_info,
)
from tests.frontend_stage import linked_core, refusals, told

CATS, DOGS = ModelId("cats"), ModelId("dogs")
SCORES = (TensorInfo("scores", "float32", (5,)),)
VISION = replace(
    model_info("vision", slo_ms=50.0, inputs=()),
    heads=(HeadInfo(CATS, 50.0), HeadInfo(DOGS, 80.0, SCORES)),
)


def test_clients_are_told_of_heads_and_not_of_their_model() -> None:
    core = linked_core(VISION, model_info("digits"))
    listed = {model.model_id: model for model in core.models}
    assert set(listed) == {"digits", CATS, DOGS}
    assert (listed[DOGS].slo_ms, listed[DOGS].outputs, listed[DOGS].head_of) == (80.0, SCORES, "vision")
    assert listed[CATS].replicas == 1
    assert not listed[CATS].heads


def test_requests_of_all_heads_are_announced_as_their_models_each_within_its_own_slo() -> None:
    core = linked_core(VISION)
    core.handle(asked(1, DOGS, specs=()), 0.0)
    core.handle(asked(2, CATS, specs=()), 0.0)
    runs = [one for one in told(core.handle(TurnEnded(), 0.0)) if isinstance(one, Arrivals)]
    assert [(run.model_id, run.first_seq, run.count) for run in runs] == [("vision", 0, 1), ("vision", 1, 1)]
    tight, loose = runs
    assert tight.budget_ms < 50.0 < loose.budget_ms < 80.0, "the earliest deadline first, whoever asked first"


def test_inputs_say_for_which_head_each_request_is_and_answers_find_their_requests() -> None:
    core = linked_core(VISION)
    for number, name in enumerate((CATS, DOGS, CATS)):
        core.handle(asked(number, name, 60.0, ()), 0.0)
    core.handle(TurnEnded(), 0.0)
    (push,) = of_type(PushInputs, core.handle(grant((0, 3), model_id="vision"), 1.0))
    assert push.message.model_id == "vision"
    assert push.message.heads == (CATS, DOGS, CATS)
    answered = []
    for seqs in ((0, 2), (1,)):  # of each head
        actions = core.handle(computed(*seqs, model_id="vision"), 5.0)
        answered += [
            one.message.request_no for one in of_type(Reply, actions) if isinstance(one.message, Answer)
        ]
    assert answered == [0, 2, 1]


def with_heads(model_id: str, *heads: ModelId, replicas: int = 1) -> ModelInfo:
    info = model_info(model_id, inputs=(), replicas=replicas)
    return replace(info, heads=tuple(HeadInfo(head, 50.0) for head in heads))


def whose(core: FrontendCore) -> dict[str, str]:
    return {model.model_id: model.head_of for model in core.models}


@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), st.sets(st.sampled_from([CATS, DOGS]), min_size=1))),
    st.dictionaries(st.sampled_from("abc"), st.sets(st.sampled_from([CATS, DOGS]), min_size=1)),
)
def test_whose_a_head_is_follows_from_what_is_listed_now_whatever_was(
    former: list[dict[str, set[ModelId]]], last: dict[str, set[ModelId]]
) -> None:
    def listed(heads: dict[str, set[ModelId]]) -> SchedulerSaid:
        return directory([with_heads(name, *sorted(its)) for name, its in heads.items()])

    core, fresh = linked_core(model_info("other")), linked_core(model_info("other"))
    for now_ms, heads in enumerate([*former, last]):
        core.handle(listed(heads), float(now_ms))
    fresh.handle(listed(dict(sorted(last.items()))), 0.0)
    assert whose(core) == whose(fresh)
    assert whose(core).keys() == {head for heads in last.values() for head in heads}


def test_a_head_that_moves_to_another_shards_model_is_always_found() -> None:
    core = FrontendCore(frontend_settings(shards=2))
    core.handle(Tick(), 0.0)
    core.handle(directory([with_heads("a", CATS, DOGS)]), 0.0)
    core.handle(directory([with_heads("b", DOGS, replicas=0)], [], shard=1), 0.0)
    assert whose(core) == {CATS: "a", DOGS: "a"}, "which serves it"
    core.handle(directory([with_heads("b", DOGS)], [slice_info("h1/gpu0/0")], shard=1), 1.0)
    core.handle(directory([with_heads("a", CATS)]), 2.0)
    assert whose(core) == {CATS: "a", DOGS: "b"}
    assert refusals(core.handle(asked(1, DOGS, specs=()), 3.0)) == []


def test_a_model_without_heads_says_none() -> None:
    core = linked_core(model_info(inputs=()))
    core.handle(asked(1, specs=()), 0.0)
    core.handle(TurnEnded(), 0.0)
    (push,) = of_type(PushInputs, core.handle(grant((0, 1)), 1.0))
    assert push.message.heads == ()


def test_the_model_itself_is_not_asked_and_a_name_that_is_nearly_a_heads_is_suggested() -> None:
    core = linked_core(VISION)
    (reply,) = of_type(Reply, core.handle(asked(1, "vision", specs=()), 0.0))
    assert isinstance(reply.message, Refusal)
    assert (reply.message.code, reply.message.reason) == (
        "InvalidInput",
        "model 'vision' is asked by its heads: cats, dogs",
    )
    (reply,) = of_type(Reply, core.handle(asked(2, "cat", specs=()), 0.0))
    assert isinstance(reply.message, Refusal)
    assert "did you mean 'cats'?" in reply.message.reason


def test_figures_are_of_the_model_also_of_what_is_refused_at_once() -> None:
    core = linked_core(replace(VISION, replicas=0))
    assert refusals(core.handle(asked(1, DOGS, specs=()), 0.0)) == [(1, "NoReplica")]
    core.handle(directory([VISION], [slice_info()]), 1.0)
    core.handle(asked(2, CATS, specs=()), 2.0)
    figures = {one.model_id: one for one in core.recorder.figures(ModelId(""), 3.0).models}
    assert set(figures) == {"vision"}


def test_heads_go_with_their_model_and_when_it_has_others() -> None:
    core = linked_core(VISION)
    core.handle(
        directory([replace(VISION, heads=(HeadInfo(CATS, 50.0), HeadInfo(ModelId("cows"), 50.0)))], []), 1.0
    )
    assert {model.model_id for model in core.models} == {CATS, "cows"}
    assert refusals(core.handle(asked(1, DOGS, specs=()), 1.0)) == [(1, "ModelNotFound")]
    core.handle(asked(2, CATS, specs=()), 1.0)
    (reply,) = of_type(Reply, core.handle(directory([], []), 2.0))
    assert isinstance(reply.message, Refusal)
    assert (reply.message.code, reply.message.reason) == ("ModelNotFound", "model 'cats' was removed")
    assert core.models == ()
