"""What one turn of a scheduler costs grows with what there is, not with its square: counted, without a clock."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fabric.ids import ModelId, NodeId, PeerId, SliceId
from fabric.messages import Arrivals, DesiredSlices, Directory, ModelsAdd, ModelsRemove, Ping
from roles.runtime.core import Lost
from roles.scheduler.dispatch.start_times import StartTimes
from roles.scheduler.fleet import SliceRecord
from tests.unit.roles.scheduler.test_controller import FRONTEND, OPERATOR, Stage, model, two_nodes

FEW, MANY = 50, 200


class CountedId(str):
    """A name that counts how often it is looked at."""

    __slots__ = ()
    looked_at = 0

    def __eq__(self, other: object) -> bool:
        CountedId.looked_at += 1
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        CountedId.looked_at += 1
        return str.__hash__(self)


@pytest.mark.parametrize("has_started", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_model_is_looked_for_among_its_own_starts_alone(*, is_shared: bool, has_started: bool) -> None:
    """Each directory asks for all models, of which one slice hosts each, or all."""

    def looked_at(count: int) -> int:
        starts = StartTimes()
        models = [ModelId(CountedId(f"m{k}")) for k in range(count)]
        hosted = [models] if is_shared else [[one] for one in models]
        for k, of_one in enumerate(hosted):
            if has_started:
                starts.begin(SliceId(f"first-{k}"), of_one, 0.0)
                starts.end(SliceId(f"first-{k}"), models, 40.0)
            starts.begin(SliceId(f"second-{k}"), of_one, 100.0)
        CountedId.looked_at = 0
        coming = [starts.coming_in_ms(one, 110.0) for one in models]
        assert coming == [30.0 if has_started else None] * count
        return CountedId.looked_at

    assert looked_at(MANY) <= looked_at(FEW) * MANY // FEW


class CountedSlices(dict[SliceId, SliceRecord]):
    """That counts how often all of them are looked at."""

    walks = 0

    def values(self) -> Any:
        self.walks += 1
        return super().values()


def test_many_models_are_added_and_removed_with_as_few_looks_at_all_slices_as_one() -> None:
    def walks(count: int) -> list[int]:
        stage = two_nodes(model("a"), placement="symphony")
        fleet = stage.scheduler._fleet
        fleet.slices = slices = CountedSlices(fleet.slices)
        names = [f"m{k}" for k in range(count)]
        found = []
        added = ModelsAdd(1, json.dumps([model(name) for name in names]))
        for change in (added, ModelsRemove(2, tuple(map(ModelId, names)))):
            slices.walks = 0
            stage.sent.clear()
            stage.hear(OPERATOR, change)
            found.append(slices.walks)
            stage.run(2_000)
            assert stage.answer().status == "ok"
        return found

    assert walks(1) == walks(8)


@pytest.mark.parametrize("how", ["removed", "not in the file", "added and taken back"])
def test_of_models_that_go_together_everybody_hears_once(how: str) -> None:
    """A directory is as large as the cluster, and goes to all of it."""
    names = [f"m{k}" for k in range(4)]
    stage = two_nodes(
        model("a"), *(map(model, names) if how != "added and taken back" else ()), placement="symphony"
    )
    stage.run(2_000)
    if how == "removed":
        for name in names:  # a batch of the first that runs, and then what waits for its slice
            stage.hear(FRONTEND, Arrivals(ModelId(name), 0, 9, 100.0))
        stage.sent.clear()
        stage.hear(OPERATOR, ModelsRemove(1, tuple(map(ModelId, names))))
    elif how == "not in the file":
        nodes = [{"host": "left"}, {"host": "right"}]
        stage = Stage(model("a"), nodes=nodes, placement="symphony", ran=stage)
        stage.run(1_000)
    else:
        stage.failing = set(names)
        stage.hear(OPERATOR, ModelsAdd(1, json.dumps([model(name) for name in names])))
        stage.run(1_000)
    told = [one.message for one in stage.sent if one.peer == FRONTEND and isinstance(one.message, Directory)]
    listed = [{one.model_id for one in directory.models}.intersection(names) for directory in told]
    assert listed[-1] == set()
    assert {len(one) for one in listed} <= {0, len(names)}


def test_many_nodes_are_told_what_to_host_with_as_few_looks_at_all_slices_as_one() -> None:
    def walks(count: int) -> int:
        nodes = [{"host": f"n{k}"} for k in range(count)]
        stage = Stage(model("a"), nodes=nodes, placement="symphony")
        fleet = stage.scheduler._fleet
        fleet.slices = slices = CountedSlices(fleet.slices)
        stage.is_starting_slow = True
        stage.sent.clear()
        stage.hear(OPERATOR, ModelsAdd(1, json.dumps([model("b")])))
        told = [one.peer for one in stage.sent if isinstance(one.message, DesiredSlices)]
        assert told == sorted(stage.agent(NodeId(node["host"])) for node in nodes)
        return slices.walks

    assert walks(1) == walks(8)


def test_many_slices_that_break_their_promise_are_dealt_with_in_as_few_looks_at_all_slices_as_one() -> None:
    """Each on a GPU that has no share left, where none of them can grow."""

    def walks(gpus: int) -> int:
        hosts = [{"model": "a", "batch": 4}]
        given = [{"gpu": gpu, "share_percent": 25, "models": hosts} for gpu in range(gpus) for _ in range(4)]
        nodes = [{"host": "left", "gpus": gpus}]
        stage = Stage(model("a"), nodes=nodes, placement={"given": {"slices": given}})
        stage.run(100)
        fleet = stage.scheduler._fleet
        fleet.slices = slices = CountedSlices(fleet.slices)
        controller = stage.scheduler.controller
        assert controller is not None
        for _ in range(40):
            for record in list(slices.values()):
                controller._run_time_watch.note(record, ModelId("a"), 1, 11.0)
            stage.run(100)
        assert sum("no share left" in one for one in controller.unlogged) == gpus
        return slices.walks

    assert walks(1) == walks(8)


@pytest.mark.parametrize("what", ["pings", "is lost"])
def test_a_worker_is_found_without_a_look_at_all_slices(what: str) -> None:
    """After a take-over all of them ping at once; of a host that is lost all are lost at once."""

    def walks(gpus: int) -> int:
        stage = Stage(model("a"), nodes=[{"host": "left", "gpus": gpus}], placement="symphony")
        fleet = stage.scheduler._fleet
        assert len(fleet.slices) == gpus
        worker = PeerId("worker-left-9/00000009")
        stage.hear(worker, Ping(1))  # is answered with the directory, once in a while
        fleet.slices = slices = CountedSlices(fleet.slices)
        if what == "pings":
            stage.hear(worker, Ping(2))
        else:
            stage.take(stage.core.handle(Lost(worker, "silent"), 0.0))
        return slices.walks

    assert walks(1) == walks(8) == 0
