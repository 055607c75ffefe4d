"""Models that come to a slice and go from it while it serves, on virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.ids import BatchId, ModelId, NodeId
from fabric.messages import (
    BatchFailed,
    Done,
    Host,
    LeftOut,
    Loading,
    ReplicaInfo,
    SliceFailed,
    SliceReady,
    SliceSpec,
)
from roles.gpu_worker.core import TELL_AGAIN_MS, WorkerCore
from roles.gpu_worker.events import (
    AgentUntold,
    BatchRan,
    End,
    Execute,
    LoadModel,
    LoadSlice,
    PushOutputs,
    UnloadModel,
    UnloadSlice,
    WorkerAction,
)
from roles.gpu_worker.executors.base import DeviceBroken, LoadFailed, ModelLoaded, RunFailed, Warming
from roles.gpu_worker.model_changes import LOAD_LIMIT_MS
from roles.gpu_worker.peer_checks import AGENT
from roles.runtime.core import SCHEDULER, Handle, Heard, Send, Tick
from tests.worker_builders import (
    SCHEDULER_AT,
    SLICE,
    actions_of,
    host,
    inputs,
    loaded,
    model_spec,
    part,
    run_batch,
    sent,
    serving_core,
    slice_spec,
    worker_core,
)

OUTPUTS = Handle(77)


def hosting(*names: str, slo_ms: float = 25.0) -> SliceSpec:
    return slice_spec(models=[model_spec(name, slo_ms=slo_ms) for name in names])


def replica(name: str) -> ReplicaInfo:
    model = model_spec(name)
    return ReplicaInfo(model.model_id, model.batch_size_max, model.exec_ms)


def hosts(actions: Sequence[WorkerAction]) -> list[list[str]]:
    """What the scheduler hears that the slice hosts."""
    told = [action.message for action in actions if isinstance(action, Send) and action.peer == SCHEDULER]
    return [[one.model_id for one in ready.replicas] for ready in told if isinstance(ready, SliceReady)]


def test_a_model_more_is_loaded_beside_those_that_serve_and_announced_when_it_is_warm() -> None:
    core = serving_core(hosting("a"))
    only = hosting("b")
    assert core.handle(host(hosting("a", "b")), 1.0) == [
        Send(AGENT, Loading(SLICE, ModelId("b"))),
        LoadModel(only, 1),
    ]
    core.handle(run_batch(model_id="a"), 2.0)
    assert actions_of(Execute, core.handle(inputs(0, 1, model_id="a"), 3.0)), "it serves on"
    refused = core.handle(run_batch(model_id="b", batch_id=2), 4.0)
    assert sent(Done, refused)[0].status == "expired"
    actions = core.handle(ModelLoaded(SLICE, 1, replica("b")), 5.0)
    assert hosts(actions) == [["a", "b"]]
    assert [action.peer for action in actions_of(Send, actions)] == [AGENT, SCHEDULER]
    core.handle(run_batch(model_id="b", batch_id=3), 6.0)
    (execute,) = actions_of(Execute, core.handle(inputs(0, 1, model_id="b", batch_id=3), 7.0))
    assert execute.run.model_id == "b"


def test_an_agent_that_has_to_be_told_again_hears_last_what_is_loaded_beside() -> None:
    """Should the process end in that load, it is the model's doing."""
    core = serving_core(hosting("a"))
    core.handle(host(hosting("a", "b")), 1.0)
    core.handle(AgentUntold(), 1.0)
    again = actions_of(Send, core.handle(Tick(), 1.0 + TELL_AGAIN_MS))
    assert [type(one.message) for one in again] == [SliceReady, Loading]
    assert again[-1] == Send(AGENT, Loading(SLICE, ModelId("b")))


def test_models_are_loaded_one_after_the_other() -> None:
    core = serving_core(hosting("a"))
    (load,) = actions_of(LoadModel, core.handle(host(hosting("a", "b", "c")), 1.0))
    actions = core.handle(ModelLoaded(SLICE, load.number, replica("b")), 2.0)
    assert hosts(actions) == [["a", "b"]]
    (load,) = actions_of(LoadModel, actions)
    assert [model.model_id for model in load.spec.models] == ["c"]
    assert hosts(core.handle(ModelLoaded(SLICE, load.number, replica("c")), 3.0)) == [["a", "b", "c"]]


