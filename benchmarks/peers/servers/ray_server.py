"""The sleeping model behind Ray Serve. Run by Ray's own interpreter; settings in the variable PEER."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any

import ray
from ray import serve

PEER = json.loads(os.environ["PEER"])
IN_FLIGHT_MAX = 1_000  # of a replica: its default of 5 would keep batches at 5


@serve.deployment(
    num_replicas=PEER["devices"], max_ongoing_requests=IN_FLIGHT_MAX, ray_actor_options={"num_cpus": 0.01}
)
class Sleeper:
    """Takes its time for a batch, one at a time; each replica is a device."""

    @serve.batch(  # type: ignore[untyped-decorator]  # a rival's, unknown to our checker
        max_batch_size=PEER["max_batch"], batch_wait_timeout_s=PEER["wait_ms"] / 1e3
    )
    async def infer(self, values: list[Any]) -> list[float]:
        """One batch, aside, so that the replica goes on taking requests."""
        takes_s = (PEER["alpha_ms"] * len(values) + PEER["beta_ms"]) / 1e3
        await asyncio.to_thread(time.sleep, takes_s)
        return [1.0] * len(values)

    async def __call__(self, request: Any) -> dict[str, float]:
        """One request."""
        return {"output": await self.infer((await request.json())["input"])}


def main() -> None:
    """Serve until told to stop."""
    ray.init(include_dashboard=False, num_cpus=4, logging_level="ERROR", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PEER["port"]})
    for model in PEER["models"]:
        application = Sleeper.bind()  # type: ignore[attr-defined]  # the decorator makes it a deployment
        serve.run(
            application, name=model, route_prefix=f"/{model}", logging_config={"enable_access_log": False}
        )
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
