"""Models that go to another shard: this one serves on until every frontend has gone there with its requests.

The other shard serves the model already, in a higher term. Each frontend that hears of that announces its next requests there and
says that it has `Left` here. What it announced here before is answered here. So the model is removed when all
have left and nothing is queued, and no request is refused. A frontend that does not leave within a while
cannot see the other shard: then the model stays, and the operator hears why.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from fabric.ids import PeerId
from fabric.messages import Changed, ModelsRemove, PlanChange
from roles.scheduler.fleet import Fleet
from roles.scheduler.planning.actuator import Actuator
from roles.scheduler.planning.desired_state import BUSY

LEAVE_MS: Final = 30_000.0


class _Removal(Struct, frozen=True):
    peer: PeerId
    change: ModelsRemove
    until_ms: float


class LeavingModels:
    """Removals that wait. Bounded by whoever adds them."""

    def __init__(self, fleet: Fleet, actuator: Actuator) -> None:
        self._fleet = fleet
        self._actuator = actuator
        self._waiting: list[_Removal] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, peer: PeerId, change: ModelsRemove, now_ms: float) -> None:
        """Remove these models when they have been left."""
        self._waiting.append(_Removal(peer, change, now_ms + LEAVE_MS))

    def take(self, now_ms: float) -> list[tuple[PeerId, PlanChange]]:
        """Those that can be carried out now; those that have waited for too long are refused."""
        ready: list[tuple[PeerId, PlanChange]] = []
        waiting: list[_Removal] = []
        for one in self._waiting:
            still = self.still_used(one.change)
            if not still:
                ready.append((one.peer, one.change))
            elif now_ms < one.until_ms:
                waiting.append(one)
            else:
                answer = Changed(one.change.request_no, "refused", BUSY, f"{still} for {LEAVE_MS / 1e3:g} s")
                self._actuator.send(one.peer, answer)
        self._waiting = waiting
        return ready

    def still_used(self, change: ModelsRemove) -> str:
        """By whom; empty: by nobody. What is not served at all is for the controller to refuse."""
        for model_id in change.model_ids:
            if model_id in self._fleet.replicas:
                frontends = self._fleet.frontends_at(model_id)
                if frontends:
                    return f"{', '.join(frontends)} has not left {model_id}"
                if self._actuator.queued(model_id):
                    return f"{self._actuator.queued(model_id)} requests of {model_id} are queued"
        return ""
