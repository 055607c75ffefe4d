"""A whole session on a GPU that is not there: its measuring processes answer what iGniter's own model says."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import pytest
from msgspec.structs import asdict

from fabric.errors import ConfigError, FabricError
from fabric.messages import LoaderSpec
from profiles.igniter.performance_model import Resident, read_coefficients
from profiles.occupancy import LaunchGaps
from profiles.requirements import Requirements
from profiles.store import shipped_data
from roles.node_agent.mps.control import MpsMissing
from roles.profiling.process import MeasuringRequest, ProfilingFailed
from roles.profiling.sensors import Sensors
from roles.profiling.session import Ask, Instruments, Session
from roles.profiling.shares import Environment

KNOWN = read_coefficients(shipped_data("igniter_v100")["workload_coefficients"]["resnet50"])
LOADER = LoaderSpec(zoo="torchvision", arch="resnet50")
PCIE = 1e7
SCHED_MS = KNOWN.kernels * KNOWN.sched_ms_per_kernel
BYTES = (int(KNOWN.load_bytes), int(KNOWN.feedback_bytes))


class Gpu:
    """Draws 53.5 W, and iGniter's line more while something runs on it."""

    class NVMLError(Exception):
        """As NVML's."""

    def __init__(self) -> None:
        self.watts = 53.5
        self.reads = 0

    def wait_for_samples(self) -> None:
        """Until the sensors' thread, which runs on the real clock, has looked twice."""
        wanted = self.reads + 2
        for _ in range(10_000):
            if self.reads >= wanted:
                return
            threading.Event().wait(0.001)
        raise AssertionError("nobody looks at the sensors")

    def sensors(self, gpu: int) -> Sensors:
        asked["sensors"] = gpu
        return Sensors(gpu, "550.54", self, object())

    def nvmlDeviceGetPowerUsage(self, handle: object) -> float:  # noqa: N802  NVML's name
        self.reads += 1
        return self.watts * 1e3

    def nvmlDeviceGetClockInfo(self, handle: object, clock: int) -> int:  # noqa: N802  NVML's name
        return 1530

    def nvmlDeviceGetMaxClockInfo(self, handle: object, clock: int) -> int:  # noqa: N802  NVML's name
        return 1530

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: object) -> int:  # noqa: N802  NVML's name
        return 300_000


class Played:
    """One measuring process; `limit`: its batches from there on find no memory."""

    started: ClassVar[Counter[str]] = Counter()
    fails: ClassVar[dict[tuple[float, int], FabricError]] = {}
    """By share and batch size, and by 0 and the number of the group's member."""

    def __init__(self, gpu: Gpu, request: MeasuringRequest, share: float, limit: int | None = None) -> None:
        self._gpu = gpu
        self._request = request
        self._answers = self._group() if request.is_group else self._alone(share, limit)

    def __enter__(self) -> Self:
        Played.started["group" if self._request.is_group else "alone"] += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self._gpu.watts = 53.5

    def tell(self, line: str) -> None:
        assert line in {"go\n", "stop\n"}

    def answer(self) -> dict[str, Any]:
        return next(self._answers)

    def _alone(self, share: float, limit: int | None) -> Iterator[dict[str, Any]]:
        yield {
            "event": "loaded",
            "digest": "ab" * 32,
            "load_bytes": BYTES[0],
            "feedback_bytes": BYTES[1],
            "pcie_bytes_per_ms": PCIE,
            "torch": "2.11",
            "gpu": "Tesla V100",
        }
        for size in self._request.batch_sizes:
            active = Resident(KNOWN, size, share)
            if (share, size) in self.fails:
                raise self.fails[share, size]
            self._gpu.watts = 53.5 + KNOWN.power_w_per_rps * active.ability_rps + KNOWN.power_w
            yield {"event": "starts", "batch_size": size}
            if limit is not None and size >= limit:
                yield {"event": "no_larger", "batch_size": size, "reason": "out of memory"}
                break
            ms = active.active_ms + SCHED_MS + size * sum(BYTES) / PCIE
            self._gpu.wait_for_samples()
            yield {
                "event": "point",
                "batch_size": size,
                "p50_ms": ms,
                "p95_ms": ms,
                "p99_ms": ms,
                "runs": 9,
                "memory_bytes": size << 20,
            }
            if size in self._request.traced:
                yield {
                    "event": "kernels",
                    "batch_size": size,
                    "sm_count": 80,
                    "gaps": asdict(LaunchGaps(int(KNOWN.kernels), KNOWN.sched_ms_per_kernel, 1.0)),
                    "requirements": asdict(Requirements(80.0, 20.0, 40.0, 1.0)),
                    "rows": [],
                }
        yield {"event": "end"}

    def _group(self) -> Iterator[dict[str, Any]]:
        if (0, self.started["group"]) in self.fails:
            raise self.fails[0, self.started["group"]]
        self._gpu.watts += 30.0
        yield {"event": "ready"}
        self._gpu.wait_for_samples()
        yield {"event": "ran", "gaps": {"gap_ms_per_kernel": 0.001 * (self._gpu.watts - 53.5) / 30.0}}


