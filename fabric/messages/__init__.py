"""Every message that crosses a process line, one frozen struct each, one closed union; a file per pair of roles.

Wire form: MessagePack arrays, first element the integer tag. Fields are only ever appended, with a default,
so an older peer can read a newer message. No deadline crosses a line: a message carries a budget or a
duration in ms and its receiver adds its own clock. `docs/wire.md` has the same as tables.

Tensors are not in here: they ride as raw frames behind the header, described by the envelope's `TensorSpec`s.
"""

# A package exports a name of its files by `A as A`; isort would write a statement for each of them.
# isort: skip_file
from fabric.messages.agent_scheduler import (
    DesiredSlices as DesiredSlices,
    NodeHello as NodeHello,
    SliceChanged as SliceChanged,
    SliceState as SliceState,
    SliceStatus as SliceStatus,
    Telemetry as Telemetry,
)
from fabric.messages.agent_worker import (
    Host as Host,
    Loading as Loading,
    SliceFailed as SliceFailed,
    Stop as Stop,
    WorkerHello as WorkerHello,
)
from fabric.messages.applications import (
    GlueAsked as GlueAsked,
    GlueMade as GlueMade,
    GluePart as GluePart,
    StageLine as StageLine,
    StageResult as StageResult,
)
from fabric.messages.base import (
    ADDRESSES_MAX as ADDRESSES_MAX,
    ITEMS_MAX as ITEMS_MAX,
    PRIORITY_MAX as PRIORITY_MAX,
    PARTS_MAX as PARTS_MAX,
    REQUESTS_TOLD_MAX as REQUESTS_TOLD_MAX,
    RUN_REQUESTS_MAX as RUN_REQUESTS_MAX,
    TOLD_REQUESTS_MAX as TOLD_REQUESTS_MAX,
    Addresses as Addresses,
    Listed as Listed,
    Message as Message,
    Part as Part,
    Parts as Parts,
    Runs as Runs,
    SeqRun as SeqRun,
    Value as Value,
    split_runs as split_runs,
)
from fabric.messages.client_frontend import (
    Answer as Answer,
    CancelRequest as CancelRequest,
    Infer as Infer,
    ModelsAsked as ModelsAsked,
    ModelsListed as ModelsListed,
    Ping as Ping,
    Pong as Pong,
    Refusal as Refusal,
    Unready as Unready,
)
from fabric.messages.envelope import (
    PARCELS_MAX as PARCELS_MAX,
    WIRE_VERSION as WIRE_VERSION,
    AnyMessage as AnyMessage,
    Envelope as Envelope,
    Parcel as Parcel,
)
from fabric.messages.frontend_scheduler import (
    Arrivals as Arrivals,
    Directory as Directory,
    Dropped as Dropped,
    FrontendHello as FrontendHello,
    FrontendInfo as FrontendInfo,
    Grant as Grant,
    Left as Left,
    Returned as Returned,
    SliceInfo as SliceInfo,
    Withdraw as Withdraw,
)
from fabric.messages.frontend_worker import (
    BatchFailed as BatchFailed,
    Inputs as Inputs,
    InputsReturned as InputsReturned,
    Outputs as Outputs,
)
from fabric.messages.gpus import (
    GpuInfo as GpuInfo,
    GpuRef as GpuRef,
    GpuReport as GpuReport,
    GpuSample as GpuSample,
    GpuSharing as GpuSharing,
)
from fabric.messages.leases import (
    EpochGranted as EpochGranted,
    LeaseAsked as LeaseAsked,
    LeaseReport as LeaseReport,
    PlanCopy as PlanCopy,
    SchedulerHello as SchedulerHello,
    TakeOver as TakeOver,
)
from fabric.messages.models import (
    LEAVING_TERM as LEAVING_TERM,
    MERGES as MERGES,
    PREFIX as PREFIX,
    HeadInfo as HeadInfo,
    HeadOutputs as HeadOutputs,
    HeadSpec as HeadSpec,
    InterferenceOption as InterferenceOption,
    InterferenceSpec as InterferenceSpec,
    LeftOut as LeftOut,
    LoaderSpec as LoaderSpec,
    ModelInfo as ModelInfo,
    ModelSpec as ModelSpec,
    ReplicaInfo as ReplicaInfo,
    SliceSpec as SliceSpec,
)
from fabric.messages.operator import (
    Changed as Changed,
    DrainAsked as DrainAsked,
    ModelAdvice as ModelAdvice,
    ModelWarning as ModelWarning,
    ModelsAdd as ModelsAdd,
    ModelSet as ModelSet,
    ModelsRemove as ModelsRemove,
    PlanChange as PlanChange,
    PlanRequest as PlanRequest,
    PlanReport as PlanReport,
    RestartRoles as RestartRoles,
    RoleChange as RoleChange,
    RoleDrain as RoleDrain,
    RoleDrainDryRun as RoleDrainDryRun,
    RoleRequest as RoleRequest,
    SchedulerStanding as SchedulerStanding,
    SectionAsked as SectionAsked,
    SliceReport as SliceReport,
    StandbyReport as StandbyReport,
    StatusAsked as StatusAsked,
    StatusListed as StatusListed,
    UnplacedInfo as UnplacedInfo,
)
from fabric.messages.planner import (
    ChangedSlice as ChangedSlice,
    CurrentSlice as CurrentSlice,
    KeptSlice as KeptSlice,
    MoveInfo as MoveInfo,
    NewSlice as NewSlice,
    PlanAsked as PlanAsked,
    PlanMade as PlanMade,
    ReplicaHint as ReplicaHint,
)
from fabric.messages.rehearsals import (
    RehearsalAsked as RehearsalAsked,
    RehearsalMade as RehearsalMade,
    RehearsalModel as RehearsalModel,
    RehearsalReplica as RehearsalReplica,
    RehearsalRun as RehearsalRun,
    RehearsalSlice as RehearsalSlice,
)
from fabric.messages.records import (
    BatchEntry as BatchEntry,
    BatchesRemembered as BatchesRemembered,
    FiguresAsked as FiguresAsked,
    FiguresListed as FiguresListed,
    ModelFigures as ModelFigures,
    Ledger as Ledger,
    RecordsAsked as RecordsAsked,
    RequestRecord as RequestRecord,
    SliceAbsence as SliceAbsence,
    RequestsRemembered as RequestsRemembered,
)
from fabric.messages.stages import (
    Activations as Activations,
    LoadStage as LoadStage,
    StageFailed as StageFailed,
    StageLoaded as StageLoaded,
    UnloadStage as UnloadStage,
)
from fabric.messages.tensors import (
    RANK_MAX as RANK_MAX,
    TENSORS_MAX as TENSORS_MAX,
    ImagePreprocess as ImagePreprocess,
    Shape as Shape,
    SharedAt as SharedAt,
    TensorInfo as TensorInfo,
    TensorSpec as TensorSpec,
)
from fabric.messages.worker_scheduler import (
    Done as Done,
    PreemptBatch as PreemptBatch,
    RunBatch as RunBatch,
    SliceReady as SliceReady,
)
