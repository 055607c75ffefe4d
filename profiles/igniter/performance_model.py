"""iGniter's performance model (section 3.1): a closed form for run time by batch, share and neighbours.

Equations, for the n workloads on one GPU (times in ms, shares and utilisations in percent):

    t_active  = (k1 b² + k2 b + k3) / (r + k4) + k5                 alone; its cache and power use follow
    t_sched   = n_k (k_sch + (alpha_sch n + beta_sch if n ≥ 2))     launch delay of n_k kernels
    t_gpu     = (t_sched + t_active (1 + alpha_cache Σ others' L2)) F / f
    f         = F, lowered by alpha_f per watt of demand over the power limit
    latency   = b d_load / B + t_gpu + b d_feedback / B             PCIe transfers, never overlapped in one batch

k1 … k4 are fitted against the share in percent, as the authors' code does (the paper writes 0 … 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from profiles.documents import POSITIVE_MIN, checked_number
from profiles.model import ModelProfile, TableProfile

BATCH_SIZE_MAX = 32  # the coefficients were fitted over batches 1, 16 and 32
# A fitted k4 may be negative. At its pole and left of it the hyperbola says nothing, and a share that small is of no use:
# run times are then as long as they get, but finite, so that who tries such a share steps away from it.
SHARE_FROM_POLE_MIN_PERCENT = 0.01
# Neither the paper nor its code bounds the clock from below: a crowd that asks for enough watts would stop or
# reverse it. The lowest clocks of both GPUs are at 9 % (V100, 135 of 1530 MHz) and 19 % (T4, 300 of 1590).
FREQUENCY_FRACTION_MIN = 0.1


class Hardware(Struct, frozen=True):
    """What iGniter knows of a GPU type."""

    power_max_w: float
    power_idle_w: float
    frequency_max_mhz: float
    frequency_mhz_per_w: float
    pcie_bytes_per_ms: float
    sched_ms_per_workload: float
    sched_ms_offset: float
    share_step_percent: float

    def crowd_ms(self, count: int) -> float:
        """What `count` workloads add to the launch delay of each kernel (equation 6)."""
        return self.sched_ms_per_workload * count + self.sched_ms_offset if count > 1 else 0.0

    def slowness(self, workloads_w: float) -> float:
        """F / f, 1 or more, where the workloads ask for that power (equations 9 and 10)."""
        excess_w = self.power_idle_w + workloads_w - self.power_max_w
        if excess_w <= 0:
            return 1.0
        fraction = 1 + self.frequency_mhz_per_w * excess_w / self.frequency_max_mhz
        return 1 / max(fraction, FREQUENCY_FRACTION_MIN)


class Coefficients(Struct, frozen=True):
    """What iGniter knows of a model on that type: the fitted lines of section 3.1."""

    load_bytes: float
    feedback_bytes: float
    kernels: float
    sched_ms_per_kernel: float
    active: tuple[float, float, float, float, float]  # k1 … k5
    power_w_per_rps: float
    power_w: float
    cache_percent_per_rps: float
    cache_percent: float
    cache_slowdown_per_percent: float

    def work(self, batch_size: int) -> float:
        """k1 b² + k2 b + k3 of equation 11."""
        k1, k2, k3, _, _ = self.active
        return k1 * batch_size**2 + k2 * batch_size + k3

    def sched_ms(self, crowd_ms: float = 0.0) -> float:
        """Launch delay of all kernels, each of them with that delay by the crowd (equation 5)."""
        return self.kernels * (self.sched_ms_per_kernel + crowd_ms)

    def pcie_ms(self, batch_size: int, hardware: Hardware) -> float:
        """Loading a batch and feeding its results back (equation 3)."""
        return (self.load_bytes + self.feedback_bytes) * batch_size / hardware.pcie_bytes_per_ms


class Resident(Struct, frozen=True):
    """A workload on the GPU: its batch size and MPS share."""

    coefficients: Coefficients
    batch_size: int
    share_percent: float

    @property
    def active_ms(self) -> float:
        """GPU active time alone (equation 11)."""
        _, _, _, k4, k5 = self.coefficients.active
        return (
            self.coefficients.work(self.batch_size)
            / max(self.share_percent + k4, SHARE_FROM_POLE_MIN_PERCENT)
            + k5
        )

    def active_beside_ms(self, others_cache_percent: float) -> float:
        """GPU active time while others use so much of the L2 cache (equation 8)."""
        return self.active_ms * (1 + self.coefficients.cache_slowdown_per_percent * others_cache_percent)

    @property
    def ability_rps(self) -> float:
        """Processing ability b / t_active, from the modelled time."""
        return 1000 * self.batch_size / self.active_ms

    @property
    def cache_percent(self) -> float:
        """Its use of the L2 cache."""
        return self.coefficients.cache_percent_per_rps * self.ability_rps + self.coefficients.cache_percent

    @property
    def power_w(self) -> float:
        """The power it asks for."""
        return self.coefficients.power_w_per_rps * self.ability_rps + self.coefficients.power_w


def predict_ms(hardware: Hardware, residents: Sequence[Resident]) -> list[float]:
    """Inference latency in ms of each resident while all of them run (equations 1 to 11)."""
    slowness = hardware.slowness(sum(resident.power_w for resident in residents))
    crowd_ms = hardware.crowd_ms(len(residents))
    cache = [resident.cache_percent for resident in residents]
    latencies = []
    for place, resident in enumerate(residents):
        own = resident.coefficients
        active_ms = resident.active_beside_ms(sum(cache[:place]) + sum(cache[place + 1 :]))
        gpu_ms = (own.sched_ms(crowd_ms) + active_ms) * slowness
        latencies.append(gpu_ms + own.pcie_ms(resident.batch_size, hardware))
    return latencies


class IgniterProfile(ModelProfile):
    """A model alone on its GPU, by iGniter's model: the data loading and result feedback are inside."""

    def __init__(self, hardware: Hardware, coefficients: Coefficients, source: str, ref: str = "") -> None:
        super().__init__(source, BATCH_SIZE_MAX, ref=ref)
        self.hardware = hardware
        self.coefficients = coefficients

    @property
    def share_percent_min(self) -> float:
        """One step of the share: iGniter plans no smaller slice."""
        return self.hardware.share_step_percent

    def _exec_ms(self, batch_size: int, share_percent: float) -> float:
        return predict_ms(self.hardware, [Resident(self.coefficients, batch_size, share_percent)])[0]


