"""A model behind mosec: a sleeping one, run by mosec's own interpreter, or a real one; settings in the variable PEER."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from mosec import Server, Worker

PEER = json.loads(os.environ["PEER"])
MODEL = "PEER_MODEL"
"""Which of the models a worker has: mosec sets it in its process."""


class Sleeper(Worker):  # type: ignore[misc]  # a rival's class, unknown to our checker
    """Takes its time for a batch, one at a time; each of its processes is a device."""

    def forward(self, data: list[Any]) -> list[Any]:
        """One batch."""
        time.sleep((PEER["alpha_ms"] * len(data) + PEER["beta_ms"]) / 1e3)
        return [{"output": 1.0} for _ in data]


class Model(Worker):  # type: ignore[misc]  # as above
    """A real model; bodies are tensors as they lie in memory."""

    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        """Load and warm it."""
        from benchmarks.peers.bare_model import BareModel  # noqa: PLC0415  needs torch and this repository

        super().__init__()
        self._model = BareModel(PEER["loaders"][os.environ[MODEL]], PEER["device"], PEER["max_batch"])

    def deserialize(self, data: bytes) -> Any:
        """The request's tensors."""
        return self._model.decode(data)

    def forward(self, data: list[Any]) -> list[bytes]:
        """One batch; of one request where no more are allowed in one."""
        return self._model.run(data) if PEER["max_batch"] > 1 else self._model.run([data])[0]

    def serialize(self, data: bytes) -> bytes:
        """They are bytes already."""
        return data


if __name__ == "__main__":
    os.environ.update(
        MOSEC_ADDRESS="127.0.0.1",
        MOSEC_PORT=str(PEER["port"]),
        MOSEC_TIMEOUT="10000",
        MOSEC_LOG_LEVEL="warning",
    )
    server = Server()
    workers = PEER["devices"] * PEER.get("workers", 1)
    for model in PEER["models"]:
        server.append_worker(
            Model if "loaders" in PEER else Sleeper,
            num=workers,
            max_batch_size=PEER["max_batch"],
            max_wait_time=PEER["wait_ms"],
            route=f"/{model}",
            env=[{MODEL: model}] * workers,
        )
    server.run()
