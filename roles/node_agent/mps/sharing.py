"""The agent's doing about MPS: guards started and taken over, daemons asked, clients ended through them."""

from __future__ import annotations

import logging
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from fabric.ids import NodeId
from fabric.messages import GpuInfo, SliceSpec
from roles.config.cluster import NodeConfig
from roles.node_agent.blocking_calls import BlockingCalls
from roles.node_agent.events import DaemonChecked, GpusSampled, SharingPlan
from roles.node_agent.mps.control import (
    BINARY,
    LegacyControl,
    MpsControl,
    MpsError,
    MpsMissing,
    MpsPlace,
    check_gpu,
    end_client,
    end_leftovers,
)
from roles.node_agent.mps.daemons import MPS, TIME_SHARING, guard_name
from roles.node_agent.mps.environment import client_environment, device_environment
from roles.runtime.children import Processes
from roles.runtime.identities import ProcessIdentity, identity_in, read_record, send_signal, write_record
from roles.runtime.process import module_command

log = logging.getLogger("tenuto")

MIG = "mig"
OUTLIVE_MS = 30_000.0
"""How long workers serve on without an agent, where the node says so (design section 2)."""
AFTER_WORKERS_MS = 3_000.0


class ClientEnded(Struct, frozen=True):
    """A worker's work on its GPU was ended, or could not be (`problem`): now its process gets its signal."""

    worker_id: str
    number: signal.Signals
    problem: str


class LeftoversEnded(Struct, frozen=True):
    """What guards of a GPU had left was ended, or could not be (`problem`)."""

    gpu: int
    problem: str


Answer = DaemonChecked | GpusSampled | ClientEnded | LeftoversEnded


class SharingOptions(Struct, frozen=True):
    """`binary`: NVIDIA's control program. `control`: how one speaks to a GPU's daemon through it."""

    binary: str = BINARY
    control: Callable[[MpsPlace, str, float], MpsControl] = LegacyControl
    answer_ms: float = (
        5_000.0  # of a check; a busy host may take its time, and to be wrong costs every worker there
    )
    end_ms: float = 1_500.0  # of each of the three questions it takes to end a client