def test_a_model_less_takes_no_new_batch_and_is_unloaded_after_its_last() -> None:
    core = serving_core(hosting("a", "b"))
    core.handle(run_batch(model_id="b"), 0.0)
    core.handle(inputs(0, 1, model_id="b"), 0.5)
    core.handle(run_batch(model_id="b", batch_id=2, latest_in_ms=50.0), 0.5)
    actions = core.handle(host(hosting("a")), 1.0)
    assert hosts(actions) == [["a"]]
    assert actions_of(UnloadModel, actions) == []
    refused = core.handle(run_batch(model_id="b", batch_id=3), 2.0)
    assert sent(Done, refused)[0].status == "expired"
    assert len(actions_of(Execute, core.handle(inputs(0, 1, model_id="b", batch_id=2), 3.0))) == 1
    actions = core.handle(BatchRan(SLICE, BatchId(1), OUTPUTS, (), 7.0, 0.5), 7.5)
    assert actions_of(UnloadModel, actions) == []
    actions = core.handle(BatchRan(SLICE, BatchId(2), OUTPUTS, (), 7.0, 7.5), 14.5)
    assert sent(Done, actions)[0].status == "ok"
    assert actions[-1] == UnloadModel(SLICE, ModelId("b"))


def test_a_last_batch_that_fails_is_run_apart_though_its_model_is_wanted_no_more() -> None:
    core = serving_core(hosting("a", "b"))
    core.handle(run_batch(part((0, 2)), model_id="b"), 1.0)
    core.handle(inputs(0, 1, model_id="b"), 1.0)
    core.handle(host(hosting("a")), 2.0)
    (again,) = actions_of(Execute, core.handle(RunFailed(SLICE, BatchId(1), "it raised"), 3.0))
    assert [one.live_seqs for one in again.parts] == [(0,)]


def test_a_load_that_fails_leaves_only_that_model_out() -> None:
    core = serving_core(hosting("a"))
    (load,) = actions_of(LoadModel, core.handle(host(hosting("a", "b", "c")), 1.0))
    actions = core.handle(ModelLoaded(SLICE, load.number, None, "no such file"), 2.0)
    ready = sent(SliceReady, actions)[0]
    assert ready.left_out == (LeftOut(SLICE, ModelId("b"), "no such file"),)
    assert hosts(actions) == [["a"]]
    assert len(actions_of(LoadModel, actions)) == 1, "the next one"
    assert sent(SliceFailed, actions) == []
    back = core.handle(host(hosting("a")), 3.0)
    assert sent(SliceReady, back)[0].left_out == ()


def test_a_model_that_is_not_loaded_in_time_is_left_out_and_the_next_one_loaded() -> None:
    core = serving_core(hosting("a"))
    core.handle(host(hosting("a", "b", "c")), 1.0)
    assert core.wake_at_ms == 1.0 + LOAD_LIMIT_MS
    actions = core.handle(Tick(), 1.0 + LOAD_LIMIT_MS)
    assert actions[0] == UnloadModel(SLICE, ModelId("b"))
    assert "not loaded within 120 s" in sent(SliceReady, actions)[0].left_out[0].reason
    (load,) = actions_of(LoadModel, actions)
    assert [model.model_id for model in load.spec.models] == ["c"]
    assert core.handle(ModelLoaded(SLICE, 1, replica("b")), 2.0 + LOAD_LIMIT_MS) == [], "it was given up"
    assert hosts(core.handle(ModelLoaded(SLICE, 2, replica("c")), 3.0 + LOAD_LIMIT_MS)) == [["a", "c"]]


def test_a_worker_that_was_stopped_itself_gives_a_load_its_time_anew() -> None:
    core = serving_core(hosting("a"))
    core.handle(host(hosting("a", "b")), 1.0)
    late_ms = 1_000.0 + LOAD_LIMIT_MS
    assert core.handle(Tick(), late_ms) == []
    assert core.wake_at_ms == late_ms + LOAD_LIMIT_MS
    assert hosts(core.handle(ModelLoaded(SLICE, 1, replica("b")), late_ms)) == [["a", "b"]]


def test_a_load_that_nobody_wants_any_more_is_given_up() -> None:
    core = serving_core(hosting("a"))
    core.handle(host(hosting("a", "b")), 1.0)
    assert core.handle(host(hosting("a")), 2.0) == [UnloadModel(SLICE, ModelId("b"))]
    assert core.handle(ModelLoaded(SLICE, 1, replica("b")), 3.0) == []
    (load,) = actions_of(LoadModel, core.handle(host(hosting("a", "b")), 4.0))
    assert load.number == 2
    assert core.handle(ModelLoaded(SLICE, 1, replica("b")), 5.0) == [], "of the load that was given up"
    assert hosts(core.handle(ModelLoaded(SLICE, 2, replica("b")), 6.0)) == [["a", "b"]]


def test_a_model_that_is_specified_otherwise_is_loaded_anew_once_it_is_unloaded() -> None:
    core = serving_core(hosting("a", "b"))
    changed = slice_spec(models=[model_spec("a"), model_spec("b", slo_ms=90.0)])
    actions = core.handle(host(changed), 1.0)
    assert hosts(actions) == [["a"]]
    assert [type(action) for action in actions if not isinstance(action, Send)] == [UnloadModel, LoadModel]


