"""Whatever happens around a frontend, in whatever order: each accepted request gets exactly one answer.

With one shard, and with several: models come and go in each, two list the same one, in any terms, and any of them is lost. An
application asks those models too: what its tasks bring is made from tensors that are there, and given back once.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fabric.ids import BatchId, Incarnation, ModelId, PeerId, SliceId
from fabric.messages import (
    LEAVING_TERM,
    Answer,
    Arrivals,
    BatchFailed,
    CancelRequest,
    Dropped,
    FrontendHello,
    HeadInfo,
    Inputs,
    InputsReturned,
    Left,
    Refusal,
    Returned,
    TensorInfo,
    TensorSpec,
    Withdraw,
)
from policies.graphs.graph import Stage
from roles.frontend.announced_runs import coded
from roles.frontend.core import FrontendCore
from roles.frontend.events import (
    ClientSaid,
    DropSlice,
    FrontendAction,
    FrontendEvent,
    InputsMade,
    InputsNotMade,
    KeepRow,
    MadeInputs,
    MakeInputs,
    OpenSlice,
    Preprocess,
    Preprocessed,
    PreprocessFailed,
    PushInputs,
    Release,
    Reply,
    ReplyWithAll,
    SchedulerLost,
    SchedulerSaid,
    Tell,
    TurnEnded,
    Unannounced,
    Unpushed,
    WorkerSaid,
)
from roles.runtime.core import NO_PAYLOAD, Handle, Lost, Tick
from tests.applications_stage import served
from tests.builders import (
    IMAGENET,
    asked,
    computed,
    directory,
    frontend_settings,
    grant,
    model_info,
    slice_info,
)

IMAGE = TensorInfo("input", "float32", (3, 224, 224))
MODELS = [
    model_info("digits", slo_ms=50.0),
    model_info("anything", slo_ms=20.0, inputs=()),
    model_info("vision", slo_ms=200.0, inputs=(IMAGE,), image=IMAGENET),
    replace(
        model_info("joint", slo_ms=30.0, inputs=()),
        heads=(HeadInfo(ModelId("joint-a"), 30.0), HeadInfo(ModelId("joint-b"), 300.0)),
    ),
]
HEADS = [model_info(head.model_id) for model in MODELS for head in model.heads]
PIXELS = (TensorSpec("image", "float32", (1, 8, 8)),)
PICTURE = (TensorSpec("input", "uint8", (1_000,)),)
SPECS: dict[ModelId, tuple[TensorSpec, ...]] = {ModelId("digits"): PIXELS, ModelId("vision"): PICTURE}
CLIENTS = [PeerId(f"client/{number}") for number in range(3)]
APPLICATION = served(
    Stage("see", ModelId("vision")),
    Stage("read", ModelId("digits"), ("see",)),
    Stage("guess", ModelId("anything"), ("see",), is_optional=True),
    Stage("both", ModelId("digits"), ("read", "guess"), is_answer=True),
    Stage("more", ModelId("anything"), ("both",), is_optional=True),
    slo_ms=150.0,
)


class World:
    """Everything around one frontend core, as careless as `draws` makes it, checking what the core does."""

    def __init__(self, draws: random.Random, shards: int = 1, *, has_application: bool = False) -> None:
        self.core = FrontendCore(
            replace(
                frontend_settings(pending_max=200, pending_bytes_max=40_000_000, shards=shards),
                applications=(APPLICATION,) if has_application else (),
            )
        )
        self.now_ms = 0.0
        self.finals: Counter[Handle] = Counter()
        self.pending: dict[tuple[PeerId, int], Handle] = {}
        self.codes: Counter[str] = Counter()
        self.batches_of_several = 0
        self._draws = draws
        self._has_application = has_application
        self._numbers = self._made = 0
        self._shards = range(shards)
        self._models = [[model for at, model in enumerate(MODELS) if at % shards == k] for k in self._shards]
        self._slices = [
            {SliceId(f"s{k}.{number}"): Incarnation("0") for number in range(2)} for k in self._shards
        ]
        self._left: list[set[ModelId]] = [set() for _ in self._shards]
        self._open: dict[SliceId, Incarnation] = {}
        self._kept: set[Handle] = set()
        self._decoding: list[Handle] = []
        self._asked_of: dict[Handle, ModelId] = {}
        self._jobs: list[MakeInputs] = []
        self._queued: list[defaultdict[ModelId, set[int]]] = [defaultdict(set) for _ in self._shards]
        self._issued: Counter[ModelId] = Counter()
        self._flights: list[Inputs] = []
        self._shard_of: dict[SliceId, int] = {}
        self._runs: list[tuple[Arrivals, int]] = []
        self._steps: Sequence[tuple[int, Callable[[], None]]] = (
            (30, self._ask),
            (4, self._cancel),
            (25, self._end_turn),
            (14, self._grant),
            (3, self._drop),
            (14, self._compute),
            (2, self._fail),
            (3, self._return),
            (5, self._give_inputs_back),
            (2, self._refuse_push),
            (3, self._preempt),
            (1, self._refuse_announcement),
            (2, self._change_slices),
            (1, self._change_models),
            (1, self._lose_scheduler),
            (4, self._tell_directory),
            (6, self._decode),
            (16, self._make_inputs),
            (1, self._lose_client),
            (10, self._wait),
        )
        for shard in self._shards:
            self._tell_directory(shard)

    def step(self) -> None:
        weights, steps = zip(*self._steps, strict=True)
        self._draws.choices(steps, weights)[0]()

    def finish(self) -> None:
        """Nobody says anything any more: the deadlines alone must answer."""
        while (wake_at_ms := self.core.wake_at_ms) is not None and self.pending:
            self.now_ms = max(self.now_ms, wake_at_ms)
            self._feed(Tick())
        assert not self.pending
        assert not self._kept, "every payload is released"
        assert set(self.finals.values()) <= {1}
        counters = self.core.counters
        assert counters["pending"] == counters["pending_bytes"] == counters.get("tasks_pending", 0) == 0
        ended = sum(counters.get(name, 0) for name in ("answers", "refusals", "abandoned"))
        assert counters.get("accepted", 0) == ended

    # ------------------------------------------------------------ what happens

    def _ask(self) -> None:
        number = self._numbers
        client = self._draws.choice(CLIENTS)
        if self.pending and self._draws.random() < 0.03:
            client, number = self._draws.choice(list(self.pending))  # a number that is taken
        self._numbers += 1
        applications = [model_info("app")] * (3 if self._has_application else 0)
        model = self._draws.choice([*MODELS, *HEADS, *applications, model_info("unknown")])
        specs = SPECS.get(model.model_id, ())
        if self._draws.random() < 0.05:
            specs = (*PIXELS, *PICTURE)
        budget_ms = self._draws.choice([None, None, 5.0, 80.0, 400.0, -1.0, float("nan")])
        request = asked(
            number, model.model_id, budget_ms, specs, client, self._draws.choice([0.0, 0.3, 30.0])
        )
        self._kept.add(request.payload)
        self._asked_of[request.payload] = model.model_id
        self._feed(request, asking=((client, number), request.payload))

    def _cancel(self) -> None:
        client, number = self._draws.choice([*self.pending, (CLIENTS[0], 0)])
        self._feed(ClientSaid(client, CancelRequest(number)))

    def _end_turn(self) -> None:
        if self.core.has_gathered:
            self._feed(TurnEnded())
            assert not self.core.has_gathered

    def _some_queued(self) -> tuple[ModelId, list[int], int] | None:
        shard = self._a_shard()
        queued = self._queued[shard]
        models = [model_id for model_id, seqs in queued.items() if seqs]
        if not models:
            return None
        model_id = self._draws.choice(models)
        seqs = sorted(queued[model_id])[: self._draws.randint(1, 8)]
        queued[model_id] -= set(seqs)
        return model_id, seqs, shard

    def _a_shard(self) -> int:
        return self._draws.choice(self._shards)

    def _grant(self) -> None:
        some = self._some_queued()
        if some is None:
            return
        model_id, seqs, shard = some
        slices = self._slices[shard]
        slice_id = self._draws.choice([*slices, SliceId("nowhere")])
        incarnation = slices.get(slice_id, Incarnation("0"))
        if self._draws.random() < 0.1:
            incarnation = Incarnation("former")
        runs = [(run.first_seq, run.count) for run in coded(seqs)]
        batch_id = self._draws.randrange(1_000)
        self._feed(
            grant(
                *runs,
                batch_id=batch_id,
                slice_id=slice_id,
                incarnation=incarnation,
                model_id=model_id,
                shard=shard,
            )
        )

    def _drop(self) -> None:
        some = self._some_queued()
        if some is not None:
            codes = ["Overloaded", "DeadlineExceeded", "NoReplica", "FromTheFuture", "ModelNotFound"]
            code = self._draws.choice(codes)
            self._feed(SchedulerSaid(Dropped(some[0], coded(some[1]), code, ""), shard=some[2]))

    def _flight(self) -> Inputs | None:
        if not self._flights:
            return None
        flight = self._draws.choice(self._flights)
        if self._draws.random() < 0.9:  # else it will be spoken of again
            self._flights.remove(flight)
        return flight

    def _compute(self) -> None:
        flight = self._flight()
        if flight is not None:
            specs = None if self._draws.random() < 0.95 else [TensorSpec("scores", "float32", (77,))]
            outputs = computed(
                *flight.live_seqs,
                batch_id=flight.batch_id,
                model_id=flight.model_id,
                slice_id=flight.slice_id,
                specs=specs,
            )
            self._kept.add(outputs.payload)
            self._feed(outputs)

    def _fail(self) -> None:
        flight = self._flight()
        if flight is not None:
            message = BatchFailed(
                flight.batch_id, flight.slice_id, flight.model_id, flight.live_seqs, "Internal", ""
            )
            self._feed(WorkerSaid(message))

    def _give_inputs_back(self) -> None:
        """By a worker that does not run them, as it says; it may repeat itself, or name others."""
        flight = self._flight()
        if flight is None:
            return
        seqs = list(flight.live_seqs)
        if self._draws.random() < 0.3:
            seqs += [*seqs, self._draws.randrange(60), -1]
        batch_id = flight.batch_id if self._draws.random() < 0.9 else BatchId(self._draws.randrange(1_000))
        back = InputsReturned(batch_id, flight.slice_id, flight.model_id, tuple(seqs), "too late")
        self._feed(WorkerSaid(back))

    def _return(self) -> None:
        flight = self._flight()
        if flight is not None:
            returned = Returned(flight.batch_id, flight.model_id, coded(flight.live_seqs), "")
            self._feed(SchedulerSaid(returned, shard=self._shard_of[flight.slice_id]))

    def _refuse_push(self) -> None:
        flight = self._flight()
        if flight is not None:
            self._feed(Unpushed(flight))

    def _preempt(self) -> None:
        """The scheduler stops a batch and queues its requests again; it may have ended already."""
        flight = self._flight()
        if flight is not None:
            self._queued[self._shard_of[flight.slice_id]][flight.model_id].update(flight.live_seqs)

    def _refuse_announcement(self) -> None:
        if self._runs:
            run, shard = self._runs[-1]
            self._queued[shard][run.model_id] -= set(range(run.first_seq, run.first_seq + run.count))
            self._feed(Unannounced(run, shard))

    def _change_slices(self) -> None:
        shard = self._a_shard()
        slices = self._slices[shard]
        slice_id = SliceId(f"s{shard}.{self._draws.randrange(3)}")
        if slice_id in slices and self._draws.random() < 0.5:
            del slices[slice_id]
        else:
            slices[slice_id] = Incarnation(str(self._draws.randrange(1 << 30)))
        self._tell_directory(shard)

    def _change_models(self) -> None:
        shard = self._a_shard()
        self._models[shard] = [
            replace(
                model, term=self._draws.randrange(LEAVING_TERM, 3), replicas=self._draws.choice([1, 1, 0])
            )
            if len(self._shards) > 1
            else model
            for model in self._draws.sample(MODELS, self._draws.randint(1, len(MODELS)))
        ]
        self._tell_directory(shard)

    def _lose_scheduler(self) -> None:
        shard = self._a_shard()
        if self._draws.random() < 0.5:
            self._queued[shard].clear()  # it restarted; otherwise it was only silent
        self._feed(SchedulerLost(shard=shard))

    def _tell_directory(self, shard: int | None = None) -> None:
        shard = self._a_shard() if shard is None else shard
        slices = [slice_info(slice_id, incarnation) for slice_id, incarnation in self._slices[shard].items()]
        self._shard_of |= dict.fromkeys(self._slices[shard], shard)
        is_known = self._draws.random() < 0.9
        self._feed(directory(self._models[shard], slices, lists_frontend=is_known, shard=shard))
        of_shard = {one: boot for one, boot in self._open.items() if self._shard_of[one] == shard}
        assert of_shard == self._slices[shard]

    def _decode(self) -> None:
        if self._decoding:
            handle = self._decoding.pop(self._draws.randrange(len(self._decoding)))
            is_fine = self._draws.random() < 0.8
            self._feed(
                Preprocessed(handle) if is_fine else PreprocessFailed(handle, "InvalidInput", "broken")
            )

    def _make_inputs(self) -> None:
        if not self._jobs:
            return
        job = self._jobs.pop(self._draws.randrange(len(self._jobs)))
        if self._draws.random() < 0.05:
            self._feed(InputsNotMade(job.job, "Internal", "it raised"))
            return
        model_id = APPLICATION.plan.graph.stage(job.stage).model_id
        specs = SPECS.get(model_id, ()) if self._draws.random() < 0.97 else (*PIXELS, *PICTURE)
        made = []
        for _ in range(self._draws.choice((0, 1, 1, 1, 2, 5))):
            self._made += 1
            handle = Handle((1 << 50) + self._made)
            self._kept.add(handle)
            made.append(MadeInputs(handle, specs, 256))
        self._feed(InputsMade(job.job, made))

    def _lose_client(self) -> None:
        client = self._draws.choice(CLIENTS)
        for key in [key for key in self.pending if key[0] == client]:
            del self.pending[key]
        self._feed(Lost(client, "gone"))

    def _wait(self) -> None:
        self.now_ms += self._draws.choice([0.01, 0.2, 1.0, 5.0, 20.0])
        wake_at_ms = self.core.wake_at_ms
        if wake_at_ms is not None and wake_at_ms <= self.now_ms:
            self._feed(Tick())

    # ------------------------------------------------------------ what the core does

    def _feed(self, event: FrontendEvent, asking: tuple[tuple[PeerId, int], Handle] | None = None) -> None:
        actions = list(self.core.handle(event, self.now_ms))
        if asking is not None and Release(asking[1]) in actions:
            at_the_door = actions.pop()
            assert isinstance(at_the_door, Reply)
            assert isinstance(at_the_door.message, Refusal)
            self.codes[at_the_door.message.code] += 1
            asking = None
        for action in actions:
            self._check(action)
        if asking is not None:
            assert asking[0] not in self.pending
            self.pending[asking[0]] = asking[1]
        assert not self.pending or self.core.wake_at_ms is not None

    def _check(self, action: FrontendAction) -> None:
        match action:
            case Reply(peer, Answer(number) | Refusal(number) as message, payload):
                self.codes[message.code if isinstance(message, Refusal) else "ok"] += 1
                assert payload == 0 or payload in self._kept
                assert (peer, number) in self.pending, "only what is pending is answered"
                self.finals[self.pending.pop((peer, number))] += 1
            case ReplyWithAll(peer, Answer(number), payloads):
                self.codes["whole"] += 1
                assert self._kept.issuperset(payloads)
                assert (peer, number) in self.pending, "only what is pending is answered"
                self.finals[self.pending.pop((peer, number))] += 1
            case MakeInputs(_, _, _, after, request):
                assert request in self._kept
                assert self._kept.issuperset(handle for _, handles in after for handle in handles)
                self._jobs.append(action)
            case KeepRow(payload, _, kept):
                assert payload in self._kept
                assert kept < NO_PAYLOAD
                self._kept.add(kept)
            case Release(payload):
                assert payload in self._kept, "a payload is released once"
                self._kept.remove(payload)
            case Tell(Arrivals() as run, shard):
                assert run.model_id not in self._left[shard], "it said that it had left"
                assert any(run.model_id == model.model_id for model in self._models[shard])
                assert run.first_seq == self._issued[run.model_id], "seqs are dense"
                assert run.count >= 1
                # A stage's request may be due already: stages behind it take the rest.
                assert run.budget_ms >= 0.0 if self._has_application else run.budget_ms > 0.0
                assert 0.0 <= run.span_ms <= 1.0
                assert run.ready_in_ms >= 0.0
                seqs = range(run.first_seq, run.first_seq + run.count)
                self._issued[run.model_id] += run.count
                self._queued[shard][run.model_id].update(seqs)
                self._runs.append((run, shard))
            case Tell(Withdraw(model_id, runs), shard):
                for dead in runs:
                    dead_seqs = range(dead.first_seq, dead.first_seq + dead.count)
                    self._queued[shard][model_id].difference_update(dead_seqs)
            case Tell(Left(model_id, is_back), shard):
                (self._left[shard].discard if is_back else self._left[shard].add)(model_id)
            case Tell(FrontendHello(), shard):
                if self._draws.random() < 0.9:  # else it is lost on the way
                    self._left[shard].clear()
            case PushInputs(inputs, payloads):
                assert self._open[inputs.slice_id] == inputs.incarnation
                assert len(payloads) == len(inputs.live_seqs)
                assert all(payload in self._kept for payload in payloads)
                assert not set(payloads) & set(self._decoding), "what is pushed has been decoded"
                heads = {head.model_id for model in MODELS for head in model.heads}
                named = [self._asked_of.get(payload) for payload in payloads]
                assert list(inputs.heads) == [name for name in named if name in heads]
                assert len(inputs.heads) in (0, len(payloads))
                assert bool(inputs.heads) == (bool(payloads) and inputs.model_id == "joint")
                self.batches_of_several += len(set(inputs.heads)) > 1
                self._flights.append(inputs)
            case OpenSlice(slice_id, incarnation):
                self._open[slice_id] = incarnation
            case DropSlice(slice_id, incarnation):
                assert self._open.pop(slice_id) == incarnation
                self._flights = [
                    one for one in self._flights if self._draws.random() < 0.5 or one.slice_id != slice_id
                ]
            case Preprocess(payload):
                assert payload in self._kept
                self._decoding.append(payload)
            case _:
                raise AssertionError(f"not expected: {action}")


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    steps=st.integers(1, 400),
    shards=st.sampled_from([1, 1, 2, 3]),
    has_application=st.booleans(),
)
def test_every_accepted_request_is_answered_exactly_once(
    seed: int,
    steps: int,
    shards: int,
    *,
    has_application: bool,
) -> None:
    world = World(random.Random(seed), shards, has_application=has_application)
    for _ in range(steps):
        world.step()
    world.finish()


def test_ten_thousand_requests_are_each_answered_exactly_once() -> None:
    world = World(random.Random(20))
    while world.core.counters.get("accepted", 0) < 10_000:
        world.step()
    world.finish()
    assert world.finals.total() + world.core.counters["abandoned"] == world.core.counters["accepted"]
    expected = (
        "ok Overloaded DeadlineExceeded Cancelled WorkerLost NoReplica ModelNotFound InvalidInput Internal"
    )
    assert set(expected.split()) <= set(world.codes), "the test has seen every fate"
    assert world.codes["ok"] > 1_000
    assert world.batches_of_several > 100, "of heads"


def test_requests_of_an_application_with_two_thousand_tasks_are_each_answered_exactly_once() -> None:
    world = World(random.Random(21), has_application=True)
    while world.core.counters.get("tasks", 0) < 2_000:
        world.step()
    world.finish()
    assert world.finals.total() + world.core.counters["abandoned"] == world.core.counters["accepted"]
    assert world.codes["whole"] > 20
    assert world.core.counters["tasks_cancelled"] > 0


def test_the_same_events_give_the_same_actions() -> None:
    worlds = [World(random.Random(7)), World(random.Random(7))]
    for _ in range(2_000):
        for world in worlds:
            world.step()
    assert worlds[0].core.counters == worlds[1].core.counters
    assert worlds[0].codes == worlds[1].codes