@contextmanager
def some_shares(gpu: int, gpu_type: str) -> Iterator[Environment]:
    asked["shares"] = gpu
    yield lambda share: {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{share:g}"}


@contextmanager
def no_shares(gpu: int, gpu_type: str) -> Iterator[Environment]:
    if gpu >= 0:
        raise MpsMissing("nvidia-cuda-mps-control is not installed")
    yield lambda _: {}


@pytest.fixture(autouse=True)
def nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    Played.started.clear()
    Played.fails.clear()
    asked.clear()


def session(ask: Ask, warned: list[str], *, has_shares: bool = True, limit: int | None = None) -> Session:
    gpu = Gpu()

    def start(request: MeasuringRequest, environment: Mapping[str, str]) -> Played:
        share = float(environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", 100))
        return Played(gpu, request, share, limit)

    around = Instruments(start, some_shares if has_shares else no_shares, gpu.sensors)
    return Session(ask, progressed.append, warned.append, around)


progressed: list[float] = []
asked: dict[str, int] = {}


def test_igniters_coefficients_are_recovered_from_a_gpu_that_follows_its_model() -> None:
    warned: list[str] = []
    progressed.clear()
    ask = Ask("resnet50", LOADER, "cuda", (1, 4), (50.0,), "v100", for_igniter=True)
    seen = session(ask, warned).measure()
    assert Played.started == {"alone": 3, "group": 1 + 2 + 3 + 4 + 5}
    assert {(p.share_percent, p.batch_size) for p in seen.points} == {
        (share, size) for share in (100, 50, 10) for size in (1, 4, 16, 32)
    }
    assert seen.igniter is not None
    hardware, found = seen.igniter["hardware"], seen.igniter["coefficients"]
    assert tuple(
        found[f"k{i}_{unit}"] for i, unit in enumerate(("ms_pct", "ms_pct", "ms_pct", "pct", "ms"), 1)
    ) == (pytest.approx(KNOWN.active, rel=1e-4, abs=1e-4))
    assert found["alpha_power_w_per_rps"] == pytest.approx(KNOWN.power_w_per_rps, rel=1e-4)
    assert found["n_k"] == 80
    assert (hardware["P_max_power_w"], hardware["p_idle_w"], hardware["alpha_f_mhz_per_w"]) == (
        300,
        53.5,
        0.0,
    )
    assert hardware["alpha_sch_ms"] == pytest.approx(
        0.001
    )  # a ms/1000 more for each workload: a line of slope 0.001
    assert hardware["r_unit_pct"] == 2.5
    assert seen.requirements[32].weighted_sm_percent == 40.0
    assert seen.subject.driver == "550.54"
    assert [words for words in warned if "L2 and DRAM" in words]
    assert progressed == sorted(progressed)
    assert progressed[-1] == 1.0
    assert seen.profile().exec_ms(16, 50) == pytest.approx(
        Resident(KNOWN, 16, 50).active_ms + SCHED_MS + 16 * sum(BYTES) / PCIE
    )


def test_without_mps_the_whole_gpu_is_measured_and_that_is_said() -> None:
    warned: list[str] = []
    ask = Ask("resnet50", LOADER, "cuda:1", (1,), (50.0,), "v100", for_igniter=True)
    seen = session(ask, warned, has_shares=False).measure()
    assert [(p.share_percent, p.batch_size) for p in seen.points] == [(100, 1)]
    assert seen.igniter is None
    assert warned == ["left out: shares and iGniter's coefficients: nvidia-cuda-mps-control is not installed"]


def test_batches_without_memory_are_left_out_at_every_share() -> None:
    warned: list[str] = []
    ask = Ask("resnet50", LOADER, "cuda", (1, 2, 4), (50.0,), "v100")
    seen = session(ask, warned, limit=4).measure()
    assert {p.batch_size for p in seen.points} == {1, 2}
    assert seen.subject.notes == ("batches of 4 and more: out of memory",)
    with pytest.raises(ProfilingFailed, match="not even a batch of 1"):
        session(ask, warned, limit=1).measure()


def test_a_group_that_cannot_be_measured_leaves_only_itself_out() -> None:
    warned: list[str] = []
    Played.fails[0, 15] = ConfigError("OutOfMemoryError: CUDA out of memory")
    ask = Ask("resnet50", LOADER, "cuda", (1,), (), "v100", for_igniter=True)
    seen = session(ask, warned).measure()
    assert seen.igniter is not None
    assert warned[0] == "left out: 5 copies side by side: OutOfMemoryError: CUDA out of memory"
    assert warned[0].removeprefix("left out: ") in seen.subject.notes


def test_a_share_that_cannot_be_measured_leaves_only_itself_out() -> None:
    warned: list[str] = []
    Played.fails[20.0, 1] = ProfilingFailed("a measuring process has said nothing for 300 s and was ended")
    Played.fails[50.0, 4] = ProfilingFailed("it died")
    ask = Ask("resnet50", LOADER, "cuda", (1, 2, 4), (20.0, 50.0), "v100")
    seen = session(ask, warned).measure()
    assert [(p.share_percent, p.batch_size) for p in seen.points] == [(100, 1), (100, 2), (100, 4)]
    assert warned == [
        "left out: share 50 % after batches of 2: it died",
        "left out: share 20 %: a measuring process has said nothing for 300 s and was ended",
        "left out: share 50 %: it has fewer batch sizes than the whole GPU",
    ]
    assert seen.subject.notes[-1] == "share 50 %: it has fewer batch sizes than the whole GPU"
    Played.fails[100.0, 1] = ConfigError("there is no model")
    with pytest.raises(ConfigError, match="there is no model"):
        session(ask, warned).measure()


def test_sensors_and_shares_are_those_of_the_gpu_that_cuda_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    warned: list[str] = []
    session(Ask("resnet50", LOADER, "cuda:1", (1,), (50.0,), "v100"), warned).measure()
    assert (asked, warned) == ({"sensors": 0, "shares": 0}, [])


def test_where_the_gpu_cannot_be_told_nothing_is_read_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7f")
    warned: list[str] = []
    session(Ask("resnet50", LOADER, "cuda", (1,), (50.0,), "v100"), warned)
    assert asked == {}
    assert warned == [
        "left out: power, clock, shares and iGniter's coefficients: CUDA_VISIBLE_DEVICES=MIG-7f names no GPU that would be cuda:0"
    ]


def test_cuda_counts_gpus_as_nvml_does() -> None:
    environments: list[Mapping[str, str]] = []
    gpu = Gpu()

    def start(request: MeasuringRequest, environment: Mapping[str, str]) -> Played:
        environments.append(environment)
        return Played(gpu, request, 100.0)

    ask = Ask("resnet50", LOADER, "cuda:1", (1,))
    Session(ask, lambda _: None, lambda _: None, Instruments(start, some_shares, gpu.sensors)).measure()
    assert environments == [{"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}]
    assert asked == {"sensors": 1}
