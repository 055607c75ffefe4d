"""The other ranks of a gang, as its worker speaks to them: they load when it does, and get the inputs of each step."""

from __future__ import annotations

from fabric.errors import LocalProtocolError
from fabric.ids import BatchId
from fabric.messages import Activations, LoadStage, SliceSpec, StageFailed, StageLoaded
from roles.gpu_worker.executors.base import DeviceBroken
from roles.gpu_worker.executors.gang import Gang, Step
from roles.gpu_worker.stages.later_stages import EXPIRES_MS_MAX, LaterStages, StageGone


class OtherRanks:
    """They are processes like later stages, and a step is to them what a batch is to those."""

    def __init__(self, processes: LaterStages, gang: Gang) -> None:
        self._processes = processes
        self._gang = gang
        self._count = 0

    def load(self, spec: SliceSpec) -> None:
        """They are started. All ranks load at once: they may exchange weights."""
        self._count = len(spec.following)
        self._gang.start(1 + self._count)
        for rank in self._ranks if spec.models else ():  # none is left where its model was left out
            self._processes.send(rank, LoadStage(spec, 0, rank, (), ""))

    def take(self, limit: int, now_ms: float) -> list[DeviceBroken]:
        """Send them what the first rank begins, and hear them. What comes of it is heard of the first one, but for the end of all."""
        for step in self._gang.take(limit, now_ms):
            self._begin(step)
        for said in self._processes.take(limit, now_ms):
            if isinstance(said, StageGone):
                return [DeviceBroken(f"rank {said.stage} of {1 + self._count} is gone: {said.reason}")]
            match said.message:
                case StageLoaded() as message:
                    self._gang.loaded(message.stage, message.reason)
                case Activations() as message:
                    self._gang.ended(message.stage, message.batch_id, "")
                case StageFailed() as message:
                    self._gang.ended(message.stage, message.batch_id, message.reason)
                case _:
                    pass
        failure = self._gang.failure(now_ms)
        return [DeviceBroken(failure)] if failure else []

    @property
    def _ranks(self) -> range:
        return range(1, 1 + self._count)

    def _begin(self, step: Step) -> None:
        # Whatever comes of deadlines meanwhile: they must take the step if the first rank does.
        number, slice_id, model_id = BatchId(step.number), step.slice_id, step.model_id
        message = Activations(number, slice_id, model_id, 0, 0.0, EXPIRES_MS_MAX)
        for rank in self._ranks:
            try:
                is_out, reason = self._processes.send(rank, message, step.tensors), "it takes no more"
            except LocalProtocolError as error:
                is_out, reason = False, f"what it should compute cannot be sent: {error}"
            if not is_out:
                self._gang.ended(rank, step.number, reason)
