"""What processes are told of MPS when they start: environment variables of daemons, of workers, of those without MPS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from fabric.messages import GpuInfo, SliceSpec
from roles.node_agent.mps.control import LOG, MARK, PIPE, MpsPlace

CONTEXT_BYTES: Final = 1 << 30  # a CUDA context with its libraries' kernels and work space, generously


def device_environment(*infos: GpuInfo) -> dict[str, str]:
    """For a process that may see these GPUs and no other ones: its own, and those of its pipeline's later stages."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(info.uid for info in infos)}


def daemon_environment(place: MpsPlace, uid: str) -> dict[str, str]:
    """For a GPU's daemon."""
    return {
        "CUDA_VISIBLE_DEVICES": uid,
        PIPE: str(place.pipe),
        LOG: str(place.log),
        MARK: str(place.directory),
    }


def client_environment(
    place: MpsPlace,
    info: GpuInfo,
    spec: SliceSpec,
    *,
    has_shares: bool,
    beside: Sequence[SliceSpec] = (),
) -> dict[str, str]:
    """For the worker of a slice on a GPU whose daemon answers. `beside`: the other slices there.

    The memory limit is there to keep a neighbour's mistake from taking everybody's memory, not to be tight; it cannot
    be changed while the worker runs, which may get more models, so it leaves out only what the others need. Where some
    model's need is not known, or the GPU has no shares, there is none.
    """
    variables = {PIPE: str(place.pipe), LOG: str(place.log)}
    if not has_shares:
        return variables
    # Said in any case: whoever started us may have said something else in our own environment.
    percent = 100.0 if spec.share_percent is None else spec.share_percent
    variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{percent:g}"
    needs = [model.memory_bytes for model in spec.models]
    free_bytes = info.memory_bytes - sum(_need_bytes(other) for other in beside)
    limit_bytes = max(_need_bytes(spec), free_bytes)
    if needs and all(needs) and limit_bytes < info.memory_bytes:
        variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={limit_bytes >> 20}M"
    return variables


def _need_bytes(spec: SliceSpec) -> int:
    return sum(model.memory_bytes for model in spec.models) * 3 // 2 + CONTEXT_BYTES


def without_mps(environment: Mapping[str, str]) -> dict[str, str]:
    """The same without words about MPS that came from whoever started us: they are for another daemon."""
    return {name: value for name, value in environment.items() if not name.startswith("CUDA_MPS_")}
