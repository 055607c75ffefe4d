"""The process of a later stage: its device, its two sockets and the real clock around its core."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fabric.clock import Clock, MonotonicClock
from fabric.errors import LocalProtocolError
from fabric.ids import Incarnation, ModelId, PeerId, SliceId
from fabric.link import NamedTensor, Received
from fabric.messages import Activations, AnyMessage, LoadStage, StageFailed, UnloadStage
from fabric.sockets import LinkOptions
from fabric.transport import ZMQ, Transport
from roles.gpu_worker.events import BatchRan, End
from roles.gpu_worker.executors.base import ExecutorEvent, Job, JobPart, JobRan, Loaded, Part
from roles.gpu_worker.executors.thread import BlockingDevice, ThreadExecutor
from roles.gpu_worker.stages.core import (
    ActivationsCame,
    ForgetModel,
    LoadPart,
    PassOn,
    ReleaseInputs,
    RunStage,
    StageAction,
    StageAsked,
    StageCore,
    StageEvent,
    TellWorker,
)
from roles.gpu_worker.stages.later_stages import meeting_of
from roles.runtime.core import Handle
from roles.runtime.defects import DefectReport
from roles.runtime.loop.driver import Driver, Role
from roles.runtime.loop.sources import LinkSource, SendingSource, TranslatedSource
from roles.runtime.payloads import Payloads
from roles.runtime.process import (
    die_with_parent,
    leave_the_end_to_parent,
    set_up_descriptors,
    set_up_logging,
)

WORKER: Final = PeerId("worker")
NEXT: Final = PeerId("next")
ONE_START: Final = Incarnation("00000000")
"""A worker and its stages start and end together: none of them meets another one's former start."""

log = logging.getLogger("tenuto")


def run_stage(name: str, stage: int, run_dir: Path, threads: int, addresses: Sequence[str]) -> int:
    """Serve until the worker ends, or the device breaks; the exit code."""
    die_with_parent()
    leave_the_end_to_parent()
    set_up_descriptors()
    set_up_logging(name)
    shell = StageShell(stage, threads, addresses, meeting_of(name.rpartition(".")[0], run_dir))
    driver = Driver([shell.role], MonotonicClock(), on_defect=DefectReport(name, run_dir).end)
    try:
        log.info("stage_starts pid=%d stage=%d", os.getpid(), stage)
        driver.run(lambda: shell.end is not None)
        assert shell.end is not None, "that is what ended the loop"
        log.error("stage_ends exit_code=%d reason=%r", shell.end.exit_code, shell.end.reason)
        return shell.end.exit_code
    finally:
        driver.close()
        shell.close()


class StageShell:
    """Does what the core decides. `end`: it is over, and how."""

    def __init__(
        self,
        stage: int,
        threads: int,
        addresses: Sequence[str],
        meeting: Path | None = None,
        clock: Clock | None = None,
        transport: Transport = ZMQ,
    ) -> None:
        self.end: End | None = None
        self._clock = clock or MonotonicClock()
        self._threads = threads
        self._stage = stage
        self._meeting = meeting
        self._pull = transport.bind_payload([addresses[stage]], LinkOptions(is_sharing=False))
        self._push = transport.push()
        self._push.know(WORKER, ONE_START, [addresses[0]])
        self._push.know(NEXT, ONE_START, [addresses[(stage + 1) % len(addresses)]])
        self._parts: dict[tuple[SliceId, ModelId], Part] = {}
        self._payloads = Payloads(sys.maxsize)
        self._thread = ThreadExecutor(self._make_device, self._clock.now_ms)
        self._thread.prepare()  # while the worker still loads, and finds where to cut
        self.role = Role[StageEvent, StageAction](
            StageCore(stage),
            [
                LinkSource(self._pull, self._heard),
                TranslatedSource(self._thread, self._from_device),
                SendingSource(self._push),
            ],
            self._perform,
        )

    def close(self) -> None:
        """Flush for at most 100 ms, end the device's thread."""
        self._push.close()
        self._pull.close()
        self._thread.close()

    def _heard(self, received: Received) -> StageEvent | None:
        match received.message:
            case LoadStage() | UnloadStage() as message:
                return StageAsked(message)
            case Activations() as message:
                handle = self._payloads.put(received.tensors)
                assert handle is not None, "bounded by the batches that a worker has under way, not in bytes"
                return ActivationsCame(message, handle, received.late_ms)
            case _:
                log.error("message_not_for_a_stage message=%s", type(received.message).__name__)
                return None

    def _from_device(self, event: ExecutorEvent) -> StageEvent:
        match event:
            case JobRan():
                handle = self._payloads.put(event.outputs)
                assert handle is not None, "as above"
                return BatchRan(
                    event.slice_id, event.batch_id, handle, event.rejected, event.exec_ms, event.began_at_ms
                )
            case Loaded():
                gc.collect()  # what stays is not walked any more
                gc.freeze()
                return event
            case _:
                return event

    def _perform(self, action: StageAction) -> None:
        match action:
            case LoadPart(message, is_beside):
                (model,) = message.spec.models
                part = Part(self._stage, message.first_layers, message.digest)
                self._parts[message.spec.slice_id, model.model_id] = part
                if is_beside:
                    self._thread.load_model(message.spec, message.number)
                else:
                    self._thread.load(message.spec)
            case ForgetModel(slice_id, model_id):
                self._thread.unload_model(slice_id, model_id)
            case RunStage(message, payload):
                tensors = self._payloads.get(payload)
                rows = len(tensors[0].array)
                # Tensors of a whole batch: each is cut into its rows, as if every one had come alone.
                part_ = JobPart(rows, [_row(one, row) for row in range(rows) for one in tensors])
                job = Job(message.slice_id, message.batch_id, message.model_id, [part_])
                self._thread.run(job, self._clock.now_ms())
            case PassOn(message, payload):
                self._pass_on(message, payload)
            case TellWorker(message):
                self._tell(message)
            case ReleaseInputs(payload):
                self._payloads.release(payload)
            case End():
                self.end = action

    def _pass_on(self, message: Activations, payload: Handle) -> None:
        tensors = self._payloads.get(payload)
        self._payloads.release(payload)
        try:
            is_out, reason = self._push.send(NEXT, message, tensors), "the next stage takes no more"
        except LocalProtocolError as error:
            is_out, reason = False, f"what the stage gave cannot be sent: {error}"
        if not is_out:
            self._tell(StageFailed(message.batch_id, message.slice_id, message.model_id, self._stage, reason))

    def _tell(self, message: AnyMessage) -> None:
        if not self._push.send(
            WORKER, message
        ):  # it gives the batch up by itself, or hears no more of anything
            log.error("worker_untold message=%s", type(message).__name__)

    def _make_device(self) -> BlockingDevice:
        # Here, on the device's thread: torch takes seconds to import.
        from roles.gpu_worker.executors.torch import TorchDevice  # noqa: PLC0415  see above

        gc.freeze()
        return TorchDevice(self._clock, self._threads, self._parts, self._meeting)


def _row(tensor: NamedTensor, row: int) -> NamedTensor:
    return NamedTensor(tensor.name, tensor.array[row])