def test_a_slice_that_changes_while_it_loads_changes_when_it_has() -> None:
    core = worker_core()
    core.handle(host(hosting("a", "b")), 0.0)
    assert core.handle(host(hosting("a", "c")), 1.0) == []
    actions = core.handle(loaded(hosting("a", "b")), 2.0)
    assert actions_of(UnloadModel, actions) == [UnloadModel(SLICE, ModelId("b"))]
    assert len(actions_of(LoadModel, actions)) == 1
    assert [one.model_id for one in sent(SliceReady, actions)[0].replicas] == ["a"]


def test_a_slice_whose_first_models_all_failed_is_no_place_for_another() -> None:
    """Its agent starts it anew instead."""
    core = worker_core()
    core.handle(host(hosting("a")), 0.0)
    core.handle(LoadFailed(SLICE, "no such file"), 1.0)
    assert core.handle(host(hosting("a", "b")), 2.0)[0] == UnloadSlice(SLICE)


def test_what_the_agent_wants_left_out_is_not_loaded() -> None:
    core = serving_core(hosting("a"))
    out = LeftOut(SLICE, ModelId("b"), "left out after it ended its worker 3 times")
    actions = core.handle(
        Heard(AGENT, Host(NodeId("node-0"), (hosting("a", "b"),), SCHEDULER_AT, 0, (out,))), 1.0
    )
    assert actions_of(LoadModel, actions) == []
    assert sent(SliceReady, actions)[0].left_out == (out,)


def test_a_device_that_breaks_while_it_only_loads_a_model_is_that_models_doing() -> None:
    core = serving_core(hosting("a"))
    core.handle(host(hosting("a", "b")), 1.0)
    (failed,) = sent(SliceFailed, core.handle(DeviceBroken("illegal address"), 2.0))
    assert failed.model_id == "b"
    core = serving_core(hosting("a"))
    core.handle(run_batch(model_id="a"), 0.0)
    core.handle(inputs(0, 1, model_id="a"), 0.5)
    core.handle(host(hosting("a", "b")), 1.0)
    (failed,) = sent(SliceFailed, core.handle(DeviceBroken("illegal address"), 2.0))
    assert failed.model_id == "", "it may have been the batch"


def with_a_batch_behind(warming: Warming, *, is_given_up: bool = False) -> WorkerCore:
    """A core that serves `a`, of which one request waits for the device while that warms up `b`."""
    core = serving_core(hosting("a"))
    core.handle(host(hosting("a", "b")), 1.0)
    core.handle(warming, 2.0)
    if is_given_up:
        core.handle(Tick(), 1.0 + LOAD_LIMIT_MS)
    at_ms = 2.0 + LOAD_LIMIT_MS
    core.handle(run_batch(part((0, 1)), model_id="a"), at_ms)
    core.handle(inputs(0, model_id="a"), at_ms)
    return core


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_run_that_warms_a_model_up_and_does_not_end_is_that_models_doing(*, is_given_up: bool) -> None:
    core = with_a_batch_behind(Warming(SLICE, ModelId("b"), is_over=False), is_given_up=is_given_up)
    failed: list[SliceFailed] = []
    while not failed:
        assert core.wake_at_ms is not None
        actions = core.handle(Tick(), core.wake_at_ms)
        failed = sent(SliceFailed, actions)
    assert failed[0].model_id == "b"
    assert failed[0].reason == (
        "model 'b' hung: a run that warms it up kept a batch of 'a' from ending within 32000 ms"
    )
    told = [push.message for push in actions_of(PushOutputs, actions)]
    assert [one.code for one in told if isinstance(one, BatchFailed)] == ["WorkerLost"]


def test_a_batch_that_hangs_between_the_runs_that_warm_a_model_up_is_its_own_doing() -> None:
    core = with_a_batch_behind(Warming(SLICE, ModelId("b"), is_over=False))
    core.handle(Warming(SLICE, ModelId("b"), is_over=True), 3.0 + LOAD_LIMIT_MS)
    failed: list[SliceFailed] = []
    while not failed:
        assert core.wake_at_ms is not None
        failed = sent(SliceFailed, core.handle(Tick(), core.wake_at_ms))
    assert failed[0].model_id == "a"


def test_a_device_that_breaks_in_a_run_that_warms_a_model_up_is_that_models_doing() -> None:
    core = with_a_batch_behind(Warming(SLICE, ModelId("b"), is_over=False))
    (failed,) = sent(SliceFailed, core.handle(DeviceBroken("illegal address"), 3.0 + LOAD_LIMIT_MS))
    assert failed.model_id == "b"


