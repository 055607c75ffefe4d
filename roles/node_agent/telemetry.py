"""When the node's GPUs are sampled, and what the scheduler hears of them. Sans-IO.

One sample is asked for at a time: where a GPU does not answer, the next one waits for it, and the age of the last
is there to see.
"""

from __future__ import annotations

from collections.abc import Sequence

from fabric.ids import NodeId
from fabric.limits import ago_ms
from fabric.messages import GpuInfo, GpuReport, GpuSample, Telemetry
from roles.node_agent.events import AgentAction, SampleGpus
from roles.node_agent.mps.daemons import Daemons
from roles.runtime.core import SCHEDULER, Send


class GpuWatch:
    """Samples GPUs that have sensors. What to do goes to `actions`, the core's own list."""

    def __init__(
        self,
        node_id: NodeId,
        gpus: Sequence[GpuInfo],
        daemons: Daemons,
        every_ms: float,
        actions: list[AgentAction],
    ) -> None:
        self._node_id = node_id
        self._gpus = gpus
        self._daemons = daemons
        self._every_ms = every_ms
        self._actions = actions
        self._samples: dict[int, GpuSample] = {}
        self._sampled_at_ms = 0.0
        has_sensors = any(gpu.device == "cuda" for gpu in gpus)
        self._next_at_ms: float | None = 0.0 if has_sensors else None

    @property
    def wake_at_ms(self) -> float | None:
        """The next sample."""
        return self._next_at_ms

    def tick(self, now_ms: float) -> None:
        """Ask, if it is time."""
        if self._next_at_ms is not None and self._next_at_ms <= now_ms:
            self._next_at_ms = None
            self._actions.append(SampleGpus())

    def sampled(self, samples: Sequence[GpuSample], now_ms: float) -> None:
        """The answer: pass it on."""
        self._samples = {sample.gpu: sample for sample in samples}
        self._sampled_at_ms = now_ms
        self._next_at_ms = now_ms + self._every_ms
        self.tell()

    def tell(self) -> None:
        """Tell the scheduler what is known; lost, it is told again with the next sample."""
        samples = tuple(self._samples.values())
        self._actions.append(
            Send(SCHEDULER, Telemetry(self._node_id, samples, tuple(self._daemons.listed())))
        )

    def listed(self, now_ms: float) -> tuple[GpuReport, ...]:
        """For people."""
        sharing = {one.gpu: one for one in self._daemons.listed()}
        return tuple(
            GpuReport(
                self._node_id,
                info,
                sharing.get(info.gpu),
                self._samples.get(info.gpu),
                ago_ms(now_ms, self._sampled_at_ms) if info.gpu in self._samples else None,
            )
            for info in self._gpus
        )
