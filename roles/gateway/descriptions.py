"""What there is, in the protocol's documents: the server, models, the repository. The same for HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fabric.ids import ModelId
from fabric.messages import ModelInfo, TensorInfo
from roles.gateway.inference import VERSION
from roles.gateway.tensors import datatype_of
from roles.runtime.own_version import own_version

PLATFORM: Final = "tenuto"
EXTENSIONS: Final = ("binary_tensor_data", "model_repository", "model_configuration", "statistics")
"""Those of Triton's extensions that are served."""


def server() -> dict[str, Any]:
    """`GET /v2`."""
    return {"name": "tenuto", "version": own_version(), "extensions": list(EXTENSIONS)}


def model(info: ModelInfo) -> dict[str, Any]:
    """`GET /v2/models/M`: inputs and outputs of one request, so without a batch axis."""
    return {
        "name": info.model_id,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [_tensor(one) for one in info.inputs],
        "outputs": [_tensor(one) for one in info.outputs],
    }


def config(info: ModelInfo) -> dict[str, Any]:
    """`GET /v2/models/M/config`: what a client needs of Triton's. `max_batch_size` 0: shapes are those of one request."""
    return {
        "name": info.model_id,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": 0,
        "input": [_config_tensor(one) for one in info.inputs],
        "output": [_config_tensor(one) for one in info.outputs],
    }


def index(
    served: Mapping[ModelId, ModelInfo], known: Sequence[str], *, is_ready_only: bool
) -> list[dict[str, Any]]:
    """`POST /v2/repository/index`: models that are served, and their heads, and those of the file that are not."""
    found = [
        {
            "name": name,
            "version": VERSION,
            "state": "READY" if info.replicas else "UNAVAILABLE",
            "reason": "" if info.replicas else "no slice that serves it is ready",
        }
        for name, info in served.items()
    ]
    found += [
        {"name": name, "version": VERSION, "state": "UNAVAILABLE", "reason": "unloaded"}
        for name in known
        if name not in served
    ]
    return [one for one in found if one["state"] == "READY" or not is_ready_only]


def listed(served: Sequence[ModelInfo]) -> dict[str, Any]:
    """`GET /v1/models`, for people."""
    return {
        "models": [
            {
                "name": info.model_id,
                "slo_ms": info.slo_ms,
                "is_ready": info.replicas > 0,
                "replicas": info.replicas,
                "takes_pictures": info.image is not None,
                "inputs": [_plain(one) for one in info.inputs],
                "outputs": [_plain(one) for one in info.outputs],
            }
            for info in served
        ]
    }


def _tensor(info: TensorInfo) -> dict[str, Any]:
    return {"name": info.name, "datatype": datatype_of(info.dtype), "shape": list(info.shape)}


def _config_tensor(info: TensorInfo) -> dict[str, Any]:
    return {"name": info.name, "data_type": f"TYPE_{datatype_of(info.dtype)}", "dims": list(info.shape)}


def _plain(info: TensorInfo) -> dict[str, Any]:
    return {"name": info.name, "dtype": info.dtype, "shape": list(info.shape)}
