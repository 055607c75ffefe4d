"""One run of the profiler: processes share after share, groups for iGniter, one profile of what they saw."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, Self

from fabric.errors import ConfigError, FabricError, ProfileError
from fabric.messages import PREFIX, HeadSpec, LoaderSpec
from profiles.igniter.fit import (
    GROUP_SHARE_PERCENT,
    GROUP_SIZES,
    PAIR_BATCH_SIZE,
    GroupPoint,
)
from profiles.igniter.sections import GpuNumbers, igniter_points, igniter_sections
from profiles.measured import KernelRow, MeasuredProfile, Point, Subject
from profiles.model import WHOLE_GPU_PERCENT
from profiles.occupancy import LaunchGaps
from profiles.profilers.plan import ShareRuns, runs_of
from profiles.requirements import Requirements
from roles.node_agent.discovery import NvmlUnavailable
from roles.node_agent.mps.control import MpsError
from roles.profiling.process import MeasuringProcess, MeasuringRequest, ProfilingFailed
from roles.profiling.sensors import Sampling, Sensors, nvml_number
from roles.profiling.shares import Environment, mps_shares
from roles.runtime.process import child_environment

IDLE_FOR_S = 1.0
TRACED_MAX = 8  # batch sizes whose kernels are kept


@dataclass(frozen=True, slots=True)
class Ask:
    """What is wanted. `limit_s` bounds the wait for every single measurement, loading included."""

    model: str
    loader: LoaderSpec
    device: str
    batch_sizes: Sequence[int]
    shares: Sequence[float] = (WHOLE_GPU_PERCENT,)
    gpu_type: str = "cpu"
    for_ms: float = 1_000.0
    threads: int = 1
    for_igniter: bool = False
    limit_s: float = 300.0
    stages: Sequence[int] = ()
    heads: Sequence[HeadSpec] = ()
    """Of a model that has any: what is loaded instead of `loader`, and measured in joint batches."""
    merge: str = PREFIX

    @property
    def gpu(self) -> int | None:
        """CUDA's number of the GPU; None: a CPU."""
        kind, _, index = self.device.partition(":")
        return None if kind == "cpu" else int(index or 0)


