"""The sleeping model behind LitServe. Run by LitServe's own interpreter; settings in the variable PEER."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from litserve import LitAPI, LitServer

PEER = json.loads(os.environ["PEER"])


class Sleeper(LitAPI):  # type: ignore[misc]  # a rival's class, unknown to our checker
    """Takes its time for a batch, one at a time; each of its processes is a device."""

    def setup(self, device: str) -> None:
        """Nothing to load."""

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201  it would be taken for the body's type
        """The request's values; the argument's name is LitServe's."""
        return request["input"]

    def batch(self, inputs: list[Any]) -> list[Any]:
        """As they are: there is nothing to stack."""
        return inputs

    def predict(self, x: list[Any]) -> list[float]:
        """One batch."""
        time.sleep((PEER["alpha_ms"] * len(x) + PEER["beta_ms"]) / 1e3)
        return [1.0] * len(x)

    def unbatch(self, output: list[float]) -> list[float]:
        """As they are."""
        return output

    def encode_response(self, output: float) -> dict[str, float]:
        """The answer's JSON."""
        return {"output": output}


if __name__ == "__main__":
    apis = [
        Sleeper(max_batch_size=PEER["max_batch"], batch_timeout=PEER["wait_ms"] / 1e3, api_path=f"/{model}")
        for model in PEER["models"]
    ]
    server = LitServer(
        apis, accelerator="cpu", devices=1, workers_per_device=PEER["devices"], fast_queue=PEER["fast_queue"]
    )
    server.run(
        host="127.0.0.1",
        port=PEER["port"],
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
    )