class EstimatedIgniterProfile(IgniterProfile):
    """A measured table, with coefficients that were estimated from it: run times are the table's.

    Only who plans by iGniter's model, or emulates by it, uses the estimates.
    """

    def __init__(
        self,
        hardware: Hardware,
        coefficients: Coefficients,
        source: str,
        measured: TableProfile,
        ref: str = "",
    ) -> None:
        super().__init__(hardware, coefficients, source, ref)
        self.measured = measured
        self.batch_size_max = measured.batch_size_max
        self.usage = measured.usage

    @property
    def share_percent_min(self) -> float:
        """That of the table."""
        return self.measured.share_percent_min

    def memory_bytes(self, batch_size: int) -> int:
        """That of the table."""
        return self.measured.memory_bytes(batch_size)

    def _exec_ms(self, batch_size: int, share_percent: float) -> float:
        return self.measured.exec_ms(batch_size, share_percent, extrapolate=True)


def read_hardware(entry: Mapping[str, Any]) -> Hardware:
    """The `hardware` object of a shipped iGniter file. Raises ProfileError where it is none."""
    return Hardware(
        power_max_w=checked_number(entry, "P_max_power_w", 0),
        power_idle_w=checked_number(entry, "p_idle_w", 0),
        frequency_max_mhz=checked_number(entry, "F_max_frequency_mhz", POSITIVE_MIN),
        frequency_mhz_per_w=checked_number(entry, "alpha_f_mhz_per_w"),
        pcie_bytes_per_ms=checked_number(entry, "B_pcie_bytes_per_ms", POSITIVE_MIN),
        sched_ms_per_workload=checked_number(entry, "alpha_sch_ms"),
        sched_ms_offset=checked_number(entry, "beta_sch_ms"),
        share_step_percent=checked_number(entry, "r_unit_pct", POSITIVE_MIN),
    )


def read_coefficients(entry: Mapping[str, Any]) -> Coefficients:
    """One model of `workload_coefficients` in a shipped iGniter file. Raises ProfileError where it is none."""
    return Coefficients(
        load_bytes=checked_number(entry, "d_load_bytes", 0),
        feedback_bytes=checked_number(entry, "d_feedback_bytes", 0),
        kernels=checked_number(entry, "n_k", 0),
        sched_ms_per_kernel=checked_number(entry, "k_sch_ms_per_kernel", 0),
        active=(
            checked_number(entry, "k1_ms_pct"),
            checked_number(entry, "k2_ms_pct"),
            checked_number(entry, "k3_ms_pct"),
            checked_number(entry, "k4_pct"),
            checked_number(entry, "k5_ms"),
        ),
        power_w_per_rps=checked_number(entry, "alpha_power_w_per_rps"),
        power_w=checked_number(entry, "beta_power_w"),
        cache_percent_per_rps=checked_number(entry, "alpha_cacheutil_pct_per_rps"),
        cache_percent=checked_number(entry, "beta_cacheutil_pct"),
        cache_slowdown_per_percent=checked_number(entry, "alpha_cache_per_pct"),
    )
