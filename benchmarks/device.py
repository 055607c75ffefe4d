"""What a figure of a real device was measured on, for every log and every file of figures.

python -m benchmarks.device cuda        one line: GPU, driver, torch, date
"""

from __future__ import annotations

import datetime as dt
import sys
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from fabric.messages import LoaderSpec
from roles.node_agent.discovery import Nvml, NvmlUnavailable


def machine(device: str) -> dict[str, str]:
    """The GPU's own name (else `device`), driver, torch, and the date, without a CUDA context: that would be one beside those that are measured.

    Empty: there is none.
    """
    kind, _, number = device.partition(":")
    name, driver = device, ""
    if kind == "cuda":
        try:
            gpu = Nvml.open().describe(int(number or 0), kind)
            name, driver = gpu.name, gpu.driver
        except NvmlUnavailable as error:
            driver = f"unknown ({error})"
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    today = dt.datetime.now(dt.UTC).date().isoformat()
    return {"device": name, "driver": driver, "torch": torch, "date": today}


def described(device: str) -> str:
    """The same in words."""
    about = machine(device)
    words = [device if about["device"] == device else f"{device}: {about['device']}"]
    words += [f"driver {about['driver']}"] if about["driver"] else []
    return ", ".join([*words, f"torch {about['torch']}" if about["torch"] else "no torch", about["date"]])


def loader_named(model: str, dtype: str = "float32") -> LoaderSpec:
    """As `tenuto profile` understands a model's name: ARCH, ZOO/ARCH, or the module:Class of somebody's own."""
    zoo, _, arch = model.rpartition("/")
    if ":" in arch:
        return LoaderSpec(python=model)
    return LoaderSpec(zoo=zoo or "torchvision", arch=arch, dtype=dtype)


def example_inputs(spec: LoaderSpec) -> dict[str, np.ndarray]:
    """One request's inputs; the model is loaded for that, on the CPU."""
    import torch  # noqa: PLC0415  it takes seconds, and emulated devices do without

    from roles.gpu_worker.executors.loaders.registry import load_model  # noqa: PLC0415  likewise

    return {key: value.numpy() for key, value in load_model(spec, torch.device("cpu")).example.items()}


if __name__ == "__main__":
    print(described(sys.argv[1]))
