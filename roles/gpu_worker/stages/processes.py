"""The processes of a pipeline's later stages, as the worker sees them: started, spoken to, watched, ended with it.

All sockets are in the run directory, which belongs to this user alone. A stage's place is known before it is there: what is sent
to it until then waits in the socket.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fabric.ids import PeerId
from fabric.link import Link, NamedTensor
from fabric.messages import AnyMessage
from fabric.sockets import LinkOptions
from fabric.transport import ZMQ, PushLink, Transport
from roles.gpu_worker.stages.later_stages import StageGone, StageSaid, meeting_of
from roles.gpu_worker.stages.process import ONE_START
from roles.runtime.children import Processes
from roles.runtime.process import module_command

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
LAST_CHARS: Final = 300


class StageProcesses:
    """Spawn from the main thread only: they end when the thread that started them does."""

    def __init__(self, worker_id: str, run_dir: Path, threads: int, transport: Transport = ZMQ) -> None:
        self._worker_id = worker_id
        self._run_dir = run_dir
        self._meeting = meeting_of(worker_id, run_dir)
        self._threads = threads
        self._transport = transport
        self._processes: Processes | None = None
        self._pull: Link | None = None
        self._push: PushLink | None = None

    def start(self, stages: int, *, is_gang: bool = False) -> None:
        """See `LaterStages`. The first of the GPUs that this process may see is its own, the next one the second stage's."""
        addresses = [f"ipc://{self._run_dir / self._worker_id}.{stage}" for stage in range(stages)]
        self._pull = self._transport.bind_payload([addresses[0]], LinkOptions(is_sharing=False))
        self._push = self._transport.push()
        self._processes = Processes()
        self._meeting.unlink(missing_ok=True)  # of those before
        seen = os.environ.get(VISIBLE, "").split(",")
        for stage in range(1, stages):
            self._push.know(_peer(stage), ONE_START, [addresses[stage]])
            name = f"{self._worker_id}.{stage}"
            # What a rank gives goes back to the worker, as if all before it were that one.
            known = [addresses[0]] * stage + [addresses[stage]] if is_gang else addresses
            words = (name, str(stage), str(self._run_dir), str(self._threads), *known)
            environment = {VISIBLE: seen[stage]} if len(seen) >= stages else {}
            self._processes.spawn(name, module_command("roles.gpu_worker.stages", *words), environment)

    def send(self, stage: int, message: AnyMessage, tensors: Sequence[NamedTensor] = ()) -> bool:
        """See `LaterStages`."""
        return self._push is not None and self._push.send(_peer(stage), message, tensors)

    def stop(self) -> None:
        """Kill and reap them; nothing where there are none."""
        if self._processes is not None:
            self._processes.close()
        if self._push is not None:
            self._push.close()
        if self._pull is not None:
            self._pull.close()
        self._meeting.unlink(missing_ok=True)
        self._processes = self._push = self._pull = None

    def filenos(self) -> Sequence[int]:
        """Of the sockets, and of the processes' ends."""
        if self._pull is None or self._processes is None or self._push is None:
            return ()
        return self._pull.fileno(), self._processes.fileno(), self._push.fileno()

    @property
    def has_more(self) -> bool:
        """Whether something has come, or a process could not be started."""
        if self._pull is None or self._processes is None:
            return False
        return (
            self._pull.has_more
            or self._processes.has_more
            or (self._push is not None and self._push.has_more)
        )

    def take(self, limit: int, now_ms: float) -> Sequence[StageSaid | StageGone]:
        """What they say, then the ends of those that have ended."""
        if self._pull is None or self._processes is None or self._push is None:
            return ()
        self._push.receive(limit)  # what waits for room goes on
        said: list[StageSaid | StageGone] = [
            StageSaid(one.message, one.tensors, one.late_ms) for one in self._pull.receive(limit)
        ]
        for exited in self._processes.take(limit, now_ms):
            stage = int(exited.name.rpartition(".")[2])
            how = f"killed by signal {-exited.code}" if exited.code < 0 else f"exit code {exited.code}"
            words = exited.last_words.strip()[-LAST_CHARS:]
            said.append(StageGone(stage, f"{how}; its last words: {words}" if words else how))
        return said


def _peer(stage: int) -> PeerId:
    return PeerId(f"stage-{stage}")
