"""PyTorch models on a CPU or a CUDA device. Every call blocks; `thread.py` gives it a thread."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fabric.clock import Clock
from fabric.errors import ConfigError, error_text
from fabric.ids import ModelId, SliceId
from fabric.messages import ImagePreprocess, LoaderSpec, ModelSpec, ReplicaInfo, SliceSpec
from profiles.profilers.memory import empty_cache, is_out_of_device_memory, is_out_of_memory
from roles.gpu_worker.executors.base import Job, JobRan, Part
from roles.gpu_worker.executors.gang import Gang, RankFailed
from roles.gpu_worker.executors.hosted import DeviceReplica
from roles.gpu_worker.executors.loaders.base import LoadedModel, LoaderError
from roles.gpu_worker.executors.loaders.registry import load_model
from roles.gpu_worker.executors.merging.heads import load_heads
from roles.gpu_worker.executors.rank_model import load_first_rank, load_other_rank
from roles.gpu_worker.executors.stage_model import load_first, load_later

log = logging.getLogger("tenuto")


@dataclass(slots=True)
class _BesideLoad:
    is_over: bool = False
    """It came to nothing, and what it took is given back by the next `collect`."""


class TorchDevice:
    """The slices of this process, usually one."""

    def __init__(
        self,
        clock: Clock,
        threads: int = 1,
        parts: MutableMapping[tuple[SliceId, ModelId], Part] | None = None,
        meeting: Path | None = None,
        gang: Gang | None = None,
    ) -> None:
        """`parts`: of models on pipelines, which of their stages is here. Where none is named it is the first one, and that is written down.

        `meeting`: the file by which ranks find each other; `gang`: of the first one, the others.
        """
        # Workers share a host's cores: torch's default, every core for each of them, makes all of them slow.
        torch.set_num_threads(threads)
        self._clock = clock
        self._hosted: dict[SliceId, dict[ModelId, DeviceReplica]] = {}
        self._uses_cuda = False
        self._beside: dict[tuple[SliceId, ModelId], _BesideLoad] = {}
        """Models that are being loaded beside others: what these lack meanwhile they may have again in a moment."""
        self._is_loaded_beside = False
        """Whether there were any when the last batch began."""
        self._parts = {} if parts is None else parts
        self._meeting = meeting
        self._gang = gang

    def load(self, spec: SliceSpec) -> tuple[ReplicaInfo, ...]:
        """Load, warm and measure these models of the slice, one after the other."""
        device = self._device(spec)
        replicas = []
        for model in spec.models:
            hosted, image = self._made(spec, model, device)
            if not (spec.is_gang and self._gang is None):  # another rank runs when the first one does
                hosted.warm(model.slo_ms)
            replicas.append(self._kept(spec.slice_id, model, hosted, image, device))
        return tuple(replicas)

    def load_beside(self, spec: SliceSpec) -> Iterator[ReplicaInfo | None]:
        """Load the one model of `spec` here and now, on another thread than the device's; steps that warm it there."""
        device = self._device(spec)
        (model,) = spec.models
        of = spec.slice_id, model.model_id
        load = self._beside[of] = _BesideLoad()
        try:
            hosted, image = self._made(spec, model, device, is_beside=True)
            hosted.try_sizes(model.slo_ms)
            # What is there when a model is loaded is put out of the collector's sight: no garbage may be among it, such as of
            # a load that failed. This takes a few ms, as what was there before the load is out of its sight already.
            gc.collect()
            empty_cache()  # of the stream of the tries, on which no batch runs
        except BaseException:
            load.is_over = True
            raise

        def steps() -> Iterator[ReplicaInfo | None]:
            try:
                yield None  # begun: however it ends now, that is seen
                for _ in hosted.warming(model.slo_ms):
                    yield None
                replica = self._kept(spec.slice_id, model, hosted, image, device)
                if self._beside.get(of) is load:
                    del self._beside[of]
                yield replica
            finally:
                load.is_over = True

        begun = steps()
        next(begun)
        return begun

    def unload(self, slice_id: SliceId) -> None:
        """Forget it and give its memory back to the device."""
        for of, model_id in [*((slice_id, one) for one in self._hosted.get(slice_id, ())), *self._beside]:
            if of == slice_id:
                self.unload_model(slice_id, model_id)
        self._hosted.pop(slice_id, None)
        empty_cache()  # of one that failed to load, too

    def unload_model(self, slice_id: SliceId, model_id: ModelId) -> None:
        """The same with one model of a slice that serves on; what a load of it that hangs holds is gone for good."""
        self._beside.pop((slice_id, model_id), None)
        hosted = self._hosted.get(slice_id, {}).pop(model_id, None)
        traces = hosted.traces() if hosted is not None else None
        del hosted
        if traces is not None and (not traces or any(trace() is not None for trace in traces)):
            # It hangs in a circle of objects, or somebody else has it. The worker keeps what it loaded out of the
            # collector's sight, so this takes a moment, and is done only where it may be needed.
            self.collect(is_frozen=True)
        empty_cache()

    def collect(self, *, is_frozen: bool) -> None:
        """Give back what nobody holds any more, though it hangs in circles of objects."""
        if is_frozen:
            gc.unfreeze()
        gc.collect()
        if is_frozen:
            gc.freeze()
        empty_cache()
        for of, load in list(self._beside.items()):
            if load.is_over:
                del self._beside[of]

    def run(self, job: Job) -> JobRan:
        """Run the rows that fit the model's signature."""
        model = self._hosted[job.slice_id][job.model_id]
        self._is_loaded_beside = bool(self._beside)
        if not self._is_loaded_beside:
            model.grow_back()
        began_ms = self._clock.now_ms()
        outputs, rejected = model.run_parts(job.parts)
        took_ms = self._clock.now_ms() - began_ms
        return JobRan(job.slice_id, job.batch_id, outputs, tuple(rejected), took_ms, began_ms)

    def stage(self, job: Job) -> None:
        """Put a batch's inputs in place while another one runs; one whose slice has just gone is left alone."""
        model = self._hosted.get(job.slice_id, {}).get(job.model_id)
        if model is not None:
            model.stage(job.parts)

    def shrunk(self, job: Job, error: BaseException) -> int | None:
        """The largest batch worth granting from now on, where the job failed for want of memory that nobody will give back."""
        if not is_out_of_memory(error):
            return None
        model = self._hosted[job.slice_id][job.model_id]
        before = model.batch_size_max
        count = min(before, sum(part.count for part in job.parts))
        after = model.shrink(count, is_for_now=self._is_loaded_beside or bool(self._beside))
        return after if after < before else None

    def explain(self, error: BaseException) -> str:
        """Out of memory is said plainly; our own errors need no type in front."""
        if isinstance(error, LoaderError | ConfigError | RankFailed):
            return str(error)
        text = error_text(error)
        if is_out_of_device_memory(error):
            empty_cache()
            return f"out of memory on the device ({text})"
        if is_out_of_memory(error):
            return f"out of memory on the host ({text})"
        return text

    @property
    def is_broken(self) -> bool:
        """Whether the CUDA context answers no more, or other ranks; a CPU does not break."""
        if self._gang is not None and self._gang.broken:
            return True
        if not self._uses_cuda:
            return False
        try:  # any call says it; one about the whole device is refused while another thread captures (ADR 0070)
            torch.cuda.current_stream().synchronize()
        except RuntimeError:
            return True
        return False

    def _device(self, spec: SliceSpec) -> torch.device:
        if spec.device == "cpu":
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise ConfigError(
                f"slice {spec.slice_id} wants device {spec.device!r}, but torch finds no CUDA here"
            )
        self._uses_cuda = True
        # An agent that gave this process one GPU only made that one number 0; of a pipeline's this process has its first.
        is_own = torch.cuda.device_count() == 1 or spec.following
        device = torch.device("cuda", 0 if is_own else spec.gpu)
        torch.cuda.set_device(device)  # for users' code that says just "cuda"
        return device

    def _made(
        self, slice_: SliceSpec, spec: ModelSpec, device: torch.device, *, is_beside: bool = False
    ) -> tuple[DeviceReplica, ImagePreprocess | None]:
        if spec.heads:
            loaded = load_heads(
                spec.heads, device, spec.merge, is_beside=is_beside, is_idempotent=spec.is_idempotent
            )
            return DeviceReplica(
                spec.model_id, loaded, spec.batch_size_max, device, self._clock
            ), loaded.image
        if spec.loader is None:
            raise ConfigError(f"model {spec.model_id!r} has no loader, and a {device.type} device needs one")
        loaded = self._loaded(slice_, spec.model_id, spec.loader, device)
        return DeviceReplica(spec.model_id, loaded, spec.batch_size_max, device, self._clock), loaded.image

    def _loaded(
        self, slice_: SliceSpec, model_id: ModelId, loader: LoaderSpec, device: torch.device
    ) -> LoadedModel:
        if slice_.is_gang:
            return self._rank(slice_, model_id, loader, device)
        stages = slice_.stages
        if loader.stages not in (0, stages):
            raise ConfigError(
                f"model {model_id!r} must be cut into {loader.stages} stages; its slice has {stages} GPUs"
            )
        if stages == 1:
            return load_model(loader, device)
        part = self._parts.get((slice_.slice_id, model_id))
        if part is not None and part.stage:
            return load_later(loader, device, part)
        loaded, part = load_first(loader, device, stages, self._clock)
        self._parts[slice_.slice_id, model_id] = part
        return loaded

    def _rank(
        self, slice_: SliceSpec, model_id: ModelId, loader: LoaderSpec, device: torch.device
    ) -> LoadedModel:
        assert self._meeting is not None, "a process that may have a slice has one"
        ranks = 1 + len(slice_.following)
        if loader.ranks != ranks:
            raise ConfigError(f"model {model_id!r} runs in {loader.ranks} ranks; its slice has {ranks} GPUs")
        of = slice_.slice_id, model_id
        if self._gang is not None:
            return load_first_rank(loader, device, self._meeting, self._gang, of)
        return load_other_rank(loader, device, self._parts[of].stage, self._meeting)

    def _kept(
        self,
        slice_id: SliceId,
        spec: ModelSpec,
        hosted: DeviceReplica,
        image: ImagePreprocess | None,
        device: torch.device,
    ) -> ReplicaInfo:
        """It is warm: from now on it runs when it is asked."""
        self._hosted.setdefault(slice_id, {})[spec.model_id] = hosted
        _tell(spec.model_id, hosted)
        return _replica(spec, hosted, image, _memory_bytes(device))


