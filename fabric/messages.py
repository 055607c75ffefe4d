"""Every message that crosses a process line, one frozen struct each, one closed union.

Wire form: MessagePack arrays, first element the integer tag. Fields are only ever appended, with a default,
so an older peer can read a newer message. No deadline crosses a line: a message carries a budget or a
duration in ms and its receiver adds its own clock. `docs/wire.md` has the same as tables.

Tensors are not in here: they ride as raw frames behind the header, described by the envelope's `TensorSpec`s.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar

import msgspec

from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, NodeId, SliceId

TENSORS_MAX: Final = 4_096
"""Of one message."""
RANK_MAX: Final = 8
PARCELS_MAX: Final = 64
"""Messages that may travel as one."""
REQUESTS_TOLD_MAX: Final = 4_096
"""Runs that one message speaks of. A batch has no more requests; of what waits there may be more: see `split_runs`."""
PARTS_MAX: Final = 1_024
"""Of one batch: frontends that have requests in it."""
ITEMS_MAX: Final = 65_536
"""In any tuple or dict of a message."""

ADDRESSES_MAX: Final = 16
"""Of one peer: a role has one per transport."""

ItemT = TypeVar("ItemT")
Listed = Annotated[tuple[ItemT, ...], msgspec.Meta(max_length=ITEMS_MAX)]
"""Lists in what anybody may send us: their length is looked at before anything of them is decoded."""

Addresses = Annotated[tuple[str, ...], msgspec.Meta(max_length=ADDRESSES_MAX)]

Shape = Annotated[tuple[int, ...], msgspec.Meta(max_length=RANK_MAX)]

# ---------------------------------------------------------------- values inside messages


class Value(msgspec.Struct, frozen=True, array_like=True):
    """A part of a message; never sent alone."""


StructT = TypeVar("StructT", bound=msgspec.Struct)


def replaced(struct: StructT, **fields: Any) -> StructT:
    """The same with other values in some fields."""
    return msgspec.structs.replace(struct, **fields)


class SharedAt(Value, frozen=True):
    """Bytes in memory that processes of one host share (`fabric/shared_memory.py`)."""

    arena: str
    offset: int


class TensorSpec(Value, frozen=True):
    """Raw bytes: little-endian, C order. `dtype` is numpy's name, such as ``float32``. `at`: they have no frame."""

    name: str
    dtype: str
    shape: Shape
    at: SharedAt | None = None


class TensorInfo(Value, frozen=True):
    """One input or output of a model, for a single request: `shape` has no batch axis; -1 is any length."""

    name: str
    dtype: str
    shape: Shape


class ImagePreprocess(Value, frozen=True):
    """Decode, resize the shorter side, crop the centre, scale to 0..1, normalise per channel; CHW float32.

    `input_name` is the model input it produces.
    """

    input_name: str
    resize: int
    crop: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class ModelInfo(Value, frozen=True):
    """What a frontend must know of a model. Empty `inputs` means any tensors are accepted (emulated models)."""

    model_id: ModelId
    slo_ms: float
    inputs: Listed[TensorInfo] = ()
    outputs: Listed[TensorInfo] = ()
    image: ImagePreprocess | None = None
    replicas: int = 0
    """How many ready slices host it now."""


class SliceInfo(Value, frozen=True):
    """Where a ready slice takes its inputs; `addresses` are tried in order (ipc first, for the same host)."""

    slice_id: SliceId
    incarnation: Incarnation
    node_id: NodeId
    addresses: Addresses


class FrontendInfo(Value, frozen=True):
    """Where a frontend takes outputs."""

    frontend_id: FrontendId
    incarnation: Incarnation
    addresses: Addresses


class SeqRun(Value, frozen=True):
    """Requests `first_seq` … `first_seq + count - 1` of one frontend and model."""

    first_seq: int
    count: int


Runs = Annotated[tuple[SeqRun, ...], msgspec.Meta(max_length=REQUESTS_TOLD_MAX)]