class Sharing:
    """How the GPUs of a node are shared. `plans` has the NVIDIA ones only."""

    def __init__(
        self,
        node: NodeConfig,
        gpus: Sequence[GpuInfo],
        run_dir: Path,
        options: SharingOptions,
        outlive_ms: float = 0.0,
    ) -> None:
        self._node_id: NodeId = node.node_id
        # A little longer than the workers: they are its clients.
        self._outlive_ms = outlive_ms + AFTER_WORKERS_MS if outlive_ms else 0.0
        self._gpus = {gpu.gpu: gpu for gpu in gpus if gpu.device == "cuda"}
        self._places = {gpu: MpsPlace.of(run_dir, node.host, gpu) for gpu in self._gpus}
        self._options = options
        self._clients: dict[str, int] = {}
        self.plans: Mapping[int, SharingPlan] = {
            gpu: self._plan(info, is_wanted=node.mps) for gpu, info in self._gpus.items()
        }
        for gpu, plan in self.plans.items():
            if plan.reason and node.mps:
                log.warning("gpu_without_shares gpu=%d sharing=%s reason=%r", gpu, plan.mode, plan.reason)

    def _plan(self, info: GpuInfo, *, is_wanted: bool) -> SharingPlan:
        if info.is_mig:
            return SharingPlan(MIG, "MIG is on: its partitions are left as they are")
        if not is_wanted:
            return SharingPlan(TIME_SHARING, "the configuration says mps: false")
        try:
            has_shares = check_gpu(info)
            if shutil.which(self._options.binary) is None:
                raise MpsMissing(f"{self._options.binary} is not on the PATH")
            self._places[info.gpu].make()
        except MpsError as error:
            return SharingPlan(TIME_SHARING, f"no MPS: {error}")
        reason = (
            ""
            if has_shares
            else f"no shares below compute capability 7.0 (this is {info.compute_capability})"
        )
        return SharingPlan(MPS, reason, has_shares)

    # ------------------------------------------------------------ daemons

    def take_over(self, processes: Processes, own: ProcessIdentity) -> list[int]:
        """The guards of a former agent that still run are controlled by this one from now on: their GPUs."""
        taken = []
        for gpu, plan in self.plans.items():
            place = self._places[gpu]
            record = read_record(place.record_file)
            guard = identity_in(record, "guard")
            if plan.mode != MPS or guard is None or record.get("uid") != self._gpus[gpu].uid:
                continue
            write_record(place.owner_file, {"owner": own})
            if processes.adopt(guard_name(self._node_id, gpu), guard):
                taken.append(gpu)
        return taken

    def start(self, gpu: int, processes: Processes, own: ProcessIdentity) -> None:
        """Start a GPU's guard, which waits for the end of a former one that was not taken over."""
        place = self._places[gpu]
        former = identity_in(read_record(place.record_file), "guard")
        if former is not None:
            send_signal(former, signal.SIGTERM)
        name = guard_name(self._node_id, gpu)
        try:
            write_record(place.owner_file, {"owner": own})
        except OSError as error:
            processes.refuse(name, error)
            return
        options = (
            "--uid",
            self._gpus[gpu].uid,
            "--binary",
            self._options.binary,
            "--outlive-ms",
            f"{self._outlive_ms:.0f}",
        )
        keeper = "roles.node_agent.mps.daemon_keeper"
        processes.spawn(name, module_command(keeper, str(place.directory), *options))

    def check(self, gpu: int, start: int, blocking: BlockingCalls[Answer]) -> None:
        """Ask for a sign of life."""
        control = self._control(gpu, self._options.answer_ms)

        def ask() -> DaemonChecked:
            try:
                return DaemonChecked(gpu, start, "", tuple(control.servers()))
            except MpsError as error:
                return DaemonChecked(gpu, start, str(error))

        blocking.run(ask)

    def end_leftovers(self, gpu: int, blocking: BlockingCalls[Answer]) -> None:
        """End daemon and servers of guards that were killed, then `LeftoversEnded` comes."""
        place = self._places[gpu]

        def end() -> LeftoversEnded:
            try:
                end_leftovers(place)
            except MpsError as error:
                return LeftoversEnded(gpu, str(error))
            return LeftoversEnded(gpu, "")

        blocking.run(end)

    def release(self, processes: Processes) -> None:
        """Leave the guards to themselves, when this agent ends out of order: they see it and end in order."""
        for gpu in self._gpus:
            processes.release(guard_name(self._node_id, gpu))

    def remove(self) -> None:
        """Take the files away, after the last daemon, and with them what a guard has left that was killed."""
        for place in self._places.values():
            place.clear_away()

    # ------------------------------------------------------------ clients

    def environment(self, spec: SliceSpec, beside: Sequence[SliceSpec], *, is_mps: bool) -> dict[str, str]:
        """For the worker of a slice of a real GPU; empty for any other. `beside`: the other slices of that GPU."""
        info = self._gpus.get(spec.gpu)
        if info is None or spec.device != "cuda":
            return {}
        variables = device_environment(info, *(self._gpus[gpu] for gpu in spec.following))
        if is_mps:
            has_shares = self.plans[spec.gpu].has_shares
            place = self._places[spec.gpu]
            variables |= client_environment(place, info, spec, has_shares=has_shares, beside=beside)
        return variables

    def joined(self, worker_id: str, gpu: int) -> None:
        """That worker is a client of the GPU's daemon."""
        self._clients[worker_id] = gpu

    def left(self, worker_id: str) -> None:
        """That worker has ended; nothing if it was none."""
        self._clients.pop(worker_id, None)

    def gpu_of(self, worker_id: str) -> int | None:
        """Whose client it is; None: nobody's."""
        return self._clients.get(worker_id)

    def end_client(
        self, worker_id: str, pid: int | None, number: signal.Signals, blocking: BlockingCalls[Answer]
    ) -> bool:
        """End its work on the GPU, then `ClientEnded` comes; False: it has none, so signal it right away."""
        gpu = self._clients.get(worker_id)
        if gpu is None or pid is None:
            return False
        control = self._control(gpu, self._options.end_ms)

        def end() -> ClientEnded:
            try:
                end_client(control, pid)
            except MpsError as error:
                return ClientEnded(worker_id, number, str(error))
            return ClientEnded(worker_id, number, "")

        blocking.run(end)
        return True

    def _control(self, gpu: int, limit_ms: float) -> MpsControl:
        return self._options.control(self._places[gpu], self._options.binary, limit_ms / 1e3)
