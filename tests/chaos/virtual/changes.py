"""What an operator of a virtual cluster changes, and what is served since."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from fabric.ids import ModelId, NodeId
from fabric.messages import Changed, DrainAsked, ModelsAdd, ModelSet, ModelsRemove, PlanChange
from roles.scheduler.fleet import Fleet
from tests.chaos.virtual.processes.clients import OperatorProcess

if TYPE_CHECKING:
    from tests.chaos.virtual.world import World


class Changes:
    """`served`: of each model whether it is served; None: a change of it has an outcome that nobody knows."""

    def __init__(self, world: World, model: Callable[[int], dict[str, Any]]) -> None:
        self.served: dict[ModelId, bool | None] = {
            ModelId(f"m{number}"): True for number in range(world.shape.models)
        }
        self._world = world
        self._model = model
        self._operator: OperatorProcess | None = None
        self._asked = 0
        self._under_way = 0
        self._are_kept = True
        self._touched: set[ModelId] = set()
        self.drained: dict[NodeId, bool | None] = {}
        """Of nodes that were taken out or back; None: nobody knows."""
        self.slos_ms: dict[ModelId, float | None] = {}
        """Of models whose SLO was changed; None: nobody knows."""

    @property
    def are_under_way(self) -> bool:
        """Whether an answer is outstanding."""
        return self._under_way > 0

    def is_doubtful(self, model_id: ModelId) -> bool:
        """Whether that model may be known, and may not."""
        return model_id in self._touched or model_id not in self.served

    def ask(self, what: str) -> None:
        """One of the script's `CHANGES`, and of which model or node: `add:2`, `drain:0`."""
        word, _, number = what.partition(":")
        place = int(number)
        self._asked += 1
        self._under_way += 1
        model_id = ModelId(f"m{place}")
        node_id = NodeId(self._world.hosts[place % len(self._world.hosts)].node.node_id)
        message: PlanChange
        match word:
            case "add":
                self._touched.add(model_id)
                message = ModelsAdd(self._asked, json.dumps([self._model(place)]))
            case "remove":
                self._touched.add(model_id)
                message = ModelsRemove(self._asked, (model_id,))
            case "slo":
                message = ModelSet(self._asked, model_id, slo_ms=2 * self._world.shape.slo_ms)
            case "drain" | "back":
                message = DrainAsked(self._asked, node_id, is_back=word == "back")
            case _:
                raise AssertionError(what)
        if self._operator is None:
            self._operator = OperatorProcess(self._world)
        over = partial(self._over, word, model_id, node_id)
        operator = self._operator
        # Its connections take a moment; a command at a terminal waits for them too.
        self._world.at(self._world.now_ms + 30.0, lambda: operator.ask(message, over))

    def may_be_lost(self) -> None:
        """What is answered may not be written down."""
        self._are_kept = False

    def lacking(self, fleet: Fleet) -> Iterator[str]:
        """Changes that were done, and are not there."""
        if not self._are_kept:
            return
        for node_id, is_drained in self.drained.items():
            hosted = [one.spec.slice_id for one in fleet.slices.values() if one.node_id == node_id]
            if is_drained and hosted:
                yield f"{node_id} was drained, and {hosted} are planned there"
        for model_id, slo_ms in self.slos_ms.items():
            if slo_ms is not None and fleet.slos_ms.get(model_id, slo_ms) != slo_ms:
                yield f"the SLO of {model_id} was set to {slo_ms}, and is {fleet.slos_ms[model_id]}"

    def _over(self, word: str, model_id: ModelId, node_id: NodeId, answer: Changed | None) -> None:
        self._under_way -= 1
        is_known = answer is not None and answer.status in {"ok", "refused"}
        is_done = answer is not None and answer.status == "ok"
        if word in {"drain", "back"}:
            if not is_known:
                self.drained[node_id] = None
            elif is_done and self.drained.get(node_id, False) is not None:
                self.drained[node_id] = word == "drain"
            return
        if not is_known or word == "add" or self.served.get(model_id, False) is None:
            self.slos_ms[model_id] = None
        elif is_done and word == "slo" and self.slos_ms.get(model_id, 0.0) is not None:
            self.slos_ms[model_id] = 2 * self._world.shape.slo_ms
        if word == "slo":
            return
        if answer is None:
            self.served[model_id] = None
        elif answer.status == "ok" and self.served.get(model_id, False) is not None:
            self.served[model_id] = word == "add"
