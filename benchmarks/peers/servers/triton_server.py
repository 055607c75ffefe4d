"""The sleeping model behind Triton: the server binary of nvidia-pytriton with its Python backend.

Run by the interpreter that pytriton is installed for; settings in the variable PEER. Triton loads this file as each
model's `model.py` too: `TritonPythonModel` is the name it looks for.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PEER = json.loads(os.environ["PEER"])

CONFIG = """
backend: "python"
max_batch_size: {max_batch}
input [{{ name: "input", data_type: TYPE_FP32, dims: [ -1 ] }}]
output [{{ name: "output", data_type: TYPE_FP32, dims: [ 1 ] }}]
instance_group [{{ count: {devices}, kind: KIND_CPU }}]
dynamic_batching {{ max_queue_delay_microseconds: {wait_us} }}
"""


class TritonPythonModel:
    """Takes its time for a batch; each instance is a process of its own and a device."""

    def initialize(self, _args: dict[str, str]) -> None:
        """Nothing to load."""
        import numpy as np  # noqa: PLC0415  this file is also run without the backend
        import triton_python_backend_utils as backend  # noqa: PLC0415  only there inside Triton

        output = backend.Tensor("output", np.ones((1, 1), np.float32))
        self._answer: Callable[[], Any] = lambda: backend.InferenceResponse(output_tensors=[output])

    def execute(self, requests: list[Any]) -> list[Any]:
        """One batch: every request holds one item."""
        time.sleep((PEER["alpha_ms"] * len(requests) + PEER["beta_ms"]) / 1e3)
        return [self._answer() for _ in requests]


def _write_repository(directory: Path) -> None:
    for model in PEER["models"]:
        version = directory / model / "1"
        version.mkdir(parents=True)
        shutil.copy(__file__, version / "model.py")
        config = CONFIG.format(
            max_batch=PEER["max_batch"], devices=PEER["devices"], wait_us=round(PEER["wait_ms"] * 1000)
        )
        (directory / model / "config.pbtxt").write_text(config, encoding="utf-8")


def main() -> None:
    """Lay out binary, stub and models, and become the server."""
    spec = find_spec("pytriton")
    assert spec is not None, "run by the interpreter that has it"
    assert spec.origin is not None, "a regular package"
    package = Path(spec.origin).parent
    directory = Path(PEER["directory"])
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    backends = directory / "backends"
    shutil.copytree(package / "tritonserver" / "backends", backends)
    shutil.copy(
        package / "tritonserver" / "python_backend_stubs" / python / "triton_python_backend_stub",
        backends / "python",
    )
    _write_repository(directory / "models")
    libraries = [str(package.parent / "nvidia_pytriton.libs"), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
    }
    binary = package / "tritonserver" / "bin" / "tritonserver"
    arguments = {
        "model-repository": directory / "models",
        "backend-directory": backends,
        "backend-config": f"python,shm-region-prefix-name=peer{PEER['port']}",
        "http-address": "127.0.0.1",
        "http-port": PEER["port"],
        "allow-grpc": "false",
        "allow-metrics": "false",
    }
    words = [f"--{name}={value}" for name, value in arguments.items()]
    os.execve(binary, [str(binary), *words], environment)


if __name__ == "__main__":
    main()
