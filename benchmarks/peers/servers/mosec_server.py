"""The sleeping model behind mosec. Run by mosec's own interpreter; settings in the variable PEER."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from mosec import Server, Worker

PEER = json.loads(os.environ["PEER"])


class Sleeper(Worker):  # type: ignore[misc]  # a rival's class, unknown to our checker
    """Takes its time for a batch, one at a time; each of its processes is a device."""

    def forward(self, data: list[Any]) -> list[Any]:
        """One batch."""
        time.sleep((PEER["alpha_ms"] * len(data) + PEER["beta_ms"]) / 1e3)
        return [{"output": 1.0} for _ in data]


if __name__ == "__main__":
    os.environ.update(
        MOSEC_ADDRESS="127.0.0.1",
        MOSEC_PORT=str(PEER["port"]),
        MOSEC_TIMEOUT="10000",
        MOSEC_LOG_LEVEL="warning",
    )
    server = Server()
    for model in PEER["models"]:
        server.append_worker(
            Sleeper,
            num=PEER["devices"],
            max_batch_size=PEER["max_batch"],
            max_wait_time=PEER["wait_ms"],
            route=f"/{model}",
        )
    server.run()
