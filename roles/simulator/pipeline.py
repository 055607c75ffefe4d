"""Slices over several modelled GPUs: a pipeline, whose models are cut into stages, one a GPU; a gang, whose model runs on all at once.

A stage runs one batch at a time, in the order in which they came. So all moments of a batch are known when it starts: each stage
takes it when the stage before has ended and its own last batch has.
"""

from __future__ import annotations

from collections.abc import Sequence

from fabric.ids import BatchId, ModelId, NodeId, PeerId
from fabric.messages import ModelSpec, SliceSpec
from roles.simulator.gpu import SimulatedGpu, SimulatedJob, SimulatedSlice, SimulatedSurroundings


class SimulatedPipeline(SimulatedSlice):
    """`running` is the batch in the first stage, `free_at_ms` when that one can take the next."""

    def __init__(
        self,
        spec: SliceSpec,
        node_id: NodeId,
        peer: PeerId,
        gpus: Sequence[SimulatedGpu],
        world: SimulatedSurroundings,
    ) -> None:
        self._stages_ms: dict[ModelId, Sequence[Sequence[float]]] = {}
        self._free_at_ms = [0.0] * len(gpus)
        super().__init__(spec, node_id, peer, gpus, world)

    def _alone_ms(self, model: ModelSpec) -> Sequence[float]:
        self._stages_ms[model.model_id] = model.stages_ms
        return model.exec_ms

    def preempt(self, batch_id: BatchId, now_ms: float) -> None:
        """A batch that has begun goes through: it cannot be found among the stages in time."""
        if self._job is not None and self._job.run.batch_id == batch_id:
            self._world.preempted_late()
        else:
            super().preempt(batch_id, now_ms)

    def _run(self, job: SimulatedJob, now_ms: float) -> None:
        at_ms = now_ms
        stages: list[tuple[int, float, float]] = []
        for place, (gpu, times_ms) in enumerate(
            zip(self._gpus, self._stages_ms[job.run.model_id], strict=True)
        ):
            start_at_ms = max(at_ms, self._free_at_ms[place])
            at_ms = self._free_at_ms[place] = start_at_ms + times_ms[job.ran - 1]
            stages.append((gpu.number, start_at_ms, at_ms))
        job.stages = tuple(stages)
        self.free_at_ms = self._free_at_ms[0]
        self._world.schedule(self.free_at_ms, self._leave_first, job)
        self._world.schedule(at_ms, self._finish, job)

    def _leave_first(self, job: SimulatedJob, now_ms: float) -> None:
        """The first stage can take another batch."""
        assert self._job is job, "one at a time"
        self._job = None
        self._look(None, now_ms)

    def _finish(self, job: SimulatedJob, now_ms: float) -> None:
        job.finished_at_ms = now_ms
        self._world.ran(self, job)
        self._report(job, "ok", now_ms)


class SimulatedGang(SimulatedSlice):
    """One batch at a time, for which all its GPUs are busy."""

    def _end(self, job: SimulatedJob, now_ms: float) -> None:
        job.stages = tuple((gpu.number, job.started_at_ms, now_ms) for gpu in self._gpus)
        super()._end(job, now_ms)