def split_runs(runs: tuple[SeqRun, ...]) -> Iterator[tuple[SeqRun, ...]]:
    """As many at a time as a message may hold."""
    for begin in range(0, len(runs), REQUESTS_TOLD_MAX):
        yield runs[begin : begin + REQUESTS_TOLD_MAX]


class Part(Value, frozen=True):
    """What one frontend has in a batch. Its place in `RunBatch.parts` is the part number."""

    frontend_id: FrontendId
    runs: Runs


Parts = Annotated[tuple[Part, ...], msgspec.Meta(max_length=PARTS_MAX)]


class LoaderSpec(Value, frozen=True):
    """How a real device gets a model: exactly one of `zoo` and `python` is set.

    zoo: ``torchvision`` (with `arch`, random weights unless `weights` names a local file), or ``transformers``
    (`arch` a type such as ``bert``, with `config` over its defaults as (key, JSON) pairs; or `weights`, a local
    directory; or, `from_hub`, `arch` a name there).
    python: ``module:Class`` with `load`, `infer(batch)`, `example`.
    `cuda_graphs` None: where it is known to be safe. The rest is in docs/worker.md.
    """

    zoo: str | None = None
    arch: str | None = None
    python: str | None = None
    weights: str | None = None
    top_k: int | None = None
    seed: int = 0
    dtype: str = "float32"
    channels_last: bool = False
    cuda_graphs: bool | None = None
    sequence_length: int = 512
    config: Listed[tuple[str, str]] = ()
    from_hub: bool = False


class ModelSpec(Value, frozen=True):
    """A model to host on a slice. `exec_ms[b - 1]` is l(b): required on emulated devices, a hint on real ones.

    `profile_ref` names the shipped profile that l(b) is from, where it is from one.
    """

    model_id: ModelId
    slo_ms: float
    batch_size_max: int
    loader: LoaderSpec | None = None
    exec_ms: Listed[float] = ()
    memory_bytes: int = 0
    profile_ref: str = ""
    run_limit_ms: float | None = None
    """A run that takes longer has hung; None: twenty times l(b), at least 2 s."""


class InterferenceOption(Value, frozen=True):
    """An option of an interference law, as a configuration has it."""

    name: str
    value: float


class InterferenceSpec(Value, frozen=True):
    """How slices of one emulated GPU disturb each other: an interference law's name and its options."""

    name: str
    options: Listed[InterferenceOption] = ()


class SliceSpec(Value, frozen=True):
    """A slice that should exist: a share of one GPU (None: no limit) and the models on it.

    `interference` None: it feels no neighbours, or its device is real and they disturb it by themselves.
    """

    slice_id: SliceId
    gpu: int
    device: str  # emulated | cpu | cuda
    share_percent: float | None
    models: Listed[ModelSpec]
    interference: InterferenceSpec | None = None

    def is_same_but_models(self, other: SliceSpec) -> bool:
        """Whether a worker that serves one of the two can become the other: nothing but the models differs."""
        return replaced(self, models=other.models) == other


class ReplicaInfo(Value, frozen=True):
    """A model on a slice that is loaded and warm. `exec_ms[b - 1]` is what the worker measured or emulates."""

    model_id: ModelId
    batch_size_max: int
    exec_ms: Listed[float]
    inputs: Listed[TensorInfo] = ()
    outputs: Listed[TensorInfo] = ()
    image: ImagePreprocess | None = None
    memory_bytes: int = 0


class LeftOut(Value, frozen=True):
    """A model that its slice should host and does not: it cannot be loaded, or has hung too often."""

    slice_id: SliceId
    model_id: ModelId
    reason: str


class GpuInfo(Value, frozen=True):
    """One device of a node, in the node's own order. What follows `memory_bytes` is known of NVIDIA GPUs only.

    `gpu_type` is the configuration's word, which profiles go by; `name` is what the driver calls it.
    """

    gpu: int
    gpu_type: str
    device: str
    memory_bytes: int = 0
    uid: str = ""  # of the physical GPU, as in CUDA_VISIBLE_DEVICES
    name: str = ""
    sm_count: int = 0  # 0: not known
    compute_capability: str = ""  # such as "8.0"
    is_mig: bool = False
    driver: str = ""