def test_a_slice_that_is_unwanted_while_a_model_loads_is_unloaded_at_once() -> None:
    core = serving_core(hosting("a"), slice_spec("n/gpu1/0"))
    core.handle(host(hosting("a", "b"), slice_spec("n/gpu1/0")), 1.0)
    assert core.handle(host(slice_spec("n/gpu1/0")), 2.0) == [UnloadSlice(SLICE)]
    assert core.handle(ModelLoaded(SLICE, 1, replica("b")), 3.0) == []
    assert core.wake_at_ms is None


names = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("host"), names, st.sampled_from((25.0, 50.0))),
        st.tuples(st.just("loaded"), st.booleans()),
        st.tuples(st.just("stale")),
        st.tuples(st.just("grant"), st.sampled_from("abcd")),
        st.tuples(st.just("ran")),
        st.tuples(st.just("later"), st.sampled_from((1.0, LOAD_LIMIT_MS))),
    ),
    max_size=30,
)


class Device:
    """What an executor would hold, from what it was told; it says when it is told nonsense."""

    def __init__(self) -> None:
        self.models = {ModelId("a"): model_spec("a")}
        self.loading: LoadModel | None = None
        self.over: list[int] = []
        self.running: list[tuple[BatchId, ModelId]] = []

    def obey(self, actions: Sequence[WorkerAction]) -> None:
        for action in actions:
            match action:
                case LoadModel(spec, number):
                    assert self.loading is None, "one at a time"
                    assert spec.models[0].model_id not in self.models
                    self.loading = action
                    assert number not in self.over
                case UnloadModel(_, model_id):
                    assert model_id not in {running for _, running in self.running}
                    is_loading = self.loading is not None and self.loading.spec.models[0].model_id == model_id
                    if is_loading and self.loading is not None:
                        self.over.append(self.loading.number)
                        self.loading = None
                    else:
                        del self.models[model_id]
                case Execute(run, _):
                    assert run.model_id in self.models
                    assert len(self.running) < 2
                    self.running.append((run.batch_id, run.model_id))
                case LoadSlice() | UnloadSlice() | End():
                    raise AssertionError(f"the slice serves on: {action}")
                case _:
                    pass


@given(steps)
def test_whatever_is_wanted_when_in_the_end_it_hosts_that_and_nothing_else(
    script: list[tuple[object, ...]],
) -> None:
    core, device = serving_core(hosting("a")), Device()
    now_ms, batches, failed = 1.0, 0, set[tuple[str, float]]()
    wanted = hosting("a")

    def take(event: object) -> None:
        device.obey(core.handle(event, now_ms))  # type: ignore[arg-type]  # any event

    def finish_load(*, is_good: bool) -> None:
        load = device.loading
        assert load is not None
        device.loading = None
        device.over.append(load.number)
        (model,) = load.spec.models
        if is_good:
            device.models[model.model_id] = model
            take(ModelLoaded(SLICE, load.number, replica(model.model_id)))
        else:
            failed.add((model.model_id, model.slo_ms))
            take(ModelLoaded(SLICE, load.number, None, "no"))

    def finish_run() -> None:
        batch_id, _ = device.running.pop(0)
        take(BatchRan(SLICE, batch_id, OUTPUTS, (), 1.0, now_ms))

    for step in script:
        now_ms += 1.0
        match step:
            case ("host", list() as chosen, float() as slo_ms):
                models = [model_spec("a"), *(model_spec(n, slo_ms=slo_ms) for n in chosen if n != "a")]
                wanted = slice_spec(models=models)
                take(host(wanted))
                failed = {one for one in failed if one in {(m.model_id, m.slo_ms) for m in models}}
            case ("loaded", bool() as is_good) if device.loading is not None:
                finish_load(is_good=is_good)
            case ("stale",) if device.over:
                take(ModelLoaded(SLICE, device.over[-1], replica("b")))
            case ("grant", str() as name):
                batches += 1
                take(run_batch(model_id=name, batch_id=batches, latest_in_ms=5.0))
                take(inputs(0, 1, model_id=name, batch_id=batches))
            case ("ran",) if device.running:
                finish_run()
            case ("later", float() as wait_ms) if not device.running:
                now_ms += wait_ms
                if core.wake_at_ms is not None and core.wake_at_ms <= now_ms:
                    if device.loading is not None:
                        failed.add(
                            (device.loading.spec.models[0].model_id, device.loading.spec.models[0].slo_ms)
                        )
                    take(Tick())
    while device.running:
        finish_run()
    while device.loading is not None:
        finish_load(is_good=True)
    now_ms += 1_000.0
    take(Tick())
    left = {m.model_id: m for m in wanted.models if (m.model_id, m.slo_ms) not in failed}
    assert device.models == left
