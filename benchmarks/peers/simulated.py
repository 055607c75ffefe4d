"""The simulator beside a real device: the same models, run times measured there, and the same arrivals."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.cases import RealCase
from benchmarks.peers.measure import OURS, Effort, Measured
from roles.config.read_config import load_config
from roles.lab.goodput import Question, find_goodput, question_of
from roles.lab.parallel import executor_of

APART_MAX = 0.05


@dataclass(frozen=True, slots=True)
class Simulated:
    """Goodput of the default discipline, live and simulated.

    `network`: what messages took on the live way (`cluster.network`), by the ledger at the live goodput; `without_network_rps`
    is simulated with messages that take no time.
    """

    case_name: str
    live_rps: float
    simulated_rps: float
    without_network_rps: float
    network: Mapping[str, float]

    @property
    def apart(self) -> float:
        """By how much of the simulated goodput the live one differs from it."""
        return abs(1 - self.live_rps / self.simulated_rps) if self.simulated_rps else float("inf")

    def __str__(self) -> str:
        verdict = "held" if self.apart <= APART_MAX else "MISSED"
        network = ", ".join(f"{name} {value:g}" for name, value in self.network.items())
        return (
            f"  in simulation {self.simulated_rps:.0f} r/s ({network}), without network {self.without_network_rps:.0f};"
            f" live {self.live_rps:.0f} is {100 * self.apart:.1f} % apart: {verdict} (line ≤ {100 * APART_MAX:g} %)"
        )


def simulated(live: Measured, case: RealCase, effort: Effort) -> Simulated:
    """The highest rate that is good there, by the same seeds and windows."""
    stages_ms = live.at_goodput[0].stages_ms if live.at_goodput else {}
    way_ms = stages_ms.get("transfer_ms", 0.0)
    network = {
        "control_ms": round(way_ms / 2, 3),  # a request is announced and granted before its batch can start
        "result_ms": round(stages_ms.get("network_ms", 0.0) + stages_ms.get("return_ms", 0.0), 3),
    }
    with executor_of(None) as (executor, size):
        with_network_rps, without_rps = (
            find_goodput(
                _question(case, effort, one), effort.seeds, executor, size, lambda _: None
            ).goodput_rps
            for one in (network, {})
        )
    return Simulated(case.name, live.goodput_rps, with_network_rps, without_rps, network)


def _question(case: RealCase, effort: Effort, network: Mapping[str, float]) -> Question:
    document: dict[str, Any] = case.document()
    for model in document["models"]:
        model["rate_rps"] = case.bare_rps / case.models
    document["cluster"]["network"] = network
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "cluster.json"
        file.write_text(json.dumps({**document, "batching": OURS[0]}), encoding="utf-8")
        return question_of(load_config(file), effort.warmup_s, effort.window_s)