class GpuSharing(Value, frozen=True):
    """How the slices of a GPU share it. `reason`: why not by MPS, or what else a person should know."""

    gpu: int
    mode: str  # mps | time-sharing | mig | starting
    reason: str = ""


class GpuSample(Value, frozen=True):
    """What a GPU's own sensors say; None where it has no such sensor."""

    gpu: int
    busy_percent: float | None = None  # of the last sampling period some kernel ran
    memory_used_bytes: int | None = None
    power_w: float | None = None
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    throttle: Listed[str] = ()  # why the clocks are lower than they could be, such as sw_power_cap


class GpuReport(Value, frozen=True):
    """One GPU as the scheduler knows it. `sampled_ago_ms` None: nothing was ever measured."""

    node_id: NodeId
    info: GpuInfo
    sharing: GpuSharing | None = None
    sample: GpuSample | None = None
    sampled_ago_ms: float | None = None


class Ledger(Value, frozen=True):
    """Where a request's time went, in ms. `held_ms` was chosen by the scheduler, `waited_ms` was forced on it."""

    network_ms: float = 0.0  # client -> frontend and back; filled by the client
    preprocess_ms: float = 0.0
    held_ms: float = 0.0
    waited_ms: float = 0.0
    transfer_ms: float = 0.0
    queue_ms: float = 0.0  # inputs complete on the device -> start
    gpu_ms: float = 0.0
    return_ms: float = 0.0
    total_ms: float = 0.0  # frontend receipt -> answer; the client replaces it by send -> receipt
    batch_size: int = 0
    slice_id: SliceId = SliceId("")
    reason: str = ""  # why the batch left when it did: full, frontrun, slice_free, ...

    def seen_by_client(self, total_ms: float) -> Ledger:
        """The frontend's ledger for one who waited `total_ms` in all: the difference was the network."""
        return msgspec.structs.replace(self, network_ms=max(0.0, total_ms - self.total_ms), total_ms=total_ms)


