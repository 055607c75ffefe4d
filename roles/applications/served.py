"""An application as a frontend serves it, and what there is to draw where nothing decides a fan-out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from policies.graphs import ApplicationPlan
from policies.graphs.fan_outs import FanOut

_DRAWS = 1 << 18
_PARTIAL_SHARE = 0.02
_STRIDES = (7_919, 104_729, 15_485_863)  # of request, stage and place into the draws: primes


class GlueSpec(Struct, frozen=True):
    """A user's class that makes the inputs of a stage: `python` is ``module:Class``, one call may take `limit_ms`."""

    python: str
    limit_ms: float


class ServedApplication(Struct, frozen=True):
    """An application as the file has it. `rule`: of `graph_deadlines`. `fan_outs` by stage, `glue` of those stages that have any.

    `numbers`: of the first request, and the step to the next one; what is drawn for a request goes by its number.
    """

    plan: ApplicationPlan
    fan_outs: Mapping[str, FanOut]
    rule: str
    seed: int = 1
    glue: Mapping[str, GlueSpec] = field(default_factory=dict)
    numbers: tuple[int, int] = (0, 1)

    @property
    def may_be_partial(self) -> bool:
        """Whether a request may do without some stage."""
        return any(stage.is_optional for stage in self.plan.graph.stages)

    @property
    def is_drawn(self) -> bool:
        """Whether it is left to chance how many requests follow an answer, somewhere: neither written nor of data or a glue."""
        return any(
            one.process != "fixed" and one.source is None and stage not in self.glue
            for stage, one in self.fan_outs.items()
        )

    def answer_by_ms(self, budget_ms: float) -> float:
        """How much of a budget may pass until there must be an answer. Where stages are optional some is kept back to send what there is."""
        return budget_ms * (1.0 - _PARTIAL_SHARE) if self.may_be_partial else budget_ms

    def drawn(self, numbers: tuple[int, int]) -> ServedApplication:
        """The same where there are no tensors: what data would decide is drawn as the file expects it."""
        fan_outs = {stage: replace(fan_out, source=None) for stage, fan_out in self.fan_outs.items()}
        return replace(self, fan_outs=fan_outs, glue={}, numbers=numbers)


class FanOutDraws:
    """How many tasks follow an answer, drawn by the seed, the request and the stage alone: the same under every rule and discipline."""

    def __init__(self, served: ServedApplication) -> None:
        import numpy as np  # noqa: PLC0415  few frontends have applications

        plan = served.plan
        own = random.Random(f"{served.seed}/fan-outs/{plan.name}")
        # numpy's frozen stream (NEP 19), as in roles/workload/arrivals.py.
        self._uniform = np.random.RandomState([own.getrandbits(32) for _ in range(8)]).random_sample(_DRAWS)
        self._fan_outs = served.fan_outs
        self._places = {stage.name: place for place, stage in enumerate(plan.graph.stages)}
        self._drawn: dict[int, Counter[str]] = {}

    def forget(self, number: int) -> None:
        """The request has ended."""
        self._drawn.pop(number, None)

    def count(self, number: int, stage: str, at_ms: float) -> int:
        """How many tasks of that stage follow an answer of that request, at a moment from the start of the run."""
        fan_out = self._fan_outs[stage]
        if fan_out.process == "fixed":
            return fan_out.count(0.0, at_ms)
        drawn = self._drawn.setdefault(number, Counter())
        nth = drawn[stage]
        drawn[stage] += 1
        place = sum(one * by for one, by in zip((number, self._places[stage], nth), _STRIDES, strict=True))
        return fan_out.count(float(self._uniform[place % _DRAWS]), at_ms)