def _replica(
    spec: ModelSpec, hosted: DeviceReplica, image: ImagePreprocess | None, memory_bytes: int
) -> ReplicaInfo:
    return ReplicaInfo(
        model_id=spec.model_id,
        batch_size_max=hosted.batch_size_max,
        exec_ms=hosted.exec_ms,
        inputs=hosted.inputs,
        outputs=hosted.outputs,
        image=image,
        memory_bytes=memory_bytes or spec.memory_bytes,
        reason=hosted.limited_by,
        heads=hosted.heads,
        not_merged=hosted.not_merged,
    )


def _tell(model_id: ModelId, hosted: DeviceReplica) -> None:
    """Once a load: how its batches run, where that is not what was asked for."""
    if hosted.buckets.sizes:
        log.info("cuda_graphs model=%s batch_sizes=%s", model_id, list(hosted.buckets.sizes))
    if hosted.buckets.problem is not None:
        log.warning(
            "cuda_graphs_impossible model=%s runs=eagerly reason=%r", model_id, hosted.buckets.problem
        )
    if hosted.merged:
        first, *_, last = [*hosted.merged] * 2
        log.info(
            "heads_merged model=%s heads=%d layers_run_once=%d first=%s last=%s",
            model_id,
            len(hosted.heads),
            len(hosted.merged),
            first,
            last,
        )
    if hosted.not_merged:
        log.warning("heads_not_merged model=%s reason=%r", model_id, hosted.not_merged)
    if hosted.limited_by:
        log.warning(
            "batch_size_limited model=%s batch_size_max=%d reason=%r",
            model_id,
            hosted.batch_size_max,
            hosted.limited_by,
        )
    if hosted.not_finite:
        log.warning(
            "outputs_not_finite model=%s outputs=%s: its own example gives NaN or infinity",
            model_id,
            list(hosted.not_finite),
        )


def _memory_bytes(device: torch.device) -> int:
    """What torch has reserved of the device so far; 0 where nobody counts."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