# ---------------------------------------------------------------- messages


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of everything that is sent."""


# client -> frontend and back (tensors on the same connection)


class Infer(Message, frozen=True, tag=1):
    """Client -> frontend, with input tensors: one request. `budget_ms` None means the model's SLO.

    The budget ends when the client has the answer: `way_ms` of it go by between client and frontend, as far
    as the client has measured, and are not the frontend's to spend.
    """

    request_no: int
    model_id: ModelId
    budget_ms: float | None = None
    way_ms: float = 0.0


class CancelRequest(Message, frozen=True, tag=2):
    """Client -> frontend: forget it; answered by `Refusal(Cancelled)` unless the answer is already out."""

    request_no: int


class Answer(Message, frozen=True, tag=3):
    """Frontend -> client, with output tensors."""

    request_no: int
    ledger: Ledger


class Refusal(Message, frozen=True, tag=4):
    """Frontend -> client: the final answer when there are no outputs."""

    request_no: int
    code: str
    reason: str
    retryable: bool


class ModelsAsked(Message, frozen=True, tag=5):
    """Client -> frontend: asks which models there are."""


class ModelsListed(Message, frozen=True, tag=6):
    """Frontend -> client."""

    models: Listed[ModelInfo]


class Ping(Message, frozen=True, tag=7):
    """Anyone -> anyone: asks for a sign of life, answered at once by `Pong` with the same number."""

    number: int


class Pong(Message, frozen=True, tag=8):
    """The answer to `Ping`. A round trip also measures the link's minimum RTT.

    `memory`: who shares memory with the sender may send tensors through it (see `fabric/shared_memory.py`).
    """

    number: int
    memory: str = ""


# frontend <-> scheduler


class FrontendHello(Message, frozen=True, tag=10):
    """Frontend -> scheduler: first message, and again after a reconnect."""

    frontend_id: FrontendId
    incarnation: Incarnation
    addresses: Addresses


class Directory(Message, frozen=True, tag=11):
    """Scheduler -> frontends and workers: everything that exists now. A slice not listed is gone."""

    version: int
    models: Listed[ModelInfo]
    slices: Listed[SliceInfo]
    frontends: Listed[FrontendInfo]


class Arrivals(Message, frozen=True, tag=12):
    """Frontend -> scheduler: a run of requests for one model wants places in batches.

    Budgets never fall along a run: `budget_ms` is the tightest, `span_ms` (at most 1) the spread to the
    loosest. `ready_in_ms` covers preprocessing. `slack_ms`: was kept back for what cannot be known, so that a result
    up to so much later may still be of use.
    """

    model_id: ModelId
    first_seq: int
    count: int
    budget_ms: float
    span_ms: float = 0.0
    ready_in_ms: float = 0.0
    slack_ms: float = 0.0


class Withdraw(Message, frozen=True, tag=13):
    """Frontend -> scheduler: these are dead (cancelled or expired); sent when half a run is."""

    model_id: ModelId
    runs: Runs


class Grant(Message, frozen=True, tag=14):
    """Scheduler -> frontend: push the inputs of `runs` to that slice as part `part` of the batch.

    `waited_ms` is what the batch waited although the discipline wanted to go (no slice was free).
    """

    batch_id: BatchId
    slice_id: SliceId
    incarnation: Incarnation
    model_id: ModelId
    part: int
    runs: Runs
    batch_size: int
    start_in_ms: float
    waited_ms: float
    reason: str


class Dropped(Message, frozen=True, tag=15):
    """Scheduler -> frontend: these will not run. `code` is a request error's wire code."""

    model_id: ModelId
    runs: Runs
    code: str
    reason: str


class Returned(Message, frozen=True, tag=16):
    """Scheduler -> frontend: granted, but not run, through no fault of theirs. Announce again if budgets allow."""

    batch_id: BatchId
    model_id: ModelId
    runs: Runs
    reason: str


# worker <-> scheduler


class SliceReady(Message, frozen=True, tag=20):
    """Worker -> scheduler and agent: this slice is loaded, warm and takes inputs at `addresses`.

    `left_out`: models it should host and does not.
    """

    slice_id: SliceId
    incarnation: Incarnation
    node_id: NodeId
    gpu: int
    addresses: Addresses
    replicas: Listed[ReplicaInfo]
    left_out: Listed[LeftOut] = ()


class RunBatch(Message, frozen=True, tag=21):
    """Scheduler -> worker: run this batch in `start_in_ms`, in `latest_in_ms` with the parts that came.

    After `latest_in_ms` the tightest deadline in the batch is lost, after `expires_in_ms` all of them are, with
    their slack: a batch that is late for its first requests still serves the others.
    """

    batch_id: BatchId
    slice_id: SliceId
    incarnation: Incarnation
    model_id: ModelId
    parts: Parts
    start_in_ms: float
    latest_in_ms: float
    expires_in_ms: float


class Done(Message, frozen=True, tag=22):
    """Worker -> scheduler: the batch ended. `status` is ok | failed | expired (not launched: too late) | preempted.

    `missing` are parts (with the seqs) whose inputs had not come. Times: `transfer_ms` from the receipt of RunBatch
    until the last input (until it was waited for no more, where one is missing), `queue_ms` until the start,
    `exec_ms` the run; 0 where it did not happen.
    """

    batch_id: BatchId
    slice_id: SliceId
    model_id: ModelId
    status: str
    ran: int
    missing: Parts
    transfer_ms: float
    queue_ms: float
    exec_ms: float


class PreemptBatch(Message, frozen=True, tag=23):
    """Scheduler -> worker: stop that batch if you can; its `Done` says whether it was `preempted`.

    The scheduler grants its requests again, so a frontend may be granted a request more than once; only the
    newest grant counts.
    """

    batch_id: BatchId
    slice_id: SliceId


