"""What is served, and how fast: `Case` on emulated devices, `RealCase` on a real one.

At a peer several models share the devices evenly, each with its own: this suits equal rates best, since batches of one
model then never wait for another's. On one real device each has a process of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fabric.link import Tensor

ALPHA_MS = 1.053
BETA_MS = 5.072
MAX_BATCH = 16
PAYLOAD_FLOATS = 16
BOUND_MARGIN = 1.25
Inputs = Mapping[str, Tensor]
"""Of one request."""
EMULATED_INPUTS: Inputs = {"input": np.full(PAYLOAD_FLOATS, 0.5, np.float32)}


@dataclass(frozen=True, slots=True)
class Case:
    """What is served, and how fast: `models` of equal rates on `devices`, where a batch of b takes beta + alpha * b ms."""

    devices: int
    models: int
    slo_ms: float
    alpha_ms: float = ALPHA_MS
    beta_ms: float = BETA_MS

    @property
    def name(self) -> str:
        """How rows and results call it."""
        counts = ((self.devices, "device"), (self.models, "model"))
        words = [f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts]
        return ", ".join([*words, f"{self.slo_ms:g} ms"])

    @property
    def model_names(self) -> tuple[str, ...]:
        """The models' names in requests, in order."""
        return tuple(f"sleep{number}" for number in range(self.models))

    @property
    def inputs(self) -> Mapping[str, Inputs]:
        """What a request holds, by model."""
        return dict.fromkeys(self.model_names, EMULATED_INPUTS)

    @property
    def devices_each(self) -> int:
        """How many devices a model has where they are shared out."""
        return self.devices // self.models

    @property
    def bound_rps(self) -> float:
        """No server carries more: every device runs the largest batch all the time."""
        return self.devices * 1000 * MAX_BATCH / (self.alpha_ms * MAX_BATCH + self.beta_ms)

    @property
    def bound_text(self) -> str:
        """What that is."""
        return f"all devices busy with full batches: {self.bound_rps:.0f} r/s"

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """What peers may be told as the largest batch: at a tight SLO also smaller ones, which never block for 22 ms."""
        is_tight = self.slo_ms < 2 * (self.alpha_ms * MAX_BATCH + self.beta_ms)
        return (MAX_BATCH, MAX_BATCH // 2) if is_tight else (MAX_BATCH,)

    def document(self) -> dict[str, Any]:
        """Models and cluster of our configuration file."""
        profile = {"alpha_ms": self.alpha_ms, "beta_ms": self.beta_ms, "max_batch": MAX_BATCH}
        models = [{"name": name, "slo_ms": self.slo_ms, "profile": profile} for name in self.model_names]
        return {"models": models, "cluster": {"gpus": self.devices}}

    def told(self, models: Sequence[str]) -> dict[str, Any]:
        """What a peer's server file is told of these models."""
        return {"models": models, "alpha_ms": self.alpha_ms, "beta_ms": self.beta_ms}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A real model as `real.py` met it: `exec_ms` by batch size in our worker with inputs in place, `bare_rps` of a bare loop at the largest.

    `peer_ms`: by batch size as peers run it, eagerly and with its copies. `loader`: as in our configuration file.
    """

    name: str
    loader: Mapping[str, Any]
    inputs: Inputs
    exec_ms: Mapping[int, float]
    peer_ms: Mapping[int, float]
    bare_rps: float

    @property
    def most_rps(self) -> float:
        """Of the bare loop and our worker, whichever serves more, the latter at its best batch size."""
        return max(self.bare_rps, *(1e3 * size / took_ms for size, took_ms in self.exec_ms.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RealCase(Case):
    """Real models of equal rates on one real device, `cpu` or `cuda`, all with one SLO."""

    device: str
    served: tuple[ServedModel, ...] = field(compare=False)

    @property
    def name(self) -> str:
        """How rows and results call it."""
        return f"{' + '.join(self.model_names)} on {self.device}, {self.slo_ms:g} ms"

    @property
    def model_names(self) -> tuple[str, ...]:
        """The models' names in requests, in order."""
        return tuple(one.name for one in self.served)

    @property
    def inputs(self) -> Mapping[str, Inputs]:
        """What a request holds, by model."""
        return {one.name: one.inputs for one in self.served}

    @property
    def devices_each(self) -> int:
        """All models run on the one device, each at a peer in a process of its own."""
        return 1

    @property
    def bare_rps(self) -> float:
        """Of bare loops that take turns, each as often as its model is asked."""
        return _in_turn_rps([one.bare_rps for one in self.served])

    @property
    def bound_rps(self) -> float:
        """The search's upper end, which it takes for bad: more than bare loops or our workers, none of which has yet waited for a request, serve in turn.

        The margin is for servers that overlap what these do one after the other, such as copies of answers with runs.
        """
        return BOUND_MARGIN * _in_turn_rps([one.most_rps for one in self.served])

    @property
    def bound_text(self) -> str:
        """What that is."""
        return f"bare loops of full batches: {self.bare_rps:.0f} r/s"

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The largest with which a request that just missed a batch can wait for one of every model and its own, as peers run them, and two smaller ones."""
        fitting = []
        for size in self.served[0].peer_ms:
            took_ms = [one.peer_ms.get(size, math.inf) for one in self.served]
            if sum(took_ms) + max(took_ms) <= self.slo_ms:
                fitting.append(size)
        largest = max(fitting, default=1)
        return tuple(dict.fromkeys(max(1, largest // part) for part in (1, 2, 4)))

    def document(self) -> dict[str, Any]:
        """Models and cluster of our configuration file, with the run times measured beforehand."""
        return {
            "models": [
                {
                    "name": one.name,
                    "slo_ms": self.slo_ms,
                    "loader": one.loader,
                    "profile": {"table": {str(size): took_ms for size, took_ms in one.exec_ms.items()}},
                }
                for one in self.served
            ],
            "cluster": {"nodes": [{"host": "here", "gpus": 1, "device": self.device}]},
        }

    def told(self, models: Sequence[str]) -> dict[str, Any]:
        """What a peer's server file is told of these models."""
        loaders = {one.name: one.loader for one in self.served}
        return {"models": models, "loaders": loaders, "device": self.device}


def _in_turn_rps(rates_rps: Sequence[float]) -> float:
    """Of models that have one device in turn, each as often, what they serve together."""
    return len(rates_rps) / sum(1 / rate_rps for rate_rps in rates_rps)


CASES = (Case(1, 1, 25.0), Case(1, 1, 50.0), Case(4, 1, 25.0), Case(4, 4, 25.0))