@dataclass(slots=True)
class _Seen:
    points: list[Point] = field(default_factory=list)
    loaded: dict[str, Any] = field(default_factory=dict)
    requirements: dict[int, Requirements] = field(default_factory=dict)
    kernels: dict[int, list[KernelRow]] = field(default_factory=dict)
    gaps: LaunchGaps | None = None
    sm_count: int = 0
    cuts: dict[int, tuple[float, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Measuring(Protocol):
    """A measuring process, or its stand-in."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def tell(self, line: str) -> None:
        """A word to it."""
        ...

    def answer(self) -> dict[str, Any]:
        """Its next answer."""
        ...


@dataclass(frozen=True, slots=True)
class Instruments:
    """What a session starts and reads; a test brings its own."""

    start: Callable[[MeasuringRequest, Mapping[str, str]], Measuring] = MeasuringProcess
    shares: Callable[[int, str], AbstractContextManager[Environment]] = mps_shares
    sensors: Callable[[int], Sensors] = Sensors.open
    number: Callable[[int, str | None], int] = nvml_number


class Session:
    """`warn` is told at once what will be missing; `progress` takes the part that is done, 0 to 1."""

    def __init__(
        self,
        ask: Ask,
        progress: Callable[[float], None],
        warn: Callable[[str], None],
        instruments: Instruments | None = None,
    ) -> None:
        self._instruments = instruments or Instruments()
        self._ask = ask
        self._progress = progress
        self._warn = warn
        self._seen = _Seen()
        self._gpu = self._number()
        self._sensors = self._instruments.sensors(self._gpu) if self._gpu is not None else Sensors(0)
        self._done = 0
        self._total = 1

    def measure(self) -> MeasuredProfile:
        """Everything. Raises ConfigError for a model or a device that cannot be had, ProfilingFailed for the rest."""
        with ExitStack() as stack:
            environment = self._shares(stack)
            runs = self._runs(environment)
            with_groups = self._ask.for_igniter and environment is not None
            self._total = sum(len(run.batch_sizes) for run in runs) + (len(GROUP_SIZES) if with_groups else 0)
            idle_w = self._idle_power_w()
            for run in runs:
                try:
                    self._measure_share(run, environment)
                except (ConfigError, ProfilingFailed) as error:
                    self._end_share(run.share_percent, error)
            igniter = self._igniter(environment, idle_w) if environment and with_groups else None
        return self._whole(igniter)

    # ------------------------------------------------ shares

    def _number(self) -> int | None:
        """NVML's, by which sensors and shares know the GPU that CUDA runs on."""
        if self._ask.gpu is None:
            return None
        try:
            return self._instruments.number(self._ask.gpu, child_environment().get("CUDA_VISIBLE_DEVICES"))
        except ConfigError as error:
            self._miss(f"power, clock, shares and iGniter's coefficients: {error}")
            return None

    def _shares(self, stack: ExitStack) -> Environment | None:
        ask = self._ask
        wants = ask.for_igniter or any(share < WHOLE_GPU_PERCENT for share in ask.shares)
        if not wants:
            return None
        if ask.gpu is None:
            self._miss("shares and iGniter's coefficients: a CPU has no MPS shares")
            return None
        if self._gpu is None:  # which was said
            return None
        try:
            return stack.enter_context(self._instruments.shares(self._gpu, ask.gpu_type))
        except (MpsError, NvmlUnavailable) as error:
            self._miss(f"shares and iGniter's coefficients: {error}")
            return None

    def _runs(self, environment: Environment | None) -> list[ShareRuns]:
        ask = self._ask
        if environment is None:
            return runs_of(ask.batch_sizes, ())
        return runs_of(ask.batch_sizes, ask.shares, for_igniter=ask.for_igniter)

    def _environment(self, environment: Environment | None, share: float) -> dict[str, str]:
        """CUDA counts GPUs as NVML does, not the fastest first."""
        shares = {} if environment is None else environment(share)
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **shares}

    def _device(self, environment: Environment | None) -> str:
        """A process that may see one GPU only knows it as the first."""
        return self._ask.device if environment is None else "cuda:0"

    # ------------------------------------------------ one share

    def _measure_share(self, run: ShareRuns, environment: Environment | None) -> None:
        request = MeasuringRequest(
            self._ask.loader,
            self._device(environment),
            run.batch_sizes,
            run.traced[-TRACED_MAX:],
            self._ask.for_ms,
            self._ask.threads,
            limit_ms=self._ask.limit_s * 1e3,
            stages=self._ask.stages if run.share_percent == WHOLE_GPU_PERCENT else (),
            heads=self._ask.heads,
            merge=self._ask.merge,
        )
        with self._instruments.start(request, self._environment(environment, run.share_percent)) as process:
            while (said := process.answer())["event"] != "end":
                match said["event"]:
                    case "loaded":
                        self._seen.loaded = self._seen.loaded or said
                        if reason := said.get("not_merged"):
                            self._miss(f"running the heads together: {reason}")
                    case "starts":
                        self._take_point(run.share_percent, process)
                    case "kernels":
                        self._take_kernels(said)
                    case "no_kernels":
                        self._miss(
                            "kernels and occupancy: torch's tracer saw none (are counters restricted?)"
                        )
                    case "no_larger":
                        self._miss_larger(said)
                    case "cut":
                        self._seen.cuts[said["stages"]] = tuple(said["stages_ms"])
                    case "no_cut":
                        self._miss(f"the cut into {said['stages']} stages: {said['reason']}")

    def _end_share(self, share: float, error: FabricError) -> None:
        """Of the whole GPU what was measured before holds; raises the error where that is nothing."""
        sizes = [point.batch_size for point in self._seen.points if point.share_percent == share]
        if not sizes and share == WHOLE_GPU_PERCENT:
            raise error
        after = f" after batches of {max(sizes)}" if sizes else ""
        self._miss(f"share {share:g} %{after}: {error}")

    def _take_point(self, share: float, process: Measuring) -> None:
        with Sampling(self._sensors) as sampled:
            said = process.answer()
        if said["event"] == "no_larger":
            self._miss_larger(said)
            return
        point = Point(
            share,
            said["batch_size"],
            said["p50_ms"],
            said["p95_ms"],
            said["p99_ms"],
            said["runs"],
            said["memory_bytes"],
            sampled.power_w,
            sampled.frequency_mhz,
        )
        self._seen.points.append(point)
        self._step()

    def _miss_larger(self, said: Mapping[str, Any]) -> None:
        self._miss(f"batches of {said['batch_size']} and more: {said['reason']}")

    def _take_kernels(self, said: dict[str, Any]) -> None:
        batch_size = said["batch_size"]
        self._seen.requirements[batch_size] = Requirements(**said["requirements"])
        self._seen.kernels[batch_size] = [
            KernelRow(**{**row, "grid": tuple(row["grid"]), "block": tuple(row["block"])})
            for row in said["rows"]
        ]
        self._seen.gaps = self._seen.gaps or LaunchGaps(**said["gaps"])
        self._seen.sm_count = said["sm_count"]

    # ------------------------------------------------ iGniter

    def _igniter(self, environment: Environment, idle_w: float | None) -> dict[str, dict[str, float]] | None:
        loaded, sensors = self._seen.loaded, self._sensors
        power_max_w, frequency_max_mhz = sensors.power_max_w(), sensors.frequency_max_mhz()
        groups = [self._group(environment, count) for count in GROUP_SIZES]
        usable = [group for group in groups if group is not None]
        if None in (idle_w, power_max_w, frequency_max_mhz) or self._seen.gaps is None or len(usable) < 3:
            self._miss("iGniter's coefficients: power, clock or kernels cannot be seen on this GPU")
            return None
        assert idle_w is not None
        assert power_max_w is not None
        assert frequency_max_mhz is not None
        gpu = GpuNumbers(
            power_max_w,
            idle_w,
            frequency_max_mhz,
            loaded["pcie_bytes_per_ms"],
            100 / (self._seen.sm_count // 2),
        )
        transferred = (loaded["load_bytes"], loaded["feedback_bytes"])
        try:
            sections = igniter_sections(
                igniter_points(self._seen.points, gpu, sum(transferred)),
                gpu,
                self._seen.gaps,
                usable,
                transferred,
            )
        except ProfileError as error:
            self._miss(f"iGniter's coefficients: {error}")
            return None
        self._miss(
            "iGniter's and gpulet's L2 and DRAM terms: torch shows no performance counters; they are 0 or left out"
        )
        return sections

    def _group(self, environment: Environment, count: int) -> GroupPoint | None:
        """So many copies of the model side by side, each with a fifth of the GPU; None where that cannot be measured."""
        try:
            return self._measured_group(environment, count)
        except (ConfigError, ProfilingFailed) as error:
            self._miss(f"{count} copies side by side: {error}")
            return None
        finally:
            self._step()

    def _measured_group(self, environment: Environment, count: int) -> GroupPoint | None:
        request = MeasuringRequest(
            self._ask.loader,
            self._device(environment),
            (PAIR_BATCH_SIZE,),
            for_ms=self._ask.for_ms,
            is_group=True,
            limit_ms=self._ask.limit_s * 1e3,
            heads=self._ask.heads,
            merge=self._ask.merge,
        )
        with ExitStack() as stack:
            members = [
                stack.enter_context(
                    self._instruments.start(request, self._environment(environment, GROUP_SHARE_PERCENT))
                )
                for _ in range(count)
            ]
            for member in members:
                member.answer()  # ready
            with Sampling(self._sensors) as sampled:
                for member in members:
                    member.tell("go\n")
                seen = [member.answer() for member in members]
            for member in members:
                member.tell("stop\n")
        gaps = [one["gaps"]["gap_ms_per_kernel"] for one in seen if one["gaps"] is not None]
        if sampled.power_w is None or sampled.frequency_mhz is None or not gaps:
            return None
        return GroupPoint(count, sampled.power_w, sampled.frequency_mhz, sum(gaps) / len(gaps))

    def _idle_power_w(self) -> float | None:
        if self._gpu is None:
            return None
        with Sampling(self._sensors) as sampled:
            threading.Event().wait(IDLE_FOR_S)
        return sampled.power_w

    # ------------------------------------------------ together

    def _whole(self, igniter: dict[str, dict[str, float]] | None) -> MeasuredProfile:
        seen, ask = self._seen, self._ask
        by_share: dict[float, set[int]] = {}
        for point in seen.points:
            by_share.setdefault(point.share_percent, set()).add(point.batch_size)
        sizes = by_share.pop(WHOLE_GPU_PERCENT, set())
        if not sizes:
            raise ProfilingFailed("not even a batch of 1 fits the device")
        too_short = {share for share, its in by_share.items() if not its >= sizes}
        for share in sorted(too_short):  # a table has no holes, and the whole GPU's is what all plans go by
            self._miss(f"share {share:g} %: it has fewer batch sizes than the whole GPU")
        # The start of this process; nothing else here needs the time of day.
        started = datetime.fromtimestamp(Path("/proc/self").stat().st_mtime, UTC)
        subject = Subject(
            ask.model,
            seen.loaded["digest"],
            ask.device,
            ask.gpu_type,
            seen.loaded["gpu"],
            self._sensors.driver,
            seen.loaded["torch"],
            started.date().isoformat(),
            tuple(seen.notes),
        )
        return MeasuredProfile(
            subject,
            [
                point
                for point in seen.points
                if point.batch_size in sizes and point.share_percent not in too_short
            ],
            seen.loaded["load_bytes"],
            seen.loaded["feedback_bytes"],
            seen.requirements,
            seen.kernels,
            igniter,
            seen.cuts,
        )

    def _miss(self, what: str) -> None:
        if what not in self._seen.notes:
            self._seen.notes.append(what)
            self._warn(f"left out: {what}")

    def _step(self) -> None:
        self._done += 1
        self._progress(min(1.0, self._done / self._total))