# frontend <-> worker (PUSH/PULL, with tensors)


class Inputs(Message, frozen=True, tag=30):
    """Frontend -> worker: the inputs of one part, request after request in `live_seqs` order.

    Every request brings the same number of tensors: frames are grouped by request. Seqs of the part that are
    not live were cancelled or have expired.
    """

    batch_id: BatchId
    slice_id: SliceId
    incarnation: Incarnation
    model_id: ModelId
    frontend_id: FrontendId
    part: int
    live_seqs: Listed[int]


class Outputs(Message, frozen=True, tag=31):
    """Worker -> frontend: one frame per output, the rows in `seqs` order."""

    batch_id: BatchId
    slice_id: SliceId
    model_id: ModelId
    seqs: Listed[int]
    batch_size: int
    transfer_ms: float
    queue_ms: float
    gpu_ms: float


class BatchFailed(Message, frozen=True, tag=32):
    """Worker -> frontend: these ran into an error; `code` is a request error's wire code."""

    batch_id: BatchId
    slice_id: SliceId
    model_id: ModelId
    seqs: Listed[int]
    code: str
    reason: str


# node agent <-> scheduler


class SliceState(StrEnum):
    """What became of a slice that should exist."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    LOST = "lost"
    STOPPED = "stopped"


class SliceStatus(Value, frozen=True):
    """`state`: a `SliceState`; `reason` says why for the last three."""

    slice_id: SliceId
    incarnation: Incarnation
    state: str
    reason: str = ""


class NodeHello(Message, frozen=True, tag=40):
    """Agent -> scheduler: first message, and again after a reconnect: what is there and what runs.

    `workers_outlive_agent`: when this agent is lost, its workers are not, until they are silent themselves.
    """

    node_id: NodeId
    incarnation: Incarnation
    gpus: Listed[GpuInfo]
    slices: Listed[SliceStatus]
    workers_outlive_agent: bool = False


class DesiredSlices(Message, frozen=True, tag=41):
    """Scheduler -> agent: these slices should exist on your node, and no others."""

    version: int
    slices: Listed[SliceSpec]


class SliceChanged(Message, frozen=True, tag=42):
    """Agent -> scheduler: a slice changed its state. A lost one is reported at once (process handle)."""

    node_id: NodeId
    status: SliceStatus


class Telemetry(Message, frozen=True, tag=43):
    """Agent -> scheduler: what its GPUs do, once a second, and when their sharing changes. NVIDIA GPUs only."""

    node_id: NodeId
    samples: Listed[GpuSample]
    sharing: Listed[GpuSharing]


# worker <-> node agent


class WorkerHello(Message, frozen=True, tag=50):
    """Worker -> agent: the process named `worker_id` is up and asks what to host.

    With `slices` it hosts them already, for an agent that is gone, and asks this one to adopt it.
    """

    worker_id: str
    incarnation: Incarnation
    pid: int
    slices: Listed[SliceSpec] = ()


class Host(Message, frozen=True, tag=51):
    """Agent -> worker: host these slices; introduce yourself to the scheduler at `scheduler_addresses`.

    `agent_pid` is the process that a worker which may outlive its agent watches; 0: not said. Models `left_out` are
    not even loaded.
    """

    node_id: NodeId
    slices: Listed[SliceSpec]
    scheduler_addresses: Addresses
    agent_pid: int = 0
    left_out: Listed[LeftOut] = ()


class SliceFailed(Message, frozen=True, tag=52):
    """Worker -> agent: this slice cannot be served (no model loads, its device broke); its reason in words.

    `model_id`: it ends because of that model, whose run hung or whose load broke the device; empty: for another reason.
    """

    slice_id: SliceId
    incarnation: Incarnation
    reason: str
    model_id: ModelId = ModelId("")


class Loading(Message, frozen=True, tag=54):
    """Worker -> agent: begins to load that model; should the process end or hang now, it is the model's doing."""

    slice_id: SliceId
    model_id: ModelId


