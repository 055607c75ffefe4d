"""What an operator of a virtual cluster changes, and what is served since."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fabric.ids import ModelId, NodeId
from fabric.messages import Changed, DrainAsked, ModelsAdd, ModelSet, ModelsRemove, PlanChange
from tests.chaos.virtual.clients import OperatorProcess

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
        self._touched: set[ModelId] = set()

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
        over = partial(self._over, word, model_id)
        operator = self._operator
        # Its connections take a moment; a command at a terminal waits for them too.
        self._world.at(self._world.now_ms + 30.0, lambda: operator.ask(message, over))

    def _over(self, word: str, model_id: ModelId, answer: Changed | None) -> None:
        self._under_way -= 1
        if word not in {"add", "remove"}:
            return
        if answer is None:
            self.served[model_id] = None
        elif answer.status == "ok" and self.served.get(model_id, False) is not None:
            self.served[model_id] = word == "add"
