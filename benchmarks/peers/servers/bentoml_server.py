"""The sleeping model behind BentoML. Run by BentoML's own interpreter; settings in the variable PEER."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import bentoml

PEER = json.loads(os.environ["PEER"])


@bentoml.service(
    workers=PEER["devices"],
    threads=1,
    traffic={"timeout": 10, "max_concurrency": 1_000},
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
)
class Sleeper:
    """Takes its time for a batch, one at a time; each of its workers is a device."""

    @bentoml.api(  # type: ignore[untyped-decorator]  # a rival's, unknown to our checker
        route=f"/{PEER['models'][0]}",
        batchable=True,
        max_batch_size=PEER["max_batch"],
        max_latency_ms=PEER["wait_ms"],
    )
    def predict(self, x: list[list[float]]) -> list[float]:
        """One batch, on the worker's one thread."""
        time.sleep((PEER["alpha_ms"] * len(x) + PEER["beta_ms"]) / 1e3)
        return [1.0] * len(x)


if __name__ == "__main__":
    words = [
        "-m",
        "bentoml",
        "serve",
        f"{Path(__file__).stem}:Sleeper",
        "--working-dir",
        str(Path(__file__).parent),
    ]
    address = ["--host", "127.0.0.1", "--port", str(PEER["port"])]
    os.execv(sys.executable, [sys.executable, *words, *address])