class Stop(Message, frozen=True, tag=53):
    """Agent -> worker: finish what runs within `grace_ms`, then end."""

    grace_ms: float


# anyone -> scheduler, for people


class StatusAsked(Message, frozen=True, tag=60):
    """Operator -> any role's control socket."""


class SliceReport(Value, frozen=True):
    """One slice as the scheduler sees it. `state`: a `SliceState`; a worker says how far it is with the slice."""

    slice_id: SliceId
    state: str
    reason: str
    models: Listed[ModelId]
    batches: int
    requests: int
    left_out: Listed[LeftOut] = ()


class UnplacedInfo(Value, frozen=True):
    """A model, or that part of its rate, that found no place."""

    model_id: ModelId
    rate_rps: float | None
    reason: str


class GpuRef(Value, frozen=True):
    """One GPU of a node, in the node's own order."""

    node_id: NodeId
    gpu: int


class ReplicaHint(Value, frozen=True):
    """What a plan says of a model on a slice: batch and promised run time (None: nothing), weight and rate.

    `batch_max` binds: the slice must be replaced for another one.
    """

    model_id: ModelId
    batch: int | None = None
    weight: float = 1.0
    rate_rps: float | None = None
    predicted_ms: float | None = None
    batch_max: int | None = None


class CurrentSlice(Value, frozen=True):
    """A slice that runs, as a planner sees it."""

    slice_id: SliceId
    node_id: NodeId
    gpu: int
    share_percent: float | None
    hints: Listed[ReplicaHint]
    memory_bytes: int


class KeptSlice(Value, frozen=True):
    """A slice that stays as it is, with the new plan's hints."""

    slice_id: SliceId
    hints: Listed[ReplicaHint]


class NewSlice(Value, frozen=True):
    """A slice to start once all of `after` have ended: there is no memory for both."""

    node_id: NodeId
    spec: SliceSpec
    hints: Listed[ReplicaHint]
    after: Listed[SliceId] = ()


class ChangedSlice(Value, frozen=True):
    """A slice that serves on, with these models in the end: what is new is loaded beside the others."""

    slice_id: SliceId
    models: Listed[ModelSpec]
    hints: Listed[ReplicaHint]


class MoveInfo(Value, frozen=True):
    """All `starts` become ready and `changes` load, then `ends` and what `changes` leave out are drained.

    An earlier `wave` is over before it begins.
    """

    wave: int
    starts: Listed[NewSlice]
    ends: Listed[SliceId]
    changes: Listed[ChangedSlice] = ()


class ModelAdvice(Value, frozen=True):
    """Measured and planned rate; `gpus`: what the model lacks, or (negative) leaves idle, in GPUs' worth."""

    model_id: ModelId
    rate_rps: float
    planned_rps: float | None
    gpus: float = 0.0


class PlanReport(Value, frozen=True):
    """What the controller does: `state` steady | planning | moving, and why; `gpus_advised` of `gpus` in all.

    `lately`: what it did last, oldest first.
    """

    state: str
    reason: str
    gpus: int
    gpus_advised: int
    models: Listed[ModelAdvice]
    moves_done: int
    moves_failed: int
    unplaced: Listed[UnplacedInfo] = ()
    lately: Listed[str] = ()


class StatusListed(Message, frozen=True, tag=61):
    """The answer: identity, beliefs, and counters by name (`bytes_in`, `bytes_out`, `requests_dropped`, …)."""

    role_id: str
    pid: int
    slices: Listed[SliceReport]
    models: Listed[ModelInfo]
    counters: dict[str, float]
    gpus: Listed[GpuReport] = ()
    plan: PlanReport | None = None


# operator -> scheduler, and what the scheduler has computed aside (docs/dynamic-placement.md)


