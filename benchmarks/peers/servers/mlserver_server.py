"""The sleeping model behind MLServer. Run by MLServer's own interpreter; settings in the variable PEER."""

from __future__ import annotations

import asyncio
import json
import os
import time

from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.settings import ModelParameters
from mlserver.types import InferenceRequest, InferenceResponse
from numpy import float32, ones

PEER = json.loads(os.environ["PEER"])


class Sleeper(MLModel):  # type: ignore[misc]  # a rival's class, unknown to our checker
    """Takes its time for a batch; MLServer would run several at once, a device runs one."""

    async def load(self) -> bool:
        """Nothing to load but the lock that makes it one device."""
        self._device = asyncio.Lock()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """One batch: requests are stacked along the first axis."""
        size = payload.inputs[0].shape[0]
        takes_s = (PEER["alpha_ms"] * size + PEER["beta_ms"]) / 1e3
        if PEER["blocking"]:  # as its own runtimes for scikit-learn and the like do
            time.sleep(takes_s)  # noqa: ASYNC251  see above
        else:
            async with self._device:
                await asyncio.to_thread(time.sleep, takes_s)
        outputs = [NumpyCodec.encode_output("output", ones((size, 1), float32))]
        return InferenceResponse(model_name=self.name, outputs=outputs)


async def _serve() -> None:
    settings = Settings(
        host="127.0.0.1",
        http_port=PEER["port"],
        grpc_port=PEER["port_2"],
        metrics_endpoint=None,
        parallel_workers=0,
        debug=False,
        access_logger_enabled=False,
    )
    models = [
        ModelSettings(
            name=model,
            implementation=Sleeper,
            max_batch_size=PEER["max_batch"],
            max_batch_time=PEER["wait_ms"] / 1e3,
            parameters=ModelParameters(version="v1"),
        )
        for model in PEER["models"]
    ]
    await MLServer(settings).start(models)


if __name__ == "__main__":
    asyncio.run(_serve())
