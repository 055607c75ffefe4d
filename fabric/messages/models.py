"""Models, slices and replicas, as messages of several pairs of roles describe them."""

from __future__ import annotations

from msgspec.structs import replace

from fabric.ids import ModelId, SliceId
from fabric.messages.base import Listed, Value
from fabric.messages.tensors import ImagePreprocess, TensorInfo

PREFIX = "prefix"
MERGES = (PREFIX, "stacked", "operators")
"""How the heads of a model can run together (ADR 0290)."""
LEAVING_TERM = -1
"""Of a model that the configuration gives to another shard: this one serves it until that one does."""


class HeadInfo(Value, frozen=True):
    """A head of a model, as clients ask it; its inputs are the model's."""

    model_id: ModelId
    slo_ms: float
    outputs: Listed[TensorInfo] = ()


class ModelInfo(Value, frozen=True):
    """What a frontend must know of a model. Empty `inputs` means any tensors are accepted (emulated models)."""

    model_id: ModelId
    slo_ms: float
    inputs: Listed[TensorInfo] = ()
    outputs: Listed[TensorInfo] = ()
    image: ImagePreprocess | None = None
    replicas: int = 0
    """How many ready slices get its batches now; those that drain do not."""
    is_idempotent: bool = True
    """A request may run again after a worker was lost that may have run it."""
    coming_in_ms: float | None = None
    """Without replicas: when a slice will be ready, by what its start has taken before; None: none is known to come. Where one is late a frontend is told 0, a client None."""
    term: int = 0
    """How often it was moved between shards: of those that list it the one with the highest term serves it; see `LEAVING_TERM`."""
    heads: Listed[HeadInfo] = ()
    """Clients ask these instead of the model itself; empty: it has none."""
    head_of: ModelId = ModelId("")
    """Where a frontend lists a head to its clients: the model whose batches run its requests."""
    asks: Listed[ModelId] = ()
    """Where a frontend lists an application: the models that its stages ask, each once; empty: it is none."""


class LoaderSpec(Value, frozen=True):
    """How a real device gets a model: exactly one of `zoo` and `python` is set.

    zoo: ``torchvision`` (with `arch`, random weights unless `weights` names a local file), or ``transformers``
    (`arch` a type such as ``bert``, with `config` over its defaults as (key, JSON) pairs; or `weights`, a local
    directory; or, `from_hub`, `arch` a name there).
    python: ``module:Class`` with `load`, `infer(batch)`, `example`.
    `cuda_graphs` None: where it is known to be safe. `stages` of a model that must be cut into so many; 0: not said.
    `begin_at`: the modules at which its second and following stages begin. `ranks` of a class that computes each batch in so
    many processes together; 0: in one. The rest is in docs/guides/worker.md.
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
    stages: int = 0
    begin_at: Listed[str] = ()
    ranks: int = 0


class HeadSpec(Value, frozen=True):
    """A model that runs in the batches of another one, with which it shares its leading layers (ADR 0290)."""

    model_id: ModelId
    slo_ms: float | None = None
    """None: that model's."""
    loader: LoaderSpec | None = None


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
    is_idempotent: bool = True
    """A request may run more than once."""
    term: int = 0
    """As in `ModelInfo`, where a scheduler speaks of a model; 0 where a slice is to host it."""
    stages_ms: Listed[Listed[float]] = ()
    """On a slice of several GPUs, of each stage what `exec_ms` is of all together; `memory_bytes` is then of one GPU."""
    heads: Listed[HeadSpec] = ()
    """What its requests are for, instead of itself; `loader` is then None, each head has its own."""
    merge: str = PREFIX
    """How its heads run together, one of `MERGES`."""

    @property
    def interval_ms(self) -> tuple[float, ...]:
        """When the next batch can start behind one of b, at index b - 1: the slowest stage's time. Empty: it is not cut."""
        return tuple(max(times) for times in zip(*self.stages_ms, strict=True))


class InterferenceOption(Value, frozen=True):
    """An option of an interference law, as a configuration has it."""

    name: str
    value: float


class InterferenceSpec(Value, frozen=True):
    """How slices of one emulated GPU disturb each other: an interference law's name and its options."""

    name: str
    options: Listed[InterferenceOption] = ()


class SliceSpec(Value, frozen=True):
    """A slice that should exist: a share of one GPU (None: no limit), or a chain of GPUs, and the models on it.

    `interference` None: it feels no neighbours, or its device is real and they disturb it by themselves.
    """

    slice_id: SliceId
    gpu: int
    device: str  # emulated | cpu | cuda
    share_percent: float | None
    models: Listed[ModelSpec]
    interference: InterferenceSpec | None = None
    following: Listed[int] = ()
    """The node's GPUs of the second and following stages, where its models are cut, or ranks; `gpu` has the first."""
    is_gang: bool = False
    """Its one model runs each batch on all its GPUs at once, a rank on each."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """All of the node's GPUs that it runs on."""
        return self.gpu, *self.following

    @property
    def is_pipeline(self) -> bool:
        """Whether it has a stage of its models on each of several GPUs."""
        return bool(self.following) and not self.is_gang

    @property
    def stages(self) -> int:
        """Into how many stages its models are cut, one on each of its GPUs; 1 unless it is a pipeline."""
        return 1 + len(self.following) if self.is_pipeline else 1

    def is_same_but_models(self, other: SliceSpec) -> bool:
        """Whether a worker that serves one of the two can become the other: nothing but the models differs.

        A model of which anything differs is loaded anew beside what runs, and in a gang ranks would meet each other in different ones.
        """
        return self == other if self.is_gang else replace(self, models=other.models) == other


class HeadOutputs(Value, frozen=True):
    """What a head gives, as a worker has met it."""

    model_id: ModelId
    outputs: Listed[TensorInfo]


class ReplicaInfo(Value, frozen=True):
    """A model on a slice that is loaded and warm. `exec_ms[b - 1]` is what the worker measured or emulates."""

    model_id: ModelId
    batch_size_max: int
    exec_ms: Listed[float]
    inputs: Listed[TensorInfo] = ()
    outputs: Listed[TensorInfo] = ()
    image: ImagePreprocess | None = None
    memory_bytes: int = 0
    reason: str = ""
    """Why `batch_size_max` is less than was asked for; empty: it is not, or larger batches take longer than the SLO."""
    interval_ms: Listed[float] = ()
    """When the next batch can start behind one of b, at index b - 1: the slowest stage's time; empty: when it has ended."""
    heads: Listed[HeadOutputs] = ()
    """Of a model that has heads and runs on a real device."""
    not_merged: str = ""
    """Why its heads cannot run together in the way that was asked for, and run one after the other; empty: they can, or there are none."""


class LeftOut(Value, frozen=True):
    """A model that its slice should host and does not: it cannot be loaded, or has hung too often."""

    slice_id: SliceId
    model_id: ModelId
    reason: str