class ModelsAdd(Message, frozen=True, tag=62):
    """Operator -> scheduler: serve these too. `document`: a JSON list of sections as in the file's `models`."""

    request_no: int
    document: str


class ModelsRemove(Message, frozen=True, tag=63):
    """Operator -> scheduler: serve these no more."""

    request_no: int
    model_ids: Listed[ModelId]


class ModelSet(Message, frozen=True, tag=64):
    """Operator -> scheduler: another SLO or declared rate; None leaves it as it is."""

    request_no: int
    model_id: ModelId
    slo_ms: float | None = None
    rate_rps: float | None = None


class DrainAsked(Message, frozen=True, tag=65):
    """Operator -> scheduler: plan without that node, or that GPU of it. `is_back`: plan with it again."""

    request_no: int
    node_id: NodeId
    gpu: int | None = None
    is_back: bool = False


PlanChange = ModelsAdd | ModelsRemove | ModelSet | DrainAsked
"""What an operator may ask for while everything serves."""


class Changed(Message, frozen=True, tag=66):
    """Scheduler -> operator: what became of the request. `status`: ok | partial | failed | refused.

    refused: nothing was changed, `code` says why (UnknownModel, NameTaken, InvalidConfig, UnknownGpu, Busy);
    partial: `unplaced` found no place; failed: rolled back. The numbers are of slices; `changed` ones serve on with
    other models.
    """

    request_no: int
    status: str
    code: str = ""
    reason: str = ""
    started: int = 0
    ended: int = 0
    kept: int = 0
    unplaced: Listed[UnplacedInfo] = ()
    changed: int = 0


class PlanAsked(Message, frozen=True, tag=70):
    """Scheduler core -> its planner: place this `document` (JSON; paths relative to `base_dir`).

    `rates_rps` override the document's; `gpus_out` are not to be used. With a `grown` slice: change
    nothing but its share, to `share_percent`.
    """

    number: int
    document: str
    base_dir: str
    current: Listed[CurrentSlice]
    rates_rps: dict[str, float]
    gpus_out: Listed[GpuRef] = ()
    grown: SliceId = SliceId("")
    share_percent: float | None = None


class PlanMade(Message, frozen=True, tag=71):
    """The planner's answer, with the rates it planned for. With a `reason` there is no plan.

    `priorities` are those of `models`, in their order; slices of `moves` have no names of their own yet.
    """

    number: int
    reason: str = ""
    models: Listed[ModelSpec] = ()
    priorities: Listed[float] = ()
    kept: Listed[KeptSlice] = ()
    moves: Listed[MoveInfo] = ()
    unplaced: Listed[UnplacedInfo] = ()
    rates_rps: dict[str, float] = {}


AnyMessage = (
    Infer
    | CancelRequest
    | Answer
    | Refusal
    | ModelsAsked
    | ModelsListed
    | Ping
    | Pong
    | FrontendHello
    | Directory
    | Arrivals
    | Withdraw
    | Grant
    | Dropped
    | Returned
    | SliceReady
    | RunBatch
    | Done
    | PreemptBatch
    | Inputs
    | Outputs
    | BatchFailed
    | NodeHello
    | DesiredSlices
    | SliceChanged
    | Telemetry
    | WorkerHello
    | Host
    | SliceFailed
    | Loading
    | Stop
    | StatusAsked
    | StatusListed
    | ModelsAdd
    | ModelsRemove
    | ModelSet
    | DrainAsked
    | Changed
    | PlanAsked
    | PlanMade
)


class Parcel(Value, frozen=True):
    """One message and the tensors that ride with it, described in their order."""

    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=TENSORS_MAX)]
    body: AnyMessage


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The header frame: what was sent to one peer at one moment, in order.

    `sent_at_ms` is on the sender's clock and measures queueing only, never a deadline.
    """

    version: int
    epoch: int
    sent_at_ms: float
    parcels: Annotated[tuple[Parcel, ...], msgspec.Meta(max_length=PARCELS_MAX)]


WIRE_VERSION = 1
