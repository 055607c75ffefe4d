"""A model behind LitServe: a sleeping one, run by LitServe's own interpreter, or a real one; settings in the variable PEER."""

from __future__ import annotations

import json
import os
import time
from typing import Annotated, Any

from fastapi import Body, Response
from litserve import LitAPI, LitServer

PEER = json.loads(os.environ["PEER"])
RAW = "application/octet-stream"


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


class Model(LitAPI):  # type: ignore[misc]  # as above
    """A real model; bodies are tensors as they lie in memory."""

    def setup(self, device: str) -> None:
        """Load and warm it."""
        from benchmarks.peers.bare_model import BareModel  # noqa: PLC0415  needs torch and this repository

        loader = PEER["loaders"][self.api_path.removeprefix("/")]
        self._model = BareModel(loader, device, PEER["max_batch"])

    def decode_request(self, request: bytes) -> Any:
        """The request's tensors."""
        return self._model.decode(request)

    def batch(self, inputs: list[Any]) -> list[Any]:
        """As they are: the model puts them into its own memory."""
        return inputs

    def predict(self, x: list[Any]) -> list[bytes]:
        """One batch; of one request where no more are allowed in one."""
        return self._model.run(x) if PEER["max_batch"] > 1 else self._model.run([x])[0]

    def unbatch(self, output: list[bytes]) -> list[bytes]:
        """As they are."""
        return output

    def encode_response(self, output: bytes) -> Response:
        """The bytes alone."""
        return Response(output, media_type=RAW)


# LitServe gives FastAPI the annotations themselves, which must not be strings.
Model.decode_request.__annotations__["request"] = Annotated[bytes, Body(media_type=RAW)]
Model.encode_response.__annotations__["return"] = Response


if __name__ == "__main__":
    is_cuda = PEER.get("device", "cpu") != "cpu"
    apis = [
        (Model if "loaders" in PEER else Sleeper)(
            max_batch_size=PEER["max_batch"], batch_timeout=PEER["wait_ms"] / 1e3, api_path=f"/{model}"
        )
        for model in PEER["models"]
    ]
    server = LitServer(
        apis,
        accelerator="cuda" if is_cuda else "cpu",
        devices=1,
        workers_per_device=PEER["devices"] * PEER.get("workers", 1),
        fast_queue=PEER["fast_queue"],
    )
    server.run(
        host="127.0.0.1",
        port=PEER["port"],
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
    )
